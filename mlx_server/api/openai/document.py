"""What the OpenAPI document says of the fields of `GenerationFields` beyond their types.

Bounds that are checked where every way in passes, in `SamplingParams`, and values that have parsers of their own.
tests/api/test_openapi.py sends what lies at each bound and beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_server.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
)

JsonSchema = dict[str, Any]

_TOKEN_ID = {"type": "integer", "minimum": 0}
_REQUEST_ID = {"minLength": 1, "maxLength": 128, "pattern": "^[!-~]+$"}
_PENALTY = {"minimum": -2, "maximum": 2}
_LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}

_BOUNDS: Mapping[str, JsonSchema] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_TOP_K},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "allowed_token_ids": {"items": _TOKEN_ID, "minItems": 1},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "seed": {"format": "int64"},
    "min_tokens": {"minimum": 0},
    "prompt_logprobs": _LOGPROBS,
    "cache_salt": {"minLength": 1, "maxLength": 128, "pattern": r"^[^@/\\\u0000]+$"},
    "request_id": _REQUEST_ID,
    "rid": _REQUEST_ID,
}
"""What narrows a field's type."""

_TEXT = {"type": "string", "minLength": 1}
_JSON_SCHEMA = {"type": ["object", "string"], "description": "A JSON schema, or the text of one."}
_STOP_STRING = {**_TEXT, "maxLength": MAX_STOP_CHARS}
_STOP = {"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS}]}
_CHOICE = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_CONSTRAINTS: Mapping[str, JsonSchema] = {
    "json": _JSON_SCHEMA,
    "json_object": {"const": True},
    "regex": _TEXT,
    "choice": _CHOICE,
    "grammar": {**_TEXT, "description": "In Lark's notation, or in GBNF."},
    "structural_tag": {"type": ["object", "string"]},
}


def _named_shape(kind: str, **properties: JsonSchema) -> JsonSchema:
    named = {"type": {"const": kind}, **properties}
    return {"type": "object", "required": list(named), "properties": named}


_SCHEMA_FORMAT = {"type": "object", "required": ["schema"], "properties": {"schema": {"type": "object"}}}

_SHAPES: Mapping[str, JsonSchema] = {
    "response_format": {
        "anyOf": [
            _named_shape("text"),
            _named_shape("json_object"),
            _named_shape("json_schema", json_schema=_SCHEMA_FORMAT),
            _named_shape("structural_tag"),
        ]
    },
    "structured_outputs": {
        "type": "object",
        "properties": {
            **_CONSTRAINTS,
            "disable_any_whitespace": {"type": "boolean"},
            "disable_additional_properties": {"type": "boolean"},
            "whitespace_pattern": {"type": "string"},
        },
        "oneOf": [{"required": [name]} for name in _CONSTRAINTS],
    },
    "guided_json": _JSON_SCHEMA,
    "guided_regex": _TEXT,
    "guided_choice": _CHOICE,
    "guided_grammar": _CONSTRAINTS["grammar"],
    "json_schema": _JSON_SCHEMA,
    "regex": _TEXT,
    "ebnf": _CONSTRAINTS["grammar"],
    "stop": _STOP,
    "stop_sequences": _STOP,
}
"""What fields may hold whose types say too little."""


def describe(schema: JsonSchema, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Completes the schema of a body in place. `refused` names fields with the values that are accepted all the
    same."""
    properties = schema["properties"]
    for name in _SHAPES.keys() & properties.keys():
        properties[name]["anyOf"] = [_SHAPES[name], {"type": "null"}]
    for name in _BOUNDS.keys() & properties.keys():
        properties[name]["anyOf"][0].update(_BOUNDS[name])
    for name in refused.keys() & properties.keys():
        properties[name] = {"enum": [None, *refused[name]], "description": "Not supported: any other value is a 400."}
