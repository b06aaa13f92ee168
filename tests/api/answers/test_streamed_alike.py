"""What of an answer that ends anywhere is text, and what is a call, in each protocol, streamed and whole."""

from __future__ import annotations

import json
from itertools import groupby

import pytest

from tests.api.doors import Asked, Chat, Door, Messages, Ollama, Responses, Said
from tests.api.fakes import say
from tests.api.worlds import World

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
SAID = f"<think>Hm.</think>First {CALL} then {CALL}\nend"
CALLS = f"{CALL}a{CALL}{CALL}"
DOORS = {"chat": Chat(), "responses": Responses(), "messages": Messages(), "ollama": Ollama()}


async def both(world: World, door: Door, num_tokens: int) -> list[Said]:
    """The answer whole, and streamed."""
    asked = Asked(max_tokens=num_tokens, stop=("STOP",), tools=(TOOL,))
    return [*await door.whole(world, asked), *await door.streamed(world, asked)]


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
async def test_the_beginning_of_a_call_that_is_cut_off_is_no_text(world: World, door: Door):
    for text in SAID, CALL.replace("<tool_call>\n", "```json\n"):
        world.engine.script = say(text)
        length = len(world.engine.tokenizer.encode(text, add_special_tokens=False))
        for num_tokens in range(1, length, 3):
            for shown in await both(world, door, num_tokens):
                assert not any(word in str(shown.parts) for word in ("tool_call>", '"name": "f')), (text, num_tokens)
    world.engine.script = say("A call begins with <tool_call>, and so on.")
    length = len(world.engine.tokenizer.encode("A call begins with <tool_call>, and", add_special_tokens=False))
    for shown in await both(world, door, length):
        assert "<tool_call>, and" in str(shown.parts)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
async def test_calls_in_reasoning_count_if_the_model_gives_no_answer_after_it(world: World, door: Door):
    for text, num_calls in ((f"Hm.\n{CALL}\n{CALL}", 2), (f"{CALL}</think>\n", 1), (f"{CALL}</think>S", 0), ("Hm", 0)):
        world.engine.script = say(f"<think>{text}")
        length = len(world.engine.tokenizer.encode(f"<think>{text}", add_special_tokens=False))
        for num_tokens in (length, length + 1):
            for shown in await both(world, door, num_tokens):
                assert len(shown.calls) == (num_calls if num_tokens > length else 0), (text, shown)


@pytest.mark.parametrize("tokens_per_delta", [1, 1000])
@pytest.mark.parametrize("door", [DOORS["responses"], DOORS["messages"]], ids=["responses", "messages"])
async def test_texts_and_calls_are_in_the_order_in_which_they_were_written(
    world: World, tokens_per_delta: int, door: Door
):
    world.engine.tokens_per_delta = tokens_per_delta
    world.engine.script = say(SAID)
    for shown in await both(world, door, 300):
        assert [kind for kind, _ in shown.parts] == ["reasoning", "text", "call", "text", "call", "text"]


@pytest.mark.parametrize("tokens_per_delta", [1, 1000])
async def test_ollama_s_clients_see_no_call_that_was_cut_off(world: World, tokens_per_delta: int):
    world.engine.tokens_per_delta = tokens_per_delta
    world.engine.script = say(CALLS)
    length = len(world.engine.tokenizer.encode(CALLS, add_special_tokens=False))
    for num_tokens in range(1, length, 5):
        for shown in await both(world, DOORS["ollama"], num_tokens):
            assert shown.end == ("length",)
            assert all(call == ("call", ("f", {"a": "b"})) for call in shown.calls)
    world.engine.script = say(CALL.replace("b", "STOP"))
    for shown in await both(world, DOORS["ollama"], 300):
        assert (shown.parts, shown.end) == ((), ("stop",))


@pytest.mark.parametrize("protocol", ["messages", "ollama"])
@pytest.mark.parametrize(
    "arguments", ['{"a": "b', '{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud83d"}', f'{{"a": {"[" * 300}{"]" * 300}}}']
)
async def test_arguments_that_no_object_can_hold_are_not_lost(world: World, protocol: str, arguments: str):
    """The model has not finished them, or no JSON can be made of their values."""
    world.engine.script = say(f'<tool_call>\n{{"name": "f", "arguments": {arguments}')
    world.engine.max_model_len = 1000
    (said,) = await DOORS[protocol].whole(world, Asked(max_tokens=700, tools=(TOOL,)))
    assert said.parts == (("call", ("f", {"invalid_json": arguments})),)
    assert said.end == (("tool_use", None) if protocol == "messages" else ("stop",))


async def test_ollama_s_clients_get_each_call_as_soon_as_it_is_complete(world: World):
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>'
    world.engine.script = say(f"{call}Then some text.{call}And more.")
    answer = await world.http.post("/api/chat", json=DOORS["ollama"].body(Asked(tools=(TOOL,))))
    lines = [json.loads(line)["message"] for line in answer.text.splitlines()]
    kinds = [
        "call" if line.get("tool_calls") else "text" for line in lines if line.get("tool_calls") or line["content"]
    ]
    assert [kind for kind, _ in groupby(kinds)] == ["call", "text", "call", "text"]
