"""What the Responses API sends: the response's body, and the events by which its output items grow."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from mlx_server.api.answers.collect import Answer, Usage, UsageMeter
from mlx_server.api.answers.generation import Finish, OutputEvent
from mlx_server.api.errors import ErrorInfo
from mlx_server.api.http import sse
from mlx_server.api.http.request_bounds import MAX_ECHO_CHARS
from mlx_server.api.openai.exchange import Exchange, Writer
from mlx_server.api.openai.output import cached_tokens
from mlx_server.api.openai.responses.custom_tools import InputReader
from mlx_server.api.openai.responses.items import unqualified
from mlx_server.api.openai.responses.request import ResponsesRequest
from mlx_server.api.openai.responses.store import KeptItem, KeptResponses, StoredResponse
from mlx_server.engine.tools.parser import ToolCallDelta
from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import SamplingParams

Event = dict[str, Any]
"""An event without its sequence number."""

_STATUSES = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "abort": "cancelled"}

# The protocol has no event of its own for a response that was cancelled; its body says so.
_LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


class ResponseWriter(Writer):
    """One response. In a stream the response opens, then each item opens, grows and closes, then the response ends; an
    error on the way ends it, too."""

    def __init__(
        self,
        exchange: Exchange,
        request: ResponsesRequest,
        sampling: SamplingParams,
        store: KeptResponses | None,
        input_items: tuple[KeptItem, ...],
    ) -> None:
        """`store` keeps the response with its `input_items`, as it is at any time; None if nothing is to be kept."""
        # The id is a key to what is kept, so it is never one that a client has chosen.
        self.response_id = f"resp_{uuid.uuid4().hex}"
        self._first_body = {"id": self.response_id, **_head(exchange.model_name, request, sampling)}
        self._body = self._first_body
        self._store = store
        self._input_items = input_items
        self._items = OutputItems(request.namespaces(), request.custom_tools())
        self._meter = UsageMeter(1)
        self._numbers = itertools.count()

    def whole(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        calls = [
            ToolCallDelta(index, call.call_id, call.name, call.arguments)
            for index, call in enumerate(choice.tool_calls)
        ]
        event = OutputEvent(
            index=0, content=choice.content, reasoning=choice.reasoning, tool_calls=tuple(calls), finish=choice.finish
        )
        for _ in self._items.append(event):
            pass
        self._body = self._ending(choice.finish, answer.usage)
        self._put()
        return self._body

    def opening(self, has_output: bool) -> bytes:
        self._put()
        return self._with_body("response.created") + self._with_body("response.in_progress")

    def write(self, event: OutputEvent) -> bytes:
        self._meter.update(event)
        written = b"".join(map(self._encode, self._items.append(event)))
        if event.finish is not None:
            self._update(self._ending(event.finish, self._meter.total()))
        return written

    def closing(self) -> bytes:
        return self._with_body(_LAST_EVENTS[self._body["status"]])

    def failure(self, error: ErrorInfo) -> bytes:
        failed = {"code": "server_error", "message": error.message}
        self._update({**self._first_body, "status": "failed", "output": self._items.done, "error": failed})
        return self.closing()

    async def settle(self) -> None:
        if self._store is not None:
            await self._store.settle()

    def close(self) -> None:
        if self._body["status"] == "in_progress":
            self._update({**self._body, "status": "cancelled"})
            if self._store is not None:
                self._store.settle_later()

    def _ending(self, finish: Finish, usage: Usage) -> dict[str, Any]:
        return {
            **self._first_body,
            "status": _STATUSES[finish.reason],
            "completed_at": int(time.time()) if _STATUSES[finish.reason] == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if finish.reason == "length" else None,
            "output": self._items.done,
            "usage": usage_body(usage),
        }

    def _put(self) -> None:
        if self._store is not None:
            self._store.put(StoredResponse.of(self._body, self._input_items))

    def _update(self, body: dict[str, Any]) -> None:
        self._body = body
        if self._store is not None:
            self._store.update(body)

    def _with_body(self, kind: str) -> bytes:
        return self._encode({"type": kind, "response": self._body})

    def _encode(self, event: Event) -> bytes:
        return sse.named(event["type"], {**event, "sequence_number": next(self._numbers)})


def _head(model: str, request: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    """The body of a response while there is no output: mostly what was asked."""
    reasoning, text = request.reasoning, request.text
    return {
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": sampling.frequency_penalty,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_shown(tool) for tool in request.tools or ()],
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def _shown(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool with the members that every function of a response has."""
    missing = {"description": None, "parameters": None, "strict": None} if tool.get("type") == "function" else {}
    return {**missing, **tool}


def check_echo(request: ResponsesRequest) -> None:
    """Raises `InvalidRequestError` for a request of which each answer and several events would repeat too much."""
    text = request.text and request.text.format
    ids = [request.user, request.prompt_cache_key, request.safety_identifier]
    repeated = [request.instructions, request.metadata, request.tools, request.tool_choice, *ids, text]
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
        "input_tokens_details": {**cached_tokens(usage), "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


class OutputItems:
    """Makes items, and their events, of what the model writes. One item is open at a time: what belongs to
    another closes it."""

    def __init__(self, namespaces: Mapping[str, str], custom: Collection[str]) -> None:
        """`namespaces` has that of each tool that belongs to one; `custom` are the custom tools' names."""
        self.done: list[dict[str, Any]] = []
        self._namespaces = namespaces
        self._custom = custom
        self._open: _TextItem | _CallItem | None = None

    def append(self, event: OutputEvent) -> Iterator[Event]:
        for kind, text in ((_Reasoning, event.reasoning), (_Message, event.content)):
            if text:
                if self._open is None or self._open.key != kind.key:
                    yield from self._enter(kind(self._next_index))
                assert self._open is not None
                yield from self._open.grow(text)
        for piece in event.tool_calls:
            yield from self._call(piece)
        if event.finish is not None:
            is_whole = _STATUSES[event.finish.reason] == "completed"
            yield from self._close("completed" if is_whole else "incomplete")

    def _call(self, piece: ToolCallDelta) -> Iterator[Event]:
        if self._open is None or self._open.key != piece.index:
            kind = _CustomCallItem if piece.name in self._custom else _CallItem
            yield from self._enter(kind(piece, self._next_index, self._namespaces.get(piece.name or "", "")))
        assert self._open is not None
        if piece.arguments_fragment:
            yield from self._open.grow(piece.arguments_fragment)

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
    """A message, or the reasoning before it: one part of text. Subclasses say how they begin, what the empty part is,
    and what their text's events carry."""

    key: ClassVar[str]
    prefix: ClassVar[str]
    head: ClassVar[Mapping[str, Any]]
    part: ClassVar[Mapping[str, Any]]
    events: ClassVar[str]
    extra: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, index: int) -> None:
        self._id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._index = index
        self._where = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._text: list[str] = []

    def opening(self) -> Iterator[Event]:
        item = {**self.head, "id": self._id, "status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}
        yield {"type": "response.content_part.added", **self._where, "part": self.part}

    def grow(self, text: str) -> Iterator[Event]:
        self._text.append(text)
        yield {"type": f"{self.events}.delta", **self._where, "delta": text, **self.extra}

    def closing(self, status: str) -> Iterator[Event]:
        item = self.body(status)
        (part,) = item["content"]
        yield {"type": f"{self.events}.done", **self._where, "text": part["text"], **self.extra}
        yield {"type": "response.content_part.done", **self._where, "part": part}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def body(self, status: str) -> dict[str, Any]:
        part = {**self.part, "text": "".join(self._text)}
        return {**self.head, "id": self._id, "status": status, "content": [part]}


class _Reasoning(_TextItem):
    key: ClassVar = "reasoning"
    prefix: ClassVar = "rs"
    head: ClassVar = {"type": "reasoning", "summary": []}
    part: ClassVar = {"type": "reasoning_text", "text": ""}
    events: ClassVar = "response.reasoning_text"


class _Message(_TextItem):
    key: ClassVar = "message"
    prefix: ClassVar = "msg"
    head: ClassVar = {"type": "message", "role": "assistant"}
    part: ClassVar = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    events: ClassVar = "response.output_text"
    extra: ClassVar = {"logprobs": []}


class _CallItem:
    """A call of one of the client's functions, which may belong to a `namespace`."""

    prefix: ClassVar = "fc"

    def __init__(self, piece: ToolCallDelta, index: int, namespace: str) -> None:
        self.key = piece.index
        self._id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._call_id = piece.id
        self._name = unqualified(piece.name or "", namespace)
        self._namespace = {"namespace": namespace} if namespace else {}
        self._index = index
        self._where = {"item_id": self._id, "output_index": index}
        self._arguments: list[str] = []

    def opening(self) -> Iterator[Event]:
        item = self.body("in_progress")
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}

    def grow(self, text: str) -> Iterator[Event]:
        self._arguments.append(text)
        yield {"type": "response.function_call_arguments.delta", **self._where, "delta": text}

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
            **self._namespace,
            "arguments": "".join(self._arguments),
            "status": status,
        }


class _CustomCallItem(_CallItem):
    """A call of one of the client's custom tools: its input is a text, and no JSON."""

    prefix: ClassVar = "ctc"

    def __init__(self, piece: ToolCallDelta, index: int, namespace: str) -> None:
        super().__init__(piece, index, namespace)
        self._input = InputReader()

    def grow(self, text: str) -> Iterator[Event]:
        if found := self._input.feed(text):
            yield {"type": "response.custom_tool_call_input.delta", **self._where, "delta": found}

    def closing(self, status: str) -> Iterator[Event]:
        item = self.body(status)
        yield {"type": "response.custom_tool_call_input.done", **self._where, "input": item["input"]}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def body(self, status: str) -> dict[str, Any]:
        if status != "in_progress":
            self._input.finish()
        return {
            "type": "custom_tool_call",
            "id": self._id,
            "call_id": self._call_id,
            "name": self._name,
            **self._namespace,
            "input": self._input.text,
            "status": status,
        }
