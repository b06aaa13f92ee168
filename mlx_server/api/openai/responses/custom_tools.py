"""Custom tools of the Responses API: their input is free text, which may have to match a regex or a Lark grammar.

The model sees such a tool as a function with one argument, `input`. The client gets the text of that argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from mlx_server.engine.grammar.lark_regex import lark_regex
from mlx_server.engine.grammar.schema import MAX_REGEX_CHARS, check_length
from mlx_server.engine.text.messages import string_in
from mlx_server.errors import InvalidRequestError

ARGUMENT = "input"


def as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """The function that the model sees for a tool that `input_patterns` has accepted."""
    form = tool.get("format") or {}
    description = str(tool.get("description") or "")
    if form.get("type") == "grammar":
        rule = f"`{ARGUMENT}` must match this {form['syntax']} grammar:\n{form['definition']}"
        description = f"{description}\n\n{rule}" if description else rule
    parameters = {
        "type": "object",
        "properties": {ARGUMENT: {"type": "string"}},
        "required": [ARGUMENT],
        "additionalProperties": False,
    }
    shown = {"description": description} if description else {}
    return {"type": "function", "name": tool["name"], **shown, "parameters": parameters}


def input_patterns(tools: Iterable[tuple[str, dict[str, Any], str]]) -> dict[str, str]:
    """The regexes that tools' inputs must match, by the tool's name. `tools` has names, tools, and their paths in the
    request. Raises `InvalidRequestError`, also for regexes that are too long together."""
    found: dict[str, str] = {}
    for name, tool, where in tools:
        pattern = _input_pattern(tool, where)
        if pattern is not None:
            found[name] = pattern
            num_chars = sum(map(len, found.values()))
            if num_chars > MAX_REGEX_CHARS:
                raise InvalidRequestError(
                    f"The grammars of custom tools have {num_chars} characters together, as regexes, up to {where}; "
                    f"the most is {MAX_REGEX_CHARS}. Simplify them, or leave some out.",
                    f"{where}.format",
                )
    return found


def _input_pattern(tool: dict[str, Any], where: str) -> str | None:
    """The regex that the whole input must match; None for free text. Raises `InvalidRequestError`, also for an invalid
    grammar."""
    form, where = tool.get("format"), f"{where}.format"
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return None
    if not isinstance(form, dict) or form.get("type") != "grammar":
        raise InvalidRequestError(f"{where}.type must be text or grammar.", f"{where}.type")
    definition = string_in(form, "definition", where)
    check_length(definition, MAX_REGEX_CHARS, f"{where}.definition")
    match form.get("syntax"):
        case "regex":
            return definition
        case "lark":
            try:
                return lark_regex(definition)
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    f"{where}.definition cannot be enforced: {error}. In a call's argument, a Lark grammar is enforced "
                    "as a regex, so it must not recurse. Simplify it, or leave format out.",
                    f"{where}.definition",
                ) from error
    raise InvalidRequestError(f"{where}.syntax must be lark or regex.", f"{where}.syntax")


_HEAD = re.compile(rf'\s*\{{\s*"{ARGUMENT}"\s*:\s*"')
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(rf'(?:\\u{_HEX}{{4}})+|\\["\\/bfnrt]')
_WHOLE = re.compile(
    rf'(?:[^"\\]|\\[^u]|(?!\\u[dD][89abAB]{_HEX}{{2}}(?:\\(?:u{_HEX}{{0,3}})?)?\Z)'
    rf"\\u(?:{_HEX}{{4}}|{_HEX}{{0,3}}(?!{_HEX}|\Z)))*"
)
"""A string's text up to an escape that may go on, the first half of a surrogate pair included."""


class InputReader:
    r"""Reads the input from a call's arguments while they come: `{"input": "a\nb"}` is `a`, a line break, `b`, however
    the text is cut into pieces."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._held = ""
        self._is_open: bool | None = None  # None before the string begins
        self.text = ""

    def feed(self, fragment: str) -> str:
        """The part of the input that is certain once `fragment` has come."""
        self._arguments.append(fragment)
        self._held += fragment
        if self._is_open is None and (head := _HEAD.match(self._held)):
            self._is_open, self._held = True, self._held[head.end() :]
        if not self._is_open:
            return ""
        whole = _WHOLE.match(self._held)
        assert whole is not None
        piece = whole[0]
        self._is_open = not self._held.startswith('"', len(piece))
        self._held = self._held[len(piece) :]
        return self._add(_unescaped(piece))

    def finish(self) -> str:
        """The rest, if the model has not written its arguments in the expected form."""
        return "" if self.text or self._is_open is not None else self._add(_read("".join(self._arguments)))

    def _add(self, text: str) -> str:
        self.text += text
        return text


def _unescaped(piece: str) -> str:
    """What is no escape of JSON stays as it is: models forget to double backslashes."""
    return _without_halves(_ESCAPE.sub(lambda escape: str(json.loads(f'"{escape[0]}"')), piece))


def _without_halves(text: str) -> str:
    """JSON can spell half of a surrogate pair, but no text can have it."""
    return text.encode("utf-8", "replace").decode()


def _read(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    found = value.get(ARGUMENT) if isinstance(value, dict) else None
    return _without_halves(found) if isinstance(found, str) else arguments
