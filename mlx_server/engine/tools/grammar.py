"""Grammars that force a model to call a tool (`tool_choice` required or named), in the format it was trained on; or
that only enforce the tools' own grammars if the model calls one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.engine.grammar.schema import adapted_schema, changed_schema, check_patterns, checked_schema, referenced
from mlx_server.engine.grammar.spec import StructuredKind, StructuredSpec
from mlx_server.engine.grammar.structural_tag import ANY_TEXT, LarkWriter, alternatives, json_expression, json_options
from mlx_server.engine.grammar.structural_tag import terminal as _terminal
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.formats import FORMATS, TAG_SAFE, Notation, Parameter, Tool, ToolFormat, ToolParser
from mlx_server.engine.tools.values import ALL_KINDS, ValueTypes, value_types
from mlx_server.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """`spec` allows only calls. `is_opened`: it includes the text between the reasoning and the calls."""

    spec: StructuredSpec
    is_opened: bool


_PLAIN = r"/[^<&\n]*/"
_DECIDED = frozenset(("const", "enum", "format", "pattern"))


def force_tool_calls(
    tokenizer: Tokenizer,
    parser: ToolParser,
    tools: Sequence[Tool],
    *,
    is_parallel: bool = True,
    is_closed: bool = True,
    patterns: Mapping[str, str] | None = None,
    is_free: bool = False,
) -> ForcedCalls:
    """Allows one call of one of `tools`, or several with `is_parallel`, with arguments that fit their schemas, which
    are closed first if `is_closed` (`adapted_schema`). Texts in calls of the tools in `patterns` match their regexes.
    With `is_free` there may be any text before and after the calls, and no call at all.

    Schema keywords that llguidance does not support are ignored: in a tool they are hints to the model. Raises
    `InvalidRequestError` for a format without a grammar here, and for names and arguments that the format cannot
    express.
    """
    form = _format_of(parser, tokenizer)
    grammar = _CallGrammar(LarkWriter(tokenizer.added_tokens), parser, form, is_closed, patterns or {})
    write = grammar.write_free if is_free else grammar.write
    try:
        source = write(tools, form.max_calls if is_parallel else 1)
    except RecursionError as error:  # references can nest as deep as there are definitions
        raise InvalidRequestError("The parameters of tools are nested too deeply; flatten them.", "tools") from error
    return ForcedCalls(StructuredSpec(StructuredKind.LARK, source, param="tools"), form.is_opened and not is_free)


def _format_of(parser: ToolParser, tokenizer: Tokenizer) -> ToolFormat:
    is_list = parser.name == "mistral" and "[ARGS]" not in tokenizer.added_tokens  # its older models
    form = FORMATS.get("mistral_list" if is_list else parser.name)
    if form is None or form.is_addressed:
        raise InvalidRequestError(
            f"Calls in this model's format ({parser.name}) cannot be forced: set tool_choice to auto or none, and "
            "send no response_format with tools.",
            "tool_choice",
        )
    return form


class _CallGrammar:
    """Writes the grammar of one request's tools."""

    def __init__(
        self, writer: LarkWriter, parser: ToolParser, form: ToolFormat, is_closed: bool, patterns: Mapping[str, str]
    ) -> None:
        self._is_closed = is_closed
        self._patterns = patterns
        self._has_pattern = False  # the function that is being written
        self._writer = writer
        self._parser = parser
        self._format = form
        self._json_options = {**json_options(None), "lenient": True}

    def write(self, tools: Sequence[Tool], max_calls: int) -> str:
        literal, form = self._writer.literal, self._format
        call, following = self._any_call(tools, self._parser.start)
        calls = call if max_calls == 1 else f"{call} ({following}){{0,{max_calls - 1}}}"
        if form.around is None:
            return self._writer.text(f"{literal(form.lead)} {calls}" if form.lead else calls)
        before, after = form.around
        before, after = form.lead + self._parser.start + before, after + self._parser.end
        return self._writer.text(f"{literal(before)} {calls} {literal(after)}")

    def write_free(self, tools: Sequence[Tool], max_calls: int) -> str:
        """Allows text, and calls after their first marker."""
        form, literal, start = self._format, self._writer.literal, self._parser.start
        if form.lead or form.is_opened or not start:
            raise InvalidRequestError(
                f"In this model's format of calls ({self._parser.name}) a custom tool's grammar is only enforced if "
                "a call is required; set tool_choice to required, or leave format out.",
                "tools",
            )
        call, following = self._any_call(tools, "")
        if form.around is not None:
            before, after = form.around
            call = f"{literal(before)} {call} ({following}){{0,{max_calls - 1}}} {literal(after + self._parser.end)}"
            max_calls = 1
        text = self._writer.rule("TEXT", ANY_TEXT)
        return self._writer.text(f"({self._writer.text_until(start)} {call}){{0,{max_calls}}} {text}")

    def _any_call(self, tools: Sequence[Tool], marker: str) -> tuple[str, str]:
        """Matches one call of any tool after `marker`; and such a call after another one."""
        functions = [
            self._call(tool["function"], f"tools[{index}].function", marker) for index, tool in enumerate(tools)
        ]
        call = self._writer.rule("call", alternatives(functions))
        separator = self._format.separator
        return call, f"{self._writer.literal(separator)} {call}" if separator else call

    def _call(self, function: Mapping[str, Any], where: str, marker: str) -> str:
        """Matches one function's call, after `marker` unless one pair of markers encloses all calls."""
        name, form = function["name"], self._format
        if form.names is not None and form.names.fullmatch(name) is None:
            raise self._unwritable(f"{where}.name is {name!r}, which", f"{where}.name")
        schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        schema = checked_schema(schema, f"{where}.parameters")
        check_patterns(schema, f"{where}.parameters")
        schema = adapted_schema(schema, is_closed=self._is_closed)
        self._has_pattern = name in self._patterns
        schema = self._with_pattern(schema, name, where)
        start, end = (marker, self._parser.end) if form.around is None else ("", "")
        before = self._writer.literal(start + form.before.format(name=name, json_name=json.dumps(name)))
        if form.number is not None:
            before += f" {self._writer.rule('NUMBER', '/[0-9]{1,3}/')} {self._writer.literal(form.number)}"
        arguments = self._arguments(schema, f"{where}.parameters")
        return self._writer.rule("function", f"{before} {arguments} {self._writer.literal(form.after + end)}")

    def _with_pattern(self, schema: Any, name: str, where: str) -> Any:
        """Adds the tool's pattern to each text of the schema."""
        pattern, form = self._patterns.get(name), self._format
        if pattern is None:
            return schema
        if form.notation is not None or (form.parameter is not None and form.parameter.has_cdata):
            raise InvalidRequestError(
                f"{where}: in this model's format of calls ({self._parser.name}) a custom tool's grammar cannot be "
                "enforced; leave format out.",
                "tools",
            )
        texts = {key: {**text, "pattern": f"^(?:{pattern})$"} for key, text in schema["properties"].items()}
        return {**schema, "properties": texts}

    def _arguments(self, schema: Mapping[str, Any], where: str) -> str:
        if self._format.parameter is not None:
            return self._parameters(schema, self._format.parameter, where)
        if self._format.notation is None:
            return json_expression({"type": "object", **schema}, self._json_options)
        written = _NotationWriter(self._writer, self._format.notation, schema).arguments()
        if written is None:
            raise self._unwritable(f"{where} requires arguments whose names or types", where)
        return written

    def _unwritable(self, what: str, where: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{what} this model's format of calls ({self._parser.name}) cannot express; rename it with letters, digits "
            "and `_`, or set tool_choice to auto.",
            where,
        )

    def _parameters(self, schema: Mapping[str, Any], parameter: Parameter, where: str) -> str:
        required = schema.get("required", ())
        written = []
        for key, value_schema in schema.get("properties", {}).items():
            if TAG_SAFE.fullmatch(key) is None:
                if key in required:
                    raise self._unwritable(f"{where} requires {key!r}, which", where)
                continue
            expression = self._parameter(key, value_schema, schema, parameter)
            written.append(expression if key in required else f"({expression})?")
        return " ".join(written) or '""'

    def _parameter(self, key: str, schema: Any, root: Mapping[str, Any], parameter: Parameter) -> str:
        """Matches one argument, and what precedes and follows it."""
        types = value_types(schema, root)
        kinds = _written_kinds(types)
        if types.kinds == ALL_KINDS or ("string" in types.kinds and types.texts is None and not parameter.is_typed):
            kinds = []  # any text may be given, and is read as what it looks like
        groups = [[kind] for kind in kinds] if parameter.is_typed else [kinds]
        values = [(group[0], self._json(schema, root, group, parameter.after)) for group in groups if group]
        if "string" in types.kinds:
            values.insert(0, ("string", self._text(schema, types.texts, parameter)))
        written: dict[str, list[str]] = {}  # values by what precedes them
        for kind, value in values:
            before = parameter.before.format(key=key, type="number" if kind == "integer" else kind)
            written.setdefault(before, []).append(value)
        literal = self._writer.literal
        return alternatives(f"{literal(before)} {alternatives(choices)}" for before, choices in written.items())

    def _json(self, schema: Mapping[str, Any], root: Mapping[str, Any], kinds: Sequence[str], after: str) -> str:
        """Matches a value of one of these kinds, as JSON, and what follows it."""
        has_token = self._writer.begins_with_added_token(after)
        names: dict[str, str] = {}  # of the definitions, by references

        def change(inner: dict[str, Any]) -> None:
            _limit_number(inner)
            if not has_token:
                _exclude_closing_tags(inner)
            if isinstance(inner.get("$ref"), str):
                inner["$ref"] = f"#/$defs/{names.setdefault(inner['$ref'], str(len(names)))}"

        whole = changed_schema({**schema, "type": kinds}, change)
        definitions: list[Any] = []
        while len(definitions) < len(names):
            reference = list(names)[len(definitions)]
            definitions.append(changed_schema(referenced(root, reference), change))
        whole["$defs"] = dict(zip(names.values(), definitions, strict=True))
        return f"{json_expression(whole, self._json_options)} {self._writer.literal(after)}"

    def _text(self, schema: Any, texts: Sequence[str] | None, parameter: Parameter) -> str:
        """Matches an unquoted string, one of `texts` if not None, and what follows it. It ends at the first `after`."""
        after = parameter.after
        if self._has_pattern:
            pattern = schema["pattern"][1:-1]
            if self._writer.begins_with_added_token(after):
                return f"{self._writer.rule('REGEX', _terminal(pattern))} {self._writer.literal(after)}"
            # One terminal: llguidance never backtracks to an earlier end of the text.
            return self._writer.rule("REGEX", _terminal(pattern + re.escape(after)))
        if texts is not None:
            written = [_cdata(text) if parameter.has_cdata else text for text in texts]
            return f"{alternatives(map(self._writer.literal, written))} {self._writer.literal(after)}"
        if not parameter.has_cdata:
            return self._writer.text_until(after)
        plain = f"{self._writer.rule('PLAIN', _PLAIN)} {self._writer.literal(after)}"
        section = f"{self._writer.literal('<![CDATA[')} {self._writer.text_until(']]>' + after)}"
        return alternatives((plain, section))


def _exclude_closing_tags(schema: dict[str, Any]) -> None:
    """Forbids texts that a parser would read as the end of the argument."""
    if _may_be(schema, "string") and not _DECIDED & schema.keys():
        schema["pattern"] = "^([^<]|<+[^</])*$"


def _may_be(schema: Mapping[str, Any], kind: str) -> bool:
    types = schema.get("type")
    return kind in types if isinstance(types, list) else kind == types


def _cdata(text: str) -> str:
    return f"<![CDATA[{text}]]>" if re.search(r"[<&\n]", text) else text


def _written_kinds(types: ValueTypes) -> list[str]:
    """The kinds of values that are written as JSON; `number` includes `integer`, and null comes last."""
    covered = {"string", "integer"} if "number" in types.kinds else {"string"}
    return sorted(types.kinds - covered, key=lambda kind: (kind == "null", kind))


_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_INTEGER = r"/-?(0|[1-9][0-9]{0,30})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?/"
"""Without JSON's exponents: some such numbers are too large for any parser."""
_LARGEST = 9 * 10**18
"""The largest bound that llguidance takes."""
_WORD = re.compile(r"\w+", re.ASCII)


def _limit_number(schema: dict[str, Any]) -> None:
    """Numbers with bounds have no exponents, either."""
    if _may_be(schema, "number") and schema.keys().isdisjoint((*_NUMBER_KEYWORDS, *_DECIDED)):
        schema |= {"minimum": -_LARGEST, "maximum": _LARGEST}


class _NotationWriter:
    """Writes the values of one tool's schema. Limits on lengths, and patterns, are left out: they are hints."""

    def __init__(self, writer: LarkWriter, notation: Notation, schema: Mapping[str, Any]) -> None:
        self._writer = writer
        self._notation = notation
        self._schema = schema
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def arguments(self) -> str | None:
        """Matches all arguments; None if the notation cannot express a required one."""
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
        """Quotes keys that are not words, which parsers of bare keys cannot read."""
        is_bare = before == "{key}:" and _WORD.fullmatch(key) is None
        return self._writer.literal(before.format(key=json.dumps(key) if is_bare else key))

    def value(self, schema: Any) -> str:
        """Matches one value that fits `schema`."""
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
        """Writes a rule for each referenced schema, since schemas may be recursive."""
        if reference not in self._references:
            if not reference.startswith("#/"):
                return self._anything()
            self._references[reference] = name = self._writer.declare("reference")
            self._writer.define(name, self.value(referenced(self._schema, reference)))
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
        """Matches exactly `value`; objects and arrays match anything."""
        if isinstance(value, str):
            quote = self._notation.quote
            written = json.dumps(value, ensure_ascii=False) if self._notation.is_escaped else quote + value + quote
            return self._writer.literal(written)
        if value is None:
            return self._words(self._notation.nulls)
        if isinstance(value, bool):
            return self._words([word for word in self._notation.booleans if (word.lower() == "true") is value])
        return self._writer.literal(json.dumps(value)) if isinstance(value, int | float) else self._anything()
