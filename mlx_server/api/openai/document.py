"""What the OpenAPI document says of fields beyond their types: of bounds that only `SamplingParams` checks, and of
values that have parsers of their own.

tests/api/test_openapi.py sends what lies at each bound and beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_server.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

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
    "description": "data:image/...;base64,...; others only where the server was started with leave to open them.",
}
"""Of an image, which models that see are given; `GET /v1/models` says which do."""


_BOUNDS: Mapping[str, JsonSchema] = {
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "allowed_token_ids": {"items": {"type": "integer", "minimum": 0}, "minItems": 1},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "seed": {"format": "int64"},
}
"""What narrows a field's type."""

_JSON_SCHEMA = {"type": ["object", "string"], "description": "A JSON schema, or the text of one."}
_STOP_STRING = {**TEXT, "maxLength": MAX_STOP_CHARS}
_STOP = either(_STOP_STRING, list_of(_STOP_STRING, maxItems=MAX_STOP_STRINGS))
_CHOICE = list_of(STRING, minItems=1)
_CONSTRAINTS: Mapping[str, JsonSchema] = {
    "json": _JSON_SCHEMA,
    "json_object": {"const": True},
    "regex": TEXT,
    "choice": _CHOICE,
    "grammar": {**TEXT, "description": "In Lark's notation, or in GBNF."},
    "structural_tag": {"type": ["object", "string"]},
}


_SHAPES: Mapping[str, JsonSchema] = {
    "response_format": either(
        of_type("text"),
        of_type("json_object"),
        of_type("json_object", schema={"type": "object"}),
        of_type("json_schema", schema={"type": "object"}),
        of_type("json_schema", json_schema=members("schema", schema={"type": "object"})),
        of_type("structural_tag"),
    ),
    "structured_outputs": {
        "type": "object",
        "properties": {
            **_CONSTRAINTS,
            "disable_any_whitespace": {"type": "boolean"},
            "disable_additional_properties": {"type": "boolean"},
            "whitespace_pattern": STRING,
        },
        "oneOf": [{"required": [name]} for name in _CONSTRAINTS],
    },
    "guided_json": _JSON_SCHEMA,
    "guided_regex": TEXT,
    "guided_choice": _CHOICE,
    "guided_grammar": _CONSTRAINTS["grammar"],
    "json_schema": _JSON_SCHEMA,
    "regex": TEXT,
    "ebnf": _CONSTRAINTS["grammar"],
    "grammar": _CONSTRAINTS["grammar"],
    "format": either({"const": "json"}, _JSON_SCHEMA),
    "stop": _STOP,
    "stop_sequences": _STOP,
}
"""What fields may hold whose types say too little."""


def describe(schema: JsonSchema) -> None:
    """Completes the schema of a body in place."""
    properties = schema["properties"]
    for name in _SHAPES.keys() & properties.keys():
        if "enum" not in properties[name]:  # of fields that are refused
            properties[name]["anyOf"] = [_SHAPES[name], NULL]
    for name in _BOUNDS.keys() & properties.keys():
        properties[name]["anyOf"][0].update(_BOUNDS[name])
