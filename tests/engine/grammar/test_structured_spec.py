"""Which constraint a request asks for, in every field that clients use."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_server.engine.grammar.spec import parse_structured
from mlx_server.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{}},"additionalProperties":false}'
CHOICES = ["a", "b"]


@pytest.mark.parametrize(
    ("body", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}', "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            SCHEMA_TEXT,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA_TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, "json_schema", SCHEMA_TEXT, "structured_outputs.json"),
        (
            {"structured_outputs": {"regex": "a+", "disable_fallback": True, "x": None}},
            "regex",
            "a+",
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"choice": CHOICES}}, "choice", '["a", "b"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: A"}}, "lark", "start: A", "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "gbnf", "root ::= x", "structured_outputs.grammar"),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            "json_schema",
            '{"type":"object"}',
            "structured_outputs.json_object",
        ),
        ({"guided_json": SCHEMA, "guided_regex": None}, "json_schema", SCHEMA_TEXT, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": CHOICES}, "choice", '["a", "b"]', "guided_choice"),
        ({"guided_grammar": "start: A"}, "lark", "start: A", "guided_grammar"),
        ({"json_schema": SCHEMA_TEXT}, "json_schema", SCHEMA_TEXT, "json_schema"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": "root ::= x"}, "gbnf", "root ::= x", "ebnf"),
        ({"grammar": "root ::= x"}, "gbnf", "root ::= x", "grammar"),
        ({"format": "json"}, "json_schema", '{"type":"object"}', "format"),
        ({"format": SCHEMA}, "json_schema", SCHEMA_TEXT, "format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            SCHEMA_TEXT,
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            "json_schema",
            SCHEMA_TEXT,
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "structural_tag",
            '{"type":"structural_tag","structures":[],"triggers":[]}',
            "response_format",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "{}", "structured_outputs.structural_tag"),
    ],
)
def test_constraints_are_read_from_every_field(body: dict[str, Any], kind: str, source: str, param: str) -> None:
    spec = parse_structured(body)
    assert spec is not None
    assert (spec.kind.value, spec.source, spec.param, spec.whitespace_pattern) == (kind, source, param, None)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "guided_json": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"json_object": False, "disable_any_whitespace": True}},
        {"guided_whitespace_pattern": " "},
    ],
)
def test_no_constraint_is_none(body: dict[str, Any]) -> None:
    assert parse_structured(body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None, "disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"json_schema": SCHEMA}}, "structured_outputs.json_schema"),
        ({"structured_outputs": {"regex": "a", 5: 1}}, "structured_outputs.5"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": 1}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": {"enum": [object()]}}}, "structured_outputs.json"),
    ],
)
def test_wrong_constraints_are_refused_by_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_structured(body)
    assert caught.value.param == param
