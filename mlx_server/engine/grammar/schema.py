"""Clients' schemas: how long and deep they may be, whether they are any, and what llguidance needs changed in them.

Compiling a grammar takes time and stack in proportion to its length, at best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from mlx_server.errors import InvalidRequestError

MAX_SOURCE_CHARS = 128 * 1024
"""Of any constraint. Grammars nest as deep as they are long, and compiling them recurses."""

MAX_GRAMMAR_CHARS = 32 * 1024
"""Of Lark and GBNF, whose terminals are regexes, too."""

MAX_REGEX_CHARS = 8 * 1024
"""Of a regex, or of all patterns in a schema: 8 Ki of `a?` take 30 MiB, 32 Ki half a gigabyte, and so on."""

_PATTERNS = frozenset(("pattern", "regex", "whitespace_pattern", "item_separator", "key_separator"))


def check_length(text: str, limit: int, where: str) -> None:
    """Raises `InvalidRequestError` for a text that is longer than the limit."""
    if len(text) > limit:
        raise InvalidRequestError(f"{where} has {len(text)} characters; the most is {limit}.", where)


def check_patterns(value: Any, where: str) -> None:
    """Raises `InvalidRequestError` where all the patterns together in a schema or structural tag are too long."""
    num_chars = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            num_chars += sum(len(text) for key, text in item.items() if key in _PATTERNS and isinstance(text, str))
            named = item.get("patternProperties")
            num_chars += sum(map(len, named)) if isinstance(named, Mapping) else 0
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    if num_chars > MAX_REGEX_CHARS:
        raise InvalidRequestError(
            f"The patterns in {where} have {num_chars} characters; the most is {MAX_REGEX_CHARS}.", where
        )


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
    _expect(isinstance(schema, Mapping), where, "a JSON schema: an object, or a boolean")
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
        _expect(isinstance(value, Mapping), where, "an object of schemas")
        return {name: checked_schema(inner, f"{where}.{name}", depth) for name, inner in value.items()}
    if key in _LISTS or (key == "items" and isinstance(value, list)):
        _expect(isinstance(value, list), where, "a list of schemas")
        return [checked_schema(inner, f"{where}[{index}]", depth) for index, inner in enumerate(value)]
    if key in _SCHEMAS:
        return checked_schema(value, where, depth)
    if key == "required":
        _expect(_is_texts(value), where, "a list of strings")
    if key == "type":
        _expect(isinstance(value, str) or _is_texts(value), where, "a string, or a list of strings")
    if key == "$ref":
        _expect(isinstance(value, str), where, "a string")
    if key == "enum":
        _expect(isinstance(value, list), where, "a list")
    return value


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _expect(is_so: bool, where: str, wanted: str) -> None:
    if not is_so:
        raise InvalidRequestError(f"{where} must be {wanted}.", where)


_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords that hold values, in which nothing is a schema."""


def changed_schema(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy in which `change` was done to each schema, the innermost first. Raises `RecursionError`."""
    if isinstance(schema, list):
        return [changed_schema(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: value if key in _VALUES else changed_schema(value, change) for key, value in schema.items()}
    change(copy)
    return copy


_STEP = 1e-6
"""How far a bound is moved: the numbers between are lost to the model, which hardly writes any of them."""

_LARGEST = 2.0**32
"""Beyond it, a step may be too small to change a number."""


def keep_bounds(schema: Any) -> Any:
    """The schema, with each exclusive bound moved inwards that llguidance takes for an inclusive one.

    It does so for a whole number when the other bound is less than 1 away: `{"exclusiveMinimum": 1, "maximum": 1.5}`
    would allow 1, and becomes `{"minimum": 1.000001, "maximum": 1.5}`.
    """
    return changed_schema(schema, _move_bounds)


def _move_bounds(schema: dict[str, Any]) -> None:
    low, high = _number(schema, "exclusiveMinimum", -inf), _number(schema, "exclusiveMaximum", inf)
    lower, upper = max(low, _number(schema, "minimum", -inf)), min(high, _number(schema, "maximum", inf))
    if upper - lower >= 1:
        return
    if low == lower and float(low).is_integer():
        del schema["exclusiveMinimum"]
        schema["minimum"] = low + _STEP
    if high == upper and float(high).is_integer():
        del schema["exclusiveMaximum"]
        schema["maximum"] = high - _STEP


def _number(schema: Mapping[str, Any], key: str, otherwise: float) -> float:
    value = schema.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return otherwise
    return value if abs(value) < _LARGEST else otherwise
