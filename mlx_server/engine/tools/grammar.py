"""Grammars that force a model to call a tool (`tool_choice` required or named), in the format it was trained on; or
that only enforce the tools' own grammars if the model calls one."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.engine.grammar.schema import (
    MAX_SOURCE_CHARS,
    adapted_schema,
    changed_schema,
    check_patterns,
    check_references,
    checked_schema,
)
from mlx_server.engine.grammar.spec import StructuredKind, StructuredSpec, check_halves
from mlx_server.engine.grammar.structural_tag import ANY_TEXT, LarkWriter, alternatives, json_expression
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.formats import FORMATS, TAG_SAFE, Parameter, Tool, ToolFormat, ToolParser
from mlx_server.engine.tools.notations import CONDITIONS, UNENFORCED, NotationWriter, unenforced
from mlx_server.engine.tools.tagged_grammar import JSON_OPTIONS, TaggedWriter
from mlx_server.engine.tools.texts import can_hold
from mlx_server.engine.tools.values import Arguments, keywords
from mlx_server.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """`spec` allows only calls. `is_opened`: it includes the text between the reasoning and the calls. `notes` name the
    keywords of schemas that it does not enforce."""

    spec: StructuredSpec
    is_opened: bool
    notes: tuple[str, ...] = ()


_MAX_JSON_CHARS = MAX_SOURCE_CHARS // 2
"""How much JSON the schemas of arguments between tags may take, each with all definitions that it refers to. Arguments
for which no room is left are free, as without a schema."""
_ANNOTATIONS = ("title", "description", "default", "examples")
_OF_ARGUMENTS = ("anyOf", "oneOf", *CONDITIONS, "minProperties", "maxProperties", "propertyNames")
"""Only enforced where the arguments are JSON, if they say which of a function's arguments there may be."""


def force_tool_calls(
    tokenizer: Tokenizer,
    parser: ToolParser,
    tools: Sequence[Tool],
    *,
    is_parallel: bool = True,
    is_closed: bool = True,
    patterns: Mapping[str, str] | None = None,
    fields: Mapping[str, str] | None = None,
    allowed: Container[str] | None = None,
    is_free: bool = False,
) -> ForcedCalls:
    """Allows one call of one of `tools`, or several with `is_parallel`, with arguments that fit their schemas, which
    are closed first if `is_closed` (`adapted_schema`). Texts in calls of the tools in `patterns` match their regexes.
    Only tools in `allowed` are called, if given. With `is_free` there may be any text before and after the calls, and
    no call at all. `fields` are the request's fields of the tools' parameters, by the tools' names, if they are not
    those of chat completions.

    Schema keywords that llguidance does not support are ignored: in a tool they are hints to the model. Raises
    `InvalidRequestError` for a format without a grammar here, and for names and arguments that the format cannot
    express.
    """
    form = _format_of(parser, tokenizer)
    named = {
        tool["function"]["name"]: f"tools[{index}].function.parameters" for index, tool in enumerate(tools)
    } | dict(fields or {})
    grammar = _CallGrammar(LarkWriter(tokenizer.added_tokens), parser, form, is_closed, patterns or {}, named)
    write = grammar.write_free if is_free else grammar.write
    callable_ = [tool["function"] for tool in tools if allowed is None or tool["function"]["name"] in allowed]
    try:
        source = write(callable_, form.max_calls if is_parallel else 1)
    except RecursionError as error:  # references can nest as deep as there are definitions
        raise InvalidRequestError("The parameters of tools are nested too deeply; flatten them.", "tools") from error
    spec = StructuredSpec(StructuredKind.LARK, source, param="tools", fields=grammar.fields)
    return ForcedCalls(
        spec,
        form.is_opened and not is_free,
        tuple(filter(grammar.free_keywords.__contains__, dict.fromkeys((*UNENFORCED, *_OF_ARGUMENTS)))),
    )


def _format_of(parser: ToolParser, tokenizer: Tokenizer) -> ToolFormat:
    is_list = parser.name == "mistral" and "[ARGS]" not in tokenizer.added_tokens  # its older models
    form = FORMATS.get("mistral_list" if is_list else parser.name)
    if form is None or not form.can_be_forced:
        raise InvalidRequestError(
            f"Calls in this model's format ({parser.name}) cannot be forced: set tool_choice to auto or none, and "
            "send no response_format with tools.",
            "tool_choice",
        )
    return form


class _CallGrammar:
    """Writes the grammar of one request's functions. `fields` are the request's fields by the rules for the functions
    that have been written from them; `named` has them by the functions' names."""

    def __init__(
        self,
        writer: LarkWriter,
        parser: ToolParser,
        form: ToolFormat,
        is_closed: bool,
        patterns: Mapping[str, str],
        named: Mapping[str, str],
    ) -> None:
        self.fields: dict[str, str] = {}
        self.free_keywords = set[str]()  # those in schemas that are not enforced
        self._named = named
        self._is_closed = is_closed
        self._patterns = patterns
        self._writer = writer
        self._parser = parser
        self._format = form
        self._room = _MAX_JSON_CHARS

    def write(self, functions: Sequence[Tool], max_calls: int) -> str:
        literal, form = self._writer.literal, self._format
        call, following = self._any_call(functions, self._parser.start)
        calls = call if max_calls == 1 else f"{call} ({following}){{0,{max_calls - 1}}}"
        if form.around is None:
            return self._writer.text(f"{literal(form.lead)} {calls}" if form.lead else calls)
        before, after = form.around
        before, after = form.lead + self._parser.start + before, after + self._parser.end
        return self._writer.text(f"{literal(before)} {calls} {literal(after)}")

    def write_free(self, functions: Sequence[Tool], max_calls: int) -> str:
        """Allows text, and calls after their first marker."""
        form, literal, start = self._format, self._writer.literal, self._parser.start
        if form.lead or form.is_opened or not start:
            raise InvalidRequestError(
                f"In this model's format of calls ({self._parser.name}) a custom tool's grammar is only enforced if "
                "a call is required; set tool_choice to required, or leave format out.",
                "tools",
            )
        call, following = self._any_call(functions, "")
        if form.around is not None:
            before, after = form.around
            call = f"{literal(before)} {call} ({following}){{0,{max_calls - 1}}} {literal(after + self._parser.end)}"
            max_calls = 1
        text = self._writer.rule("TEXT", ANY_TEXT)
        return self._writer.text(f"({self._writer.text_until(start)} {call}){{0,{max_calls}}} {text}")

    def _any_call(self, functions: Sequence[Tool], marker: str) -> tuple[str, str]:
        """Matches one call of any function after `marker`; and such a call after another one."""
        calls = [self._call(function, self._named[function["name"]], marker) for function in functions]
        call = self._writer.rule("call", alternatives(calls))
        separator = self._format.separator
        return call, f"{self._writer.literal(separator)} {call}" if separator else call

    def _call(self, function: Mapping[str, Any], where: str, marker: str) -> str:
        """Matches one function's call, after `marker` unless one pair of markers encloses all calls. `where` is the
        field of its parameters."""
        name, form = function["name"], self._format
        if form.names is not None and form.names.fullmatch(name) is None:
            name_field = f"{where.rpartition('.')[0]}.name"
            raise self._unwritable(f"{name_field} is {name!r}, which", name_field)
        schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        schema = checked_schema(schema, where)
        check_patterns(schema, where)
        check_halves(json.dumps(schema, ensure_ascii=False), where)
        try:
            check_references(schema)
        except ValueError as error:
            raise InvalidRequestError(f"{where} cannot be compiled: {error}", where) from error
        schema = changed_schema(adapted_schema(schema, is_closed=self._is_closed), self._reduce)
        schema = self._with_pattern(schema, name, where)
        start, end = (marker, self._parser.end) if form.around is None else ("", "")
        names = {"name": name, "json_name": json.dumps(name)}
        before = self._writer.literal(start + form.before.format(**names))
        if form.number is not None:
            number = self._writer.rule("NUMBER", "/[0-9]{1,3}/")
            before += f" {number} {self._writer.literal(form.number.format(**names))}"
        arguments = self._arguments(schema, where, has_pattern=name in self._patterns)
        rule = self._writer.rule("function", f"{before} {arguments} {self._writer.literal(form.after + end)}")
        self.fields[rule] = where
        return rule

    def _reduce(self, schema: dict[str, Any]) -> None:
        """Drops what a grammar does not need, and patterns that cannot be enforced, which it notes."""
        for key in _ANNOTATIONS:
            schema.pop(key, None)
        named = schema.get("patternProperties")
        held = {name: value for name, value in named.items() if can_hold(name)} if isinstance(named, dict) else named
        if held != named:
            schema |= {"patternProperties": held, "additionalProperties": True}
            self.free_keywords.add("patternProperties")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and not can_hold(pattern):
            del schema["pattern"]
            self.free_keywords.add("pattern")

    def _with_pattern(self, schema: Any, name: str, where: str) -> Any:
        """Adds the tool's pattern to each text of the schema."""
        pattern, form = self._patterns.get(name), self._format
        if pattern is None:
            return schema
        if form.notation is not None or (form.parameter is not None and form.parameter.has_cdata):
            raise InvalidRequestError(
                f"{where}: in this model's format of calls ({self._parser.name}) a custom tool's grammar cannot be "
                "enforced; leave format out.",
                where,
            )
        texts = {key: {**text, "pattern": f"^(?:{pattern})$"} for key, text in schema["properties"].items()}
        return {**schema, "properties": texts}

    def _arguments(self, schema: Mapping[str, Any], where: str, *, has_pattern: bool) -> str:
        parameter, notation = self._format.parameter, self._format.notation
        if parameter is not None:
            return self._parameters(self._listed(schema), parameter, where, has_pattern=has_pattern)
        if notation is None:
            return json_expression({"type": "object", **schema}, JSON_OPTIONS)
        schema = self._listed(schema)
        changed_schema({**schema, "allOf": []}, lambda inner: self.free_keywords.update(unenforced(inner)))
        written = NotationWriter(self._writer, notation, schema, self._parser.end).arguments()
        if written is None:
            raise self._unwritable(f"{where} requires arguments whose names", where)
        return written

    def _listed(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The schema with all its arguments in `properties`. Notes what it says of them besides."""
        arguments = Arguments(schema)
        self.free_keywords |= keywords(schema, schema).intersection(_OF_ARGUMENTS)
        return {**schema, "properties": arguments.schemas, "required": sorted(arguments.required)}

    def _unwritable(self, what: str, where: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{what} this model's format of calls ({self._parser.name}) cannot express; rename it with letters, digits "
            "and `_`, or set tool_choice to auto.",
            where,
        )

    def _parameters(self, schema: Mapping[str, Any], parameter: Parameter, where: str, *, has_pattern: bool) -> str:
        required = schema.get("required", ())
        written = []
        writer = TaggedWriter(
            *(self._writer, parameter, self._parser.end, schema, self._room, self.free_keywords),
            has_pattern=has_pattern,
        )
        for key, value_schema in schema.get("properties", {}).items():
            if TAG_SAFE.fullmatch(key) is None:
                if key in required:
                    raise self._unwritable(f"{where} requires {key!r}, which", where)
                continue
            expression = writer.argument(key, value_schema)
            if expression is None and key in required:
                raise InvalidRequestError(f"{where} requires {key!r}, but no value can fit its schema.", where)
            if expression is not None:
                written.append(expression if key in required else f"({expression})?")
        self._room = writer.room
        return " ".join(written) or '""'
