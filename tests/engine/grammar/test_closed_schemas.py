"""Schemas that do not say so are closed, and what several of them say together keeps its meaning."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from mlx_server.engine.grammar.schema import adapted_schema, referenced
from mlx_server.engine.grammar.spec import parse_structured
from tests.constraint_worlds import accepts, is_whole, start

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
C = {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]}
PATTERN = {"patternProperties": {"^x": {"type": "integer"}}}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/N"}}, "required": ["v"]}
DEFS = {"$defs": {"A": A, "B": B, "N": NODE}}


def refer(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


# A schema, what fits it, and how texts begin that do not once it is closed.
CASES: dict[str, tuple[dict[str, Any], list[Any], list[str]]] = {
    "plain": (A, [{"a": 1}], ['{"a":1,']),
    "no members": ({"type": "object", "properties": {}}, [{}], ['{"']),
    "inner": ({"properties": {"o": A}, "required": ["o"]}, [{"o": {"a": 1}}], ['{"o":{"a":1,']),
    "items": ({"type": "array", "items": A}, [[{"a": 1}, {"a": 2}]], ['[{"a":1,']),
    "free": ({"type": "object"}, [{}, {"q": 1}], []),
    "open": ({**A, "additionalProperties": True}, [{"a": 1, "q": 2}], []),
    "of one type": ({**A, "additionalProperties": {"type": "null"}}, [{"a": 1, "q": None}], ['{"a":1,"q":1']),
    "patterns": ({**A, **PATTERN}, [{"a": 1, "x1": 2}, {"a": 1, "q": "r"}], ['{"a":1,"x1":"']),
    "either": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], ['{"a":1,', '{"b":1,']),
    "nullable": ({"anyOf": [A, {"type": "null"}]}, [{"a": 1}, None], ['{"a":1,']),
    "all of two": ({"allOf": [A, B]}, [{"a": 1, "b": 2}], ['{"a":1}', '{"a":1,"b":2,', '{"q"']),
    "all of one": ({"allOf": [refer("A")], "description": "x", **DEFS}, [{"a": 1}], ['{"a":1,']),
    "all of references": (
        {"allOf": [refer("A"), refer("B")], **DEFS},
        [{"a": 1, "b": 2}],
        ['{"a":1}', '{"a":1,"b":2,'],
    ),
    "a part used alone, too": (
        {"properties": {"whole": refer("A"), "two": {"allOf": [refer("A"), B]}}, "required": ["whole", "two"], **DEFS},
        [{"whole": {"a": 1}, "two": {"a": 1, "b": 2}}],
        ['{"whole":{"a":1,', '{"whole":{"a":1},"two":{"a":1,"b":2,'],
    ),
    "all of alternatives": (
        {"allOf": [A, {"anyOf": [B, C]}]},
        [{"a": 1, "b": 2}, {"a": 1, "c": 2}],
        ['{"a":1}', '{"a":1,"b":2,"q"'],
    ),
    "beside alternatives": (
        {"type": "object", "properties": {"t": {"const": 1}}, "required": ["t"], "anyOf": [A, B]},
        [{"t": 1, "a": 1}, {"t": 1, "b": 1}],
        ['{"t":1}', '{"t":1,"q"'],
    ),
    "beside a reference": ({**refer("A"), **B, **DEFS}, [{"a": 1, "b": 2}], ['{"a":1,"b":2,', '{"q"']),
    "recursive": ({**refer("N"), **DEFS}, [{"v": 1, "next": {"v": 2}}], ['{"v":1,"next":{"v":2,"q"']),
    "of itself": (
        {"properties": {"v": {"type": "integer"}, "in": {"$ref": "#"}}},
        [{"v": 1, "in": {"v": 2, "in": {}}}],
        ['{"v":1,"in":{"q"'],
    ),
    "required beyond": ({"properties": {"a": {}}, "required": ["r"]}, [{"r": 1}], ['{"q"']),
    "unevaluated": ({"allOf": [A, B], "unevaluatedProperties": False}, [{"a": 1, "b": 2}], ['{"a":1,"b":2,']),
    "unevaluated on purpose": ({"allOf": [A], "unevaluatedProperties": True}, [{"a": 1, "q": 2}], []),
    "closed by a part": ({"allOf": [{**A, "additionalProperties": False}]}, [{"a": 1}], ['{"a":1,']),
    "opened by a part": ({"allOf": [{**A, **PATTERN}, B]}, [{"a": 1, "b": 2, "x": 3}], ['{"a":1,"b":2,"x":"']),
    "names with slashes": (
        {"allOf": [{"$ref": "#/$defs/a~1b"}, B], "$defs": {"a/b": A}},
        [{"a": 1, "b": 2}],
        ['{"a":1,"b":2,'],
    ),
    "named by nothing": ({"properties": {"": {"type": "integer"}}}, [{"": 1}, {}], ['{"a"']),
    "named like keywords": (
        {"properties": {"default": A, "enum": B, "properties": {"type": "integer"}}},
        [{"default": {"a": 1}, "enum": {"b": 1}, "properties": 1}],
        ['{"default":{"a":1,', '{"default":{"a":1},"enum":{"b":1,', '{"q"'],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_schema_names_may_be_written_and_nothing_else(name: str) -> None:
    schema, fitting, others = CASES[name]
    for value in fitting:
        assert is_whole(start(json=schema), json.dumps(value, separators=(",", ":"))), value
    for text in others:
        assert not accepts(start(json=schema), text), text


@pytest.mark.parametrize("name", ["plain", "inner", "either", "all of two", "recursive", "no members"])
def test_the_switches_give_json_schemas_own_reading(name: str) -> None:
    schema = CASES[name][0]
    for body in (
        {"open_schemas": True, "json_schema": schema},
        {"structured_outputs": {"disable_additional_properties": False, "json": schema}},
    ):
        spec = parse_structured(body)
        assert spec is not None
        assert json.loads(spec.source) == schema


def test_schemas_in_structural_tags_are_closed() -> None:
    content = {"type": "json_schema", "json_schema": A}
    tag = {"format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    assert is_whole(start(structural_tag=tag), '<f>{"a":1}</f>')
    assert not accepts(start(structural_tag=tag), '<f>{"a":1,')


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    age: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    age: int


class Pack(BaseModel):
    kind: Literal["pack"] = "pack"
    members: list[Annotated[Cat | Dog | Pack, Field(discriminator="kind")]]


class Home(BaseModel):
    pet: Annotated[Cat | Dog | Pack, Field(discriminator="kind")]


def test_a_tagged_union_must_have_its_tag() -> None:
    schema = Home.model_json_schema()
    for text in (
        '{"pet":{"kind":"cat","age":1}}',
        '{"pet":{"kind":"pack","members":[{"kind":"dog","age":1}]}}',
    ):
        Home.model_validate_json(text)
        assert is_whole(start(json=schema), text)
    assert not accepts(start(json=schema), '{"pet":{"age"')
    tag_of_none = {"oneOf": [A, B], "discriminator": {"propertyName": "kind"}}
    assert adapted_schema(tag_of_none, is_closed=False) == {"anyOf": [A, B]}


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        ("#", None),
        ("#/anyOf/1/x", 2),
        ("#/a~1b/~0", 3),
        ("#/1", 4),
        *(
            (reference, "unknown")
            for reference in ("#/anyOf/2", "#/anyOf/x", "#/anyOf/-1", "#/none", "#/1/0", "#1", "other.json#/1")
        ),
    ],
)
def test_references_are_followed_within_the_schema_alone(reference: str, target: Any):
    schema = {"anyOf": [{}, {"x": 2}], "a/b": {"~": 3}, "1": 4}
    wanted = schema if target is None else {"additionalProperties": True} if target == "unknown" else target
    assert referenced(schema, reference) == wanted
