"""Grammars that make a model call a tool (`tool_choice` required or named), in the format it was trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_server.engine.grammar.spec import StructuredKind, StructuredSpec, check_patterns
from mlx_server.engine.grammar.structural_tag import LarkWriter, alternatives, json_expression, json_options
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.formats import JsonTagParser, Tool, ToolParser, checked_schema
from mlx_server.engine.tools.notation import FUNCTION_GEMMA, GEMMA, PYTHON, Notation, NotationWriter
from mlx_server.errors import InvalidRequestError

_MAX_PARALLEL_CALLS = 16


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """`spec` admits calls only. `parser` reads what it admits, and is not always the model's own. `is_opened`:
    the calls begin with what a model writes between its reasoning and them, so that nothing else belongs there."""

    spec: StructuredSpec
    parser: ToolParser
    is_opened: bool = False


class _Parameter(NamedTuple):
    """What stands around each argument; `{key}` and `{type}` are filled in. With `has_cdata`, texts that XML cannot
    hold stand in a CDATA section."""

    before: str
    after: str
    has_cdata: bool = False


class _Region(NamedTuple):
    """What stands around all calls, inside the parser's markers."""

    before: str
    after: str


_PLAIN = r"/[^<&\n]*/"
_DATA = frozenset(("const", "default", "enum", "examples"))
_DECIDED = frozenset(("const", "enum", "format", "pattern"))
_TAG_SAFE = re.compile(r"[^\s<>\"'=:|]+")


@dataclass(frozen=True, slots=True)
class _Format:
    """What stands around a call's arguments; `{name}` and `{json_name}` are filled in. `before` may go on with what
    matches `number`.

    The arguments are one JSON object, or each of them stands for itself as `parameter` says, or they are written in
    a `notation`. Each call stands between the parser's markers, or all do with a `region`. `lead` is what comes
    before the first marker. `names` is what functions may be called, None anything.
    """

    before: str
    after: str
    separator: str = "\n"
    parameter: _Parameter | None = None
    notation: Notation | None = None
    region: _Region | None = None
    number: str | None = None
    lead: str = ""
    names: re.Pattern[str] | None = _TAG_SAFE
    max_calls: int = _MAX_PARALLEL_CALLS


_JSON_TAGS = _Format('\n{{"name": {json_name}, "arguments": ', "}\n", names=None)
_GLM = _Format("{name}\n", "", parameter=_Parameter("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"))
_FORMATS = {
    "json_tools": _JSON_TAGS,
    "longcat": _JSON_TAGS,
    "llama3_json": _Format(' {json_name}, "parameters": ', "}", names=None, max_calls=1),
    "mistral": _Format("{name}[ARGS]", "", separator="", names=re.compile(r"[\w-]+")),
    "mistral_list": _Format(
        '{{"name": {json_name}, "arguments": ', "}", separator=", ", region=_Region(" [", "]"), names=None
    ),
    "qwen3_coder": _Format(
        "\n<function={name}>\n", "</function>\n", parameter=_Parameter("<parameter={key}>\n", "\n</parameter>\n")
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "minimax_m2": _Format(
        '\n<invoke name="{name}">\n', "</invoke>\n", parameter=_Parameter('<parameter name="{key}">', "</parameter>\n")
    ),
    "minicpm5": _Format(
        '"{name}">', "", separator="", parameter=_Parameter('<param name="{key}">', "</param>", has_cdata=True)
    ),
    "kimi_k2": _Format(
        "<|tool_call_begin|>functions.{name}:",
        "<|tool_call_end|>",
        separator="",
        number="<|tool_call_argument_begin|>",
        region=_Region("", ""),
    ),
    "kimi_k3": _Format(
        '<|open|>call tool="{name}" index="',
        "<|close|>call<|sep|>",
        separator="",
        parameter=_Parameter('<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
        number='"<|sep|>',
        region=_Region("", ""),
        lead="<|close|>response<|sep|>",  # the answer before the calls stays empty
    ),
    "gemma4": _Format("call:{name}{{", "}", separator="", notation=GEMMA, names=re.compile(r"[\w-]+")),
    "function_gemma": _Format("call:{name}{{", "}", separator="", notation=FUNCTION_GEMMA, names=re.compile(r"\w+")),
    "pythonic": _Format(
        "{name}(", ")", separator=", ", notation=PYTHON, region=_Region("[", "]"), names=re.compile(r"[A-Za-z_][\w.]*")
    ),
    "harmony": _Format(
        "{name} <|constrain|>json<|message|>",
        "",
        lead="<|channel|>commentary ",
        names=re.compile(r"[\w.-]+"),
        max_calls=1,  # it writes the next one when it has seen the first one's result
    ),
}
_OPENED = frozenset(("harmony",))


def force_tool_calls(
    tokenizer: Tokenizer, parser: ToolParser | None, tools: Sequence[Tool], *, is_parallel: bool = True
) -> ForcedCalls:
    """Admits one call of one of `tools`, or several with `is_parallel`, with arguments that fit their schemas.

    Where `parser` is None, calls are JSON between tags. Keywords of schemas that llguidance does not know are
    ignored: in a tool they are hints to the model. Raises `InvalidRequestError` for a format that has no grammar
    here, and for names and arguments that the format cannot write.
    """
    parser = parser or JsonTagParser()
    form = _format_of(parser, tokenizer)
    grammar = _CallGrammar(LarkWriter(tokenizer.added_tokens), parser, form)
    try:
        source = grammar.write(tools, form.max_calls if is_parallel else 1)
    except RecursionError as error:  # of references, which are as deep as there are definitions
        raise InvalidRequestError("The parameters of tools are nested too deeply; flatten them.", "tools") from error
    spec = StructuredSpec(StructuredKind.LARK, source, param="tools")
    return ForcedCalls(spec, parser, is_opened=parser.name in _OPENED)


def _format_of(parser: ToolParser, tokenizer: Tokenizer) -> _Format:
    is_list = parser.name == "mistral" and "[ARGS]" not in tokenizer.added_tokens  # its older models
    form = _FORMATS.get("mistral_list" if is_list else parser.name)
    if form is None:
        raise InvalidRequestError(
            f"Calls in this model's format ({parser.name}) cannot be forced: set tool_choice to auto or none, and "
            "send no response_format with tools.",
            "tool_choice",
        )
    return form


class _CallGrammar:
    """Writes the grammar of one request's tools."""

    def __init__(self, writer: LarkWriter, parser: ToolParser, form: _Format) -> None:
        self._writer = writer
        self._format = form
        self._start, self._end = parser.start, parser.end
        self._name = parser.name
        self._json_options = {**json_options(None), "lenient": True}

    def write(self, tools: Sequence[Tool], max_calls: int) -> str:
        functions = [self._call(tool["function"], f"tools[{index}].function") for index, tool in enumerate(tools)]
        call = self._writer.rule("call", alternatives(functions))
        following = f"{self._writer.literal(self._format.separator)} {call}" if self._format.separator else call
        calls = call if max_calls == 1 else f"{call} ({following}){{0,{max_calls - 1}}}"
        lead, region = self._format.lead, self._format.region
        if region is None:
            return self._writer.text(f"{self._writer.literal(lead)} {calls}" if lead else calls)
        before = self._writer.literal(lead + self._start + region.before)
        return self._writer.text(f"{before} {calls} {self._writer.literal(region.after + self._end)}")

    def _call(self, function: Mapping[str, Any], where: str) -> str:
        name, names = function["name"], self._format.names
        if names is not None and names.fullmatch(name) is None:
            raise self._unwritable(f"{where}.name is {name!r}, which", f"{where}.name")
        schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        schema = checked_schema(schema, f"{where}.parameters")
        check_patterns(schema, f"{where}.parameters")
        start, end = ("", "") if self._format.region is not None else (self._start, self._end)
        before = self._writer.literal(start + self._format.before.format(name=name, json_name=json.dumps(name)))
        if self._format.number is not None:
            before += f" {self._writer.rule('NUMBER', '/[0-9]{1,3}/')} {self._writer.literal(self._format.number)}"
        arguments = self._arguments(schema, f"{where}.parameters")
        return self._writer.rule("function", f"{before} {arguments} {self._writer.literal(self._format.after + end)}")

    def _arguments(self, schema: Mapping[str, Any], where: str) -> str:
        if self._format.parameter is not None:
            return self._parameters(schema, self._format.parameter, where)
        if self._format.notation is None:
            return json_expression({"type": "object", **schema}, self._json_options)
        written = NotationWriter(self._writer, self._format.notation, schema).arguments()
        if written is None:
            raise self._unwritable(f"{where} requires arguments of names or types that", where)
        return written

    def _unwritable(self, what: str, where: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{what} this model's format of calls ({self._name}) cannot write; rename it with letters, digits and "
            "`_`, or set tool_choice to auto.",
            where,
        )

    def _parameters(self, schema: Mapping[str, Any], parameter: _Parameter, where: str) -> str:
        required = schema.get("required", ())
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        written = []
        for key, value_schema in schema.get("properties", {}).items():
            if _TAG_SAFE.fullmatch(key) is None:
                if key in required:
                    raise self._unwritable(f"{where} requires {key!r}, which", where)
                continue
            before = parameter.before.format(key=key, type=_written_type(value_schema))
            expression = f"{self._writer.literal(before)} {self._value(value_schema, definitions, parameter)}"
            written.append(expression if key in required else f"({expression})?")
        return " ".join(written) or '""'

    def _value(self, schema: Any, definitions: Mapping[str, Any], parameter: _Parameter) -> str:
        """A value and what follows it. Strings stand unquoted, up to where `after` first stands."""
        after = parameter.after
        if not _may_be_text(schema):
            whole = {**schema, **definitions}
            if not self._writer.begins_with_added_token(after):
                whole = _without_closing_tags(whole)
            return f"{json_expression(whole, self._json_options)} {self._writer.literal(after)}"
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        if choices and all(isinstance(choice, str) for choice in choices):
            written = [_cdata(choice) if parameter.has_cdata else choice for choice in choices]
            return f"{alternatives(map(self._writer.literal, written))} {self._writer.literal(after)}"
        if not parameter.has_cdata:
            return self._writer.text_until(after)
        plain = f"{self._writer.rule('PLAIN', _PLAIN)} {self._writer.literal(after)}"
        section = f"{self._writer.literal('<![CDATA[')} {self._writer.text_until(']]>' + after)}"
        return alternatives((plain, section))


def _without_closing_tags(schema: Any) -> Any:
    """A copy whose texts cannot hold what a parser would take for the end of the argument."""
    if isinstance(schema, list):
        return [_without_closing_tags(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: value if key in _DATA else _without_closing_tags(value) for key, value in schema.items()}
    if schema.get("type") == "string" and not _DECIDED & schema.keys():
        copy["pattern"] = "^([^<]|<+[^</])*$"
    return copy


def _cdata(text: str) -> str:
    return f"<![CDATA[{text}]]>" if re.search(r"[<&\n]", text) else text


def _may_be_text(schema: Any) -> bool:
    types = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    return "string" in types


def _written_type(schema: Any) -> str:
    if _may_be_text(schema):
        return "string"
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    kind = next((kind for kind in kinds if kind != "null"), "null")
    return "number" if kind == "integer" else kind
