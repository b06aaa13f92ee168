"""Tool calls in a model's output: found while it streams, and handed on call by call.

A model writes calls in a format of its own between two markers. Knows the output's text only; what stands between
the markers is read by the model's `ToolParser`, or streamed as it comes where the arguments are JSON.

Tools for models whose chat template knows none: explained in words, calls and results written as text.

The format asked for is that of `tool_formats.JsonTagParser`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_server.engine.text.detokenizer import StringScanner
from mlx_server.engine.tools.formats import (
    FAIL_WHEN_CUT,
    JSON_FORMATS,
    PARAMETER_FORMATS,
    JsonObjectCursor,
    JsonTagParser,
    ParameterStream,
    Tool,
    ToolParser,
)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of one call. `id` and `name` are set on its first delta only; `arguments_fragment` is a part of the
    arguments' JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments_fragment: str


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a piece of output turned out to be."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class _Call(NamedTuple):
    id: str | None
    name: str
    arguments: str


_MAX_HEAD_CHARS = 1024
"""Where no head stands in this much text, none will: the region is read whole."""


class ToolCallExtractor:
    """Turns one choice's streamed text into content and tool calls, wherever the markers are cut.

    Arguments are streamed where the format is JSON or has tags around each, otherwise they come whole when their
    region ends. A region that is no call comes out as the content it was, markers included; arguments that break off
    have been streamed by then and stay as they are. White space alone around calls is dropped.
    """

    def __init__(self, parser: ToolParser, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        self._parser = parser
        self._tools = tools
        self._new_id = new_id or _random_id
        self._format = JSON_FORMATS.get(parser.name)
        self._parameter_format = PARAMETER_FORMATS.get(parser.name)
        self._parameters: ParameterStream | None = None
        self._outside = StringScanner([parser.start])
        self._read = self._read_content
        self._body = ""
        self._json = JsonObjectCursor()
        self._num_calls = 0
        self._ids: set[str] = set()
        self._num_streamed = 0
        self._blank: str | None = ""  # white space that is shown only if content follows; None within content
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun, which makes the finish reason `tool_calls`."""
        return self._num_calls > 0

    def append(self, text: str) -> ToolOutput:
        """Takes new text; what may be the beginning of a marker or of a call is held back."""
        while text:
            text = self._read(text)
        return self._take()

    def finish(self) -> ToolOutput:
        """What was held back, at the end of the output."""
        if self._read == self._read_body:
            is_forgiven = not self._parser.end or self._parser.name in FAIL_WHEN_CUT
            self._close_region(self._body, "", may_call=is_forgiven)
        self._show(self._outside.flush())
        if not self.has_calls:
            self._content.append(self._blank or "")
        return self._take()

    def _take(self) -> ToolOutput:
        output = ToolOutput("".join(self._content), tuple(self._deltas))
        self._content.clear()
        self._deltas.clear()
        return output

    # Each reader takes what it understands of the text and returns the rest, which the then current reader gets.

    def _read_content(self, text: str) -> str:
        scan = self._outside.scan(text)
        self._show(scan.text)
        if scan.matched is not None:
            self._body = ""
            self._num_streamed = 0
            if self._parameter_format is not None:
                self._parameters = ParameterStream(self._parameter_format, self._tools, self._arguments_of)
            self._read = self._read_body
        return scan.rest

    def _read_body(self, text: str) -> str:
        self._body += text
        rest = self._read_head()
        if rest is not None:
            return rest
        end = self._body.find(self._parser.end) if self._parser.end else -1
        if self._parameters is not None:
            self._follow(self._parameters, self._body if end < 0 else self._body[:end])
        if end < 0:
            return ""
        self._read = self._read_content
        behind = end + len(self._parser.end)
        self._close_region(self._body[:end], self._body[end:behind])
        return self._body[behind:]

    def _read_arguments(self, text: str) -> str:
        length = self._json.feed(text)
        if length is not None:
            self._read = self._read_body
        fragment = text[:length]
        self._deltas.append(ToolCallDelta(self._num_calls - 1, None, None, fragment))
        return text[len(fragment) :]

    def _read_head(self) -> str | None:
        """Begins a streamed call if its head stands in the body, and returns the rest: the arguments' beginning."""
        if self._format is None or len(self._body) > _MAX_HEAD_CHARS:
            return None
        head = self._format.head.match(self._body)
        name = None if head is None else _name_in(head)
        if head is None or name is None:
            return None
        self._begin(_Call(head.groupdict().get("id"), name, ""))
        self._num_streamed += 1
        self._json.reset()
        self._read = self._read_arguments
        rest, self._body = self._body[head.end() :], ""
        return rest

    def _follow(self, parameters: ParameterStream, body: str) -> None:
        was_begun = parameters.name is not None
        fragment = parameters.follow(body)
        if not was_begun and parameters.name is not None:
            self._begin(_Call(None, parameters.name, ""))
        if fragment:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, None, None, fragment))

    def _close_region(self, body: str, end: str, *, may_call: bool = True) -> None:
        """Handles what stands in the region behind the last streamed call, or all of it."""
        if self._parameters is not None and self._parameters.name is not None:
            self._close_parameters(self._parameters, self._parse(body) if may_call else [], bool(end))
            return
        if self._num_streamed and self._format is not None and self._format.tail.fullmatch(body):
            return
        calls = self._parse(body) if may_call else []
        for call in calls:
            self._begin(call)
        if not calls:
            start = "" if self._num_streamed else self._parser.start
            self._show(start + body + end)

    def _close_parameters(self, parameters: ParameterStream, calls: list[_Call], is_complete: bool) -> None:
        """Ends the call that was streamed; `calls` are all of the region. One that was cut off stays as it is."""
        if calls or is_complete:
            fragment = parameters.finish(json.loads(calls[0].arguments) if calls else None)
            self._deltas.append(ToolCallDelta(self._num_calls - 1, None, None, fragment))
        for call in calls[1:]:
            self._begin(call)

    def _arguments_of(self, body: str) -> Mapping[str, Any]:
        parsed = self._parser.parse(body, self._tools)
        arguments: Mapping[str, Any] = parsed[0]["arguments"] if isinstance(parsed, list) else parsed["arguments"]
        return arguments

    def _parse(self, body: str) -> list[_Call]:
        try:
            parsed = self._parser.parse(body, self._tools)
            return [_as_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # the parsers are foreign code, and every way to fail means: not a call
            return []

    def _begin(self, call: _Call) -> None:
        call_id = call.id if call.id and call.id not in self._ids else self._new_id()  # models count wrong
        self._ids.add(call_id)
        self._deltas.append(ToolCallDelta(self._num_calls, call_id, call.name, call.arguments))
        self._num_calls += 1
        self._blank = ""

    def _show(self, text: str) -> None:
        if self._blank is not None:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._blank = None
        self._content.append(text)


def _name_in(head: re.Match[str]) -> str | None:
    """The function's name; None when its JSON text is none."""
    if "name" in head.groupdict():
        return head["name"]
    try:
        name = str(json.loads(head["json_name"]))
        name.encode()
    except ValueError:
        return None
    return name


def _as_call(parsed: Any) -> _Call:
    """Raises when `parsed` is not a call; arguments may be an object, its JSON text, or missing."""
    name, call_id = parsed["name"], parsed.get("id")
    arguments = parsed.get("arguments", parsed.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a tool call")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + written).encode()  # JSON can spell halves of characters, which nothing can send on
    return _Call(call_id if isinstance(call_id, str) else None, name, written)


def _random_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


_FORMAT = JsonTagParser()

_EXPLANATION = f"""You can call functions. To call one, write this and nothing else:
{_FORMAT.start}
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
{_FORMAT.end}
The result will be given to you. These are the functions, one JSON object a line:
"""


def write_tools_into_messages(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The messages with the tools explained in the system message, for a template that has no place for them."""
    functions = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    explanation = _EXPLANATION + "\n".join(functions)
    chat = [_as_text(message) for message in messages]
    if chat[0]["role"] == "system":
        explanation = f"{chat.pop(0)['content']}\n\n{explanation}"
    return [{"role": "system", "content": explanation}, *chat]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [_call_text(call["function"]) for call in calls]
    content = "\n".join(filter(None, [message["content"], *written]))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _call_text(function: dict[str, Any]) -> str:
    body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{_FORMAT.start}\n{body}\n{_FORMAT.end}"
