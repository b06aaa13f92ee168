"""Custom tools of the Responses API: free text as input, held to its grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from mlx_server.api.openai.responses.custom_tools import InputReader
from tests.api.fakes import say
from tests.api.openai.responses.test_responses import create, post
from tests.api.openai.responses.test_responses_agents import watch
from tests.api.sse import bodies as event_bodies
from tests.api.worlds import World
from tests.engine.grammar.test_lark_regex import GOOD_PATCH, PATCH

pytestmark = pytest.mark.asyncio(loop_scope="session")

PLAIN = {"type": "custom", "name": "note", "description": "Takes notes."}
LARK = {**PLAIN, "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}}
REGEX = {**PLAIN, "name": "dial", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}|none"}}


def call(name: str, text: str) -> str:
    arguments = json.dumps({"input": text})
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_a_call_is_given_back_as_it_was_written(world: World):
    seen = watch(world)
    text = 'one "two"\n\tthree \\ é \U0001f600'
    world.engine.script = say(call("note", text))
    body = await create(world, tools=[PLAIN])
    (item,) = body["output"]
    assert item == {
        "type": "custom_tool_call",
        "id": item["id"],
        "call_id": item["call_id"],
        "name": "note",
        "input": text,
        "status": "completed",
    }
    assert item["id"].startswith("ctc_")
    Response.model_validate(body)
    assert body["tools"] == [PLAIN]
    ((_, tools),) = seen
    assert tools[0]["function"] == {
        "name": "note",
        "description": "Takes notes.",
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        },
    }
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Noted."}
    await create(world, tools=[PLAIN], previous_response_id=body["id"], input=[output])
    messages = seen[-1][0]
    assert messages[-2]["tool_calls"][0]["function"] == {"name": "note", "arguments": {"input": text}}
    assert (messages[-1]["name"], messages[-1]["content"]) == ("note", "Noted.")


async def test_a_stream_has_its_own_events(world: World):
    world.engine.max_model_len = 4000
    world.engine.script = say("Yes." + call("ns__note", "a\nb"))
    answer = await post(world, tools=[{"type": "namespace", "name": "ns", "tools": [PLAIN]}], stream=True)
    events = [event for event in event_bodies(answer.text) if event.get("output_index") == 1]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[0] == "output_item.added"
    assert set(kinds[1:-2]) == {"custom_tool_call_input.delta"}
    assert kinds[-2:] == ["custom_tool_call_input.done", "output_item.done"]
    assert (
        "".join(event["delta"] for event in events[1:-2])
        == events[-2]["input"]
        == events[-1]["item"]["input"]
        == "a\nb"
    )
    assert events[0]["item"]["input"] == ""
    assert (events[-1]["item"]["name"], events[-1]["item"]["namespace"]) == ("note", "ns")


@pytest.mark.parametrize("arguments", ["{}", '{"input": 5}', '{"text": "a"}', '{"input": "a", "more": "b"}'])
async def test_streamed_pieces_are_the_whole_input_however_it_was_written(world: World, arguments: str):
    world.engine.script = say(f'<tool_call>{{"name": "note", "arguments": {arguments}}}</tool_call>')
    events = event_bodies((await post(world, tools=[PLAIN], stream=True)).text)
    pieces = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    (item,) = events[-1]["response"]["output"]
    assert "".join(pieces) == item["input"] == ("a" if "more" in arguments else arguments)
    assert (await create(world, tools=[PLAIN]))["output"][0]["input"] == item["input"]


async def test_an_input_that_is_cut_off_before_it_begins_is_empty(world: World):
    world.engine.script = say(call("note", "text"))
    body = await create(world, tools=[PLAIN], max_output_tokens=37)
    (item,) = body["output"]
    assert (item["status"], item["input"]) == ("incomplete", "")


async def test_the_official_client_reads_both(world: World):
    world.engine.max_model_len = 4000
    world.engine.script = say(call("note", "hello"))
    stream = await world.openai.responses.create(model="fake", input="Hi", tools=[PLAIN], stream=True)  # type: ignore[list-item]
    done = [event async for event in stream if event.type == "response.custom_tool_call_input.done"]
    assert [event.input for event in done] == ["hello"]


def admits(world: World, text: str) -> bool:
    """Whether the output of the last request may be `text`, and end."""
    constraint = world.engine.requests[-1].constraint
    assert constraint is not None
    tokenizer = world.engine.tokenizer
    (end,) = tokenizer.eos_token_ids
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not _may(constraint, token):
            return False
        assert constraint.accept(token)
    return constraint.is_terminated() or _may(constraint, end)


def _may(constraint: Any, token: int) -> bool:
    mask = constraint.bitmask()
    return mask is None or bool(mask[token // 8] >> (token % 8) & 1)


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "dial"}, "auto", None])
@pytest.mark.parametrize(
    ("text", "fits"), [("123", True), ("none", True), ("12", False), ("1234", False), ("a\nb", False)]
)
async def test_a_regex_is_enforced_in_every_mode(world: World, choice: Any, text: str, fits: bool):
    world.engine.max_model_len = 4000
    await create(world, tools=[REGEX], tool_choice=choice)
    assert admits(world, call("dial", text)) is fits


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize(
    ("text", "fits"), [(GOOD_PATCH, True), ("*** Begin Patch\n", False), (GOOD_PATCH.replace("+one", "one"), False)]
)
async def test_a_lark_grammar_is_enforced_in_every_mode(world: World, choice: Any, text: str, fits: bool):
    world.engine.max_model_len = 8000
    await create(world, tools=[LARK, PLAIN], tool_choice=choice)
    assert admits(world, call("patch", text)) is fits


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("Just text.", True),
        ("", True),
        (f"First {call('note', 'free')}", True),
        (f"Two: {call('dial', '123')} and {call('note', 'x')} so.", True),
        (f"{call('dial', '123')}{call('dial', '12')}", False),
        (f"{call('nobody', '123')}", False),
    ],
)
async def test_the_model_stays_free_to_call(world: World, text: str, fits: bool):
    world.engine.max_model_len = 4000
    await create(world, tools=[REGEX, PLAIN])
    assert admits(world, text) is fits


async def test_free_text_needs_no_grammar(world: World):
    world.engine.max_model_len = 4000
    await create(world, tools=[PLAIN])
    assert world.engine.requests[-1].constraint is None


def grammar(**form: Any) -> dict[str, Any]:
    return {**PLAIN, "format": {"type": "grammar", **form}}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].name"),
        ({**PLAIN, "format": {"type": "json"}}, "tools[0].format.type"),
        ({**PLAIN, "format": "text"}, "tools[0].format.type"),
        (grammar(syntax="gbnf", definition="x"), "tools[0].format.syntax"),
        (grammar(syntax="regex"), "tools[0].format.definition"),
        (grammar(syntax="regex", definition="x" * 9000), "tools[0].format.definition"),
        (grammar(syntax="lark", definition='start: "(" start ")" | "x"'), "tools[0].format.definition"),
        (grammar(syntax="lark", definition="start: " + "(" * 4000), "tools[0].format.definition"),
        (grammar(syntax="regex", definition="(?=x)"), "tools[0].format"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_by_name(world: World, tool: dict[str, Any], param: str):
    world.engine.max_model_len = 20_000
    answer = await post(world, tools=[tool])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not world.engine.requests


async def test_grammars_are_bounded_together(world: World):
    tools = [{**grammar(syntax="regex", definition="x" * 5000), "name": f"t{index}"} for index in range(2)]
    answer = await post(world, tools=tools)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[1].format")


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (json.dumps({"input": 'a"b\\c\n\té\U0001f600'}), 'a"b\\c\n\té\U0001f600'),
        ('{ "input" : "x" }', "x"),
        ('{"input": ""}', ""),
        ('{"other": 1, "input": "late"}', "late"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": "cut', "cut"),
        ('{"inp', '{"inp'),
        ('{"input": "\\ud83d"}', "?"),
        ('{"input": "\\ud83dx\\ud83d\\ude00\\u12"}', "?x\U0001f600\\u12"),
        ('{"other": 1, "input": "\\ud83d"}', "?"),
        ('{"input": "\\d+\\n\\"x\\""}', '\\d+\n"x"'),  # the model has forgotten to double a backslash
        ('{"input": "\\\\ud83d\\n"}', "\\ud83d\n"),
        pytest.param("[" * 100_000, "[" * 100_000, id="too deep"),
    ],
)
async def test_inputs_are_read_however_they_come(arguments: str, text: str, size: int):
    reader = InputReader()
    pieces = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    assert "".join([*pieces, reader.finish()]) == reader.text == text
