"""Bodies of chat completions: the whole answer, and the chunks of a stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from mlx_server.api import sse
from mlx_server.api.collect import Answer, Choice, ToolCall, UsageMeter
from mlx_server.api.generation import Generation, OutputEvent
from mlx_server.api.openai.exchange import metrics_fields, usage_body
from mlx_server.api.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from mlx_server.engine.tools.parser import ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """What a client asked to see, and what every body of one request repeats."""

    response_id: str
    model: str
    created_s: int
    names: TokenNames
    prompt_token_ids: tuple[int, ...]
    n: int
    has_logprobs: bool = False
    num_prompt_logprobs: int | None = None
    has_token_ids: bool = False
    has_reasoning: bool = True
    include_usage: bool = False
    continuous_usage: bool = False

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.response_id, "object": kind, "created": self.created_s, "model": self.model}


def chat_completion(shape: ChatShape, answer: Answer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    body = shape.head("chat.completion")
    body["choices"] = [_choice(shape, choice) for choice in answer.choices]
    body["usage"] = usage_body(answer.usage)
    body.update(metrics_fields(answer.timings, answer.usage.num_output_tokens))
    if shape.num_prompt_logprobs is not None:
        positions = answer.choices[0].prompt_logprobs
        body["prompt_logprobs"] = prompt_logprobs(shape.names, positions, shape.num_prompt_logprobs)
    if shape.has_token_ids:
        body["prompt_token_ids"] = list(shape.prompt_token_ids)
    return body


def _choice(shape: ChatShape, choice: Choice) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": choice.index,
        "message": _message(shape, choice),
        "logprobs": chat_logprobs(shape.names, choice.logprobs) if shape.has_logprobs else None,
        "finish_reason": choice.finish.reason,
        "stop_reason": choice.finish.stop_reason,
    }
    if shape.has_token_ids:
        body["token_ids"] = list(choice.token_ids)
    return body


def _message(shape: ChatShape, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.tool_calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [_call(call) for call in choice.tool_calls]
    if choice.reasoning and shape.has_reasoning:
        message["reasoning"] = message["reasoning_content"] = choice.reasoning
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def chat_chunks(shape: ChatShape, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The events of a stream, without `[DONE]`: each choice opens with its role, then what comes, then its end."""
    stream = _ChunkStream(shape)
    for index in range(shape.n):
        yield stream.opening(index)
    async with contextlib.aclosing(generation.events()) as events:
        async for event in events:
            chunk = stream.chunk(event)
            if chunk is not None:
                yield chunk
    if shape.include_usage:
        yield stream.closing()


class _ChunkStream:
    """Makes chunks of events."""

    def __init__(self, shape: ChatShape) -> None:
        self._shape = shape
        self._meter = UsageMeter(shape.n)
        self._has_details = shape.has_logprobs or shape.has_token_ids

    def opening(self, index: int) -> bytes:
        body = self._body({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        if self._shape.has_token_ids and index == 0:
            body["prompt_token_ids"] = list(self._shape.prompt_token_ids)
        return sse.data(body)

    def chunk(self, event: OutputEvent) -> bytes | None:
        """None for an event that has nothing to show, as when a character is not complete yet."""
        if self._shape.include_usage:
            self._meter.update(event)
        delta = self._delta(event)
        if not delta and event.finish is None and not (self._has_details and event.token_ids):
            return None
        return sse.data(self._body(self._choice(event, delta)))

    def closing(self) -> bytes:
        """The chunk with the usage of all choices and none of their text."""
        usage = self._meter.total()
        body = self._shape.head("chat.completion.chunk")
        body["choices"] = []
        body["usage"] = usage_body(usage)
        body.update(metrics_fields(self._meter.timings(), usage.num_output_tokens))
        return sse.data(body)

    def _body(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = self._shape.head("chat.completion.chunk")
        body["choices"] = [choice]
        if self._shape.continuous_usage:
            body["usage"] = usage_body(self._meter.total())
        elif self._shape.include_usage:
            body["usage"] = None
        return body

    def _choice(self, event: OutputEvent, delta: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": event.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._shape.has_logprobs:
            choice["logprobs"] = chat_logprobs(self._shape.names, event.logprobs)
        if self._shape.has_token_ids:
            choice["token_ids"] = list(event.token_ids)
        if event.finish is not None:
            choice["finish_reason"] = event.finish.reason
            choice["stop_reason"] = event.finish.stop_reason
        return choice

    def _delta(self, event: OutputEvent) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if event.reasoning and self._shape.has_reasoning:
            delta["reasoning"] = delta["reasoning_content"] = event.reasoning
        if event.content:
            delta["content"] = event.content
        if event.tool_calls:
            delta["tool_calls"] = [_call_delta(piece) for piece in event.tool_calls]
        return delta


def _call_delta(piece: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": piece.arguments_fragment}
    if piece.id is None:
        return {"index": piece.index, "function": function}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": {"name": piece.name, **function}}
