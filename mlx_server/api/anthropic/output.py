"""Bodies of Anthropic's messages: the whole message, and the events of a stream.

Anthropic's streams on the wire: pings on silent ones, and errors after the first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from mlx_server.api import sse
from mlx_server.api.collect import Answer, Choice, Usage, UsageMeter
from mlx_server.api.errors import error_info
from mlx_server.api.generation import Finish, Generation, OutputEvent
from mlx_server.engine.tools.parser import ToolCallDelta

logger = logging.getLogger(__name__)

PING = sse.named("ping", {"type": "ping"})


async def anthropic_stream(events: AsyncGenerator[bytes, None], ping_s: float) -> AsyncIterator[bytes]:
    """`events`, with a ping after each `ping_s` of silence (0: never); an error on the way becomes the last event,
    since the status is long sent."""
    try:
        async with contextlib.aclosing(events), contextlib.aclosing(_pinged(events, ping_s or None)) as pinged:
            async for event in pinged:
                yield event
    except Exception as error:
        info = error_info(error)
        if info.status == 500:
            logger.exception("A stream failed")
        yield sse.named("error", info.anthropic_body())


async def _pinged(events: AsyncIterator[bytes], ping_s: float | None) -> AsyncGenerator[bytes, None]:
    coming = asyncio.ensure_future(_next(events))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=ping_s)
            if not done:
                yield PING
                continue
            event = coming.result()
            if event is None:
                return
            yield event
            coming = asyncio.ensure_future(_next(events))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


async def _next(events: AsyncIterator[bytes]) -> bytes | None:
    """The next event; None at the end."""
    return await anext(events, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageShape:
    """What every body of one message repeats."""

    message_id: str
    model: str
    num_prompt_tokens: int
    max_model_len: int
    shows_thinking: bool

    def head(self) -> dict[str, Any]:
        return {"id": self.message_id, "type": "message", "role": "assistant", "model": self.model}


def message_body(shape: MessageShape, answer: Answer) -> dict[str, Any]:
    """The body of a message that is not streamed."""
    choice = answer.choices[0]
    return {
        **shape.head(),
        "content": list(_blocks(shape, choice)),
        **_ending(shape, choice.finish, answer.usage),
        "usage": usage_body(answer.usage),
    }


def _blocks(shape: MessageShape, choice: Choice) -> Iterator[dict[str, Any]]:
    if choice.reasoning and shape.shows_thinking:
        yield {"type": "thinking", "thinking": choice.reasoning, "signature": _signature(choice.reasoning)}
    if choice.content:
        yield {"type": "text", "text": choice.content}
    for call in choice.tool_calls:
        yield {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; an empty one if the output ended within them, which the stop reason tells."""
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _signature(thinking: str) -> str:
    """Clients send thinking back only with a signature. Nothing is checked by ours: a chat may be edited here."""
    return hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()


def usage_body(usage: Usage) -> dict[str, Any]:
    """`input_tokens` are those of the prompt that the prefix cache did not have. Caching costs nothing here and
    needs no asking, so no tokens count as written to it."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


# An abort cuts an answer off as the token limit does; the protocol has no word of its own for it.
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "abort": "max_tokens"}


def _ending(shape: MessageShape, finish: Finish, usage: Usage) -> dict[str, Any]:
    if finish.reason == "stop" and isinstance(finish.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
    if finish.reason == "length" and usage.num_prompt_tokens + usage.num_output_tokens >= shape.max_model_len:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    return {"stop_reason": _STOP_REASONS[finish.reason], "stop_sequence": None}


async def message_events(shape: MessageShape, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The events of a stream: the message opens, then each block opens, grows and closes, then the message ends.

    It does not open later for its usage: what the prefix cache had is told there only if there is output already.
    """
    meter, blocks = UsageMeter(1), _BlockStream(shape)

    def pieces(event: OutputEvent) -> Iterator[bytes]:
        meter.update(event)
        yield from blocks.append(event)
        if event.finish is not None:
            usage = meter.total()
            yield _event("message_delta", delta=_ending(shape, event.finish, usage), usage=usage_body(usage))

    async with contextlib.aclosing(generation.events()) as events:
        first = await anext(events) if generation.has_output else None
        yield _event("message_start", message=_opening(shape, first))
        yield PING
        for piece in () if first is None else pieces(first):
            yield piece
        async for event in events:
            for piece in pieces(event):
                yield piece
    yield _event("message_stop")


def _opening(shape: MessageShape, first: OutputEvent | None) -> dict[str, Any]:
    """The message without content; `first` is its first output if there is any."""
    usage = Usage(shape.num_prompt_tokens, 0 if first is None else first.num_cached_tokens)
    return {**shape.head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_body(usage)}


class _BlockStream:
    """Makes events of blocks. One block is open at a time: what belongs to another closes it."""

    def __init__(self, shape: MessageShape) -> None:
        self._shows_thinking = shape.shows_thinking
        self._index = -1
        self._open: str | None = None
        self._thinking: list[str] = []

    def append(self, event: OutputEvent) -> Iterator[bytes]:
        if event.reasoning and self._shows_thinking:
            yield from self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(event.reasoning)
            yield self._delta("thinking_delta", thinking=event.reasoning)
        if event.content:
            yield from self._enter("text", {"type": "text", "text": ""})
            yield self._delta("text_delta", text=event.content)
        for piece in event.tool_calls:
            yield from self._call(piece)
        if event.finish is not None:
            yield from self._close()

    def _call(self, piece: ToolCallDelta) -> Iterator[bytes]:
        block: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
        yield from self._enter(f"tool_use {piece.index}", block)
        if piece.arguments_fragment:
            yield self._delta("input_json_delta", partial_json=piece.arguments_fragment)

    def _enter(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Makes `kind` the open block; `block` is how it begins, if it is not open yet."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=_signature("".join(self._thinking)))
        self._open = None
        yield _event("content_block_stop", index=self._index)

    def _delta(self, kind: str, **value: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **value})


def _event(kind: str, **fields: Any) -> bytes:
    return sse.named(kind, {"type": kind, **fields})
