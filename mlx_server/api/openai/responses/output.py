"""What the Responses API sends: a response's body, and the events of its output items."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic_core import to_json

from mlx_server.api.answers.collect import Answer, Usage, usage_of
from mlx_server.api.answers.generation import Finish, OutputEvent, in_order
from mlx_server.api.answers.output_parser import Thought
from mlx_server.api.errors import ErrorInfo
from mlx_server.api.http import sse
from mlx_server.api.openai.exchange import Exchange, Writer
from mlx_server.api.openai.output import cached_tokens
from mlx_server.api.openai.responses.custom_tools import InputReader
from mlx_server.api.openai.responses.items import unqualified
from mlx_server.api.openai.responses.reading import Reading, Stores, extend
from mlx_server.api.openai.responses.request import ClientTool, Reasoning, ResponsesRequest
from mlx_server.api.openai.responses.store import Item, KeptItem, KeptItems, Record
from mlx_server.engine.tools.parser import ToolCallDelta
from mlx_server.errors import ServeError
from mlx_server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

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

    def __init__(self, exchange: Exchange, request: ResponsesRequest, reading: Reading, stores: Stores) -> None:
        """Keeps the response and the items of its prompt from the start, unless the request's `store` is false. If it
        has a conversation, what was said is added to it when the response is complete. `reading` was read."""
        # The id is a key to what is kept, so clients cannot choose it.
        self.response_id = f"resp_{uuid.uuid4().hex}"
        self._members = {"id": self.response_id, **_members(exchange.model_name, request, exchange.sampling)}
        self._echo = reading.echo
        self._new_items = reading.new_items
        self._conversation_id = request.conversation_id
        self._conversations = stores.conversations
        self._store = None if request.store is False else stores.responses
        self._input_items = reading.earlier + reading.new_items
        self._response = self._as("in_progress")
        reasoning = _SUMMARY if request.reasoning is not None and request.reasoning.summary else _REASONING
        self._items = OutputItems({tool.name: tool for tool in request.client_tools()}, reasoning)
        self._numbers = itertools.count()

    @property
    def num_bytes(self) -> int:
        """Of memory, while the response is in progress."""
        return self._response.num_bytes + len(self._echo)

    def body(self) -> bytes:
        """The response as it is now."""
        return self._response.body()

    def full_body(self, answer: Answer) -> bytes:
        (choice,) = answer.choices
        for _ in self._items.append(choice):
            pass
        self._response = self._ending(answer.finish, answer.usage)
        self._put()
        return self._response.body()

    def opening(self, has_output: bool) -> bytes:
        self._put()
        return self._with_body("response.created") + self._with_body("response.in_progress")

    def write(self, event: OutputEvent) -> bytes:
        written = b"".join(map(self._encode, self._items.append(event)))
        if event.finish is not None:
            self._update(self._ending(event.finish, usage_of([event])))
        return written

    def closing(self) -> bytes:
        return self._with_body(_LAST_EVENTS[self._response.status])

    def failure(self, error: ErrorInfo) -> bytes:
        failed = {"code": "server_error", "message": error.message}
        self._update(self._as("failed", self._items.cut_off(), error=failed))
        return self.closing()

    async def settle(self) -> None:
        if self._conversation_id is not None and self._response.status in ("completed", "incomplete"):
            try:
                await extend(self._conversations, self._conversation_id, self._new_items, self._response.output)
            except ServeError as error:  # it was deleted or filled meanwhile, or the shared store has gone away
                logger.warning("The response %s was not added to its conversation: %s", self.response_id, error)
        if self._store is not None:
            await self._store.settle()

    def close(self) -> None:
        if self._response.is_in_progress:
            self._update(self._as("cancelled", self._items.cut_off()))
        if self._store is not None:
            self._store.settle_later()

    def _ending(self, finish: Finish, usage: Usage) -> Record:
        status = _status(finish)
        return self._as(
            status,
            self._items.done,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details={"reason": "max_output_tokens"} if finish.reason == "length" else None,
            usage=usage_body(usage),
        )

    def _as(self, status: str, output: Iterable[Item] = (), **changed: Any) -> Record:
        head = b"{%b,%b}" % (to_json({**self._members, **changed})[1:-1], self._echo)
        items = KeptItems.of(map(KeptItem.of, output))
        return Record(self.response_id, status, head, self._input_items, items)

    def _put(self) -> None:
        if self._store is not None:
            self._store.put(self._response)

    def _update(self, response: Record) -> None:
        self._response = response
        if self._store is not None:
            self._store.update(response)

    def _with_body(self, kind: str) -> bytes:
        number = next(self._numbers)
        return sse.named_json(
            kind, b'{"type":"%b","sequence_number":%d,"response":%b}' % (kind.encode(), number, self._response.body())
        )

    def _encode(self, event: Event) -> bytes:
        return sse.named(event["type"], {**event, "sequence_number": next(self._numbers)})


def _status(finish: Finish) -> str:
    """At a completed call, clients run it."""
    return "incomplete" if finish.cuts_call else _STATUSES[finish.reason]


def _members(model: str, request: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    """The body of a response without its status, its output, and what `ResponsesRequest.echo` has."""
    return {
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": bool(request.background),
        "conversation": None if request.conversation_id is None else {"id": request.conversation_id},
        "error": None,
        "frequency_penalty": sampling.frequency_penalty,
        "incomplete_details": None,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": request.previous_response_id,
        "reasoning": (request.reasoning or Reasoning()).model_dump(),
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": sampling.temperature,
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    """The counts under this protocol's names. Everything is cached without being asked, so no write is counted."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {**cached_tokens(usage), "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


class OutputItems:
    """Makes items, and their events, of what the model writes. One item is open at a time: output of another kind
    closes it."""

    def __init__(self, tools: Mapping[str, ClientTool], reasoning: _TextKind) -> None:
        """`tools` are the client's, by the names that the model knows; `reasoning` is the form of its reasoning."""
        self.done: list[dict[str, Any]] = []
        self._tools = tools
        self._reasoning = reasoning
        self._open: _TextItem | _CallItem | None = None

    def append(self, event: OutputEvent) -> Iterator[Event]:
        for part in in_order(event):
            if isinstance(part, str):
                kind = self._reasoning if isinstance(part, Thought) else _MESSAGE
                yield from self._grow(kind, part, partial(_TextItem, kind))
                continue
            new_call = partial(_CallItem, part, self._tools.get(part.name or ""))
            yield from self._grow(part.index, part.arguments_fragment, new_call)
        if event.finish is not None:
            is_whole = _status(event.finish) == "completed"
            yield from self._close("completed" if is_whole else "incomplete")

    def cut_off(self) -> list[dict[str, Any]]:
        """The items so far, the open one as incomplete. It gets no closing events: at these, clients run calls."""
        for _ in self._close("incomplete"):
            pass
        return self.done

    def _grow(self, key: object, text: str, new_item: Callable[[int], _TextItem | _CallItem]) -> Iterator[Event]:
        """Adds text to the item with this key, which is made and opened if it is not the open one."""
        if self._open is None or self._open.key != key:
            yield from self._close("completed")
            item = self._open = new_item(len(self.done))
            yield {"type": "response.output_item.added", "output_index": item.index, "item": item.body("in_progress")}
            yield from item.opening()
        if text:
            yield from self._open.grow(text)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item, self._open = self._open, None
        body = item.body(status)
        self.done.append(body)
        yield from item.closing(body)
        yield {"type": "response.output_item.done", "output_index": item.index, "item": body}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Kind:
    """Items of one kind: how their ids begin, the names of their events, and what each of these has beside the text."""

    prefix: str
    events: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _TextKind(_Kind):
    """Items with one part of text: how they begin, the part, the member that holds it, and the name of its events."""

    head: Mapping[str, Any]
    part: Mapping[str, Any]
    place: str = "content"
    part_events: str = "response.content_part"


_MESSAGE = _TextKind(
    prefix="msg",
    events="response.output_text",
    extra={"logprobs": []},
    head={"type": "message", "role": "assistant"},
    part={"type": "output_text", "text": "", "annotations": [], "logprobs": []},
)
_REASONING = _TextKind(
    prefix="rs",
    events="response.reasoning_text",
    head={"type": "reasoning", "summary": []},
    part={"type": "reasoning_text", "text": ""},
)
_SUMMARY = _TextKind(
    prefix="rs",
    events="response.reasoning_summary_text",
    head={"type": "reasoning"},
    part={"type": "summary_text", "text": ""},
    place="summary",
    part_events="response.reasoning_summary_part",
)
_CALL = _Kind(prefix="fc", events="response.function_call_arguments")
_CUSTOM_CALL = _Kind(prefix="ctc", events="response.custom_tool_call_input")


class _Item:
    """An item of the output. `key` tells it from the other items of its response."""

    def __init__(self, kind: _Kind, key: object, index: int) -> None:
        self.key = key
        self.index = index
        self._kind = kind
        self._id = f"{kind.prefix}_{uuid.uuid4().hex}"
        self._where: dict[str, Any] = {"item_id": self._id, "output_index": index}
        self._pieces: list[str] = []

    def grow(self, text: str) -> Iterator[Event]:
        self._pieces.append(text)
        yield {"type": f"{self._kind.events}.delta", **self._where, "delta": text, **self._kind.extra}


class _TextItem(_Item):
    """A message, or the reasoning before it: one part of text."""

    _kind: _TextKind

    def __init__(self, kind: _TextKind, index: int) -> None:
        super().__init__(kind, kind, index)
        self._where[f"{kind.place}_index"] = 0

    def opening(self) -> Iterator[Event]:
        yield {"type": f"{self._kind.part_events}.added", **self._where, "part": self._kind.part}

    def closing(self, body: dict[str, Any]) -> Iterator[Event]:
        (part,) = body[self._kind.place]
        yield {"type": f"{self._kind.events}.done", **self._where, "text": part["text"], **self._kind.extra}
        yield {"type": f"{self._kind.part_events}.done", **self._where, "part": part}

    def body(self, status: str) -> dict[str, Any]:
        kind = self._kind
        parts = [] if status == "in_progress" else [{**kind.part, "text": "".join(self._pieces)}]
        return {**kind.head, "id": self._id, "status": status, kind.place: parts}


class _CallItem(_Item):
    """A call of one of the client's tools. The input of a custom tool is free text, not JSON."""

    def __init__(self, piece: ToolCallDelta, tool: ClientTool | None, index: int) -> None:
        self._input = InputReader() if tool is not None and tool.is_custom else None
        super().__init__(_CALL if self._input is None else _CUSTOM_CALL, piece.index, index)
        namespace = "" if tool is None else tool.namespace
        self._head = {
            "type": "function_call" if self._input is None else "custom_tool_call",
            "id": self._id,
            "call_id": piece.id,
            "name": unqualified(piece.name or "", namespace),
            **({"namespace": namespace} if namespace else {}),
        }

    def opening(self) -> Iterator[Event]:
        yield from ()

    def grow(self, text: str) -> Iterator[Event]:
        if shown := text if self._input is None else self._input.feed(text):
            yield from super().grow(shown)

    def closing(self, body: dict[str, Any]) -> Iterator[Event]:
        names = ("name", "arguments") if self._input is None else ("input",)
        if rest := body[names[-1]][sum(map(len, self._pieces)) :]:  # an input in another form than expected
            yield from super().grow(rest)
        yield {"type": f"{self._kind.events}.done", **self._where, **{name: body[name] for name in names}}

    def body(self, status: str) -> dict[str, Any]:
        if self._input is None:
            return {**self._head, "arguments": "".join(self._pieces), "status": status}
        if status == "completed":
            self._input.finish()
        return {**self._head, "input": self._input.text, "status": status}
