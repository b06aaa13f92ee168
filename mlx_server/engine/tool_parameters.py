"""Arguments that stand one by one between tags, made into JSON text while they are being written.

A file that a model writes by such a call is thousands of tokens long: clients want to see it grow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mlx_server.engine.tool_formats import Tool


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
