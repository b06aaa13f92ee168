"""Grammars of arguments in notations of their own (Gemma's, Python's), by the schemas of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server.engine.grammar.schema import referenced
from mlx_server.engine.grammar.structural_tag import LarkWriter, alternatives, json_expression, terminal
from mlx_server.engine.tools.formats import Notation
from mlx_server.engine.tools.texts import without
from mlx_server.engine.tools.written import noted

TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
CONDITIONS = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies")
"""Never enforced, in any notation."""
UNENFORCED = (
    *(*TEXT_KEYWORDS, "patternProperties"),
    *("minItems", "maxItems", "uniqueItems", "prefixItems"),
    *CONDITIONS,
    *("minProperties", "maxProperties", "propertyNames", "allOf"),
)
"""Never enforced in a model's own notation; of `allOf`, schemas that say different things of one keyword."""
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_INTEGER = r"/-?(0|[1-9][0-9]{0,30})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?/"
"""Without JSON's exponents: some such numbers are too large for any parser."""
_WORD = re.compile(r"\w+", re.ASCII)


class NotationWriter:
    """Writes the values of one tool's schema, without `end` in their texts. Limits on lengths, and patterns, are left
    out: they are hints."""

    def __init__(self, writer: LarkWriter, notation: Notation, schema: Mapping[str, Any], end: str) -> None:
        self._writer = writer
        self._notation = notation
        self._schema = schema
        self._end = end
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def arguments(self) -> str | None:
        """Matches all arguments; None if the notation cannot express the name of a required one."""
        required = self._schema.get("required", ())
        properties = {
            key: schema
            for key, schema in self._schema.get("properties", {}).items()
            if self._notation.keys.fullmatch(key)
        }
        if any(key not in properties for key in required):
            return None
        return self._members(properties, required, self._notation.argument)

    def _members(self, properties: Mapping[str, Any], required: Sequence[str], before: str) -> str:
        """Matches the required members and any of the others, in order, with separators between them."""
        separator = self._writer.literal(self._notation.separator)
        first = rest = '""'  # what may follow before the first member, and after it
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
        """Quotes keys that are not words, which mlx-lm's parser of Gemma 4 cannot read bare."""
        is_quoted = before == self._notation.member == "{key}:" and _WORD.fullmatch(key) is None
        return self._writer.literal(before.format(key=json.dumps(key) if is_quoted else key))

    def value(self, schema: Any) -> str:
        """Matches one value that fits `schema`."""
        if not isinstance(schema, Mapping):
            return self._anything()
        if schema.get("allOf"):
            return self.value({key: value for part in _parts(schema) for key, value in part.items()})
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
                bounds = {name: schema[name] for name in NUMBER_KEYWORDS if name in schema}
                if bounds:
                    return json_expression({"type": kind, **bounds}, {"lenient": True})
                return self._writer.rule("NUMBER", _INTEGER if kind == "integer" else _NUMBER)
            case "boolean":
                return self._words(self._notation.booleans)
            case "null":
                return self._words(self._notation.nulls)
            case "array" if schema.get("items") is False and not schema.get("prefixItems"):
                return '"[]"'
            case "array":
                return self._array(self.value(schema.get("items", True)))
            case "object" if schema.get("properties"):
                return self._object(
                    self._members(schema["properties"], schema.get("required", ()), self._notation.member)
                )
            case "object" if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
                return self._object("")
            case "object":
                return self._free_object(schema.get("additionalProperties"))
            case _:
                return self._anything()

    def _referenced(self, reference: str) -> str:
        """Writes a rule for each referenced schema, since schemas may be recursive."""
        if reference not in self._references:
            if not reference.startswith("#/"):
                return self._anything()
            self._references[reference] = name = self._writer.declare("reference")
            self._writer.define(name, self.value(referenced(self._schema, reference)))
        return self._references[reference]

    def _anything(self) -> str:
        if self._any is None:
            self._any = self._writer.declare("any")
            words = self._words((*self._notation.booleans, *self._notation.nulls))
            choices = [self._text(), self._writer.rule("NUMBER", _NUMBER), words, self._array(self._any)]
            self._writer.define(self._any, alternatives([*choices, self._free_object()]))
        return self._any

    def _free_object(self, members: Any = None) -> str:
        """An object whose members have any names, and values that fit the schema `members`."""
        before, _, after = self._notation.member.partition("{key}")
        key = self._writer.rule("KEY", r"/\w{1,40}/")
        member = f"{self._writer.literal(before)} {key} {self._writer.literal(after)} {self.value(members)}"
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
        ends = (self._end,) if self._notation.is_escaped else (self._end, quote)
        text = self._writer.rule("TEXT", " & ".join([self._notation.text, *(terminal(without(end)) for end in ends)]))
        return f"{self._writer.literal(quote)} {self._writer.text_until(quote, text)}"

    def _constant(self, value: Any) -> str:
        """Matches exactly `value`."""
        if value is None:
            return self._words(self._notation.nulls)
        if isinstance(value, bool):
            return self._words([word for word in self._notation.booleans if (word.lower() == "true") is value])
        return self._writer.literal(noted(self._notation, value))


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schema without its `allOf`, and the schemas of that."""
    rest = {key: value for key, value in schema.items() if key != "allOf"}
    return [part for part in (*schema["allOf"], rest) if isinstance(part, Mapping)]


def unenforced(schema: Mapping[str, Any]) -> set[str]:
    """The schema's own keywords that a notation does not enforce."""
    found = schema.keys() & UNENFORCED
    keywords = [keyword for part in _parts(schema) for keyword in part] if schema.get("allOf") else []
    return found - {"allOf"} if len(keywords) == len(set(keywords)) else found
