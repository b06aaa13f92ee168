"""Ollama's routes: its shapes over the same exchange as the other protocols. docs/ollama.md states the rules."""
