"""What chat and text completions have in common: the body around the choices, usage, timings, and log-probabilities in
the formats of OpenAI and vLLM."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mlx_server.api.answers.collect import Answer, Usage, usage_of
from mlx_server.api.answers.generation import OutputEvent
from mlx_server.api.errors import ErrorInfo
from mlx_server.api.http import sse
from mlx_server.api.openai.exchange import Exchange, Writer
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.outputs import PositionLogprobs

_MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class CompletionWriter(Writer):
    """Writes the body around the choices, complete and in chunks. Subclasses write the choices."""

    def __init__(self, exchange: Exchange, prefix: str, kind: str) -> None:
        """The answer's id begins with `prefix`; `kind` is the `object` field of a chunk."""
        body = exchange.body
        self.response_id = f"{prefix}-{exchange.request_id}"
        self._head = {
            "id": self.response_id,
            "object": kind,
            "created": int(time.time()),
            "model": exchange.model_name,
        }
        tokenizer = exchange.engine.tokenizer if exchange.engine.has_tokenizer else None
        self._names = TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))
        self._num_samples = body.num_samples
        self._num_top = body.prompt_logprobs
        self._latest: dict[int, OutputEvent] = {}  # by choice index
        self._has_token_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._templates: dict[tuple[int, bool], sse.Template] = {}  # by choice index, and whether the text is reasoning
        self._repeats_usage = self._has_usage and options is not None and bool(options.continuous_usage_stats)

    @abstractmethod
    def full_choice(self, choice: OutputEvent) -> dict[str, Any]:
        """Returns a choice of an answer that is not streamed."""

    def full_body(self, answer: Answer) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self.full_choice(choice) for choice in answer.choices],
            **self._ending(answer.choices),
        }

    def closing(self) -> bytes:
        """The end of the stream, after a chunk with the usage of all choices and no choices, if the client asked for
        usage."""
        if not self._has_usage:
            return sse.DONE
        return sse.data({**self._head, "choices": [], **self._ending(self._latest.values())}) + sse.DONE

    def failure(self, error: ErrorInfo) -> bytes:
        return sse.data(error.openai_body()) + sse.DONE

    def chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        body = {**self._head, "choices": [choice], **more}
        if self._has_usage:
            body["usage"] = self._total(self._latest.values()) if self._repeats_usage else None
        return sse.data(body)

    def write(self, event: OutputEvent) -> bytes:
        """Writes an event. Most events have only text, and are written with the template of an earlier event: see
        `piece`."""
        if event.finish is None and not event.mixed and not (event.content and event.reasoning):
            template = self._templates.get((event.index, bool(event.reasoning)))
            if template is not None:
                text = event.content or event.reasoning
                return template.fill(text) if text else b""
        self._latest[event.index] = event
        return self.write_choice(event)

    @abstractmethod
    def write_choice(self, event: OutputEvent) -> bytes:
        """Returns the chunk of an event, or b"" if it has nothing to show."""

    def piece(
        self, index: int, text: str, choice: Callable[[int, str], dict[str, Any]], *, is_reasoning: bool = False
    ) -> bytes:
        """Returns the chunk with `choice(index, text)`, or b"" without text (a character may not be complete yet). The
        chunk becomes a template: later events of this index that have only text of this kind are written with it,
        without a call of `write_choice`."""
        if not text:
            return b""
        if self._repeats_usage:
            return self.chunk(choice(index, text))
        template = sse.Template(lambda blank: self.chunk(choice(index, blank)))
        self._templates[index, is_reasoning] = template
        return template.fill(text)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Includes the details always, since they say how much of the prompt was cached."""
        return {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_output_tokens,
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            "prompt_tokens_details": cached_tokens(usage),
            "completion_tokens_details": {
                "reasoning_tokens": usage.num_reasoning_tokens,
                "accepted_prediction_tokens": usage.num_accepted_drafts,
                "rejected_prediction_tokens": usage.num_rejected_drafts,
            },
        }

    def prompt_logprobs(self, choice: OutputEvent) -> list[dict[str, Any] | None] | None:
        """One entry for each prompt token, keyed by token id, and None for the first; None if the client did not ask
        for them."""
        num_top = self._num_top
        if num_top is None:
            return None
        return [None, *(_by_id(self._names, position, num_top) for position in choice.delta.prompt_logprobs)]

    def _total(self, events: Collection[OutputEvent]) -> dict[str, Any]:
        return self.usage(usage_of(events, self._num_samples))

    def _ending(self, events: Collection[OutputEvent]) -> dict[str, Any]:
        """Several choices have no common timings."""
        metrics = _metrics(*events) if len(events) == 1 else None
        return {"usage": self._total(events), **({} if metrics is None else {"metrics": metrics})}


def cached_tokens(usage: Usage) -> dict[str, int]:
    """How many prompt tokens came from the prefix cache, and how many of them from disk records of 8 bits, if any
    did."""
    rounded = {"rounded_tokens": usage.num_rounded_tokens} if usage.num_rounded_tokens else {}
    return {"cached_tokens": usage.num_cached_tokens, **rounded}


def _metrics(event: OutputEvent) -> dict[str, float] | None:
    """Timings of a choice in milliseconds, by its last event, without those of stages that it did not reach; None
    without a timing.

    `generation_time_ms` is the time from the first output token to the end, `mean_itl_ms` the mean gap between tokens.
    """
    timings = None if event.finish is None else event.finish.timings
    if timings is None or timings.finished_s is None:
        return None
    first, end = timings.first_token_s, timings.finished_s
    generation_s = None if first is None else end - first
    gaps = max(event.delta.num_output_tokens - 1, 0)
    found = {
        "time_to_first_token_ms": _milliseconds(None if first is None else first - timings.arrival_s),
        "queue_time_ms": _milliseconds((timings.first_scheduled_s or end) - timings.arrival_s),
        "generation_time_ms": _milliseconds(generation_s),
        "mean_itl_ms": _milliseconds(generation_s / gaps) if generation_s and gaps else None,
        "tokens_per_second": round(gaps / generation_s, 3) if generation_s and gaps else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written: as text, or as `token_id:N` if the client asks for it or the model has no tokenizer."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids or self.tokenizer is None else self.text(token_id)

    def text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        return [] if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))


def _by_id(names: TokenNames, position: PositionLogprobs, num_top: int) -> dict[str, Any]:
    return {
        str(token.token_id): {
            "logprob": finite(token.logprob),
            "rank": token.rank,
            "decoded_token": names.text(token.token_id),
        }
        for token in (position.token, *position.top[:num_top])
    }


def finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
