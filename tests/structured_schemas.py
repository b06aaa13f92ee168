"""JSON schemas of many shapes for tests of the grammar compiler, and some that must be refused."""

from __future__ import annotations

from typing import Any


def obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    closed = {"additionalProperties": False, **more}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        **closed,
    }


STRING: dict[str, Any] = {"type": "string", "maxLength": 12}
INTEGER: dict[str, Any] = {"type": "integer", "minimum": -99, "maximum": 999}
NUMBER: dict[str, Any] = {"type": "number"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
NULL: dict[str, Any] = {"type": "null"}


def array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 3, **more}


SCHEMAS: dict[str, Any] = {
    "string": STRING,
    "integer": INTEGER,
    "number": NUMBER,
    "boolean": BOOLEAN,
    "null": NULL,
    "empty object": obj({}),
    "flat": obj({"name": STRING, "age": INTEGER, "ok": BOOLEAN}),
    "optional properties": obj({"a": STRING, "b": INTEGER, "c": BOOLEAN}, ["b"]),
    "all optional": obj({"a": STRING, "b": INTEGER}, []),
    "nested": obj({"a": obj({"b": obj({"c": obj({"d": INTEGER})})})}),
    "array of integers": array(INTEGER),
    "array of objects": array(obj({"x": INTEGER, "y": INTEGER})),
    "array of arrays": array(array(BOOLEAN)),
    "bounded array": array(BOOLEAN, minItems=2),
    "exact array": array(INTEGER, minItems=3),
    "empty array": array(INTEGER, maxItems=0),
    "tuple": {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    "tuple with rest": {"type": "array", "prefixItems": [BOOLEAN], "items": INTEGER, "minItems": 1, "maxItems": 4},
    "enum of strings": {"enum": ["red", "green", "dark blue"]},
    "enum of all types": {"enum": ["a", 1, 2.5, True, None, [1], {"a": 1}]},
    "enum with unicode": {"enum": ["naïve", "日本", "🙂", 'quo"te', "back\\slash", "new\nline"]},
    "const": {"const": {"a": [1, "b", None]}},
    "const property": obj({"kind": {"const": "circle"}, "r": INTEGER}),
    "minimum and maximum": {"type": "integer", "minimum": 7, "maximum": 1234},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "negative range": {"type": "integer", "minimum": -50, "maximum": -3},
    "number range": {"type": "number", "minimum": 0.25, "maximum": 0.75},
    "number exclusive": {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    "multiple of": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "exact length": {"type": "string", "minLength": 4, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "pattern alternatives": {"type": "string", "pattern": "^(yes|no|may(be)?)$"},
    "pattern inside": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 10},
    "format date": {"type": "string", "format": "date"},
    "format time": {"type": "string", "format": "time"},
    "format date-time": {"type": "string", "format": "date-time"},
    "format uuid": {"type": "string", "format": "uuid"},
    "format email": {"type": "string", "format": "email"},
    "format ipv4": {"type": "string", "format": "ipv4"},
    "unknown format": {"type": "string", "format": "phone-number", "maxLength": 8},
    "anyOf": {"anyOf": [INTEGER, {"type": "string", "maxLength": 4}, NULL]},
    "anyOf objects": {"anyOf": [obj({"a": INTEGER}), obj({"b": STRING})]},
    "oneOf of types": {"oneOf": [STRING, INTEGER]},
    "discriminated oneOf": {
        "oneOf": [obj({"kind": {"const": "cat"}, "lives": INTEGER}), obj({"kind": {"const": "dog"}, "name": STRING})]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "allOf objects": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"type": "object", "properties": {"b": BOOLEAN}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    "several types": {"type": ["integer", "boolean", "null"]},
    "nullable": obj({"a": {"type": ["string", "null"], "maxLength": 5}}),
    "additional of a type": {"type": "object", "additionalProperties": BOOLEAN, "maxProperties": 2},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]$": INTEGER},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "$defs": {"$defs": {"point": obj({"x": INTEGER})}, **obj({"p": {"$ref": "#/$defs/point"}})},
    "definitions": {"definitions": {"id": INTEGER}, **obj({"id": {"$ref": "#/definitions/id"}})},
    "recursive list": {
        "$defs": {"node": obj({"v": BOOLEAN, "next": {"anyOf": [NULL, {"$ref": "#/$defs/node"}]}})},
        "$ref": "#/$defs/node",
    },
    "tree": {
        "$defs": {"tree": obj({"n": BOOLEAN, "kids": array({"$ref": "#/$defs/tree"}, maxItems=1)})},
        "$ref": "#/$defs/tree",
    },
    "odd keys": obj({"with space": INTEGER, 'quo"te': BOOLEAN, "日本": NULL, "a.b/c": INTEGER}),
    "titles and descriptions": obj({"a": {"title": "A", "description": "d", "default": 1, **INTEGER}}, title="T"),
    "draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", **obj({"a": INTEGER})},
    "pydantic": {
        "$defs": {"Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"}},
        "title": "Car",
        **obj({
            "color": {"$ref": "#/$defs/Color"},
            "wheels": {"default": 4, "title": "Wheels", **INTEGER},
            "owner": {"anyOf": [STRING, NULL], "default": None, "title": "Owner"},
        }, ["color"]),
    },
    "extraction": obj({
        "people": array(obj({"name": STRING, "role": {"enum": ["host", "guest"]}})),
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "notes": {"type": ["string", "null"], "maxLength": 10},
    }),
    "steps": obj({"steps": array(obj({"explanation": STRING, "output": STRING})), "final_answer": STRING}),
    "anything": True,
    "unconstrained part": obj({"a": {"type": "boolean"}, "free": True}, ["a"]),
}  # fmt: skip

UNSUPPORTED_SCHEMAS: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    "remote $ref": ({"$ref": "https://example.com/schema.json"}, "example.com"),
    "missing $ref": ({"$ref": "#/$defs/nothing"}, "nothing"),
    "wrong type": ({"type": "strin"}, "strin"),
    "unsatisfiable": ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
    "look-around": ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
    "wrong keyword value": ({"type": "integer", "minimum": "3"}, "minimum"),
}
