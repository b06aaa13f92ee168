"""What is no JSON schema is refused by its path, before a grammar is made of it."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_server.engine.grammar.schema import (
    MAX_DEPTH,
    MAX_REGEX_CHARS,
    changed_schema,
    check_length,
    check_patterns,
    check_references,
    checked_schema,
    keep_bounds,
    referenced,
)
from mlx_server.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (5, "s must be a JSON schema: an object, or a boolean"),
        (None, "s must be a JSON schema"),
        ({"properties": [5]}, "s.properties must be an object of schemas"),
        ({"patternProperties": True}, "s.patternProperties must be an object of schemas"),
        ({"$defs": "a"}, "s.$defs must be an object of schemas"),
        ({"definitions": 1}, "s.definitions must be an object of schemas"),
        ({"properties": {"a": {"properties": 1}}}, "s.properties.a.properties must be an object of schemas"),
        ({"anyOf": {}}, "s.anyOf must be a list of schemas"),
        ({"oneOf": "a"}, "s.oneOf must be a list of schemas"),
        ({"allOf": [{}, 5]}, "s.allOf[1] must be a JSON schema"),
        ({"prefixItems": {}}, "s.prefixItems must be a list of schemas"),
        ({"items": [True, "a"]}, "s.items[1] must be a JSON schema"),
        ({"items": 5}, "s.items must be a JSON schema"),
        ({"additionalProperties": "no"}, "s.additionalProperties must be a JSON schema"),
        ({"not": []}, "s.not must be a JSON schema"),
        ({"required": "a"}, "s.required must be a list of strings"),
        ({"required": ["a", 1]}, "s.required must be a list of strings"),
        ({"type": 1}, "s.type must be a string, or a list of strings"),
        ({"type": ["string", 1]}, "s.type must be a string, or a list of strings"),
        ({"$ref": 1}, "s.$ref must be a string"),
        ({"enum": "a"}, "s.enum must be a list"),
    ],
)
def test_the_first_part_that_is_no_schema_is_named(schema: Any, fault: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked_schema(schema, "s")
    assert caught.value.message.startswith(fault)
    assert caught.value.param == fault.partition(" ")[0]


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {},
        {"type": "object", "properties": {"a": True, "b": {"items": False}}, "required": ["a"], "own": [1, None]},
        {"type": ["string", "null"], "enum": ["a", None], "$ref": "#"},
        {"items": [True, {}], "allOf": [{"not": {}}], "$defs": {"x": {"const": None}}},
        {"const": None},
    ],
)
def test_what_is_a_schema_stays_as_it_is(schema: Any) -> None:
    assert checked_schema(schema, "s") == schema


def test_keywords_that_are_null_are_left_out_at_every_depth() -> None:
    schema = {"type": None, "properties": {"a": {"enum": None, "const": None}}, "anyOf": [{"title": None}]}
    assert checked_schema(schema, "s") == {"properties": {"a": {"const": None}}, "anyOf": [{}]}


@pytest.mark.parametrize(
    "nest",
    [lambda inner: {"items": inner}, lambda inner: {"properties": {"a": inner}}, lambda inner: {"anyOf": [inner]}],
)
def test_schemas_nest_only_so_deep(nest: Any) -> None:
    schema: Any = {}
    for _ in range(MAX_DEPTH - 1):
        schema = nest(schema)
    assert checked_schema(schema, "s") == schema
    with pytest.raises(InvalidRequestError, match=f"is nested {MAX_DEPTH} schemas deep, which is the most"):
        checked_schema(nest(schema), "s")


def test_lengths_are_those_of_the_text_and_of_all_patterns_together() -> None:
    check_length("abc", 3, "it")
    with pytest.raises(InvalidRequestError, match="it has 4 characters; the most is 3"):
        check_length("abcd", 3, "it")
    half = "a" * (MAX_REGEX_CHARS // 2)
    fits: dict[str, Any] = {
        "properties": {"a": {"pattern": half}},
        "anyOf": [{"patternProperties": {half: {}}}],
        "title": half,
        "regex": 5,
        "items": {"patternProperties": [1]},
    }
    check_patterns(fits, "it")
    for more in ({"pattern": "a"}, {"x": [{"regex": "a"}]}, {"patternProperties": {"a": 1}}, {"key_separator": "a"}):
        with pytest.raises(InvalidRequestError, match=f"patterns in it have {MAX_REGEX_CHARS + 1} characters"):
            check_patterns({**fits, **more}, "it")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"exclusiveMinimum": 1, "maximum": 1.5}, {"minimum": 1.000001, "maximum": 1.5}),
        ({"minimum": 0.5, "exclusiveMaximum": 1}, {"minimum": 0.5, "maximum": 0.999999}),
        ({"exclusiveMinimum": 1, "maximum": 2}, None),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 2}, None),
        ({"exclusiveMinimum": 1}, None),
        ({"exclusiveMinimum": 1.25, "maximum": 1.5}, None),
        ({"exclusiveMinimum": 1, "minimum": 1.25, "maximum": 1.5}, None),
        ({"exclusiveMaximum": 2, "minimum": 1.25, "maximum": 1.5}, None),
        ({"exclusiveMinimum": 1, "minimum": 1, "maximum": 1.5}, {"minimum": 1.000001, "maximum": 1.5}),
        ({"exclusiveMinimum": True, "maximum": 1.5}, None),
        ({"exclusiveMinimum": "1", "maximum": 1.5}, None),
        ({"exclusiveMinimum": 2**32, "maximum": 2**32}, None),
        ({"exclusiveMinimum": 2**31, "maximum": 2**31}, {"minimum": 2**31 + 1e-6, "maximum": 2**31}),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, {"minimum": -0.999999, "maximum": -0.5}),
        ({"exclusiveMinimum": -(2**32), "maximum": -(2**32)}, None),
    ],
)
def test_exclusive_bounds_move_inwards_where_they_would_be_lost(schema: Any, expected: Any) -> None:
    assert keep_bounds(schema) == (schema if expected is None else expected)
    assert keep_bounds({"anyOf": [schema]}) == {"anyOf": [schema if expected is None else expected]}
    assert keep_bounds({"enum": [schema], "const": schema}) == {"enum": [schema], "const": schema}


def test_schemas_are_changed_from_inside_out_and_values_are_not() -> None:
    seen: list[str] = []
    names = {"a": {"title": "a"}, "default": {"title": "b"}, "title": True}
    schema = {"title": "d", "properties": names, "items": [{"title": "c"}], "default": {"title": "e"}}
    changed_schema(schema, lambda inner: seen.append(inner["title"]) if "title" in inner else None)
    assert seen == ["a", "b", "c", "d"]


def test_each_reference_is_followed_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which the members of `all` turn out one by one to have an end: a worst case."""
    count = 100
    followed: list[str] = []
    members = {str(index): {"$ref": f"#/a/{index}"} for index in range(count)}
    every = {"type": "object", "properties": members, "required": list(members)}
    root = {"prefixItems": [*members.values()][::-1], "items": {"$ref": "#/all"}, "a": {name: {} for name in members}}

    def counted(root: Any, reference: str) -> Any:
        followed.append(reference)
        return referenced(root, reference)

    monkeypatch.setattr("mlx_server.engine.grammar.schema.referenced", counted)
    check_references({**root, "all": every})
    assert len(followed) == count + 1
