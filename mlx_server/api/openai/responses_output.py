"""What the Responses API sends: the response's body, and the events by which its output items grow."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_server.api.body_reader import MAX_ECHO_CHARS
from mlx_server.api.collect import Choice, Usage
from mlx_server.api.errors import error_info
from mlx_server.api.generation import Finish, OutputEvent
from mlx_server.api.openai.responses_request import ResponsesRequest
from mlx_server.engine.tools.parser import ToolCallDelta
from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import SamplingParams

Event = dict[str, Any]
"""An event without its sequence number."""

_STATUSES = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "abort": "cancelled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """What every body of one response repeats: mostly what was asked."""

    response_id: str
    model: str
    created_s: int
    request: ResponsesRequest
    sampling: SamplingParams

    def opening(self) -> dict[str, Any]:
        """The body while there is no output."""
        return self._body("in_progress", [], None)

    def ending(self, finish: Finish, output: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """The body of an answer, whole or cut off."""
        body = self._body(_STATUSES[finish.reason], output, usage)
        if finish.reason == "length":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        return body

    def failure(self, error: Exception, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The body after an error; `output` is what had come before it."""
        body = self._body("failed", output, None)
        body["error"] = {"code": "server_error", "message": error_info(error).message}
        return body

    def _body(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        request = self.request
        reasoning, text = request.reasoning, request.text
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "store": request.store is not False,
            "temperature": self.sampling.temperature,
            "text": {"format": (text and text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in request.tools or ()],
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage_body(usage),
            "user": request.user,
        }


def check_echo(request: ResponsesRequest) -> None:
    """Raises `InvalidRequestError` for a request of which each answer and several events would repeat too much."""
    text = request.text and request.text.format
    repeated = [request.instructions, request.metadata, request.tools, request.tool_choice, request.user, text]
    num_chars = len(json.dumps(repeated, ensure_ascii=False))
    if num_chars > MAX_ECHO_CHARS:
        raise InvalidRequestError(
            f"instructions, metadata, tools, tool_choice, user and text have {num_chars} characters together, as JSON; "
            f"answers repeat them, up to {MAX_ECHO_CHARS}. Shorten them."
        )


def usage_body(usage: Usage) -> dict[str, Any]:
    """The counts under this protocol's names. Caching needs no asking, so no tokens count as written to it."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


def whole_output(choice: Choice) -> list[dict[str, Any]]:
    """The output items of an answer that is not streamed."""
    calls = [
        ToolCallDelta(index, call.call_id, call.name, call.arguments) for index, call in enumerate(choice.tool_calls)
    ]
    output = OutputItems()
    whole = OutputEvent(
        index=0, content=choice.content, reasoning=choice.reasoning, tool_calls=tuple(calls), finish=choice.finish
    )
    for _ in output.append(whole):
        pass
    return output.done


@dataclass(frozen=True, slots=True)
class _TextKind:
    """What differs between items that hold text: `part` is the empty part, `extra` what its text's events carry."""

    name: str
    prefix: str
    item: Mapping[str, Any]
    part: Mapping[str, Any]
    events: str
    extra: Mapping[str, Any]


_REASONING = _TextKind(
    name="reasoning",
    prefix="rs",
    item={"type": "reasoning", "summary": []},
    part={"type": "reasoning_text", "text": ""},
    events="response.reasoning_text",
    extra={},
)
_MESSAGE = _TextKind(
    name="message",
    prefix="msg",
    item={"type": "message", "role": "assistant"},
    part={"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    events="response.output_text",
    extra={"logprobs": []},
)


class OutputItems:
    """Makes items, and their events, of what the model writes. One item is open at a time: what belongs to
    another closes it."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: _TextItem | _CallItem | None = None

    def append(self, event: OutputEvent) -> Iterator[Event]:
        if event.reasoning:
            yield from self._text(_REASONING, event.reasoning)
        if event.content:
            yield from self._text(_MESSAGE, event.content)
        for piece in event.tool_calls:
            yield from self._call(piece)
        if event.finish is not None:
            is_whole = _STATUSES[event.finish.reason] == "completed"
            yield from self._close("completed" if is_whole else "incomplete")

    def _text(self, kind: _TextKind, text: str) -> Iterator[Event]:
        if self._open is None or self._open.key != kind.name:
            yield from self._enter(_TextItem(kind, self._next_index))
        assert self._open is not None
        yield self._open.grow(text)

    def _call(self, piece: ToolCallDelta) -> Iterator[Event]:
        if self._open is None or self._open.key != piece.index:
            yield from self._enter(_CallItem(piece, self._next_index))
        assert self._open is not None
        if piece.arguments_fragment:
            yield self._open.grow(piece.arguments_fragment)

    @property
    def _next_index(self) -> int:
        return len(self.done) + (self._open is not None)

    def _enter(self, item: _TextItem | _CallItem) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        yield from item.opening()

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item, self._open = self._open, None
        self.done.append(item.body(status))
        yield from item.closing(status)


class _TextItem:
    """A message, or the reasoning before it: one part of text."""

    def __init__(self, kind: _TextKind, index: int) -> None:
        self.key = kind.name
        self._kind = kind
        self._id = f"{kind.prefix}_{uuid.uuid4().hex}"
        self._index = index
        self._where = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._text: list[str] = []

    def opening(self) -> Iterator[Event]:
        item = {**self._kind.item, "id": self._id, "status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}
        yield {"type": "response.content_part.added", **self._where, "part": self._kind.part}

    def grow(self, text: str) -> Event:
        self._text.append(text)
        return {"type": f"{self._kind.events}.delta", **self._where, "delta": text, **self._kind.extra}

    def closing(self, status: str) -> Iterator[Event]:
        item = self.body(status)
        (part,) = item["content"]
        yield {"type": f"{self._kind.events}.done", **self._where, "text": part["text"], **self._kind.extra}
        yield {"type": "response.content_part.done", **self._where, "part": part}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def body(self, status: str) -> dict[str, Any]:
        part = {**self._kind.part, "text": "".join(self._text)}
        return {**self._kind.item, "id": self._id, "status": status, "content": [part]}


class _CallItem:
    """A call of one of the client's functions."""

    def __init__(self, piece: ToolCallDelta, index: int) -> None:
        self.key = piece.index
        self._id = f"fc_{uuid.uuid4().hex}"
        self._call_id = piece.id
        self._name = piece.name
        self._index = index
        self._where = {"item_id": self._id, "output_index": index}
        self._arguments: list[str] = []

    def opening(self) -> Iterator[Event]:
        item = self.body("in_progress")
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}

    def grow(self, text: str) -> Event:
        self._arguments.append(text)
        return {"type": "response.function_call_arguments.delta", **self._where, "delta": text}

    def closing(self, status: str) -> Iterator[Event]:
        item = self.body(status)
        arguments = {"name": self._name, "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **self._where, **arguments}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def body(self, status: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": status,
        }
