"""`truncation: "auto"`: the oldest items of a prompt that is too long are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from mlx_server.api.openai.responses.items import cut_points, left_out
from mlx_server.config import Config
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.pool.model_pool import ModelPool
from mlx_server.tiers import Tier
from tests import models_tested
from tests.api.real_worlds import RealWorld
from tests.api.worlds import Site, World
from tests.text_worlds import make_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def called(call_id: str, output: str | None = None) -> dict[str, Any]:
    if output is None:
        return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}
    return {"type": "function_call_output", "call_id": call_id, "output": output}


async def ask(world: World, **body: Any) -> tuple[dict[str, Any], str]:
    """The response and its prompt."""
    answer = await world.http.post("/v1/responses", json={"truncation": "auto", **body})
    assert answer.status_code == 200, answer.text
    ids = world.engine.requests[-1].prompt_token_ids
    return answer.json(), world.engine.tokenizer.decode(ids, skip_special_tokens=False)


async def num_tokens(world: World, **body: Any) -> int:
    counted = (await world.http.post("/v1/responses/input_tokens", json=body)).json()
    assert "input_tokens" in counted, counted
    return int(counted["input_tokens"])


LONG = [said(f"{number} " + "word " * 20, role) for number in range(20) for role in ("user", "assistant")]


async def test_the_oldest_items_are_left_out(world: World):
    world.engine.max_model_len = 400
    items = [said("Be brief.", "developer"), *LONG, said("Last")]
    body, prompt = await ask(world, input=items, instructions="Be nice.")
    assert body["truncation"] == "auto"
    assert prompt.startswith("<|system|>Be nice.\nBe brief.<|end|>")
    num_kept = prompt.count("word " * 20)
    assert 0 < num_kept < len(LONG)
    assert prompt.endswith(f"{LONG[-1]['content']}<|end|><|user|>Last<|end|><|assistant|>")
    kept = [items[0], *LONG[len(LONG) - num_kept :], items[-1]]
    more = [items[0], *LONG[len(LONG) - num_kept - 2 :], items[-1]]
    lengths = [await num_tokens(world, input=each, instructions="Be nice.") for each in (kept, more)]
    assert lengths[0] == len(world.engine.requests[-1].prompt_token_ids)
    assert lengths[0] <= 350 < lengths[1], "an eighth of the context is left for the answer"
    assert await num_tokens(world, input=items, instructions="Be nice.", truncation="auto") == lengths[0]
    longer, _ = await ask(world, input=items, instructions="Be nice.", max_output_tokens=5)
    assert lengths[0] < longer["usage"]["input_tokens"] <= 395
    listed = (await world.http.get(f"/v1/responses/{body['id']}/input_items?limit=100")).json()["data"]
    assert len(listed) == len(items), "what is kept is whole"


def watch_renders(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of messages of the chats that are rendered from now on."""
    found = list[int]()
    formatted = world.engine.chat.format

    def format_(messages: Any, *args: Any) -> Any:
        found.append(len(messages))
        return formatted(messages, *args)

    monkeypatch.setattr(world.engine.chat, "format", format_)
    return found


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("num_earlier", [20, 400, 1600])
async def test_the_same_items_are_left_out_until_the_context_is_full_again(
    world: World, monkeypatch: pytest.MonkeyPatch, num_earlier: int
):
    """So that most turns find their prefix cached; whatever the length of the conversation, with a few renders."""
    world.engine.max_model_len = 1600
    items = [said("word " * 6, role) for _ in range(num_earlier // 2) for role in ("user", "assistant")]
    renders = watch_renders(world, monkeypatch)
    prompts, num_renders = list[Sequence[int]](), list[int]()
    for number in range(40):
        items.append(said(f"{number} " + "more " * 6))
        renders.clear()
        await ask(world, input=items)
        num_renders.append(len(renders))
        prompts.append(world.engine.requests[-1].prompt_token_ids)
        items.append(said("Hello world", "assistant"))
    lengths = [len(prompt) for prompt in prompts]
    assert 700 <= min(lengths[20:]) < max(lengths[20:]) <= 1400, "from a half to all of what the answer leaves"
    num_cached = [common_prefix(first, second) for first, second in pairwise(prompts)]
    num_hits = sum(cached == length for cached, length in zip(num_cached, lengths, strict=False))
    assert num_hits >= 33
    assert max(num_renders) <= 4
    assert sum(num_renders) < 2.9 * 40


@pytest.mark.slow
async def test_turns_in_a_full_context_find_their_prefix_cached(site: Site, bundled: tuple[ModelPool, Config]):
    pool, config = bundled
    tiers = {"default": Tier(name="default", max_context_tokens=400)}
    real = RealWorld(site, site.serve(pool, replace(config, tiers=tiers)))
    previous, lengths, cached = None, list[int](), list[int]()
    for turn in range(21):
        body: dict[str, Any] = {
            "input": f"{turn}. Write one sentence about a river, a stone and a bird, please.",
            "previous_response_id": previous,
            "max_output_tokens": 4,
            "extra_body": {"cache_salt": str(id(lengths))},
        }
        answer = await real.openai.responses.create(model="smollm2", truncation="auto", **body)
        assert answer.usage is not None
        previous = answer.id
        lengths.append(answer.usage.input_tokens)
        cached.append(answer.usage.input_tokens_details.cached_tokens)
    await real.settled()
    assert lengths[10] > 350 > lengths[11], "ten turns in a full context follow"
    assert sum(hits > length - 32 for hits, length in zip(cached[11:], lengths[10:], strict=False)) >= 7


async def test_a_prompt_that_fits_is_not_cut(world: World):
    length = await num_tokens(world, input=LONG)
    world.engine.max_model_len = length + 1
    _, prompt = await ask(world, input=LONG)
    assert prompt.count("word " * 20) == len(LONG)
    world.engine.max_model_len = length
    for truncation in ("disabled", None):
        refused = await world.http.post("/v1/responses", json={"input": LONG, "truncation": truncation})
        assert (refused.status_code, "too long" in refused.text) == (400, True)
    _, prompt = await ask(world, input=LONG)
    assert prompt.count("word " * 20) < len(LONG)


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
async def test_earlier_items_are_left_out_first(world: World, field: str):
    made = (await world.http.post("/v1/conversations", json={})).json()["id"]
    body: dict[str, Any] = {"conversation": made} if field == "conversation" else {}
    world.engine.max_model_len = 10_000
    first = (await world.http.post("/v1/responses", json={"input": LONG[:-1], **body})).json()
    world.engine.max_model_len = 120
    continued = {field: made if field == "conversation" else first["id"]}
    _, prompt = await ask(world, input=[said("And"), said("now?")], **continued)
    assert prompt.endswith("<|assistant|>Hello world<|end|><|user|>And\nnow?<|end|><|assistant|>")
    world.engine.max_model_len = 28
    _, prompt = await ask(world, input=[said("And"), said("now?")], **continued)
    assert prompt == "<|user|>now?<|end|><|assistant|>"


async def test_the_newest_item_stays_however_long_it_is(world: World):
    world.engine.max_model_len = 50
    for items in ([*LONG, said("x " * 60)], "x " * 60):
        refused = await world.http.post("/v1/responses", json={"input": items, "truncation": "auto"})
        message = refused.json()["error"]["message"]
        assert (refused.status_code, message[:49]) == (400, "The prompt is too long: 142 tokens > 49 maximum. ")
        assert "truncation has left out all that it may" in message
    steps = [called("1"), called("1", "out " * 20)]
    refused = await world.http.post(
        "/v1/responses", json={"input": [*LONG, said("x " * 20), *steps], "truncation": "auto"}
    )
    assert "too long" in refused.json()["error"]["message"], "the task and the newest output do not fit together"
    refused = await world.http.post("/v1/responses", json={"input": "x" * 100_000, "truncation": "auto"})
    assert "The prompt is too long: at least 50 tokens > 49 maximum." in refused.json()["error"]["message"]


async def test_the_context_of_the_key_s_tier_counts(world: World):
    world.configure_server(Tier(name="small", max_context_tokens=120), api_key="k")
    tiers = {**world.context.config.tiers}
    world.configure(replace(world.context.config, tiers={**tiers, "default": replace(tiers["small"], name="default")}))
    world.engine.max_model_len = 10_000
    body = {"input": [*LONG, said("Last")], "truncation": "auto"}
    answer = await world.http.post("/v1/responses", json=body, headers={"x-api-key": "k"})
    assert answer.status_code == 200, answer.text
    assert len(world.engine.requests[-1].prompt_token_ids) <= 105


async def test_no_call_is_separated_from_its_output():
    items = [said("a"), called("1"), called("2"), called("1", "x"), said("b"), called("2", "y"), called("3", "z")]
    assert cut_points(items) == [1, 6]
    assert cut_points([said("a")]) == cut_points([]) == []
    numbered = [item for name in "abc" for item in (said(name), called("1"), called("1", name))]
    assert cut_points([*numbered, called("2"), called("1", "late")]) == [1, 3, 4, 6, 7]
    shells = [
        {"type": "shell_call", "id": "s"},
        {"type": "reasoning", "id": "r"},
        {"type": "shell_call_output", "id": "s"},
    ]
    assert cut_points([*shells, said("a"), said("b")]) == [3, 4]


async def test_the_question_that_the_rest_follows_stays():
    items = [
        said("a"),
        said("b", "assistant"),
        said("c", "system"),
        said("d"),
        called("1"),
        called("1", "x"),
        said("e"),
    ]
    left = [[index for index in range(len(items)) if index not in left_out(items, num)] for num in range(len(items))]
    assert left[:3] == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6]]
    assert left[3:] == [[2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [2, 3, 5, 6], [2, 6]]


async def test_an_agent_s_steps_are_left_out_but_not_its_task(world: World):
    """Qwen 3.5's template refuses chats without a question."""
    template = models_tested.TEMPLATES / "Qwen3.5-4B.jinja"
    world.engine.tokenizer = make_tokenizer(chat_template=template.read_text())
    world.engine.chat = ChatFormatter(world.engine.tokenizer)
    steps = [item for number in range(20) for item in (called(str(number)), called(str(number), f"out-{number}"))]
    body = {"input": [said("The task"), *steps], "tools": [{"type": "function", "name": "f"}]}
    world.engine.max_model_len = 100_000
    world.engine.max_model_len = await num_tokens(world, **body) - 100
    _, prompt = await ask(world, **body)
    assert ("The task" in prompt, "out-0" in prompt, "out-19" in prompt) == (True, False, True)
    split = (await world.http.post("/v1/conversations", json={"items": body["input"][:-1]})).json()["id"]
    _, again = await ask(world, **{**body, "input": body["input"][-1:], "conversation": split})
    assert again == prompt


async def test_a_call_is_left_out_only_with_its_output(world: World):
    items = [*LONG, said("Go"), called("1"), called("1", "out " * 20), said("Go on")]
    world.engine.max_model_len = 10_000
    with_both, with_output = [await num_tokens(world, input=items[-num:]) for num in (4, 2)]
    for length, is_there in ((with_both, True), (with_output, False)):
        world.engine.max_model_len = length * 8 // 7 + 2
        _, prompt = await ask(world, input=items)
        assert ("out out" in prompt, '"f"' in prompt) == (is_there, is_there)
        assert prompt.endswith("<|user|>Go on<|end|><|assistant|>")
