"""The formats in which models write tool calls: what they have in common, and those whose arguments are JSON.

Arguments that stand one by one between tags, made into JSON text while they are being written.

A file that a model writes by such a call is thousands of tokens long: clients want to see it grow.

The schemas of tools' parameters: held against what a grammar of calls reads of them, before it reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mlx_server.errors import InvalidRequestError

Tool = Mapping[str, Any]
"""A tool as OpenAI's clients send it: `{"type": "function", "function": {"name", "parameters", ...}}`."""


class ToolParser(Protocol):
    """How one family of models writes tool calls."""

    @property
    def name(self) -> str:
        """The format's name, as mlx-lm calls it."""
        ...

    @property
    def start(self) -> str:
        """The text that begins a region of calls."""
        ...

    @property
    def end(self) -> str:
        """The text that ends it; empty when only the end of the output does."""
        ...

    def parse(self, text: str, tools: Sequence[Tool], /) -> Any:
        """The call, or list of calls, between the markers: `{"name", "arguments"}`, maybe with an `id`.

        Raises any exception when the text is not a call.
        """
        ...


@dataclass(frozen=True, slots=True)
class JsonTagParser:
    """The format for models that have none of their own, and of all models that write JSON between tags:
    `<tool_call>{"name": "f", "arguments": {}}</tool_call>`."""

    name: str = "json_tools"
    start: str = "<tool_call>"
    end: str = "</tool_call>"

    def parse(self, text: str, tools: Sequence[Tool], /) -> Any:
        return json.loads(text)


class JsonFormat(NamedTuple):
    """Where JSON arguments stand in a region: behind `head`, maybe several times. `tail` may follow the last."""

    head: re.Pattern[str]
    tail: re.Pattern[str]


JSON_FORMATS = {
    "json_tools": JsonFormat(
        re.compile(
            r'\s*(?:\}\s*,?\s*)?\{\s*"name"\s*:\s*(?P<json_name>"(?:[^"\\]|\\.)+")\s*,'
            r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
        ),
        re.compile(r"\s*(?:[},].*)?", re.DOTALL),  # models forget a brace, or write one more, or another key
    ),
    "mistral": JsonFormat(
        re.compile(
            r"\s*(?:\[TOOL_CALLS\]\s*)?(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>[\w-]+)\s*)?\[ARGS\]\s*(?=\{)"
        ),
        re.compile(r"\s*"),
    ),
    "harmony": JsonFormat(  # what is left of it without the markers of the format, which are no content either
        re.compile(r"(?P<name>[\w.-]+)\s*(?:json|code)?\s*(?=\{)"),
        re.compile(r"\s*"),
    ),
    "llama3_json": JsonFormat(
        re.compile(
            r'(?:\s*\}\s*[;,]?\s*\{"name":)?\s*(?P<json_name>"(?:[^"\\]|\\.)+")\s*,\s*"parameters"\s*:\s*(?=\{)'
        ),
        re.compile(r"\s*\}?\s*"),
    ),
    "kimi_k2": JsonFormat(
        re.compile(
            r"\s*(?:<\|tool_call_end\|>\s*)?<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>.+?):\d+)\s*"
            r"<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
        re.compile(r"\s*(?:<\|tool_call_end\|>)?\s*"),
    ),
}

FAIL_WHEN_CUT = frozenset(("json_tools", "qwen3_coder"))
"""Formats whose parser cannot mistake the beginning of a call for a whole one, so that a missing end marker can be
forgiven."""


class JsonObjectCursor:
    """Finds the end of a JSON object in streamed text, by its brackets and strings. Does not validate."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """How many characters of `text` belong to the object, once its end has been read; None before."""
        for index, character in enumerate(text):
            if self._in_string:
                self._step_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None

    def _step_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False


class ParameterFormat(NamedTuple):
    """`head` is what a call begins with, `opening` what stands before each argument and `closing` behind it.
    `rest` makes a whole call of one that ends behind an argument. Of texts, the parser strips all white space at both
    ends with `strips_spaces`, otherwise one line break."""

    head: re.Pattern[str]
    opening: re.Pattern[str]
    closing: str
    rest: str
    strips_spaces: bool


PARAMETER_FORMATS = {
    "qwen3_coder": ParameterFormat(
        re.compile(r"\s*<function=(?P<name>[^\s<>]+)>"),
        re.compile(r"\s*<parameter=(?P<key>[^\s<>]+)>"),
        "</parameter>",
        "</function>",
        strips_spaces=False,
    ),
    "glm47": ParameterFormat(
        re.compile(r"\s*(?P<name>[^\s<>]+)\s*(?=<arg_key>)"),
        re.compile(r"\s*<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>"),
        "</arg_value>",
        "",
        strips_spaces=True,
    ),
    "minimax_m2": ParameterFormat(
        re.compile(r'\s*<invoke name="(?P<name>[^"<>]+)">'),
        re.compile(r'\s*<parameter name="(?P<key>[^"<>]+)">'),
        "</parameter>",
        "</invoke>",
        strips_spaces=True,
    ),
}
PARAMETER_FORMATS["laguna"] = PARAMETER_FORMATS["glm47"]

_MAX_WORD_CHARS = len("null")
"""Texts of this length may turn out to be no text for a parser, so that they are not begun before they are longer."""


class ParameterStream:
    """Follows the first call of one region. `parse` returns the arguments of a whole call's text, or raises.

    What it writes is what `parse` would return for the whole text, as far as it has come. It reads on where it has
    stopped, so that long arguments cost no more than their length.
    """

    def __init__(self, form: ParameterFormat, tools: Sequence[Tool], parse: Callable[[str], Mapping[str, Any]]) -> None:
        self._format = form
        self._tools = tools
        self._parse = parse
        self._at = 0
        self._searched = 0  # no closing begins before
        self._key: str | None = None  # of the argument that begins at `_at`; None between arguments
        self._shown: int | None = None  # where what is written of its text ends; None before it is begun
        self._written: set[str] = set()
        self.name: str | None = None

    def follow(self, body: str) -> str:
        """The arguments' JSON text that `body`, the region's text so far, adds to what was written."""
        return "".join(self._pieces(body))

    def finish(self, arguments: Mapping[str, Any] | None) -> str:
        """What is left at the end of the region: `arguments` are all of the call's, or None if it is broken."""
        pieces = [] if self._shown is None else ['"']
        pieces += [self._argument(key, value) for key, value in (arguments or {}).items() if key not in self._written]
        return "".join([*pieces, "}" if self._written else "{}"])

    def _pieces(self, body: str) -> Iterator[str]:
        if self.name is None:
            head = self._format.head.match(body)
            if head is None:
                return
            self.name, self._at = head["name"], head.end()
        while True:
            if self._key is None:
                opening = self._format.opening.match(body, self._at)
                if opening is None:
                    return
                self._key, self._at = opening["key"].strip(), opening.end()
            end = body.find(self._format.closing, max(self._at, self._searched))
            if self._is_text(self._key):
                yield from self._text(self._key, body, end)
            if end < 0:
                self._searched = len(body) - len(self._format.closing) + 1
                return
            yield self._close(self._key, body, end)

    def _text(self, key: str, body: str, end: int) -> Iterator[str]:
        """Writes what is certain of a text that closes at `end`, or not yet: its closing may have begun, and what
        stands before that may be stripped."""
        stop = len(body) - _overlap(body, self._format.closing) if end < 0 else end
        if self._shown is None:
            begin = self._at + self._num_leading(body[self._at : stop])
            if len(body[begin:stop].rstrip()) <= _MAX_WORD_CHARS:
                return
            yield self._key_text(key) + '"'
            self._shown = begin
        if not self._format.strips_spaces:
            stop -= body.endswith("\n", self._shown, stop)
        while self._format.strips_spaces and stop > self._shown and body[stop - 1].isspace():
            stop -= 1
        if stop > self._shown:
            yield json.dumps(body[self._shown : stop], ensure_ascii=False)[1:-1]
            self._shown = stop

    def _num_leading(self, text: str) -> int:
        if self._format.strips_spaces:
            return len(text) - len(text.lstrip())
        return int(text.startswith("\n"))

    def _close(self, key: str, body: str, end: int) -> str:
        """Ends the argument that stands before `end`."""
        behind = end + len(self._format.closing)
        self._key, self._at = None, behind
        if self._shown is not None:
            self._shown = None
            return '"'
        try:
            arguments = self._parse(body[:behind] + self._format.rest)
        except Exception:  # the parsers are foreign code; the end of the region decides what this was
            return ""
        return self._argument(key, arguments[key]) if key in arguments else ""

    def _argument(self, key: str, value: Any) -> str:
        return self._key_text(key) + json.dumps(value, ensure_ascii=False)

    def _key_text(self, key: str) -> str:
        separator = ", " if self._written else "{"
        self._written.add(key)
        return f"{separator}{json.dumps(key, ensure_ascii=False)}: "

    def _is_text(self, key: str) -> bool:
        """Whether the parser takes the argument as it stands."""
        for tool in self._tools:
            function = tool.get("function") or {}
            if function.get("name") == self.name:
                schema = _member(_member(function.get("parameters"), "properties"), key)
                return _member(schema, "type") == "string" and not _MIXED & schema.keys()
        return False


_MIXED = frozenset(("enum", "anyOf", "oneOf", "allOf"))


def _member(value: Any, key: str) -> Any:
    """Of what a client calls a schema, and may be anything."""
    return value.get(key) if isinstance(value, Mapping) else None


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)


MAX_DEPTH = 64
"""Of schemas within schemas; llguidance reads little more."""

_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_SCHEMAS = frozenset(("items", "additionalProperties", "not"))


def checked_schema(schema: Any, where: str, depth: int = MAX_DEPTH) -> Any:
    """A copy in which keywords that are null, as some clients send what they leave out, are left out. Raises
    `InvalidRequestError` with the path of the first part that is no schema, or is nested too deeply."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise _wrong(where, "a JSON schema: an object, or a boolean")
    if depth == 0:
        raise InvalidRequestError(f"{where} lies {MAX_DEPTH} schemas deep, which is the most; flatten it.", where)
    return {
        key: _checked(key, value, f"{where}.{key}", depth - 1)
        for key, value in schema.items()
        if value is not None or key == "const"
    }


def _checked(key: str, value: Any, where: str, depth: int) -> Any:
    """The value of one keyword."""
    if key in _NAMED:
        if not isinstance(value, Mapping):
            raise _wrong(where, "an object of schemas")
        return {name: checked_schema(inner, f"{where}.{name}", depth) for name, inner in value.items()}
    if key in _LISTS or (key == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise _wrong(where, "a list of schemas")
        return [checked_schema(inner, f"{where}[{index}]", depth) for index, inner in enumerate(value)]
    if key in _SCHEMAS:
        return checked_schema(value, where, depth)
    if key == "type" and isinstance(value, str):
        return value
    if key in ("required", "type") and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
        raise _wrong(where, "a list of strings" if key == "required" else "a string, or a list of strings")
    if key == "enum" and not isinstance(value, list):
        raise _wrong(where, "a list")
    return value


def _wrong(where: str, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} must be {wanted}.", where)
