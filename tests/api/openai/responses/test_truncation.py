"""`truncation: "auto"`: the oldest items of a prompt that is too long are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_server.api.openai.responses.items import cut_points, left_out
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.tiers import Tier
from tests import models_tested
from tests.api.worlds import World
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


async def test_as_few_of_the_oldest_items_as_possible_are_left_out(world: World):
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
    refused = await world.http.post("/v1/responses", json={"input": [*LONG, said("x " * 60)], "truncation": "auto"})
    assert (refused.status_code, "too long" in refused.text) == (400, True)
    assert (await world.http.post("/v1/responses", json={"input": "x " * 60, "truncation": "auto"})).status_code == 400


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
