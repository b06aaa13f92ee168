"""Calls are written as the model's own parser reads them."""

from __future__ import annotations

import json

import pytest

from mlx_server.engine.tools.formats import FORMATS, JSON_TAGS, ToolParser
from mlx_server.engine.tools.parser import ToolCallExtractor
from mlx_server.engine.tools.written import written_calls
from tests.tool_worlds import parser_named

ARGUMENTS = {"path": 'Say "hi" in\nC:\\a, é', "count": 2, "far": True, "of": ["a", "b"], "at": {"x": [1, "b"]}}
PROPERTIES = {"path": "string", "count": "integer", "far": "boolean", "of": "array", "at": "object"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in PROPERTIES.items()}},
        },
    }
    for name in ("look_at", "go")
]


OTHERS = {"mistral_list"}  # a variant of mistral's


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - OTHERS))
def test_what_is_written_is_read_back(name: str) -> None:
    given = [("look_at", ARGUMENTS), ("go", {})][: FORMATS[name].max_calls]
    parser = parser_named(name)
    text = written_calls(parser, [{"name": name, "arguments": arguments} for name, arguments in given])
    extractor = ToolCallExtractor(parser, TOOLS)
    deltas = (*extractor.append(text).calls, *extractor.finish().calls)
    found: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        called, arguments = found.get(delta.index, ("", ""))
        found[delta.index] = (called + (delta.name or ""), arguments + delta.arguments_fragment)
    assert [(called, json.loads(arguments)) for called, arguments in found.values()] == given


def test_a_format_that_nobody_can_write_becomes_json_between_tags() -> None:
    unknown = ToolParser("unknown", "<call>", "</call>", JSON_TAGS.parse)
    wanted = '<tool_call>\n{"name": "go", "arguments": {"where": "é"}}\n</tool_call>'
    assert written_calls(unknown, [{"name": "go", "arguments": {"where": "é"}}]) == wanted
