"""Anthropic's messages as they are sent: complete, and as the events of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from sse_starlette import ServerSentEvent

from mlx_server.api.answers.collect import Answer, Usage, UsageMeter, arguments_object
from mlx_server.api.answers.generation import Finish, OutputEvent, Prompt
from mlx_server.api.errors import ErrorInfo
from mlx_server.api.http import sse
from mlx_server.api.openai.exchange import Exchange, Writer

PING = ServerSentEvent(event="ping", data='{"type":"ping"}', sep="\n").encode()

# The protocol has no reason of its own for an abort, which cuts an answer off as the token limit does.
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "abort": "max_tokens"}


class MessageWriter(Writer):
    """One message. In a stream the message opens, then each block opens, grows and closes, then the message ends. One
    block is open at a time: output of another kind closes it."""

    keep_alive = PING

    def __init__(self, exchange: Exchange, prompt: Prompt, shows_thinking: bool) -> None:
        self.response_id = f"msg_{exchange.request_id}"
        self._head = {"id": self.response_id, "type": "message", "role": "assistant", "model": exchange.model_name}
        self._num_prompt_tokens = len(prompt.token_ids)
        self._max_model_len = exchange.engine.max_model_len
        self._shows_thinking = shows_thinking
        self._meter = UsageMeter(1)
        self._is_started = False
        self._index = -1
        self._open: str | None = None
        self._thinking: list[str] = []
        self._template: sse.Template | None = None  # of the open block's deltas

    def full_body(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        ending = self._ending(answer.finish, answer.usage)
        return {**self._head, "content": list(self._blocks(choice)), **ending, "usage": usage_body(answer.usage)}

    def opening(self, has_output: bool) -> bytes:
        """The first event names the cached tokens only if there is output already: it does not wait for output."""
        return b"" if has_output else self._start(num_cached_tokens=0)

    def write(self, event: OutputEvent) -> bytes:
        self._meter.update(event)
        pieces = [] if self._is_started else [self._start(event.delta.num_cached_tokens)]
        pieces += self._pieces(event)
        return b"".join(pieces)

    def closing(self) -> bytes:
        return _event("message_stop")

    def failure(self, error: ErrorInfo) -> bytes:
        return sse.named("error", error.anthropic_body())

    def _start(self, num_cached_tokens: int) -> bytes:
        self._is_started = True
        usage = usage_body(Usage(self._num_prompt_tokens, num_cached_tokens))
        stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._head, "content": [], **stop, "usage": usage}) + PING

    def _ending(self, finish: Finish, usage: Usage) -> dict[str, Any]:
        if finish.reason == "stop" and isinstance(finish.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
        if finish.reason == "length" and usage.num_prompt_tokens + usage.num_output_tokens >= self._max_model_len:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS[finish.reason], "stop_sequence": None}

    def _blocks(self, choice: OutputEvent) -> Iterator[dict[str, Any]]:
        if choice.reasoning and self._shows_thinking:
            yield {"type": "thinking", "thinking": choice.reasoning, "signature": _signature(choice.reasoning)}
        if choice.content:
            yield {"type": "text", "text": choice.content}
        for call in choice.tool_calls:
            given = arguments_object(call.arguments_fragment)
            yield {"type": "tool_use", "id": call.id, "name": call.name, "input": given}

    def _pieces(self, event: OutputEvent) -> Iterator[bytes]:
        if event.reasoning and self._shows_thinking:
            yield from self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(event.reasoning)
            yield self._delta("thinking_delta", "thinking", event.reasoning)
        if event.content:
            yield from self._enter("text", {"type": "text", "text": ""})
            yield self._delta("text_delta", "text", event.content)
        for piece in event.tool_calls:
            block: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            yield from self._enter(f"tool_use {piece.index}", block)
            if piece.arguments_fragment:
                yield self._delta("input_json_delta", "partial_json", piece.arguments_fragment)
        if event.finish is not None:
            yield from self._leave()
            usage = self._meter.total()
            yield _event("message_delta", delta=self._ending(event.finish, usage), usage=usage_body(usage))

    def _enter(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Makes `kind` the open block; `block` is how it begins, if it is not open yet."""
        if self._open == kind:
            return
        yield from self._leave()
        self._open = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _leave(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            signed = {"type": "signature_delta", "signature": _signature("".join(self._thinking))}
            yield _event("content_block_delta", index=self._index, delta=signed)
        self._open = self._template = None
        yield _event("content_block_stop", index=self._index)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        """The open block grows; all its deltas are of one kind."""
        if self._template is None:
            index = self._index
            self._template = sse.Template(
                lambda blank: _event("content_block_delta", index=index, delta={"type": kind, name: blank})
            )
        return self._template.fill(text)


def _event(kind: str, **fields: Any) -> bytes:
    return sse.named(kind, {"type": kind, **fields})


def _signature(thinking: str) -> str:
    """Clients send thinking back only with a signature. This server does not check it."""
    return hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()


def usage_body(usage: Usage) -> dict[str, Any]:
    """`input_tokens` counts the prompt's tokens that were not cached. Caching is free and automatic, so no tokens count
    as written to the cache."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }
