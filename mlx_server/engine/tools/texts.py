"""Strings without quotes in calls: llguidance's terminals for them, by the schemas of arguments.

llguidance enforces what a schema says of a string only between JSON's quotes. Here the same keywords become terminals
of its dialect of Lark, which are joined by `&`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import llguidance

from mlx_server.engine.grammar.schema import MAX_REGEX_CHARS, referenced
from mlx_server.engine.grammar.structural_tag import alternatives, terminal
from mlx_server.engine.tools.values import TypeResolver, member

ANY = "(?s:.*)"

_DATE = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]{_HOURS})"
_SPAN = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = "(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_SHORT = [f"({_GROUP}:){{{n - 1}}}{_GROUP}::(({_GROUP}:){{0,{6 - n}}}{_GROUP})?" for n in range(1, 7)]
_IN_PATH = "([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_AUTHORITY = rf"//({_IN_PATH}*@)?([a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{{2}})*(:[0-9]*)?(/{_IN_PATH}*)*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)({_SPAN})?|{_SPAN})",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "|".join((f"({_GROUP}:){{7}}{_GROUP}", f"::(({_GROUP}:){{0,6}}{_GROUP})?", *_SHORT, f"({_GROUP}:){{7}}:")),
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:({_AUTHORITY}|/?({_IN_PATH}+/?)*)(\?({_IN_PATH}|[/?])*)?(#({_IN_PATH}|[/?])*)?",
}
"""Regexes of the formats that are enforced: those that llguidance knows in JSON."""

_LONGEST = 2**20
"""The largest bound of a length that is written; no output is longer."""


class TextWriter:
    """Writes terminals for the strings of the schema `root`. `free` collects the keywords that are not enforced."""

    def __init__(self, root: Any, types: TypeResolver, free: set[str]) -> None:
        self._root = root
        self._types = types
        self._free = free
        self._known: dict[str, str | None] = {}  # by references

    def terminal(self, schema: Any) -> str | None:
        """Matches the strings that fit `schema`; None if that may be any. Raises `RecursionError`."""
        branches = [self._either(member(schema, key)) for key in ("anyOf", "oneOf")]
        both = member(schema, "allOf")
        parts = [*self._own(schema), *branches, *(map(self.terminal, both) if isinstance(both, list) else ())]
        if isinstance(reference := member(schema, "$ref"), str):
            parts.append(self._referenced(reference))
        written = " & ".join(dict.fromkeys(filter(None, parts)))
        if len(written) > MAX_REGEX_CHARS:  # references may multiply it
            return None
        return f"({written})" if written else None

    def _either(self, choices: Any) -> str | None:
        if not isinstance(choices, list):
            return None
        found = [self.terminal(one) for one in choices if "string" in self._types.types(one).kinds]
        return alternatives(filter(None, dict.fromkeys(found))) if found and None not in found else None

    def _referenced(self, reference: str) -> str | None:
        if reference not in self._known:
            self._known[reference] = None  # within itself
            self._known[reference] = self.terminal(referenced(self._root, reference))
        return self._known[reference]

    def _own(self, schema: Any) -> Iterator[str | None]:
        """What each keyword of the schema itself demands."""
        for values in (member(schema, "enum"), [member(schema, "const")]):
            if isinstance(values, list) and (texts := [json.dumps(text) for text in values if isinstance(text, str)]):
                yield alternatives(texts)
        for key, bounds in (("minLength", "{%d,}"), ("maxLength", "{0,%d}")):
            if (bound := member(schema, key)) is not None:
                is_number = isinstance(bound, int | float) and 0 <= bound <= _LONGEST
                yield self._noted(key, f"(?s:.){bounds % bound}" if is_number else None)
        if isinstance(pattern := member(schema, "pattern"), str):
            yield self._noted("pattern", _readable(pattern))
        if isinstance(name := member(schema, "format"), str):
            yield self._noted("format", FORMATS.get(name))

    def _noted(self, key: str, regex: str | None) -> str | None:
        """The terminal of the regex; notes the keyword if there is none."""
        if regex is None:
            self._free.add(key)
        return None if regex is None else terminal(regex)


def _readable(pattern: str) -> str | None:
    """`whole_regex`, if llguidance can compile it."""
    regex = whole_regex(pattern)
    try:
        fits(terminal(regex or ""))
    except ValueError:
        return None
    return regex


_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[a-zA-Z0-9_]", r"\W": "[^a-zA-Z0-9_]"}
"""JSON Schema's classes have ASCII letters and digits only."""


def whole_regex(pattern: str) -> str | None:
    """A regex that matches the whole of each text in which `pattern` is found. None for anchors in the middle."""
    branches: list[list[str]] = [[]]
    depth = 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(re.sub(r"\\.", lambda escape: _CLASSES.get(escape[0], escape[0]), piece))
    written = []
    for branch in branches:
        begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
        inner = branch[begins : len(branch) - ends]
        if "^" in inner or "$" in inner:
            return None
        written.append(f"{'' if begins else ANY}(?:{''.join(inner)}){'' if ends else ANY}")
    return "|".join(written)


def without(end: str) -> str:
    """A regex of the texts that do not contain `end`, or its part before its first character comes again. (With `~`,
    llguidance reaches its limits.)"""
    if end.startswith("]]>"):
        return r"(?:[^\]]|\][^\]]|\]{2,}[^>\]])*\]*"
    first = end[0]
    others = end[1:].partition(first)[0]
    rest = ""
    for other in map(re.escape, reversed(others)):  # after a `first`: anything but `others`
        rest = f"(?:[^{first}{other}][^{first}]*|{other}{rest})?" if rest else f"(?:[^{first}{other}][^{first}]*)?"
    return f"[^{first}]*(?:{first}{rest})*"


@cache
def _any_bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def _matcher(grammar: str) -> llguidance.LLMatcher:
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(_any_bytes(), grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _matcher_of(written: str) -> llguidance.LLMatcher:
    return _matcher(llguidance.LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {written}"))


@lru_cache(maxsize=256)
def fits(written: str) -> bool:
    """Whether there is a text that the terminal matches. Raises `ValueError` if llguidance cannot compile it."""
    matcher = _matcher_of(written)
    matcher.compute_bitmask()  # fails if no token is allowed
    return not matcher.is_error()


def fitting(texts: Iterable[str], written: str) -> tuple[str, ...]:
    """The texts that the terminal matches. Raises `ValueError` if llguidance cannot compile it."""
    beginning = _matcher_of(written)

    def is_whole(text: str) -> bool:
        matcher = beginning.deep_copy()
        return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())

    return tuple(filter(is_whole, texts))


def can_hold(pattern: str) -> bool:
    """Whether JSON's strings can be held to the pattern of a schema."""
    return can_compile({"type": "string", "pattern": pattern})


def can_compile(schema: Mapping[str, Any]) -> bool:
    """Whether llguidance can hold JSON to the schema. Other keywords than its own are ignored."""
    try:
        _matcher(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"lenient": True}))
    except ValueError:
        return False
    return True
