"""mlx-serve: a local OpenAI-compatible LLM server for Apple Silicon, paged and continuously batching."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mlx_server.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_server.engine.llm import LLM, Completion

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Late, so that the vocabulary can be imported without loading MLX.
    if name in ("LLM", "Completion"):
        # transformers would tell every user that PyTorch is missing, which nothing here needs.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        # pydantic would import logfire, a second's work, only because it is installed.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "logfire-plugin")
        from mlx_server.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
