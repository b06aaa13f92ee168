"""What is too long: texts beyond the context, ids by the million, and limits beyond what is left."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from mlx_server.api.openai import tokenization
from mlx_server.api.openai.tokenization import MAX_IDS
from mlx_server.engine.text.tokenizer import check_ids
from tests.api.fakes import say
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def tokenized(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that were tokenized."""
    lengths: list[int] = []
    encode = world.engine.tokenizer.encode

    def noted(text: str, **options: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(world.engine.tokenizer, "encode", noted)
    return lengths


async def test_what_is_far_too_long_is_refused_before_all_of_it_is_tokenized(world: World, tokenized: list[int]):
    """Ten million digits are ten million tokens, which take half a minute and gigabytes."""
    for answer in (await world.complete(prompt="1" * 10_000_000), await world.chat(messages=user("1" * 10_000_000))):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_tokens")
        assert "of its 10000" in answer.json()["error"]["message"]
    assert sum(tokenized) < 200_000
    assert world.engine.requests == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "1" * 10_000_000}),
        ("/tokenize", {"messages": user("1" * 10_000_000)}),
        ("/v1/completions/render", {"prompt": "1" * 10_000_000}),
        ("/v1/chat/completions/render", {"messages": user("1" * 10_000_000)}),
        ("/v1/messages/count_tokens", {"messages": user("1" * 10_000_000)}),
        ("/v1/responses/input_tokens", {"input": "1" * 10_000_000}),
    ],
)
async def test_so_it_is_where_tokens_are_only_counted(
    world: World, tokenized: list[int], path: str, body: dict[str, Any]
):
    answer = await world.http.post(path, json=body)
    assert answer.status_code == 400
    assert "of its 10000" in answer.json()["error"]["message"]
    assert sum(tokenized) < 300_000


@pytest.mark.parametrize("num_chars", [2000, 10_000_000])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
        ("/api/chat", "messages"),
        ("/api/generate", "prompt"),
    ],
)
async def test_clients_can_tell_that_a_prompt_is_too_long(world: World, path: str, field: str, num_chars: int):
    """LiteLLM, LangChain and coding agents shorten the conversation if the message has one of these forms."""
    text = "1" * num_chars
    answer = await world.http.post(path, json={"max_tokens": 1, field: user(text) if field == "messages" else text})
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    sizes = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message, re.IGNORECASE)
    assert sizes is not None
    assert int(sizes[1]) > int(sizes[2]) >= world.engine.max_model_len - 1
    assert "this model's maximum context length is 512 tokens" in message.lower()
    assert "Shorten" in message


async def test_what_is_little_more_than_the_context_is_counted(world: World):
    counted = (await world.http.post("/tokenize", json={"prompt": "1" * 2000})).json()
    assert (counted["count"], counted["max_model_len"]) == (2000, 512)


async def test_conversations_for_longer_contexts_are_counted(world: World):
    """By the count, agents decide when to shorten a conversation."""
    text = "1" * 250_000
    assert (await world.http.post("/tokenize", json={"prompt": text})).json()["count"] == 250_000
    assert (await world.http.post("/tokenize", json={"messages": user(text)})).json()["count"] > 250_000
    for path, field, value in (
        ("messages/count_tokens", "messages", user(text)),
        ("responses/input_tokens", "input", text),
    ):
        counted = (await world.http.post(f"/v1/{path}", json={field: value})).json()
        assert counted["input_tokens"] > 250_000
    chat = (await world.http.post("/v1/chat/completions/render", json={"messages": user(text)})).json()
    (rendered,) = (await world.http.post("/v1/completions/render", json={"prompt": text})).json()
    assert len(chat["token_ids"]) > len(rendered["token_ids"]) >= 250_000


async def test_millions_of_ids_are_to_be_sent_in_parts(world: World):
    answer = await world.http.post("/detokenize", json={"tokens": [5] * (MAX_IDS + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    assert answer.json()["error"]["message"] == (
        f"tokens: must have at most {MAX_IDS} ids, got {MAX_IDS + 1}; send fewer at a time"
    )
    assert MAX_IDS <= 131_072  # while the library decodes them, no other thread runs


async def test_ids_are_looked_at_and_answered_for_in_a_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand take milliseconds each way, in which the event loop would send no token."""
    threads: list[threading.Thread] = []

    class Counted(tokenization.JSONResponse):
        def render(self, content: object) -> bytes:
            threads.append(threading.current_thread())
            return super().render(content)

    def check(*arguments: Any) -> None:
        threads.append(threading.current_thread())
        check_ids(*arguments)

    monkeypatch.setattr(tokenization, "JSONResponse", Counted)
    monkeypatch.setattr(tokenization, "check_ids", check)
    answer = (await world.http.post("/detokenize", json={"tokens": [5] * 100})).json()
    assert answer["prompt"] == answer["text"] != ""
    assert len(threads) == 2
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("side", ["left", "right"])
async def test_what_is_to_be_cut_is_tokenized_where_it_is_kept(world: World, tokenized: list[int], side: str):
    text = " ".join(map(str, range(100_000)))
    whole = world.engine.tokenizer.encode(text)
    tokenized.clear()
    answer = await world.complete(prompt=text, truncate_prompt_tokens=7, truncation_side=side, return_token_ids=True)
    assert answer.json()["choices"][0]["prompt_token_ids"] == (whole[-7:] if side == "left" else whole[:7])
    assert sum(tokenized) < 200_000 < len(text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": user("Hi"), "max_tokens": 32_000}),
        ("/v1/chat/completions", {"messages": user("Hi"), "max_completion_tokens": 2**70}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 32_000}),
        ("/v1/messages", {"messages": user("Hi"), "max_tokens": 32_000}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 32_000}),
    ],
)
async def test_agents_may_ask_for_more_than_the_context_holds(world: World, path: str, body: dict[str, Any]):
    world.engine.script = say("a" * world.engine.max_model_len)
    answer = await world.http.post(path, json=body)
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    num_prompt = usage.get("prompt_tokens") or usage["input_tokens"]
    assert num_prompt + (usage.get("completion_tokens") or usage["output_tokens"]) == world.engine.max_model_len
