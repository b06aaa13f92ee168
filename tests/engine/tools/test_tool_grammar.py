"""Calls that a grammar forces, read back by the parser of their format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from constraint_worlds import RandomModel
from hypothesis import given, settings
from hypothesis import strategies as st
from text_worlds import make_tokenizer
from tool_worlds import parser_named

from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.grammar.schema import MAX_SOURCE_CHARS
from mlx_server.engine.text.reasoning import Dialect, ReasoningConstraint, find_reasoning_markers
from mlx_server.engine.text.splitters import new_splitter
from mlx_server.engine.tools.formats import ToolParser
from mlx_server.engine.tools.grammar import ForcedCalls, force_tool_calls
from mlx_server.engine.tools.parser import ToolCallExtractor
from mlx_server.errors import InvalidRequestError


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    return {"type": "function", "function": function if parameters is None else {**function, "parameters": parameters}}


TOOLS: list[dict[str, Any]] = [
    tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 9},
                "unit": {"type": "string", "enum": ["C", "F", "a<b&c"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "where": {"$ref": "#/$defs/place", "type": "object"},
                "is_exact": {"type": "boolean"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {
                "place": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}
            },
        },
    ),
    tool("now"),
    tool(
        "odd",
        {
            "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 2}},
            "additionalProperties": False,
        },
    ),
]
DEEP = tool(
    "plan",
    {
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/a~1node"},
            "either": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"enum": ["a", 2, True, None]}}]},
            "free": {"type": "object"},
            "maybe": {"type": ["null", "string"]},
            "fixed": {"const": "x"},
            "any": {},
        },
        "required": ["tree", "either", "free", "maybe", "fixed", "any"],
        "$defs": {
            "a/node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "next": {"anyOf": [{"$ref": "#/$defs/a~1node"}, {"type": "null"}]},
                    "is_leaf": {"type": "boolean"},
                },
                "required": ["name"],
            }
        },
    },
)

ENDINGS = (
    "\n</parameter>\n",
    "</parameter>\n",
    "]]></param>",
    "</param>",
    "</arg_value>",
    "</arg_value>\n",
    "</arg_value:opensource>\n",
    "</longcat_arg_value>\n",
    "<escape>",
    '<|"|>',
    "<|close|>argument<|sep|>",
    "</｜DSML｜parameter>\n",
)
"""Of texts, in all formats."""

KIMI_K2 = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
HY3 = tuple(
    f"<{slash}{tag}:opensource>"
    for tag in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    for slash in ("", "/")
)
HARMONY = ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|start|>")
CALL_WORLD = make_tokenizer(
    added=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    special=("[TOOL_CALLS]", "[ARGS]"),
)
WORLDS = {
    "mistral_list": make_tokenizer(special=("[TOOL_CALLS]",)),
    "gemma4": make_tokenizer(special=("<|tool_call>", "<tool_call|>", '<|"|>')),
    "function_gemma": make_tokenizer(special=("<start_function_call>", "<end_function_call>", "<escape>")),
    "pythonic": make_tokenizer(special=("<|tool_call_start|>", "<|tool_call_end|>")),
    "kimi_k2": make_tokenizer(special=KIMI_K2),
    "kimi_k3": make_tokenizer(special=XTML),
    "deepseek_v31": make_tokenizer(special=DEEPSEEK),
    "deepseek_r1": make_tokenizer(special=DEEPSEEK),
    "deepseek_dsml": make_tokenizer(special=("｜DSML｜",)),
    "hunyuan": make_tokenizer(),
    "hy3": make_tokenizer(special=HY3),
    "json_list": make_tokenizer(),
    "cohere": make_tokenizer(special=("<|START_ACTION|>", "<|END_ACTION|>")),
    "minimax_m3": make_tokenizer(special=("]<]minimax[>[",)),
    "apertus": make_tokenizer(special=("<|tools_prefix|>", "<|tools_suffix|>")),
    "olmo3": make_tokenizer(),
    "harmony": make_tokenizer(special=HARMONY),
}
WORLDS["harmony"].eos_token_ids = frozenset([WORLDS["harmony"].added_tokens["<|call|>"]])  # the other ends messages
COMPILERS = {name: GrammarCompiler(world) for name, world in (WORLDS | {"": CALL_WORLD}).items()}
FORMATS = (
    "json_tools",
    "mistral",
    "mistral_list",
    "qwen3_coder",
    "glm47",
    "laguna",
    "minimax_m2",
    "minicpm5",
    "seed_oss",
    "deepseek_r1",
    "deepseek_v31",
    "deepseek_dsml",
    "hunyuan",
    "hy3",
    "json_list",
    "cohere",
    "apertus",
    "olmo3",
    "minimax_m3",
    "mimo_v2",
    "longcat",
    "longcat_tags",
    "kimi_k2",
    "kimi_k3",
    "gemma4",
    "function_gemma",
    "pythonic",
    "harmony",
    "llama3_json",
)


def parser_of(name: str) -> ToolParser:
    return parser_named("mistral" if name == "mistral_list" else name)


def force(name: str, tools: list[dict[str, Any]], *, is_parallel: bool = True) -> ForcedCalls:
    world = WORLDS.get(name, CALL_WORLD)
    return force_tool_calls(world, parser_of(name), tools, is_parallel=is_parallel)


def read_calls(parser: ToolParser, tools: list[dict[str, Any]], text: str) -> tuple[str, list[tuple[str, Any]]]:
    extractor = ToolCallExtractor(parser, tools)
    outputs = [extractor.append(text), extractor.finish()]
    calls: dict[int, list[str]] = {}
    ids = set()
    for delta in (delta for output in outputs for delta in output.calls):
        call = calls.setdefault(delta.index, [delta.name, ""])
        call[1] += delta.arguments_fragment
        ids.add((delta.index, delta.id) if delta.id else (delta.index, None))
    named = [call_id for _, call_id in ids if call_id is not None]
    assert len(set(named)) == len(named) == len(calls), "every call has an id of its own"
    content = "".join(output.content for output in outputs)
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def written(name: str, tools: list[dict[str, Any]], seeds: range, *, is_parallel: bool) -> list[Any]:
    """The calls of each output that a random model has finished, read back."""
    world = WORLDS.get(name, CALL_WORLD)
    forced = force(name, tools, is_parallel=is_parallel)
    grammar = COMPILERS.get(name, COMPILERS[""]).compile(forced.spec)
    model = RandomModel(world, ENDINGS)
    dialect = Dialect(find_reasoning_markers(world), parser_of(name))
    outputs = []
    for seed in seeds:
        ids = model.write(grammar.start(), seed, max_tokens=600)
        if ids is None:
            continue
        text = world.decode(ids, skip_special_tokens=False)
        splitter = new_splitter(dialect, tools)
        if splitter is not None:
            split = [splitter.append(text), splitter.finish()]
            assert not any(part.reasoning for part in split)
            text = "".join(part.content for part in split)
        content, calls = read_calls(parser_of(name), tools, text)
        assert content == "", text
        outputs.append(calls)
    return outputs


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_read_back_by_their_parser(name: str, is_parallel: bool) -> None:
    outputs = written(name, TOOLS, range(40), is_parallel=is_parallel)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}
    assert len(outputs) >= 15
    for calls in outputs:
        for called, arguments in calls:
            _check_arguments(arguments, schemas[called])
    num_calls = {len(calls) for calls in outputs}
    assert num_calls >= {1, 2} if is_parallel and name not in ("harmony", "llama3_json") else num_calls == {1}
    assert {called for calls in outputs for called, _ in calls} == set(schemas)


def _check_arguments(arguments: Any, schema: Mapping[str, Any]) -> None:
    """Formats without quotes cannot bound the length of a string."""
    unbounded = json.loads(
        json.dumps(schema).replace('"maxLength": 9', '"minLength": 0').replace("uniqueItems", "title_")
    )
    for name in ("maxItems", "minItems"):
        unbounded = json.loads(json.dumps(unbounded).replace(f'"{name}"', '"title_"'))
    jsonschema.validate(arguments, unbounded)


@pytest.mark.parametrize("name", ["gemma4", "pythonic"])
def test_notations_write_every_kind_of_value(name: str) -> None:
    outputs = written(name, [DEEP], range(80), is_parallel=False)
    assert len(outputs) >= 40
    seen = set()
    for ((called, arguments),) in outputs:
        assert called == "plan"
        jsonschema.validate(arguments, DEEP["function"]["parameters"])
        seen |= {type(arguments["any"]), type(arguments["either"]), type(arguments["maybe"])}
        seen |= {key for key in ("next",) if key in arguments["tree"]}
    assert {dict, list, str, type(None), "next"} <= seen


def test_lists_and_objects_are_in_tags_as_far_as_their_schema_goes() -> None:
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "of": {"$ref": "#/$defs/points"}, "note": {"type": "string"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    parameters = {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/points"},
            "either": {"$ref": "#/$defs/either"},
            "free": {"type": "object"},
        },
        "required": ["at", "either", "free"],
        "$defs": {"points": {"type": "array", "items": point}, "either": {"anyOf": [{"type": "null"}, point]}},
    }
    outputs = written("minimax_m3", [tool("f", parameters)], range(60), is_parallel=False)
    assert len(outputs) >= 20
    for ((_, arguments),) in outputs:
        jsonschema.validate(arguments, parameters)
    points = [point for ((_, arguments),) in outputs for point in arguments["at"]]
    assert any(point.get("of") for point in points)
    assert {type(arguments["either"]) for ((_, arguments),) in outputs} == {dict, type(None)}


@pytest.mark.parametrize("name", ["gemma4", "pythonic"])
def test_an_object_that_is_closed_is_empty_and_a_tuple_is_named(name: str) -> None:
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    pair = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}
    tools = [tool("f", {"properties": {"a": closed, "b": pair}, "required": ["a"]})]
    outputs = written(name, tools, range(20), is_parallel=False)
    assert len(outputs) >= 10
    assert {str(arguments["a"]) for ((_, arguments),) in outputs} == {"{}"}
    assert force(name, tools).notes == ("prefixItems",)


@pytest.mark.parametrize("name", ["gemma4", "pythonic"])
def test_a_list_without_items_is_empty(name: str) -> None:
    offered = tool("f", {"properties": {"a": {"type": "array", "items": False}}, "required": ["a"]})
    for calls in written(name, [offered], range(5), is_parallel=False):
        assert calls == [("f", {"a": []})]


def test_a_models_own_format_is_forced() -> None:
    def first_text(name: str) -> str:
        world = WORLDS.get(name, CALL_WORLD)
        constraint = COMPILERS.get(name, COMPILERS[""]).compile(force(name, TOOLS[:1]).spec).start()
        return world.decode(constraint.forced_tokens(), skip_special_tokens=False)

    assert first_text("json_tools").startswith('<tool_call>\n{"name": "get_weather", "arguments":')
    assert first_text("mistral").startswith("[TOOL_CALLS]get_weather[ARGS]{")
    assert first_text("deepseek_r1").startswith(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"
    )
    assert first_text("hunyuan").startswith("<tool_calls><tool_call>get_weather\n```json\n{")
    assert first_text("json_list").startswith('<TOOLCALL>[{"name": "get_weather", "arguments": {')
    assert first_text("cohere") == '<|START_ACTION|>[\n    {"tool_call_id": "'
    assert first_text("apertus").startswith('<|tools_prefix|>[{"get_weather": {')
    assert first_text("olmo3") == '<function_calls>get_weather(city="'
    assert first_text("hy3").startswith(
        "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
    )
    assert first_text("mimo_v2") == "<tool_call>\n<function=get_weather>\n<parameter=city>"
    assert first_text("longcat_tags").startswith(
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    )
    assert first_text("minimax_m3") == '<tool_call>\n<invoke name="get_weather"><city>'.replace("<", "]<]minimax[>[<")
    assert first_text("mistral_list").startswith('[TOOL_CALLS] [{"name": "get_weather", "arguments": {')
    assert first_text("qwen3_coder") == "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    assert first_text("glm47") == "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
    assert first_text("minicpm5") == '<function name="get_weather"><param name="city">'
    assert first_text("kimi_k2") == "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:"
    assert first_text("kimi_k3").endswith('<|open|>tools<|sep|><|open|>call tool="get_weather" index="')
    assert first_text("gemma4") == '<|tool_call>call:get_weather{city:<|"|>'
    assert first_text("function_gemma") == "<start_function_call>call:get_weather{city:<escape>"
    assert first_text("pythonic") == '<|tool_call_start|>[get_weather(city="'
    assert first_text("harmony").startswith(
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"
    )
    assert first_text("llama3_json").startswith('{"name": "get_weather", "parameters": {')


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", ['say "no"', "a<b & c", "back\\slash", "two\nlines"])
def test_a_text_that_must_be_just_so_is_written_as_its_format_writes_it(name: str, value: str) -> None:
    offered = tool("f", {"properties": {"a": {"type": "string", "enum": [value]}}, "required": ["a"]})
    outputs = written(name, [offered], range(4), is_parallel=False)
    assert outputs
    assert all(calls == [("f", {"a": value})] for calls in outputs), outputs


def test_a_call_behind_reasoning_stands_in_its_own_channel() -> None:
    """Models with channels write the answer's marker before an answer, but not before a call."""
    world, forced = WORLDS["harmony"], force("harmony", TOOLS[1:2])
    markers = find_reasoning_markers(world)
    assert markers is not None
    constraint = ReasoningConstraint(
        world,
        markers,
        COMPILERS["harmony"].vocab_size,
        is_open=False,
        answer=COMPILERS["harmony"].compile(forced.spec).start(),
        is_answer_opened=forced.is_opened,
        max_tokens=2,
    )
    ids = constraint.forced_tokens()
    assert world.decode(ids, skip_special_tokens=False) == "<|channel|>analysis<|message|>"
    for token_id in world.encode("ab"):
        assert constraint.accept(token_id)
        ids.append(token_id)
    ids += constraint.forced_tokens()
    assert world.decode(ids, skip_special_tokens=False).startswith(
        "<|channel|>analysis<|message|>ab<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"
    )


@pytest.mark.parametrize(
    ("name", "offered", "message", "param"),
    [
        ("muse_spark", tool("f"), "cannot be forced", "tool_choice"),
        ("function_gemma", tool("a.b"), "tools[0].function.name is 'a.b'", "tools[0].function.name"),
        ("pythonic", tool("a-b"), "tools[0].function.name is 'a-b'", "tools[0].function.name"),
        ("olmo3", tool("import"), "tools[0].function.name is 'import'", "tools[0].function.name"),
        ("qwen3_coder", tool("a b"), "tools[0].function.name is 'a b'", "tools[0].function.name"),
        (
            "glm47",
            tool("f", {"properties": {"a b": {}}, "required": ["a b"]}),
            "requires 'a b'",
            "tools[0].function.parameters",
        ),
        (
            "pythonic",
            tool("f", {"properties": {"from": {"type": "string"}}, "required": ["from"]}),
            "whose names",
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_a_format_cannot_write_is_refused(name: str, offered: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        force(name, [offered])
    assert message in caught.value.message
    assert caught.value.param == param
    assert "tool_choice to auto" in caught.value.message


@pytest.mark.parametrize("name", ["gemma4", "pythonic", "qwen3_coder"])
def test_what_need_not_be_given_and_cannot_be_written_is_left_out(name: str) -> None:
    offered = tool("f", {"properties": {"a b": {"type": "string"}, "c": {"type": "integer"}}, "required": ["c"]})
    for calls in written(name, [offered], range(5), is_parallel=False):
        assert [set(arguments) for _, arguments in calls] == [{"c"}]


@pytest.mark.parametrize(
    ("parameters", "where", "wanted"),
    [
        ({"properties": ["a"]}, "properties", "an object of schemas"),
        ({"properties": {"a": 5}}, "properties.a", "a JSON schema"),
        ({"required": "a"}, "required", "a list of strings"),
        ({"required": [5]}, "required", "a list of strings"),
        ({"properties": {"a": {"type": 5}}}, "properties.a.type", "a string, or a list of strings"),
        ({"properties": {"a": {"enum": "b"}}}, "properties.a.enum", "a list"),
        ({"properties": {"a": {"anyOf": {}}}}, "properties.a.anyOf", "a list of schemas"),
        ({"properties": {"a": {"anyOf": [True, "b"]}}}, "properties.a.anyOf[1]", "a JSON schema"),
        ({"properties": {"a": {"items": 5}}}, "properties.a.items", "a JSON schema"),
        ({"$defs": {"a": None}}, "$defs.a", "a JSON schema"),
    ],
)
@pytest.mark.parametrize("name", ["json_tools", "pythonic", "qwen3_coder"])
def test_parameters_that_are_no_schema_are_refused_with_the_place(
    name: str, parameters: dict[str, Any], where: str, wanted: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        force(name, [tool("f", parameters)])
    assert caught.value.param == f"tools[0].function.parameters.{where}"
    assert f"{where} must be {wanted}" in caught.value.message


@pytest.mark.parametrize("name", ["json_tools", "pythonic", "qwen3_coder"])
def test_parameters_without_a_bottom_are_refused(name: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"properties": {"a": deep}, "required": ["a"]}
    with pytest.raises(InvalidRequestError, match="64 schemas deep"):
        force(name, [tool("f", deep)])


def test_a_chain_of_references_without_a_bottom_is_refused() -> None:
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"], "$defs": chain}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        force("pythonic", [tool("f", schema)])


@pytest.mark.parametrize("name", ["json_tools", "pythonic"])
def test_null_keywords_count_as_absent(name: str) -> None:
    """Some clients send null for what they leave out; a constant may be null all the same."""
    a = {"type": ["integer", "null"], "enum": None, "minimum": None, "anyOf": None}
    schema = {"properties": {"a": a, "b": {"const": None}}, "required": ["a", "b"], "$defs": None}
    outputs = written(name, [tool("f", schema)], range(20), is_parallel=False)
    assert outputs
    for ((_, arguments),) in outputs:
        assert isinstance(arguments["a"], int | None)
        assert arguments["b"] is None


VALUES: list[tuple[Any, set[type]]] = [
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {int, type(None)}),
    ({"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/color"}}, {"type": "null"}]}, {list, type(None)}),
    ({"$ref": "#/$defs/place"}, {dict}),
    ({"$ref": "#/properties/first"}, {int}),
    ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, {str, type(None)}),
    ({"enum": [1, 2.5, "max"]}, {int, float, str}),
    ({"oneOf": [{"const": "a"}, {"const": 5}]}, {str, int}),
    ({"type": ["boolean", "string"], "const": "xy"}, {str}),
    ({"type": ["number", "null"]}, {float, type(None)}),
    ({"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}, {dict}),
    ({"type": ["string", "integer"], "enum": ["b", "a", 5]}, {int, str}),
    ({}, {str}),
]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2", "minicpm5", "kimi_k3"])
@pytest.mark.parametrize(("schema", "kinds"), VALUES)
def test_an_argument_between_tags_follows_its_schema(name: str, schema: Any, kinds: set[type]) -> None:
    parameters = {
        "properties": {"first": {"type": "integer"}, "a": schema},
        "required": ["a"],
        "$defs": {
            "color": {"enum": ["red", "dark green"], "type": "string"},
            "place": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False},
        },
    }
    outputs = written(name, [tool("f", parameters)], range(30), is_parallel=False)
    assert len(outputs) >= 10
    for ((_, arguments),) in outputs:
        jsonschema.validate(arguments, parameters)
    assert kinds <= {type(arguments["a"]) for ((_, arguments),) in outputs}


def _families(num_arguments: int, num_words: int) -> dict[str, Any]:
    """Arguments that all refer to one family of definitions, at the end of a chain of them."""
    definitions: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(20)}
    definitions["d20"] = {"enum": [f"word{i}" for i in range(num_words)]}
    definitions["tree"] = {
        "type": "object",
        "properties": {f"f{i}": {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]} for i in range(20)}
        | {"and": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    trees = {f"t{i}": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]} for i in range(num_arguments)}
    words = {f"w{i}": {"$ref": "#/$defs/d0"} for i in range(num_arguments)}
    return {"type": "object", "properties": trees | words, "$defs": definitions}


def test_what_many_arguments_refer_to_is_written_once() -> None:
    """Each would bring all definitions, and a grammar may have 131,072 characters."""
    one, many = (force("qwen3_coder", [tool("f", _families(count, 1000))]).spec.source for count in (1, 100))
    assert len(many) < len(one) + 100 * 200
    several = [tool(f"f{i}", _families(1, 1000)) for i in range(20)]
    assert len(force("qwen3_coder", several).spec.source) < MAX_SOURCE_CHARS
    assert COMPILERS[""].compile(force("qwen3_coder", [tool("f", _families(12, 100))]).spec)


def test_arguments_that_differ_share_the_room_for_all_schemas() -> None:
    """Half of what a grammar may have."""
    lists = {f"a{i}": {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": i} for i in range(40)}
    schema = {"properties": lists, "$defs": {"d": {"enum": [f"word{i}" for i in range(1000)]}}}
    spec = force("qwen3_coder", [tool("f", schema)]).spec
    assert 4 * 10_000 < len(spec.source) < MAX_SOURCE_CHARS
    assert spec.source.count("word999") < 7


def test_arguments_whose_schemas_would_be_too_long_are_free() -> None:
    """Others are not."""
    parameters = _families(2, 20_000)
    parameters["properties"]["n"] = {"type": "integer"}
    forced = force("qwen3_coder", [tool("f", parameters)])
    assert len(forced.spec.source) < 5000

    def is_accepted(argument: str) -> bool:
        cursor = COMPILERS[""].compile(forced.spec).start()
        cursor.forced_tokens()
        return all(map(cursor.accept, CALL_WORLD.encode(argument, add_special_tokens=False)))

    assert is_accepted("parameter=t0>\nanything")
    assert is_accepted("parameter=w1>\nanything")
    assert is_accepted("parameter=n>\n5")
    assert not is_accepted("parameter=n>\nanything")


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder", "pythonic"])
def test_an_argument_that_refers_only_to_itself_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="the reference #/properties/a leads only to itself") as caught:
        force(name, [tool("f", {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}})])
    assert caught.value.param == "tools[0].function.parameters"


def test_two_arguments_may_have_the_same_members_in_another_order() -> None:
    """A schema's order of members is the order in which they are written."""
    members = {"x": {"type": "integer"}, "y": {"type": "integer"}}
    closed = {"type": "object", "required": ["x", "y"], "additionalProperties": False}
    places = {"p": {**closed, "properties": members}, "q": {**closed, "properties": dict(reversed(members.items()))}}
    outputs = written(
        "qwen3_coder", [tool("f", {"properties": places, "required": ["p", "q"]})], range(5), is_parallel=False
    )
    assert outputs
    for calls in outputs:
        assert all(list(arguments["p"]) == ["x", "y"] for _, arguments in calls)
        assert all(list(arguments["q"]) == ["y", "x"] for _, arguments in calls)


_KEYWORDS = (
    *("type", "properties", "required", "enum", "const", "anyOf", "oneOf", "items", "$ref", "$defs", "pattern"),
    *("minimum", "exclusiveMinimum", "exclusiveMaximum", "maxLength", "additionalProperties", "a", "b c", "#/$defs/a"),
    *("string", "integer", "array", "object"),
)
_WORDS = st.sampled_from(_KEYWORDS)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.just(10**400) | st.floats() | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=12,
)
_CALL = "<tool_call>\n<function=f>\n<parameter=a>\nseveral words\n</parameter>\n</function>\n</tool_call>"


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FORMATS), st.dictionaries(_WORDS, _VALUES, max_size=4))
def test_whatever_parameters_clients_send_calls_are_forced_or_refused(name: str, parameters: Any) -> None:
    offered = [tool("f", parameters)]
    refusals: list[InvalidRequestError] = []
    try:
        COMPILERS.get(name, COMPILERS[""]).compile(force(name, offered).spec)
    except InvalidRequestError as error:
        refusals.append(error)
    assert all((error.param or "").startswith("tools") for error in refusals)
    content, calls = read_calls(parser_named("qwen3_coder"), offered, _CALL)
    assert content == ""
    assert [called for called, _ in calls] == ["f"]
