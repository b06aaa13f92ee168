"""An answer is the same streamed and whole, in each protocol, wherever it ends and however many tokens a step gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import pytest

from tests.api.fakes import say
from tests.api.sse import bodies
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
TEXTS = (
    f"<think>Hm.</think>First {CALL} then {CALL}\nend",
    f"{CALL}a{CALL}{CALL}",
    f"x<tool_call>no call</tool_call>y{CALL}\n",
    f"<think>STOP</think>{CALL}",
    f"{CALL.replace('b', 'STOP')}",
    f"<think>I look.\n{CALL}\n{CALL}",
)
Shown = list[tuple[Any, ...]]
"""What a client sees, in order: texts, calls, and the end."""


def joined(pieces: Iterable[tuple[Any, str]]) -> Shown:
    """Pieces that follow each other under one key become one."""
    shown: Shown = []
    for key, text in pieces:
        if shown and shown[-1][0] == key:
            text = shown.pop()[1] + text
        shown.append((key, text))
    return shown


def by_kind(*texts: tuple[str, Any], end: Any) -> Shown:
    """For protocols without an order of texts and calls."""
    return [*((kind, text) for kind, text in texts if text), ("end", end)]


def chat(answer: dict[str, Any]) -> Shown:
    (choice,) = answer["choices"]
    message, end = choice["message"], (choice["finish_reason"], choice["stop_reason"])
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return by_kind(("content", message["content"]), ("reasoning", message.get("reasoning")), ("calls", calls), end=end)


def chat_stream(text: str) -> Shown:
    choices = [body["choices"][0] for body in bodies(text)]
    content, reasoning = ("".join(c["delta"].get(key) or "" for c in choices) for key in ("content", "reasoning"))
    calls: dict[int, tuple[str, str]] = {}
    for piece in [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]:
        name, written = calls.get(piece["index"]) or (piece["function"]["name"], "")
        calls[piece["index"]] = (name, written + piece["function"]["arguments"])
    end = (choices[-1]["finish_reason"], choices[-1]["stop_reason"])
    return by_kind(("content", content), ("reasoning", reasoning), ("calls", list(calls.values())), end=end)


def responses(answer: dict[str, Any]) -> Shown:
    def text(item: dict[str, Any]) -> str:
        return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])

    items = [(item["type"], text(item), item["status"]) for item in answer["output"]]
    return [*items, ("end", answer["status"], answer["incomplete_details"])]


def responses_stream(text: str) -> Shown:
    *events, last = bodies(text)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    grown = joined((event["output_index"], event["delta"]) for event in events if event["type"].endswith(".delta"))
    shown = responses(last["response"])
    assert [text for _, text in grown] == [text for _, text, _ in shown[:-1] if text]
    return shown


def messages(answer: dict[str, Any]) -> Shown:
    blocks = [(b["type"], b.get("name"), b.get("text"), b.get("thinking"), b.get("input")) for b in answer["content"]]
    return [*blocks, ("end", answer["stop_reason"], answer["stop_sequence"])]


def messages_stream(text: str) -> Shown:
    blocks: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    for event in bodies(text):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "partial_json": ""})
        elif event["type"] == "content_block_delta":
            for key in ("text", "thinking", "partial_json"):
                if key in event["delta"]:
                    blocks[event["index"]][key] += event["delta"][key]
        elif event["type"] == "message_delta":
            ends.append(event["delta"])
    for block in blocks:
        if block["type"] == "tool_use":
            assert block["id"]
            is_whole = block["partial_json"].endswith("}")
            block["input"] = json.loads(block["partial_json"]) if is_whole else {}
    return messages({"content": blocks, **ends[-1]})


def ollama(answer: dict[str, Any]) -> Shown:
    return ollama_stream(json.dumps(answer))


def ollama_stream(text: str) -> Shown:
    lines = [json.loads(line) for line in text.splitlines()]
    content, thinking = ("".join(line["message"].get(key, "") for line in lines) for key in ("content", "thinking"))
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    return by_kind(("content", content), ("thinking", thinking), ("calls", calls), end=lines[-1]["done_reason"])


Protocol = tuple[str, dict[str, Any], str, str, Callable[[Any], Shown], Callable[[str], Shown]]
"""The path, the body, where it has the most tokens and the stop strings, and how its answers are read."""
PROTOCOLS: dict[str, Protocol] = {
    "chat": (
        *("/v1/chat/completions", {"messages": user("Hi"), "tools": [TOOL]}, "max_tokens", "stop"),
        *(chat, chat_stream),
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}]},
        *("max_output_tokens", "stop", responses, responses_stream),
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": user("Hi"),
            "tools": [{"name": "f", "input_schema": PARAMETERS}],
            "thinking": {"type": "enabled"},
        },
        *("max_tokens", "stop_sequences", messages, messages_stream),
    ),
    "ollama": (
        *("/api/chat", {"messages": user("Hi"), "tools": [TOOL]}, "num_predict", "stop"),
        *(ollama, ollama_stream),
    ),
}


async def both(world: World, protocol: str, num_tokens: int) -> tuple[Shown, Shown]:
    path, body, limit, stop, whole, stream = PROTOCOLS[protocol]
    bounds = {limit: num_tokens, stop: ["STOP"]}
    asked = {**body, "model": "fake", **({"options": bounds} if protocol == "ollama" else bounds)}
    answer = await world.http.post(path, json={**asked, "stream": False})
    streamed = await world.http.post(path, json={**asked, "stream": True})
    assert (answer.status_code, streamed.status_code) == (200, 200), answer.text
    return whole(answer.json()), stream(streamed.text)


@pytest.mark.parametrize("tokens_per_delta", [1, pytest.param(7, marks=pytest.mark.full), 1000])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_answer_is_the_same_streamed_and_whole(world: World, protocol: str, tokens_per_delta: int):
    world.engine.tokens_per_delta = tokens_per_delta
    for text in TEXTS:
        world.engine.script = say(text)
        length = len(world.engine.tokenizer.encode(text, add_special_tokens=False)) + 1
        for num_tokens in {*range(1, length, 9), length}:
            whole, streamed = await both(world, protocol, num_tokens)
            assert streamed == whole, (text, num_tokens)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_beginning_of_a_call_that_is_cut_off_is_no_text(world: World, protocol: str):
    for text in TEXTS[0], CALL.replace("<tool_call>\n", "```json\n"):
        world.engine.script = say(text)
        length = len(world.engine.tokenizer.encode(text, add_special_tokens=False))
        for num_tokens in range(1, length, 3):
            for shown in await both(world, protocol, num_tokens):
                assert not any(word in str(shown[:-1]) for word in ("tool_call>", '"name": "f')), (text, num_tokens)
    world.engine.script = say("A call begins with <tool_call>, and so on.")
    length = len(world.engine.tokenizer.encode("A call begins with <tool_call>, and", add_special_tokens=False))
    for shown in await both(world, protocol, length):
        assert "<tool_call>, and" in str(shown)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_calls_in_reasoning_count_if_the_model_ended_its_output_there(world: World, protocol: str):
    mark = "function_call" if protocol == "responses" else "'f'"
    for text, num_calls in ((f"Hm.\n{CALL}\n{CALL}", 2), (f"{CALL}</think>", 0), (f"{CALL}</think>So.", 0), ("Hm", 0)):
        world.engine.script = say(f"<think>{text}")
        length = len(world.engine.tokenizer.encode(f"<think>{text}", add_special_tokens=False))
        for num_tokens in (length, length + 1):
            for shown in await both(world, protocol, num_tokens):
                assert str(shown).count(mark) == (num_calls if num_tokens > length else 0), (text, shown)


@pytest.mark.parametrize("tokens_per_delta", [1, 1000])
async def test_texts_and_calls_are_in_the_order_in_which_they_were_written(world: World, tokens_per_delta: int):
    world.engine.tokens_per_delta = tokens_per_delta
    world.engine.script = say(TEXTS[0])
    for protocol, text, call in (("messages", "text", "tool_use"), ("responses", "message", "function_call")):
        whole, streamed = await both(world, protocol, 300)
        assert [part[0] for part in whole[1:-1]] == [text, call, text, call, text]
        assert streamed == whole


@pytest.mark.parametrize("tokens_per_delta", [1, 1000])
async def test_ollama_s_clients_see_no_call_that_was_cut_off(world: World, tokens_per_delta: int):
    world.engine.tokens_per_delta = tokens_per_delta
    world.engine.script = say(TEXTS[1])
    length = len(world.engine.tokenizer.encode(TEXTS[1], add_special_tokens=False))
    for num_tokens in range(1, length, 5):
        for shown in await both(world, "ollama", num_tokens):
            found = dict(shown)
            assert found["end"] == "length"
            assert all(call["arguments"] == {"a": "b"} for call in found.get("calls", ()))
    world.engine.script = say(TEXTS[4])
    for shown in await both(world, "ollama", 300):
        assert shown == [("end", "stop")]


@pytest.mark.parametrize("protocol", ["messages", "ollama"])
@pytest.mark.parametrize(
    "arguments", ['{"a": "b', '{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud83d"}', f'{{"a": {"[" * 300}{"]" * 300}}}']
)
async def test_arguments_that_no_object_can_hold_are_not_lost(world: World, protocol: str, arguments: str):
    """The model has not finished them, or no JSON can be made of their values."""
    world.engine.script = say(f'<tool_call>\n{{"name": "f", "arguments": {arguments}')
    path, body, *_ = PROTOCOLS[protocol]
    world.engine.max_model_len = 1000
    answer = (await world.http.post(path, json={**body, "model": "fake", "max_tokens": 700, "stream": False})).json()
    if protocol == "messages":
        assert (answer["content"][0]["input"], answer["stop_reason"]) == ({"invalid_json": arguments}, "tool_use")
    else:
        (call,) = answer["message"]["tool_calls"]
        assert (call["function"]["arguments"], answer["done_reason"]) == ({"invalid_json": arguments}, "stop")


async def test_ollama_s_clients_get_each_call_as_soon_as_it_is_complete(world: World):
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>'
    world.engine.script = say(f"{call}Then some text.{call}And more.")
    path, body, *_ = PROTOCOLS["ollama"]
    answer = await world.http.post(path, json={**body, "model": "fake", "options": {}, "stream": True})
    lines = [json.loads(line)["message"] for line in answer.text.splitlines()]
    kinds = [
        "call" if line.get("tool_calls") else "text" for line in lines if line.get("tool_calls") or line["content"]
    ]
    assert [kind for kind, _ in groupby(kinds)] == ["call", "text", "call", "text"]
