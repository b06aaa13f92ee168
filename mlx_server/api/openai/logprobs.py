"""Log-probabilities in OpenAI's two shapes, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.outputs import PositionLogprobs, TokenLogprob

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written: as text, or as `token_id:N` on request and where a model has no tokenizer."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids or self.tokenizer is None else self.text(token_id)

    def text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        return [] if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))


def chat_logprobs(names: TokenNames, positions: Iterable[PositionLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a chat choice or chunk."""
    content = [
        {
            **_chat_token(names, position.token),
            "top_logprobs": [_chat_token(names, token) for token in position.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _chat_token(names: TokenNames, token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": names.name(token.token_id),
        "logprob": _finite(token.logprob),
        "bytes": names.bytes(token.token_id),
    }


@dataclass(frozen=True, slots=True)
class TextPosition:
    """One token of a text completion; `logprobs` is None for the prompt's first token, which nothing predicts."""

    token_id: int
    logprobs: PositionLogprobs | None


def text_logprobs(names: TokenNames, positions: Sequence[TextPosition], num_top: int, offset: int) -> dict[str, Any]:
    """The `logprobs` of a text completion; `offset` is where the first token's text begins."""
    tokens = [names.name(position.token_id) for position in positions]
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += len(names.text(position.token_id))
    return {
        "tokens": tokens,
        "token_logprobs": [p.logprobs and _finite(p.logprobs.token.logprob) for p in positions],
        "top_logprobs": [p.logprobs and _top(names, p.logprobs, num_top) for p in positions],
        "text_offset": offsets,
    }


def _top(names: TokenNames, position: PositionLogprobs, num_top: int) -> dict[str, float]:
    tokens = (*position.top[:num_top], position.token)
    return {names.name(token.token_id): _finite(token.logprob) for token in tokens}


def prompt_logprobs(
    names: TokenNames, positions: Sequence[PositionLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """One entry a prompt token, keyed by token id; None for the first."""
    return [None, *(_by_id(names, position, num_top) for position in positions)]


def _by_id(names: TokenNames, position: PositionLogprobs, num_top: int) -> dict[str, Any]:
    return {
        str(token.token_id): {
            "logprob": _finite(token.logprob),
            "rank": token.rank,
            "decoded_token": names.text(token.token_id),
        }
        for token in (position.token, *position.top[:num_top])
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
