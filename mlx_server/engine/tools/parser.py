"""Finds tool calls in a model's output while it streams.

Calls are in regions between two markers. The model's parser reads a region when it is complete. Arguments are streamed
earlier if they are JSON, or if each of them is between tags.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_server.engine.text.detokenizer import StringScanner
from mlx_server.engine.tools.formats import FORMATS, JSON_TAGS, Parameter, Tool, ToolFormat, ToolParser
from mlx_server.engine.tools.untagged import JsonObjectCursor, UntaggedCalls


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call. Only the first has `id` and `name`; `arguments_fragment` is a part of the arguments' JSON
    text."""

    index: int
    id: str | None
    name: str | None
    arguments_fragment: str


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A piece of output, read."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class _Call(NamedTuple):
    id: str | None
    name: str
    arguments: str


_MAX_HEAD_CHARS = 1024
"""If this much text has no head, no head follows: the region is read when it is complete."""


class ToolCallExtractor:
    """Splits one choice's streamed text into content and tool calls; a marker may come in several pieces.

    Arguments are streamed if the format is JSON or has tags around each, otherwise they come whole when their region
    ends. A region that is not a call becomes content again, markers included; arguments that break off after they were
    streamed stay as they are. White space around calls is dropped. If the format is JSON between tags, an answer that
    begins with a call of an offered tool may lack the tags.
    """

    def __init__(self, parser: ToolParser, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        self._parser = parser
        self._tools = tools
        self._new_id = new_id or _random_id
        self._format = FORMATS.get(parser.name) or ToolFormat(before="")
        names = [_function_name(tool) for tool in tools] if parser.name == JSON_TAGS.name else []
        self._untagged = UntaggedCalls(filter(None, names), parser.start, parser.end)
        self._parameters: _ParameterStream | None = None
        self._outside = StringScanner([parser.start])
        self._read = self._read_content
        self._body = ""
        self._json = JsonObjectCursor()
        self._num_calls = 0
        self._ids: set[str] = set()
        self._num_streamed = 0
        self._blank: str | None = ""  # white space that is content only if text follows; None inside content
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun, so that the finish reason is `tool_calls`."""
        return self._num_calls > 0

    def append(self, text: str) -> ToolOutput:
        """Takes new text. Holds back what may be the beginning of a marker or a call."""
        self._take_in(self._untagged.feed(text))
        return self._take()

    def _take_in(self, text: str) -> None:
        while text:
            text = self._read(text)

    def finish(self) -> ToolOutput:
        """Ends the output; returns what was held back."""
        self._take_in(self._untagged.finish())
        if self._read == self._read_body:
            is_forgiven = not self._parser.end or self._format.fails_when_cut
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

    # Each reader takes its part of the text and returns the rest, which goes to the reader that is then current.

    def _read_content(self, text: str) -> str:
        scan = self._outside.scan(text)
        self._show(scan.text)
        if scan.matched is not None:
            self._body = ""
            self._num_streamed = 0
            if self._format.streamed_parameter is not None:
                self._parameters = _ParameterStream(
                    self._format, self._format.streamed_parameter, self._tools, self._arguments_of
                )
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
        after = end + len(self._parser.end)
        self._close_region(self._body[:end], self._body[end:after])
        return self._body[after:]

    def _read_arguments(self, text: str) -> str:
        length = self._json.feed(text)
        if length is not None:
            self._read = self._read_body
        fragment = text[:length]
        self._deltas.append(ToolCallDelta(self._num_calls - 1, None, None, fragment))
        return text[len(fragment) :]

    def _read_head(self) -> str | None:
        """Begins a streamed call if the body has its head, and returns the text after it: the beginning of the
        arguments."""
        if self._format.head is None or len(self._body) > _MAX_HEAD_CHARS:
            return None
        head = self._format.head.match(self._body)
        name = None if head is None else _name_in(head)
        if head is None or name is None:
            return None
        self._begin(_Call(head.groupdict().get("id"), name, ""))
        self._num_streamed += 1
        self._json = JsonObjectCursor()
        self._read = self._read_arguments
        rest, self._body = self._body[head.end() :], ""
        return rest

    def _follow(self, parameters: _ParameterStream, body: str) -> None:
        was_begun = parameters.name is not None
        fragment = parameters.follow(body)
        if not was_begun and parameters.name is not None:
            self._begin(_Call(None, parameters.name, ""))
        if fragment:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, None, None, fragment))

    def _close_region(self, body: str, end: str, *, may_call: bool = True) -> None:
        """Reads what follows the last streamed call in the region, or all of the region."""
        if self._parameters is not None and self._parameters.name is not None:
            self._close_parameters(self._parameters, self._parse(body) if may_call else [], bool(end))
            return
        if self._num_streamed and self._format.tail.fullmatch(body):
            return
        calls = self._parse(body) if may_call else []
        for call in calls:
            self._begin(call)
        if not calls:
            start = "" if self._num_streamed else self._parser.start
            self._show(start + body + end)

    def _close_parameters(self, parameters: _ParameterStream, calls: list[_Call], is_complete: bool) -> None:
        """Ends the streamed call; `calls` are all calls of the region. A call that was cut off stays as it is."""
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
        except Exception:  # whatever a parser raises, the text is not a call
            return []

    def _begin(self, call: _Call) -> None:
        call_id = call.id if call.id and call.id not in self._ids else self._new_id()  # models repeat ids
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


def _function_name(tool: Tool) -> str | None:
    name = _member(_member(tool, "function"), "name")
    return name if isinstance(name, str) else None


def _name_in(head: re.Match[str]) -> str | None:
    """The function's name; None if it is invalid JSON."""
    if "name" in head.groupdict():
        return head["name"]
    try:
        name = str(json.loads(head["json_name"]))
        name.encode()
    except ValueError:
        return None
    return name


def _as_call(parsed: Any) -> _Call:
    """Raises some exception if `parsed` is not a call. The arguments may be an object, its JSON text, or missing."""
    name, call_id = parsed["name"], parsed.get("id")
    arguments = parsed.get("arguments", parsed.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a tool call")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + written).encode()  # raises for halves of surrogate pairs, which JSON can spell
    return _Call(call_id if isinstance(call_id, str) else None, name, written)


def _random_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


_MAX_WORD_CHARS = len("null")
"""A parser may read a text this short as another type, so longer ones only are streamed."""


class _ParameterStream:
    r"""Converts arguments between tags to JSON text while the model writes them: those of the first call of a region.
    `parse` returns the arguments in a complete call's text, or raises.

    The JSON text is the beginning of what `parse` would return for the complete text: for
    `<function=f>\n<parameter=path>\n/etc/a` it is `{"path": "/etc/a`. Each piece is read only once, so the cost of long
    arguments is proportional to their length.
    """

    def __init__(
        self,
        form: ToolFormat,
        parameter: Parameter,
        tools: Sequence[Tool],
        parse: Callable[[str], Mapping[str, Any]],
    ) -> None:
        # A name without an end of its own ends where the first argument begins.
        ahead = re.escape(parameter.before.partition("{")[0]) if form.before.strip().endswith("}") else ""
        self._head = re.compile(rf"{_pattern(form.before)}\s*(?={ahead})")
        self._opening = re.compile(_pattern(parameter.before))
        self._closing = parameter.after.strip()
        self._rest = form.after.strip()
        self._strips_spaces = not parameter.before.endswith("\n")
        self._tools = tools
        self._parse = parse
        self._at = 0
        self._searched = 0  # there is no closing before this position
        self._key: str | None = None  # of the argument that begins at `_at`; None between arguments
        self._shown: int | None = None  # the end of the part of its text that is written; None before the beginning
        self._written: set[str] = set()
        self.name: str | None = None

    def follow(self, body: str) -> str:
        """Takes the region's text so far, and returns the JSON text that was not returned before."""
        return "".join(self._pieces(body))

    def finish(self, arguments: Mapping[str, Any] | None) -> str:
        """Returns the remaining JSON text at the end of the region. `arguments` are all of the call's, or None if the
        call is broken."""
        pieces = [] if self._shown is None else ['"']
        pieces += [self._argument(key, value) for key, value in (arguments or {}).items() if key not in self._written]
        return "".join([*pieces, "}" if self._written else "{}"])

    def _pieces(self, body: str) -> Iterator[str]:
        if self.name is None:
            head = self._head.match(body)
            if head is None:
                return
            self.name, self._at = head["name"], head.end()
        while True:
            if self._key is None:
                opening = self._opening.match(body, self._at)
                if opening is None:
                    return
                self._key, self._at = opening["key"], opening.end()
            end = body.find(self._closing, max(self._at, self._searched))
            if self._is_text(self._key):
                yield from self._text(self._key, body, end)
            if end < 0:
                self._searched = len(body) - len(self._closing) + 1
                return
            yield self._close(self._key, body, end)

    def _text(self, key: str, body: str, end: int) -> Iterator[str]:
        """Writes the certain part of a text. It ends at `end`; if that is negative, the end is unknown: the closing tag
        may have begun, and white space before it may be stripped."""
        stop = len(body) - _overlap(body, self._closing) if end < 0 else end
        if self._shown is None:
            begin = self._at + self._num_leading(body[self._at : stop])
            if len(body[begin:stop].rstrip()) <= _MAX_WORD_CHARS:
                return
            yield self._key_text(key) + '"'
            self._shown = begin
        if not self._strips_spaces:
            stop -= body.endswith("\n", self._shown, stop)
        while self._strips_spaces and stop > self._shown and body[stop - 1].isspace():
            stop -= 1
        if stop > self._shown:
            yield json.dumps(body[self._shown : stop], ensure_ascii=False)[1:-1]
            self._shown = stop

    def _num_leading(self, text: str) -> int:
        if self._strips_spaces:
            return len(text) - len(text.lstrip())
        return int(text.startswith("\n"))

    def _close(self, key: str, body: str, end: int) -> str:
        """Ends the argument whose text ends at `end`."""
        after = end + len(self._closing)
        self._key, self._at = None, after
        if self._shown is not None:
            self._shown = None
            return '"'
        try:
            arguments = self._parse(body[:after] + self._rest)
        except Exception:  # whatever a parser raises; the end of the region decides
            return ""
        return self._argument(key, arguments[key]) if key in arguments else ""

    def _argument(self, key: str, value: Any) -> str:
        return self._key_text(key) + json.dumps(value, ensure_ascii=False)

    def _key_text(self, key: str) -> str:
        separator = ", " if self._written else "{"
        self._written.add(key)
        return f"{separator}{json.dumps(key, ensure_ascii=False)}: "

    def _is_text(self, key: str) -> bool:
        """Whether the parser reads the argument as literal text."""
        for tool in self._tools:
            function = tool.get("function") or {}
            if function.get("name") == self.name:
                schema = _member(_member(function.get("parameters"), "properties"), key)
                return _member(schema, "type") == "string" and not _MIXED & schema.keys()
        return False


def _pattern(template: str) -> str:
    r"""A regex for `template`, with any white space for its line breaks, and a group for each field:
    `<f={name}>\n` becomes `\s*<f=(?P<name>[^\s<>"]+)>`."""
    lines = [re.escape(line) for line in template.split("\n") if line]
    return r"\s*" + re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^\\s<>\"]+)", r"\s*".join(lines))


_MIXED = frozenset(("enum", "anyOf", "oneOf", "allOf"))


def _member(value: Any, key: str) -> Any:
    """`value[key]` of a part of a client's schema, which may be anything; None if it has no such member."""
    return value.get(key) if isinstance(value, Mapping) else None


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` are the beginning of `marker`."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[0], start + 1)
    return len(text) - start if start >= 0 else 0
