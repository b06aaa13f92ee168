"""The same surface over the real engine and the bundled model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from tests.api.real_worlds import FRANCE, RealWorld
from tests.api.sse import bodies
from tests.api.worlds import user

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

QUESTION = user("What is the capital of France?")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def test_paris(real: RealWorld):
    answer = await real.openai.completions.create(model="smollm2", prompt=FRANCE, max_tokens=4, temperature=0)
    assert "Paris" in answer.choices[0].text
    chat = await real.openai.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=12, temperature=0)
    assert "Paris" in (chat.choices[0].message.content or "")


async def test_sixteen_streams_at_once_equal_the_answer_alone(real: RealWorld):
    alone = await real.openai.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=12, temperature=0)

    async def stream() -> str:
        chunks = await real.openai.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert await asyncio.gather(*(stream() for _ in range(16))) == [alone.choices[0].message.content] * 16


async def test_a_shared_prefix_is_counted_as_cached(real: RealWorld):
    real.engine.reset_prefix_cache()
    prompt = list(range(100, 200))
    first = await real.complete(prompt=prompt, max_tokens=1)
    second = await real.complete(prompt=prompt, max_tokens=1)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    salted = await real.complete(prompt=prompt, max_tokens=1, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_seed_gives_the_same_tokens_alone_and_among_16_strangers(real: RealWorld):
    body = {"max_tokens": 12, "temperature": 1.0, "return_token_ids": True, "ignore_eos": True, "logprobs": 2}
    alone = (await real.complete(**body, seed=7))["choices"][0]
    others = [
        {"temperature": 1.0, "seed": 7},  # with the same seed, behind another prompt
        {"temperature": 1.0},
        {"temperature": 0},
        {"temperature": 2.0, "top_k": 50, "min_p": 0.01},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 1},
        {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 1.0, "seed": 2},
        {"temperature": 1.0, "logit_bias": {"260": 5}, "logprobs": 5, "seed": 3},
        {"temperature": 1.0, "structured_outputs": {"regex": "[a-z ]{200}"}, "seed": 4},
    ]
    most_at_once = 0

    async def watch() -> None:
        nonlocal most_at_once
        while True:
            most_at_once = max(most_at_once, real.engine.stats().num_running)
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    answers = await asyncio.gather(
        real.complete(**body, seed=7),
        *(
            real.complete(prompt=f"Number {i} is", max_tokens=12 + i, ignore_eos=True, **others[i % len(others)])
            for i in range(16)
        ),
    )
    watching.cancel()
    assert most_at_once == 17
    among = answers[0]["choices"][0]
    assert among["token_ids"] == alone["token_ids"]
    assert len(set(alone["token_ids"])) > 5
    assert among["logprobs"]["token_logprobs"] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-3)
    assert (await real.complete(**body, seed=8))["choices"][0]["token_ids"] != alone["token_ids"]


async def test_samples_differ_and_each_is_that_of_its_own_seed(real: RealWorld):
    body = {"max_tokens": 8, "temperature": 1.0}
    several = (await real.complete(**body, seed=7, n=3))["choices"]
    assert len({choice["text"] for choice in several}) == 3
    assert several[2]["text"] == (await real.complete(**body, seed=9))["choices"][0]["text"]


async def test_a_stop_string_is_neither_shown_nor_streamed(real: RealWorld):
    whole = (await real.complete(max_tokens=8))["choices"][0]["text"]
    stop = whole[3:6]
    cut = (await real.complete(max_tokens=8, stop=stop))["choices"][0]
    assert cut["text"] == whole[: whole.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    response = await real.http.post(
        "/v1/completions",
        json={"prompt": FRANCE, "temperature": 0, "max_tokens": 8, "stop": stop, "stream": True},
    )
    streamed = [body["choices"][0]["text"] for body in bodies(response.text)]
    assert "".join(streamed) == cut["text"]


async def test_greedy_tokens_are_the_likeliest_ones(real: RealWorld):
    answer = await real.openai.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    positions = answer.choices[0].logprobs.content or []
    assert len(positions) == 4
    for position in positions:
        assert position.token == position.top_logprobs[0].token
        assert position.logprob == pytest.approx(position.top_logprobs[0].logprob)
        assert position.top_logprobs[0].logprob >= position.top_logprobs[1].logprob
        assert bytes(position.bytes or []).decode(errors="replace") == position.token
    assert "".join(position.token for position in positions) == answer.choices[0].message.content


async def test_a_scored_prompt_equals_its_generation(real: RealWorld):
    """The logprobs of a generated text are those that scoring the same tokens as a prompt gives."""
    prompt = real.engine.tokenizer.encode(FRANCE)
    made = (await real.complete(prompt=prompt, max_tokens=4, logprobs=0, return_token_ids=True))["choices"][0]
    scored = await real.complete(prompt=prompt + made["token_ids"], max_tokens=0, echo=True, logprobs=0)
    logprobs = scored["choices"][0]["logprobs"]
    assert logprobs["tokens"][-4:] == made["logprobs"]["tokens"]
    assert logprobs["token_logprobs"][-4:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)


async def test_bias_bans_and_limits_reach_the_sampler(real: RealWorld):
    first = (await real.complete(max_tokens=1, return_token_ids=True))["choices"][0]["token_ids"][0]
    banned = (await real.complete(max_tokens=1, return_token_ids=True, logit_bias={str(first): -100}))["choices"][0]
    assert banned["token_ids"] != [first]
    allowed = (await real.complete(max_tokens=3, return_token_ids=True, allowed_token_ids=[500]))["choices"][0]
    assert allowed["token_ids"] == [500, 500, 500]


@pytest.mark.parametrize(
    ("more", "param"),
    [({"allowed_token_ids": [500]}, "allowed_token_ids"), ({"min_tokens": 9}, "min_tokens")],
)
async def test_a_request_that_bans_all_its_grammar_allows_is_refused(real: RealWorld, more: dict[str, Any], param: str):
    zero = real.engine.tokenizer.encode("0", add_special_tokens=False)
    if param == "min_tokens":
        more = {**more, "stop_token_ids": zero}
    body = {"prompt": FRANCE, "max_tokens": 9, "guided_regex": "0", **more}
    response = await real.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_json_fits_its_schema_and_is_streamed_whole(real: RealWorld):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answers = await asyncio.gather(
        *(
            real.openai.chat.completions.create(
                model="smollm2",
                messages=user("Describe Rome as JSON."),
                max_tokens=60,
                seed=seed,
                response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
            )
            for seed in range(4)
        ),
        real.complete(max_tokens=20),
    )
    for answer in answers[:-1]:
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)
    assert "Paris" in answers[-1]["choices"][0]["text"]


async def test_a_forced_call_names_the_tool(real: RealWorld):
    stream = await real.openai.chat.completions.create(
        model="smollm2",
        messages=user("What is the weather in Rome?"),
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
        temperature=0,
        stream=True,
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    pieces = [piece.function for chunk in chunks for piece in chunk.delta.tool_calls or []]
    assert pieces[0] is not None
    assert pieces[0].name == "get_weather"
    assert "city" in json.loads("".join(piece.arguments or "" for piece in pieces if piece))
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.full
async def test_twenty_four_forced_calls_are_valid(real: RealWorld):
    """Of three tools, at a temperature, with the open strings that clients' schemas have."""
    tools = [TOOL, *(json.loads(json.dumps(TOOL)) for _ in range(2))]
    search, book = (tool["function"] for tool in tools[1:])
    search |= {"name": "search", "description": "Searches the web"}
    search["parameters"]["properties"] |= {"words": {"type": "array", "items": {"type": "string"}, "maxItems": 3}}
    book |= {"name": "book", "description": "Books a room"}
    book["parameters"]["properties"] |= {"nights": {"type": "integer"}, "view": {"enum": ["sea", "street", None]}}
    book["parameters"]["required"] += ["nights", "view"]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    asked = [{"type": "function", "function": {"name": name}} for name in schemas]

    async def ask(seed: int) -> None:
        answer = await real.openai.chat.completions.create(
            model="smollm2",
            messages=user("I go to Rome for three nights. What now?"),
            tools=tools,
            tool_choice=("required", *asked)[seed % 4],  # type: ignore[arg-type,call-overload]
            parallel_tool_calls=False,
            max_tokens=300,
            temperature=0.7,
            seed=seed,
        )
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls or ()
        assert choice.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        if seed % 4:
            assert call.function.name == list(schemas)[seed % 4 - 1]

    found = await asyncio.gather(*map(ask, range(24)), return_exceptions=True)
    assert [error for error in found if error is not None] == []


async def test_a_client_that_leaves_gives_its_blocks_back(real: RealWorld):
    stream = await real.openai.chat.completions.create(
        model="smollm2", messages=QUESTION, stream=True, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert real.engine.stats().num_running == 1
    await stream.close()
    await real.settled()


async def test_a_prompt_beyond_the_context_names_the_numbers(real: RealWorld):
    limit = real.engine.max_model_len
    response = await real.http.post("/v1/completions", json={"prompt": [5] * limit})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "input_tokens"
    assert str(limit) in error["message"]
    assert (await real.http.post("/v1/completions", json={"prompt": [10**6]})).status_code == 400


async def test_text_round_trips_through_tokens(real: RealWorld):
    text = "Ein Käse, 你好, 👩‍👩‍👧!"
    tokens = (await real.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert (await real.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"] == text
    rendered = (await real.http.post("/v1/chat/completions/render", json={"messages": QUESTION})).json()
    chat = await real.http.post(
        "/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 1, "return_token_ids": True}
    )
    assert rendered["token_ids"] == chat.json()["prompt_token_ids"]
