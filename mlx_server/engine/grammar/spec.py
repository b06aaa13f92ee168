"""The structured output that a request asks for, read from the various fields that clients use."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_server.engine.grammar.schema import (
    MAX_GRAMMAR_CHARS,
    MAX_REGEX_CHARS,
    adapted_schema,
    check_length,
    check_patterns,
    checked_schema,
)
from mlx_server.errors import InvalidRequestError


class StructuredKind(enum.StrEnum):
    """The kinds of constraint: what `StructuredSpec.source` is."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    GBNF = "gbnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class StructuredSpec:
    """One constraint on an output; equal ones compile to the same grammar.

    `source` is JSON text for schemas, choices and structural tags, else the regex or grammar itself.
    `whitespace_pattern` matches the white space between the tokens of JSON: None means usual printing, an empty pattern
    no white space. `param` is the request's field, for error messages. If a grammar was written here from several
    fields, `fields` names them by the last rule that was written from each.
    """

    kind: StructuredKind
    source: str
    whitespace_pattern: str | None = None
    param: str = field(default="structured_outputs", compare=False)
    fields: Mapping[str, str] = field(default_factory=dict, compare=False)

    def field_at(self, line: int) -> str:
        """The request's field that the source has the line (from 1) from."""
        rules = (text.partition(":")[0] for text in self.source.split("\n")[line - 1 :])
        return next((self.fields[rule] for rule in rules if rule in self.fields), self.param)


_TAG_SCHEMAS = frozenset(("json_schema", "schema"))
"""The keys of schemas in a structural tag."""

_OPTION_TYPES = {
    "disable_any_whitespace": bool,
    "disable_additional_properties": bool,
    "whitespace_pattern": str,
    "disable_fallback": bool,  # of vLLM: there is no other backend to fall back to
}


def parse_structured(body: Mapping[str, Any], format_name: str = "response_format") -> StructuredSpec | None:
    """The constraint that a request's body asks for, or None. Errors call its `response_format` by `format_name`.

    Reads OpenAI's `response_format`; vLLM's `structured_outputs` and its older `guided_*`; SGLang's `json_schema`,
    `regex` and `ebnf`; llama.cpp's `grammar`; Ollama's `format`. Null fields count as absent. Schemas are closed
    (`adapted_schema`) unless `open_schemas` is true or `disable_additional_properties` is false. Raises
    `InvalidRequestError` with the field's name for invalid values, for more than one constraint, and for
    `structured_outputs` with none or with unknown members.
    """
    found = list(_constraints_in(body, format_name))
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[0].param} and {found[1].param} exclude each other; ask for one constraint.", found[1].param
        )
    if not found:
        return None
    outputs = body.get("structured_outputs")
    asked = outputs.get("disable_additional_properties") if isinstance(outputs, Mapping) else None
    return _adapted(found[0], is_closed=not body.get("open_schemas") if asked is None else asked)


def _constraints_in(body: Mapping[str, Any], format_name: str) -> Iterator[StructuredSpec]:
    response_format = body.get("response_format")
    if response_format is not None:
        spec = _from_response_format(response_format, format_name)
        if spec is not None:
            yield spec
    outputs = body.get("structured_outputs")
    if outputs is not None:
        yield from _from_structured_outputs(outputs)
    whitespace = _whitespace(body.get("guided_whitespace_pattern"), "guided_whitespace_pattern")
    for name, read in _TOP_LEVEL.items():
        if body.get(name) is not None:
            yield replace(read(body[name], name), whitespace_pattern=whitespace)


def _from_response_format(value: Any, where: str) -> StructuredSpec | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise InvalidRequestError(f"{where} must be an object with a type.", where)
    match value["type"]:
        case "text":
            return None
        case "json_object" | "json_schema" if value.get("schema") is not None and value.get("json_schema") is None:
            return _schema(value["schema"], f"{where}.schema")  # as llama.cpp and others have it
        case "json_object":
            return _any_object(True, where)
        case "json_schema":
            return _from_json_schema_format(value.get("json_schema"), f"{where}.json_schema")
        case "structural_tag":
            return _tag(value, where)
    raise InvalidRequestError(
        f"{where}.type is {value['type']!r}; it must be text, json_object, json_schema or structural_tag.",
        f"{where}.type",
    )


def _from_json_schema_format(value: Any, where: str) -> StructuredSpec:
    if not isinstance(value, Mapping) or value.get("schema") is None:
        raise InvalidRequestError(f"{where}.schema is missing.", f"{where}.schema")
    return _schema(value["schema"], f"{where}.schema")


def _from_structured_outputs(value: Any) -> Iterator[StructuredSpec]:
    where = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} must be an object.", where)
    given = {name for name, content in value.items() if content is not None}
    kinds = ", ".join(_IN_STRUCTURED_OUTPUTS)
    for name in value:
        if name in given and name not in _IN_STRUCTURED_OUTPUTS and name not in _OPTION_TYPES:
            raise InvalidRequestError(f"{where}.{name} is unknown; give one of {kinds}.", f"{where}.{name}")
    if given.isdisjoint(_IN_STRUCTURED_OUTPUTS):
        raise InvalidRequestError(f"{where} has no constraint; give one of {kinds}.", where)
    options = {name: value[name] for name in _OPTION_TYPES if value.get(name) is not None}
    for name, option in options.items():
        if not isinstance(option, _OPTION_TYPES[name]):
            raise InvalidRequestError(f"{where}.{name} must be a {_OPTION_TYPES[name].__name__}.", f"{where}.{name}")
    pattern = "" if options.get("disable_any_whitespace") else options.get("whitespace_pattern")
    whitespace = _whitespace(pattern, f"{where}.whitespace_pattern")
    for name, read in _IN_STRUCTURED_OUTPUTS.items():
        content = value.get(name)
        if content is None or (name == "json_object" and content is False):
            continue
        yield replace(read(content, f"{where}.{name}"), whitespace_pattern=whitespace)


def _schema(value: Any, where: str) -> StructuredSpec:
    schema = _json_value(value, where)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{where} must be a JSON schema that a value can fit: an object or true.", where)
    check_patterns(schema, where)
    return StructuredSpec(StructuredKind.JSON_SCHEMA, _json_text(schema, where), param=where)


def _any_object(value: Any, where: str) -> StructuredSpec:
    if value is not True:
        raise InvalidRequestError(f"{where} must be a boolean.", where)
    return _schema({"type": "object"}, where)


def _json_or_schema(value: Any, where: str) -> StructuredSpec:
    if value == "json":
        return _any_object(True, where)
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        raise InvalidRequestError(f"{where} is {value[:40]!r}; send `json` or a JSON schema.", where)
    return _schema(value, where)


def _regex(value: Any, where: str) -> StructuredSpec:
    return StructuredSpec(StructuredKind.REGEX, _text(value, where, MAX_REGEX_CHARS), param=where)


def _grammar(value: Any, where: str) -> StructuredSpec:
    text = _text(value, where, MAX_GRAMMAR_CHARS)
    kind = StructuredKind.GBNF if "::=" in text else StructuredKind.LARK
    return StructuredSpec(kind, text, param=where)


def _choice(value: Any, where: str) -> StructuredSpec:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
        raise InvalidRequestError(f"{where} must be a list of at least one string.", where)
    for choice in value:
        check_halves(choice, where)
    return StructuredSpec(StructuredKind.CHOICE, json.dumps(value), param=where)


def _tag(value: Any, where: str) -> StructuredSpec:
    tag = _json_value(value, where)
    if not isinstance(tag, Mapping):
        raise InvalidRequestError(f"{where} must be a structural tag: an object.", where)
    check_patterns(tag, where)
    return StructuredSpec(StructuredKind.STRUCTURAL_TAG, _json_text(tag, where), param=where)


_Reader = Callable[[Any, str], StructuredSpec]
_IN_STRUCTURED_OUTPUTS: dict[str, _Reader] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _tag,
}
_TOP_LEVEL: dict[str, _Reader] = {
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
    "format": _json_or_schema,
}

STRUCTURED_FIELDS = ("response_format", "structured_outputs", "guided_whitespace_pattern", "open_schemas", *_TOP_LEVEL)
"""All fields of a request's body that `parse_structured` reads."""


def _text(value: Any, where: str, most: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{where} must be a non-empty string.", where)
    check_length(value, most, where)
    return value


def _whitespace(pattern: str | None, where: str) -> str | None:
    check_length(pattern or "", MAX_REGEX_CHARS, where)
    return pattern


def _adapted(spec: StructuredSpec, *, is_closed: bool) -> StructuredSpec:
    """The constraint with its schemas changed by `adapted_schema`."""

    def adapted(value: Any) -> Any:
        if isinstance(value, list):
            return [adapted(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        return {key: change(item) if key in _TAG_SCHEMAS else adapted(item) for key, item in value.items()}

    def change(schema: Any) -> Any:
        return adapted_schema(checked_schema(schema, spec.param), is_closed=is_closed)

    if spec.kind not in (StructuredKind.JSON_SCHEMA, StructuredKind.STRUCTURAL_TAG):
        return spec
    try:
        value = json.loads(spec.source)
        value = change(value) if spec.kind is StructuredKind.JSON_SCHEMA else adapted(value)
    except RecursionError as error:
        raise InvalidRequestError(f"{spec.param} is nested too deeply.", spec.param) from error
    return replace(spec, source=_json_text(value, spec.param))


def _json_value(value: Any, where: str) -> Any:
    """Parses the JSON text that some clients send instead of a value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not valid JSON: {error}.", where) from error


def _json_text(value: Any, where: str) -> str:
    """Keeps the order of keys, since properties are generated in this order."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} cannot be written as JSON: {error}.", where) from error
    check_halves(text, where)
    return text


def check_halves(text: str, where: str) -> None:
    """Raises `InvalidRequestError` if the text has half of a surrogate pair, which no output can have."""
    if (half := re.search("[\ud800-\udfff]", text)) is not None:
        around = text[max(0, half.start() - 20) : half.end() + 20]
        found, shown = (part.encode("ascii", "backslashreplace").decode() for part in (half[0], around))
        raise InvalidRequestError(
            f"{where} has {found} (in `{shown}`), which is half of a surrogate pair; send the whole character.", where
        )
