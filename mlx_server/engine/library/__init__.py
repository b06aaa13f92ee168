"""`LLM` and `AsyncLLM`: the engine for scripts."""
