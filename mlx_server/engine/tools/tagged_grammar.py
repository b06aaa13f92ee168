"""Grammars of arguments between tags, by the schemas of tools: texts without quotes, and JSON whose schemas are changed
so that no value has what a parser would read as the end of the argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlx_server.engine.grammar.schema import changed_schema, referenced
from mlx_server.engine.grammar.structural_tag import LarkWriter, alternatives, json_expression, json_options, terminal
from mlx_server.engine.tools.formats import ITEM, TAG_SAFE, Parameter
from mlx_server.engine.tools.notations import CONDITIONS, NUMBER_KEYWORDS, TEXT_KEYWORDS
from mlx_server.engine.tools.texts import ANY, TextWriter, can_compile, fits, fitting, without
from mlx_server.engine.tools.values import (
    ALL_KINDS,
    TEXT,
    Arguments,
    TypeResolver,
    ValueTypes,
    inner_schema,
    keywords,
)

JSON_OPTIONS = {**json_options(None), "lenient": True}

_PLAIN = r"/[^<&\n]*/"
_SECTION, _END_OF_SECTION = "<![CDATA[", "]]>"
_OF_MEMBERS = (*CONDITIONS, "minProperties", "maxProperties", "propertyNames", "patternProperties")
_OF_ITEMS = (*CONDITIONS, "minItems", "maxItems", "uniqueItems", "prefixItems")
"""Not enforced in tags."""
_WORDS = {"null": '"null"', "boolean": '"true" | "false"'}


class TaggedWriter:
    """Writes the arguments of one function, whose schema is `root`; equal values are written once. A region of calls
    ends with `end`. `room` is how much JSON the schemas may take, `free` collects the keywords that are not enforced.
    With `has_pattern`, each text matches all of its schema's `pattern`, or the grammar cannot be compiled."""

    def __init__(
        self,
        writer: LarkWriter,
        parameter: Parameter,
        end: str,
        root: Mapping[str, Any],
        room: int,
        free: set[str],
        *,
        has_pattern: bool,
    ) -> None:
        self.room = room
        self._writer = writer
        self._parameter = parameter
        self._end = end
        self._root = root
        self._free = free
        self._has_pattern = has_pattern
        self._types = TypeResolver(root)
        self._texts = TextWriter(root, self._types, free)
        self._after = ""  # what follows the argument that is being written
        self._written: dict[tuple[str, ...], str | None] = {}  # rules for values, and for texts with what follows them

    def argument(self, key: str, schema: Any) -> str | None:
        """Matches one argument, and what precedes and follows it; None if no value can fit. Raises
        `RecursionError`."""
        parameter, types = self._parameter, self._types.whole(schema)
        if parameter.namespace and key.startswith("/"):
            return None  # it would be read as an end
        outer, self._after = self._after, parameter.end(key)
        written = self._values(key, schema, types)
        self._after = outer
        return written

    def _values(self, key: str, schema: Any, types: ValueTypes) -> str | None:
        parameter, kinds = self._parameter, _written_kinds(types)
        if types.kinds == ALL_KINDS or ("string" in types.kinds and types.texts is None and not parameter.is_typed):
            kinds = []  # any text may be given, and is read as what it looks like
        values: list[tuple[str, str]] = []
        is_apart = parameter.is_typed or parameter.namespace
        for group in [[kind] for kind in kinds] if is_apart else filter(None, [kinds]):
            if (value := self._json(schema, group)) is None:
                types = ValueTypes(ALL_KINDS)
            else:
                values.append((group[0], value))
        if "string" in types.kinds:
            self._free |= keywords(schema, self._root).intersection(CONDITIONS)
            if (text := self._text(schema, types)) is not None:
                values.insert(0, ("string", text))
        written: dict[str, list[str]] = {}  # values by what precedes them
        for kind, value in values:
            written.setdefault(parameter.begin(key, kind), []).append(value)
        literal = self._writer.literal
        choices = [f"{literal(before)} {alternatives(group)}" for before, group in written.items()]
        return alternatives(choices) if choices else None

    def _json(self, schema: Mapping[str, Any], kinds: list[str]) -> str | None:
        """Matches a value of one of these kinds, as JSON or in tags, and what follows it. None if there is no room for
        its schema with all definitions."""
        given = (json.dumps((schema, kinds)),)
        if given not in self._written:
            is_nested = bool(self._parameter.namespace) and kinds in (["array"], ["object"])
            self._written[given] = self._in_tags(schema, kinds[0]) if is_nested else self._new_json(schema, kinds)
        value = self._written[given]
        return value and f"{value} {self._writer.literal(self._after)}"

    def _in_tags(self, schema: Mapping[str, Any], kind: str) -> str | None:
        """Matches a list or an object in tags, or as JSON if the schema does not say what is in it."""
        rule = self._writer.declare("tags")
        self._written[(json.dumps((schema, [kind])),)] = rule  # the schema may refer to itself
        inner = (self._members if kind == "object" else self._items)(schema)
        value = rule if inner is not None else self._new_json(schema, [kind])
        self._writer.define(rule, inner or value or '""')
        return value

    def _members(self, schema: Mapping[str, Any]) -> str | None:
        """Matches an object's members; None if none are listed, or one that is required cannot be written."""
        arguments, written = Arguments(self._root, schema), []
        for key, inner in arguments.schemas.items():
            expression = self.argument(key, inner) if TAG_SAFE.fullmatch(key) else None
            if expression is None and key in arguments.required:
                return None
            if expression is not None:
                written.append(expression if key in arguments.required else f"({expression})?")
        self._free |= keywords(schema, self._root).intersection(_OF_MEMBERS)
        return " ".join(written) or None

    def _items(self, schema: Mapping[str, Any]) -> str | None:
        """Matches a list's items; None if the schema does not say what they are."""
        items = inner_schema(schema, self._root, "items")
        item = None if items is None else self.argument(ITEM, items)
        self._free |= keywords(schema, self._root).intersection(_OF_ITEMS)
        return None if item is None else f"({item})*"

    def _new_json(self, schema: Mapping[str, Any], kinds: list[str]) -> str | None:
        whole = _held_schema({**schema, "type": kinds}, self._root, self._ends(self._after), self.room)
        if whole is None:
            self.room -= self.room // 8  # the attempt took time, and there may be many
            return None
        self.room -= len(json.dumps(whole))
        return self._writer.rule("value", json_expression(whole, JSON_OPTIONS))

    def _ends(self, after: str) -> Sequence[str]:
        """What a parser may read as the end of the argument before `after`: any closing, if all begin with one
        token. A namespace's first character comes again in it, which `without` cannot tell."""
        if self._parameter.namespace:
            return [self._parameter.namespace[1:]]
        ends = filter(None, (after.strip(), self._end))
        return list(dict.fromkeys(self._writer.first_token(end) or end for end in ends))

    def _text(self, schema: Any, types: ValueTypes) -> str | None:
        """Matches an unquoted string that fits the schema, and what follows it; None if no string fits."""
        texts, written = types.texts, self._written
        if texts is not None:
            texts = self._fitting(texts, schema)
            if not texts:
                return None
            given = ("texts", *texts, self._after)
            if given not in written and (size := sum(map(len, texts))) <= self.room:
                self.room -= size
                written[given] = self._any_of(texts)
            if (expression := written.get(given)) is not None:
                return expression
        content = self._content(schema, types)
        given = ("content", content, self._after)
        if given not in written:
            try:
                written[given] = self._of_content(content)
            except ValueError:  # llguidance cannot hold it
                if self._has_pattern:
                    return self._writer.rule("STRING", content)  # refused, when all is compiled
                self._free |= self._limits(schema)
                written[given] = self._of_content(terminal(ANY))
        return written[given]

    def _any_of(self, texts: Sequence[str]) -> str:
        parameter, literal = self._parameter, self._writer.literal
        written = [literal(_cdata(text) if parameter.has_cdata else text) for text in texts]
        return self._writer.rule("value", f"{alternatives(written)} {literal(self._after)}")

    def _limits(self, schema: Any) -> set[str]:
        """What the schema says of a text besides its choices."""
        return keywords(schema, self._root).intersection(TEXT_KEYWORDS)

    def _fitting(self, texts: tuple[str, ...], schema: Any) -> tuple[str, ...]:
        """Those of the only texts that fit what else the schema says of texts; all if that is too much to write."""
        limits = self._limits(schema)
        if limits and (content := self._texts.terminal(schema)) is not None:
            with suppress(ValueError):  # llguidance cannot hold it
                return fitting(texts, content)
        self._free |= limits
        return texts

    def _content(self, schema: Any, types: ValueTypes) -> str:
        """The terminal of what the schema allows; of any text if that is too much to write."""
        if self._has_pattern:
            return f"({terminal(schema['pattern'][1:-1])})"
        others = frozenset() if self._parameter.is_typed else types.kinds - TEXT
        content = self._texts.terminal(schema) if others <= _WORDS.keys() else None
        if content is None or len(content) > self.room:
            self._free |= self._limits(schema)
            return terminal(ANY)
        self.room -= len(content)
        return alternatives([content, *(_WORDS[kind] for kind in sorted(others))])

    def _of_content(self, content: str) -> str | None:
        after = self._after
        if not self._parameter.has_cdata:
            return self._ended(content, after)
        section = self._ended(content, _END_OF_SECTION + after)
        choices = [self._ended(f"{content} & {_PLAIN}", after)]
        choices.append(section and f"{self._writer.literal(_SECTION)} {section}")
        return alternatives(filter(None, choices)) if any(choices) else None

    def _ended(self, content: str, after: str) -> str | None:
        """Matches a text of the terminal `content` without what would end it, and `after`; None if there is none.
        Raises `ValueError` if llguidance cannot hold it."""
        ends = [terminal(without(end)) for end in self._ends(after)]
        if not fits(" & ".join((content, *ends))):
            return None
        whole = " & ".join((content, *(self._writer.rule("WITHOUT", end) for end in ends)))
        if self._writer.first_token(after):
            return f"{self._writer.rule('STRING', whole)} {self._writer.literal(after)}"
        # One terminal: llguidance never backtracks to an earlier end of the text.
        return self._writer.rule("STRING", f"({whole}) {json.dumps(after)}")


def _cdata(text: str) -> str:
    return f"{_SECTION}{text}{_END_OF_SECTION}" if re.search(r"[<&\n]", text) else text


def _written_kinds(types: ValueTypes) -> list[str]:
    """The kinds of values that are written as JSON; `number` includes `integer`, and null comes last."""
    covered = {"string", "integer"} if "number" in types.kinds else {"string"}
    return sorted(types.kinds - covered, key=lambda kind: (kind == "null", kind))


_TEXT = "text"
"""The definition of texts that a parser would not read as the end of the argument."""
_ANY = "any"
"""The definition of values with no other texts."""
_REFERENCE = {"$ref": f"#/$defs/{_ANY}"}
_DECIDED = frozenset(("const", "enum", "format", "pattern"))
_COMBINED = frozenset(("$ref", "allOf", "anyOf", "oneOf", "const", "enum", "not", "if", "patternProperties"))
_LARGEST = 9 * 10**18
"""The largest bound that llguidance takes."""


def _held_schema(schema: Mapping[str, Any], root: Any, ends: Sequence[str], room: int) -> dict[str, Any] | None:
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
