"""JSON schemas for the OpenAPI document, where a field's Python type says too little: bounds that only `SamplingParams`
checks, and values that have parsers of their own.

tests/api/test_openapi.py sends values at each bound and beyond it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

JsonSchema = dict[str, Any]

STRING: JsonSchema = {"type": "string"}
TEXT: JsonSchema = {**STRING, "minLength": 1}
NULL: JsonSchema = {"type": "null"}


def either(*schemas: JsonSchema) -> JsonSchema:
    return {"anyOf": list(schemas)}


def list_of(items: JsonSchema, **bounds: int) -> JsonSchema:
    return {"type": "array", "items": items, **bounds}


def members(*required: str, **properties: JsonSchema) -> JsonSchema:
    """An object."""
    return {"type": "object", "required": list(required), "properties": properties}


def of_type(kind: str, **properties: JsonSchema) -> JsonSchema:
    """An object that says its `type`, all of whose `properties` are required."""
    return members("type", *properties, type={"const": kind}, **properties)


TOKEN_IDS = list_of({"type": "integer", "minimum": 0}, minItems=1)
CALL = members("function", function=members("name", name=STRING, arguments={"type": ["object", "null"]}))
"""A call of a tool in a message."""

IMAGE_URL: JsonSchema = {
    **STRING,
    "description": "data:image/...;base64,...; other URLs only if the server's settings allow them.",
}
"""Of an image, for models that take images; `GET /v1/models` says which do."""

_JSON_SCHEMA: JsonSchema = {"type": ["object", "string"], "description": "A JSON schema, or the text of one."}
_GRAMMAR = {**TEXT, "description": "In Lark's notation, or in GBNF."}
_CHOICE = list_of(STRING, minItems=1)
_CONSTRAINTS: dict[str, JsonSchema] = {
    "json": _JSON_SCHEMA,
    "json_object": {"const": True},
    "regex": TEXT,
    "choice": _CHOICE,
    "grammar": _GRAMMAR,
    "structural_tag": {"type": ["object", "string"]},
}
_RESPONSE_FORMAT = either(
    of_type("text"),
    of_type("json_object"),
    of_type("json_object", schema={"type": "object"}),
    of_type("json_schema", schema={"type": "object"}),
    of_type("json_schema", json_schema=members("schema", schema={"type": "object"})),
    of_type("structural_tag"),
)
_STRUCTURED_OUTPUTS = {
    "type": "object",
    "properties": {
        **_CONSTRAINTS,
        "disable_any_whitespace": {"type": "boolean"},
        "disable_additional_properties": {"type": "boolean"},
        "whitespace_pattern": STRING,
        "disable_fallback": {"type": "boolean"},
    },
    "additionalProperties": False,
    "oneOf": [{"required": [name]} for name in _CONSTRAINTS],
}

# The types of fields that `parse_structured` reads.
ResponseFormat = Annotated[Any, WithJsonSchema(either(_RESPONSE_FORMAT, NULL))]
StructuredOutputs = Annotated[Any, WithJsonSchema(either(_STRUCTURED_OUTPUTS, NULL))]
JsonSchemaField = Annotated[Any, WithJsonSchema(either(_JSON_SCHEMA, NULL))]
Regex = Annotated[Any, WithJsonSchema(either(TEXT, NULL))]
Choice = Annotated[Any, WithJsonSchema(either(_CHOICE, NULL))]
Grammar = Annotated[Any, WithJsonSchema(either(_GRAMMAR, NULL))]
Format = Annotated[Any, WithJsonSchema(either({"const": "json"}, _JSON_SCHEMA, NULL))]
