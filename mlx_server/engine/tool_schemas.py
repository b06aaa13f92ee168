"""The schemas of tools' parameters: held against what a grammar of calls reads of them, before it reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_server.errors import InvalidRequestError

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
