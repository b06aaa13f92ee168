"""mlx-serve: a local OpenAI-compatible LLM server for Apple Silicon, paged and continuously batching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_server.engine.library.llm import LLM, AsyncLLM, Completion, CompletionOutput
    from mlx_server.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "Completion", "CompletionOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Lazy, so that settings and errors can be imported without loading MLX, and `__main__` is the first of a command.
    if name == "SamplingParams":
        from mlx_server.sampling_params import SamplingParams

        return SamplingParams
    if name in __all__:
        from mlx_server.environment import quiet_libraries

        quiet_libraries()
        from mlx_server.engine.library import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
