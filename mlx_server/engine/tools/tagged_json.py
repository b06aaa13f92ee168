"""Arguments between tags that are JSON: their schemas, changed so that no value has what a parser would read as the end
of the argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server.engine.grammar.schema import changed_schema, referenced
from mlx_server.engine.tools.notations import NUMBER_KEYWORDS
from mlx_server.engine.tools.texts import can_compile, without

_TEXT = "text"
"""The definition of texts that a parser would not read as the end of the argument."""
_ANY = "any"
"""The definition of values with no other texts."""
_REFERENCE = {"$ref": f"#/$defs/{_ANY}"}
_DECIDED = frozenset(("const", "enum", "format", "pattern"))
_COMBINED = frozenset(("$ref", "allOf", "anyOf", "oneOf", "const", "enum", "not", "if", "patternProperties"))
_LARGEST = 9 * 10**18
"""The largest bound that llguidance takes."""


def held_schema(schema: Mapping[str, Any], root: Any, ends: Sequence[str], room: int) -> dict[str, Any] | None:
    """`schema`, with all definitions that it needs from `root`, for values without any of `ends` in their texts. Free
    members and items are values of the same kind, unless llguidance cannot combine that with the rest. None if it is
    longer than `room`."""
    whole = _held(schema, root, ends, room, is_free_held=True)
    if whole is not None and _ANY in whole["$defs"] and not can_compile(whole):
        return _held(schema, root, ends, room, is_free_held=False)
    return whole


def _held(
    schema: Mapping[str, Any], root: Any, ends: Sequence[str], room: int, *, is_free_held: bool
) -> dict[str, Any] | None:
    names: dict[str, str] = {}  # of the definitions, by references
    pending: list[str] = []
    definitions: dict[str, Any] = {}
    text = {"allOf": [{"pattern": f"^({without(end)})$"} for end in ends]}
    no_end = {"|".join(map(re.escape, ends)): False}  # among the names of members

    def change(inner: dict[str, Any]) -> None:
        _limit_number(inner)
        if _refer_to_text(inner):
            definitions[_TEXT] = text
        reference = inner.get("$ref")
        if isinstance(reference, str):
            if reference not in names:
                names[reference] = str(len(names))
                pending.append(reference)
            inner["$ref"] = f"#/$defs/{names[reference]}"
        elif is_free_held and _refer_to_any(inner, no_end):
            definitions.update({_TEXT: text, _ANY: _anything(no_end)})

    whole = changed_schema(schema, change)
    room -= len(json.dumps(whole))
    while pending and room >= 0:
        reference = pending.pop()
        definitions[names[reference]] = changed_schema(referenced(root, reference), change)
        room -= len(json.dumps(definitions[names[reference]]))
    room -= sum(len(json.dumps(definitions.get(name))) for name in (_TEXT, _ANY))
    return None if room < 0 else {**whole, "$defs": definitions}


def _limit_number(schema: dict[str, Any]) -> None:
    """Numbers with bounds have no exponents, either."""
    if _may_be(schema, "number") and schema.keys().isdisjoint((*NUMBER_KEYWORDS, *_DECIDED)):
        schema |= {"minimum": -_LARGEST, "maximum": _LARGEST}


def _refer_to_text(schema: dict[str, Any]) -> bool:
    """Holds texts to their definition. Returns whether the schema needs it."""
    is_text = "pattern" in schema or (_may_be(schema, "string") and not _DECIDED & schema.keys())
    if is_text and isinstance(schema.get("allOf", []), list):
        schema["allOf"] = [*schema.get("allOf", []), {"$ref": f"#/$defs/{_TEXT}"}]
    return is_text


def _refer_to_any(schema: dict[str, Any], no_end: Mapping[str, bool]) -> bool:
    """Holds what the schema leaves free to its definition. Returns whether the schema needs it."""
    before = dict(schema)
    if not schema:
        schema |= _REFERENCE
    if not _COMBINED.isdisjoint(schema):
        return schema != before
    if _may_be(schema, "array") and schema.get("items", True) is True:
        schema["items"] = _REFERENCE
    others = schema.get("additionalProperties", True)
    if _may_be(schema, "object") and others is not False:
        schema |= {"patternProperties": no_end, "additionalProperties": _REFERENCE if others is True else others}
    return schema != before


def _anything(no_end: Mapping[str, bool]) -> dict[str, Any]:
    number = {"type": "number"}
    _limit_number(number)
    texts = {"type": "string", "allOf": [{"$ref": f"#/$defs/{_TEXT}"}]}
    lists = {"type": "array", "items": _REFERENCE}
    objects = {"type": "object", "patternProperties": no_end, "additionalProperties": _REFERENCE}
    return {"anyOf": [{"type": ["null", "boolean"]}, number, texts, lists, objects]}


def _may_be(schema: Mapping[str, Any], kind: str) -> bool:
    types = schema.get("type")
    return kind in types if isinstance(types, list) else kind == types
