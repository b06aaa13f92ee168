"""mlx-serve: a local OpenAI-compatible LLM server for Apple Silicon, paged and continuously batching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_server.environment import quiet_libraries
from mlx_server.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_server.engine.library.llm import LLM, AsyncLLM, Completion, CompletionOutput

__all__ = ["LLM", "AsyncLLM", "Completion", "CompletionOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Lazy, so that settings and errors can be imported without loading MLX.
    if name != "SamplingParams" and name in __all__:
        quiet_libraries()
        from mlx_server.engine.library import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
