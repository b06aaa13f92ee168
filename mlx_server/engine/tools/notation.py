"""Grammars of arguments that are written between commas, in a notation of the model's own."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.engine.grammar.structural_tag import ANY_TEXT, LarkWriter, alternatives, json_expression

_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_INTEGER = r"/-?(0|[1-9][0-9]{0,30})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?/"
"""Without the exponents that JSON allows: some are numbers that no parser can hold."""
_WORD = re.compile(r"\w+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """How values are written. `argument` is what stands before one, with `{key}`; `member` the same inside of
    objects, None where the model's parser cannot read arrays and objects. Texts stand between two of `quote`: what
    matches `text`, or with `is_escaped` what JSON would escape. `keys` is what arguments may be called.
    """

    argument: str
    member: str | None
    separator: str
    quote: str
    text: str = ANY_TEXT
    is_escaped: bool = False
    booleans: tuple[str, ...] = ("true", "false")
    nulls: tuple[str, ...] = ("null",)
    keys: re.Pattern[str] = re.compile(r"[^\s:,{}<>]+")


GEMMA = Notation(argument="{key}:", member="{key}:", separator=",", quote='<|"|>', keys=re.compile(r"[\w.$@/-]+"))
FUNCTION_GEMMA = Notation(argument="{key}:", member=None, separator=",", quote="<escape>", text="/[^}]*/")
PYTHON = Notation(
    argument="{key}=",
    member='"{key}": ',
    separator=", ",
    quote='"',
    text=r'/([^"\\\x00-\x1f\x7f]|\\["\\nt])*/',
    is_escaped=True,
    booleans=("true", "false", "True", "False"),
    nulls=("null", "None"),
    keys=re.compile(rf"(?!(?:{'|'.join(keyword.kwlist)})$)[A-Za-z_]\w*", re.ASCII),
)


class NotationWriter:
    """Writes the values of one tool's schema. Bounds of lengths and patterns are left out: they are hints."""

    def __init__(self, writer: LarkWriter, notation: Notation, schema: Mapping[str, Any]) -> None:
        self._writer = writer
        self._notation = notation
        self._schema = schema
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def arguments(self) -> str | None:
        """An expression for all arguments; None if one that is required cannot be written."""
        required = self._schema.get("required", ())
        properties = {
            key: schema
            for key, schema in self._schema.get("properties", {}).items()
            if self._notation.keys.fullmatch(key) and self._can_write(schema)
        }
        if any(key not in properties for key in required):
            return None
        return self._members(properties, required, self._notation.argument)

    def _can_write(self, schema: Any) -> bool:
        if self._notation.member is not None:
            return True
        types = schema.get("type") if isinstance(schema, Mapping) else None
        return isinstance(types, str) and types not in ("array", "object")

    def _members(self, properties: Mapping[str, Any], required: Sequence[str], before: str) -> str:
        """Those required and any of the others, in their order, with separators only between them."""
        separator = self._writer.literal(self._notation.separator)
        first = rest = '""'  # what may follow where nothing has been written yet, and where something has
        for key, schema in reversed(list(properties.items())):
            member = self._writer.rule("member", f"{self._key(before, key)} {self.value(schema)}")
            begun = f"{member} {rest}"
            if key in required:
                first, rest = begun, self._writer.rule("rest", f"{separator} {begun}")
            else:
                first = self._writer.rule("first", f"{begun} | {first}")
                rest = self._writer.rule("rest", f"({separator} {member})? {rest}")
        return first

    def _key(self, before: str, key: str) -> str:
        """Parsers of bare keys know words only, but let those in quotes stand."""
        is_bare = before == "{key}:" and _WORD.fullmatch(key) is None
        return self._writer.literal(before.format(key=json.dumps(key) if is_bare else key))

    def value(self, schema: Any) -> str:
        """An expression for one value that fits `schema`."""
        if not isinstance(schema, Mapping):
            return self._anything()
        if "$ref" in schema:
            return self._referenced(str(schema["$ref"]))
        if "const" in schema:
            return self._constant(schema["const"])
        if schema.get("enum"):
            return alternatives(map(self._constant, schema["enum"]))
        choices = schema.get("anyOf") or schema.get("oneOf")
        if choices:
            return alternatives(map(self.value, choices))
        types = schema.get("type")
        if isinstance(types, list):
            return alternatives(self._of_type(kind, schema) for kind in types)
        return self._of_type(types, schema)

    def _of_type(self, kind: Any, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return self._text()
            case "integer" | "number":
                bounds = {name: schema[name] for name in _NUMBER_KEYWORDS if name in schema}
                if bounds:
                    return json_expression({"type": kind, **bounds}, {"lenient": True})
                return self._writer.rule("NUMBER", _INTEGER if kind == "integer" else _NUMBER)
            case "boolean":
                return self._words(self._notation.booleans)
            case "null":
                return self._words(self._notation.nulls)
            case "array":
                return self._array(self.value(schema.get("items", True)))
            case "object" if schema.get("properties"):
                return self._object(
                    self._members(schema["properties"], schema.get("required", ()), self._notation.member or "")
                )
            case "object":
                return self._free_object()
            case _:
                return self._anything()

    def _referenced(self, reference: str) -> str:
        """Schemas may contain themselves, so each has a rule that it can name."""
        if reference not in self._references:
            target: Any = self._schema
            for step in reference.removeprefix("#/").split("/"):
                target = target.get(step, True) if isinstance(target, Mapping) else True
            if reference == "#" or not reference.startswith("#/"):
                return self._anything()
            self._references[reference] = name = self._writer.declare("reference")
            self._writer.define(name, self.value(target))
        return self._references[reference]

    def _anything(self) -> str:
        if self._notation.member is None:
            return self._scalar()
        if self._any is None:
            self._any = self._writer.declare("any")
            self._writer.define(self._any, f"{self._scalar()} | {self._array(self._any)} | {self._free_object()}")
        return self._any

    def _scalar(self) -> str:
        words = self._words((*self._notation.booleans, *self._notation.nulls))
        return alternatives([self._text(), self._writer.rule("NUMBER", _NUMBER), words])

    def _free_object(self) -> str:
        before, _, after = (self._notation.member or "").partition("{key}")
        key = self._writer.rule("KEY", r"/\w{1,40}/")
        member = f"{self._writer.literal(before)} {key} {self._writer.literal(after)} {self._anything()}"
        return self._object(f"({self._list(self._writer.rule('member', member))})?")

    def _array(self, item: str) -> str:
        return f'"[" ({self._list(item)})? "]"'

    def _object(self, members: str) -> str:
        return f'"{{" {members} "}}"'

    def _list(self, item: str) -> str:
        return f"{item} ({self._writer.literal(self._notation.separator)} {item})*"

    def _words(self, words: Sequence[str]) -> str:
        return alternatives(map(self._writer.literal, words))

    def _text(self) -> str:
        quote = self._notation.quote
        return f"{self._writer.literal(quote)} {self._writer.text_until(quote, self._notation.text)}"

    def _constant(self, value: Any) -> str:
        """A value as it stands; objects and arrays are left to the model."""
        if isinstance(value, str):
            quote = self._notation.quote
            written = json.dumps(value, ensure_ascii=False) if self._notation.is_escaped else quote + value + quote
            return self._writer.literal(written)
        if value is None:
            return self._words(self._notation.nulls)
        if isinstance(value, bool):
            return self._words([word for word in self._notation.booleans if (word.lower() == "true") is value])
        return self._writer.literal(json.dumps(value)) if isinstance(value, int | float) else self._anything()
