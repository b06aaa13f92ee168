"""Tool calls without their markers: small models that were trained on `<tool_call>` often write only the call itself,
in a code fence, or in the tags in which they saw the tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

_MARKERS = ("```json", "```", "<tools>", "</tools>")
_AROUND = re.compile(r"(?:\s|[,;]|```(?:json)?|</?tools>)*")
_HEAD = re.compile(r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_BEFORE_NAME = '{"name":"'
_AFTER_NAME = (',"arguments":{', ',"parameters":{')
_MAX_HEAD_CHARS = 512
_SPACES = re.compile(r"\s+")
_BRACKET = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\x00-\x1f]|\\(?:u[0-9a-fA-F]{0,4}|["\\/bfnrt])?')
_MAY_GO_ON = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")


class JsonObjectCursor:
    """Finds the end of a JSON object in streamed text by its brackets and strings, without validation."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._held = ""  # an escape that may go on

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends inside the object."""
        return self._depth > 0

    def feed(self, text: str) -> tuple[str, str | None]:
        """Takes more text, which is not empty: its part of the object, and what follows the object's end, None before
        that. Line breaks, other control characters and backslashes in strings, which models forget to escape, come
        escaped: a regex `\\d` is no escape of JSON. An escape comes as soon as it is complete."""
        pieces: list[str] = []
        start = at = 0
        text, self._held = self._held + text, ""
        while (found := (_IN_STRING if self._in_string else _BRACKET).search(text, at)) is not None:
            mark, at = found.group(), found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif self._in_string and mark < " ":
                pieces += (text[start : found.start()], json.dumps(mark)[1:-1])
                start = at
            elif self._in_string and _MAY_GO_ON.match(mark):
                if at == len(text):
                    self._held, text = mark, text[: found.start()]
                    break
                pieces += (text[start : found.start()], "\\")
                start = found.start()
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return "".join((*pieces, text[start:at])), text[at:]
        return "".join((*pieces, text[start:])), None


class UntaggedCalls:
    """Puts `start` and `end` around the calls of the tools `names` at the beginning of an answer. Other text passes
    unchanged, as soon as it cannot become such a call any more.

        ```json
        {"name": "look", "arguments": {"at": "north"}}
        ```
    becomes `<tool_call>{"name": …}</tool_call>`, without the fence.
    """

    def __init__(self, names: Iterable[str], start: str, end: str) -> None:
        self._names = frozenset(names)
        self._start = start
        self._end = end
        self._held = ""
        self._cursor: JsonObjectCursor | None = None
        self._is_after_call = False
        self._is_over = not self._names

    def feed(self, text: str) -> str:
        """Takes new text, and returns the part of the output so far that is certain."""
        done: list[str] = []
        while text and not self._is_over:
            text = self._follow(self._cursor, text, done) if self._cursor is not None else self._look(text, done)
        return "".join((*done, text))

    def finish(self) -> str:
        """Ends the output; returns the text that was held back, without the end of a call's code fence."""
        held, self._held, self._is_over = self._held, "", True
        around = _AROUND.match(held) if self._is_after_call else None
        return held if around is None else held[around.end() :]

    def _follow(self, cursor: JsonObjectCursor, text: str, done: list[str]) -> str:
        """Passes the call on; returns the text after it."""
        part, rest = cursor.feed(text)
        done.append(part)
        if rest is None:
            return ""
        done.append(self._end)
        self._cursor, self._is_after_call = None, True
        return rest

    def _look(self, text: str, done: list[str]) -> str:
        """Holds text back until it is known whether a call begins; then returns the call's text."""
        self._held += text
        around = _AROUND.match(self._held)
        body = self._held[around.end() :] if around is not None else self._held
        head = _HEAD.match(body)
        if head is not None and _is_one_of(head["name"], self._names):
            self._held, self._cursor = "", JsonObjectCursor()
            done.append(self._start)
            return body
        if (
            head is not None
            or len(self._held) > _MAX_HEAD_CHARS
            or not (self._may_begin(body) or _may_be_marker(self._held))
        ):
            done.append(self.finish())
        return ""

    def _may_begin(self, body: str) -> bool:
        squeezed = _SPACES.sub("", body)
        if len(squeezed) <= len(_BEFORE_NAME):
            return _BEFORE_NAME.startswith(squeezed)
        if not squeezed.startswith(_BEFORE_NAME):
            return False
        name, quote, after = squeezed[len(_BEFORE_NAME) :].partition('"')
        if quote:
            return name in self._names and any(one.startswith(after) for one in _AFTER_NAME)
        return any(one.startswith(name) for one in self._names)


def _may_be_marker(text: str) -> bool:
    """Whether the text ends with the beginning of a marker, after nothing but white space and markers."""
    beginnings = (marker[:length] for marker in _MARKERS for length in range(1, len(marker)))
    return any(text.endswith(one) and _AROUND.fullmatch(text[: len(text) - len(one)]) for one in beginnings)


def _is_one_of(quoted: str, names: frozenset[str]) -> bool:
    try:
        return json.loads(quoted) in names
    except ValueError:
        return False
