"""Prompts as the model reads them, and how long ones are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_server.engine.tokenizer import Tokenizer
from mlx_server.errors import ContextLengthError


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what `token_ids` say, for echoes; None where nobody asked for it."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a client wants a long prompt cut: to `num_tokens` (-1 is the whole context), losing one side."""

    num_tokens: int | None = None
    side: Literal["left", "right"] = "left"

    def part(self, text: str, tokenizer: Tokenizer, max_model_len: int) -> str:
        """What of `text` is to be tokenized before `apply`. Raises `ContextLengthError` for a text that is far too
        long and not to be cut."""
        keep = self._num_kept(max_model_len)
        most = max_model_len if keep is None else min(keep, max_model_len)
        part = tokenizer.part_of(text, most, is_end=keep is not None and self.side == "left")
        if keep is None and len(part) < len(text):
            raise ContextLengthError(
                f"The prompt has {len(text)} characters, and already {len(part)} of them are more tokens than the "
                f"context holds, which is {max_model_len}. Shorten the prompt.",
                "input_tokens",
            )
        return part

    def apply(self, token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        keep = self._num_kept(max_model_len)
        if keep is None or keep >= len(token_ids):
            return token_ids
        return token_ids[len(token_ids) - keep :] if self.side == "left" else token_ids[:keep]

    def _num_kept(self, max_model_len: int) -> int | None:
        """One token of the context is for the output."""
        return max_model_len - 1 if self.num_tokens == -1 else self.num_tokens
