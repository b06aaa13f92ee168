"""Chat completions, as the stock OpenAI client sees them."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.request import Priority
from tests.api.fakes import TOOL_MARKERS, say
from tests.api.sse import bodies
from tests.api.worlds import World, user
from tests.text_worlds import make_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def test_an_answer_has_text_reason_and_usage(world: World):
    world.engine.num_cached_tokens = 7
    answer = await world.openai.chat.completions.create(model="fake", messages=user("Hi"))
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello world"
    assert choice.finish_reason == "stop"
    assert answer.model == "fake"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    num_prompt = len(world.engine.requests[0].prompt_token_ids)
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == 7  # H e l l o, " world", and the end of sequence
    assert answer.usage.total_tokens == num_prompt + 7
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 7


async def test_usage_counts_the_drafts_of_all_answers(world: World):
    world.engine.num_drafts = (3, 1)
    answer = await world.openai.chat.completions.create(model="fake", messages=user("Hi"), n=2)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 2)
    stream = bodies((await world.chat(stream=True, stream_options={"include_usage": True})).text)
    details = stream[-1]["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (3, 1)


async def test_the_prompt_is_the_chat_template_s(world: World):
    await world.chat(messages=[{"role": "system", "content": "Be nice."}, *user("Hi")])
    prompt = world.engine.tokenizer.decode(world.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|system|>Be nice.<|end|><|user|>Hi<|end|><|assistant|>"


async def test_content_may_be_a_list_of_parts(world: World):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await world.chat(messages=user(parts))
    prompt = world.engine.tokenizer.decode(world.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert "<|user|>one\ntwo<|end|>" in prompt


async def test_a_stream_joins_to_the_same_answer(world: World):
    stream = await world.openai.chat.completions.create(
        model="fake", messages=user("Hi"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    assert len({c.id for c in chunks}) == 1


async def test_a_stream_ends_with_done_and_no_usage_unless_asked(world: World):
    response = await world.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    assert all("usage" not in body and body["choices"] for body in bodies(response.text))


async def test_continuous_usage_counts_up(world: World):
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await world.chat(stream=True, stream_options=options)
    counts = [body["usage"]["completion_tokens"] for body in bodies(response.text)]
    assert counts == [0, 1, 2, 3, 4, 5, 6, 7, 7]


async def test_stages_are_timed_in_milliseconds(world: World):
    expected = {
        "time_to_first_token_ms": 1000.0,
        "queue_time_ms": 500.0,
        "generation_time_ms": 2000.0,
        "mean_itl_ms": 333.333,
        "tokens_per_second": 3.0,
    }
    assert (await world.chat()).json()["metrics"] == expected
    response = await world.chat(stream=True, stream_options={"include_usage": True})
    assert bodies(response.text)[-1]["metrics"] == expected
    assert "metrics" not in (await world.chat(n=2)).json()


async def test_n_choices_have_their_own_seeds_and_count_the_prompt_once(world: World):
    world.engine.script = lambda request: f"seed {request.sampling.seed}"
    answer = await world.openai.chat.completions.create(model="fake", messages=user("Hi"), n=3, seed=5)
    assert [choice.message.content for choice in answer.choices] == ["seed 5", "seed 6", "seed 7"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(world.engine.requests[0].prompt_token_ids)
    assert answer.usage.completion_tokens == 3 * 7


async def test_seeds_of_several_choices_stay_within_64_bits(world: World):
    await world.chat(n=2, seed=2**63 - 1)
    assert [request.sampling.seed for request in world.engine.requests] == [2**63 - 1, -(2**63)]


async def test_a_stream_of_several_choices_keeps_them_apart(world: World):
    world.engine.script = lambda request: f"seed {request.sampling.seed}"
    stream = await world.openai.chat.completions.create(
        model="fake", messages=user("Hi"), n=2, seed=1, stream=True, stream_options={"include_usage": True}
    )
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["seed 1", "seed 2"]


async def test_a_stop_string_ends_the_answer_and_is_named(world: World):
    answer = (await world.chat(stop="wor")).json()
    assert answer["choices"][0]["message"]["content"] == "Hello "
    assert answer["choices"][0]["stop_reason"] == "wor"
    answer = (await world.chat(stop=["xyz", "wor"], include_stop_str_in_output=True)).json()
    assert answer["choices"][0]["message"]["content"] == "Hello wor"


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 1000])
@pytest.mark.parametrize(
    ("stop", "content"), [("Q:", "A. "), ("\n\n", "A. Q: B"), ("<think>", "A. Q: B\n\nC"), ("\n", "A. Q: B")]
)
async def test_stop_strings_do_not_end_the_reasoning(world: World, tokens_per_delta: int, stop: str, content: str):
    """Models repeat the question there, and the answer would be missing."""
    world.engine.tokens_per_delta = tokens_per_delta
    for reasoning in ("Q: what?\n\n", "", "Q:"):
        world.engine.script = say(f"<think>{reasoning}</think>\n\nA. Q: B\n\nC")
        for template in ({}, {"enable_thinking": True}):
            answer = (await world.chat(stop=stop, chat_template_kwargs=template)).json()["choices"][0]
            assert (answer["message"]["content"], answer["finish_reason"]) == (content, "stop")
            assert answer["message"].get("reasoning_content", "") == reasoning
    world.engine.script = say("<thing> Q: B")
    assert (await world.chat(stop=stop)).json()["choices"][0]["message"]["content"] == (
        "<thing> " if stop == "Q:" else "<thing> Q: B"
    )


async def test_a_stop_token_is_named_by_its_id(world: World):
    token_id = world.engine.tokenizer.encode("o")[0]
    answer = (await world.chat(stop_token_ids=[token_id])).json()
    assert answer["choices"][0]["message"]["content"] == "Hell"
    assert answer["choices"][0]["stop_reason"] == token_id


async def test_the_newer_name_of_the_limit_wins(world: World):
    answer = await world.openai.chat.completions.create(
        model="fake", messages=user("Hi"), max_completion_tokens=2, max_tokens=5
    )
    assert answer.choices[0].message.content == "He"
    assert answer.choices[0].finish_reason == "length"


async def test_without_a_limit_the_context_is_the_limit(world: World):
    answer = (await world.chat(ignore_eos=True)).json()
    assert answer["usage"]["total_tokens"] == world.engine.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_logprobs_have_names_bytes_and_rivals(world: World):
    answer = await world.openai.chat.completions.create(
        model="fake", messages=user("Hi"), logprobs=True, top_logprobs=2, max_tokens=1
    )
    assert answer.choices[0].logprobs is not None
    (position,) = answer.choices[0].logprobs.content or []
    token_id = world.engine.tokenizer.encode("H")[0]
    assert (position.token, position.bytes) == ("H", [72])
    assert position.logprob == pytest.approx(-(token_id + 1) / 100)
    assert [(top.token, top.logprob) for top in position.top_logprobs] == [("!", -0.01), ('"', -0.02)]


async def test_logprobs_are_written_beside_the_event_loop(world: World, monkeypatch: pytest.MonkeyPatch):
    """Those of a long text take seconds, in which all streams would stand still."""
    threads: set[int] = set()
    tokenizer = world.engine.tokenizer
    token_text = tokenizer.token_text

    def noted(token_id: int) -> str:
        threads.add(threading.get_ident())
        return token_text(token_id)

    monkeypatch.setattr(tokenizer, "token_text", noted)
    assert (await world.chat(logprobs=True, max_tokens=3)).status_code == 200
    assert threads
    assert threading.get_ident() not in threads


async def test_streamed_logprobs_come_with_their_tokens(world: World):
    response = await world.chat(stream=True, logprobs=True)
    chunks = bodies(response.text)[1:]
    tokens = [position["token"] for chunk in chunks for position in chunk["choices"][0]["logprobs"]["content"]]
    assert tokens == ["H", "e", "l", "l", "o", " world", "<|end|>"]


async def test_tokens_may_be_named_by_id(world: World):
    answer = (await world.chat(logprobs=True, max_tokens=1, return_tokens_as_token_ids=True)).json()
    token_id = world.engine.tokenizer.encode("H")[0]
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{token_id}"


async def test_prompt_logprobs_start_with_none(world: World):
    answer = (await world.chat(prompt_logprobs=1, max_tokens=1)).json()
    prompt = world.engine.requests[0].prompt_token_ids
    known = answer["prompt_logprobs"]
    assert len(known) == len(prompt)
    assert known[0] is None
    assert known[1][str(prompt[1])] == {
        "logprob": pytest.approx(-(prompt[1] + 1) / 100),
        "rank": prompt[1] + 1,
        "decoded_token": world.engine.tokenizer.token_text(prompt[1]),
    }


async def test_token_ids_come_back_on_request(world: World):
    answer = (await world.chat(return_token_ids=True, max_tokens=2)).json()
    ids = world.engine.tokenizer.encode("He", add_special_tokens=False)
    assert answer["prompt_token_ids"] == list(world.engine.requests[0].prompt_token_ids)
    assert answer["choices"][0]["token_ids"] == ids
    first, *rest = bodies((await world.chat(return_token_ids=True, max_tokens=2, stream=True)).text)
    assert first["prompt_token_ids"] == list(world.engine.requests[1].prompt_token_ids)
    assert [chunk["choices"][0]["token_ids"] for chunk in rest] == [[ids[0]], [ids[1]]]


async def test_a_tool_call_is_parsed(world: World):
    world.engine.script = say(CALL)
    answer = await world.openai.chat.completions.create(model="fake", messages=user("Hi"), tools=[WEATHER])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}


async def test_a_streamed_tool_call_has_its_name_first_and_its_arguments_in_pieces(world: World):
    world.engine.script = say(CALL)
    stream = await world.openai.chat.completions.create(model="fake", messages=user("Hi"), tools=[WEATHER], stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
    assert pieces[0].function is not None
    assert pieces[0].function.name == "weather"
    assert pieces[0].id
    assert all(piece.id is None for piece in pieces[1:])
    assert len(pieces) > 3
    assert json.loads("".join(p.function.arguments or "" for p in pieces if p.function)) == {"city": "Rome"}
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 1000])
async def test_a_chunk_has_one_entry_of_one_call(world: World, tokens_per_delta: int):
    """Clients read the first entry only, or add up entries by their position in the chunk."""
    world.engine.tokens_per_delta = tokens_per_delta
    world.engine.script = say(f"Well: {CALL}\n{CALL}")
    details = {"logprobs": True, "return_token_ids": True}
    chunks = bodies((await world.chat(tools=[WEATHER], stream=True, **details)).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    calls: dict[int, str] = {}
    for choice in choices:
        for piece in choice["delta"].get("tool_calls", ())[:1]:
            assert choice["delta"]["tool_calls"] == [piece]
            assert (piece["index"] in calls) == ("id" not in piece)
            calls[piece["index"]] = calls.get(piece["index"], "") + piece["function"]["arguments"]
    assert list(map(json.loads, calls.values())) == [{"city": "Rome"}] * 2
    assert "".join(choice["delta"].get("content", "") for choice in choices).strip() == "Well:"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    token_ids = [token_id for choice in choices[1:] for token_id in choice["token_ids"]]
    assert len(token_ids) == sum(len(choice["logprobs"]["content"]) for choice in choices[1:])
    assert world.engine.tokenizer.decode(token_ids, skip_special_tokens=True).endswith("</tool_call>")


async def test_a_call_that_was_cut_off_does_not_end_the_conversation(world: World):
    world.engine.max_model_len = 2000
    world.engine.script = say(CALL)
    cut = (await world.chat(tools=[WEATHER], max_tokens=45)).json()["choices"][0]["message"]
    (call,) = cut["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Ro'
    result = {"role": "tool", "tool_call_id": call["id"], "content": "arguments are no JSON"}
    answer = await world.chat(messages=[*user("Hi"), cut, result], tools=[WEATHER])
    assert answer.status_code == 200
    prompt = world.engine.tokenizer.decode(world.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert json.dumps({"invalid_json": '{"city": "Ro'}) in prompt


TAGGED = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("wanted", "written", "stop", "arguments", "reason"),
    [
        ({}, CALL, "ome", ['{"city": "R'], "stop"),
        ({}, CALL, "</tool_call>", ['{"city": "Rome"}'], "tool_calls"),
        ({}, CALL + CALL.replace("Rome", "Oslo"), "slo", ['{"city": "Rome"}', '{"city": "O'], "stop"),
        (
            {"parallel_tool_calls": False},
            CALL + CALL.replace("Rome", "Oslo"),
            "slo",
            ['{"city": "Rome"}'],
            "tool_calls",
        ),
        ({}, f"<tool_call>{TAGGED}</tool_call>", "ome", ['{"city": "R'], "stop"),
        ({}, f"<tool_call>{TAGGED}</tool_call>", "</tool_call>", ['{"city": "Rome"}'], "tool_calls"),
    ],
)
async def test_a_stop_string_inside_a_call_is_the_reason(
    world: World, wanted: dict[str, Any], written: str, stop: str, arguments: list[str], reason: str
):
    if "<function" in written:
        tokenizer = make_tokenizer(added=TOOL_MARKERS)
        tokenizer.hf.init_kwargs["tool_parser_type"] = "qwen3_coder"
        world.engine.tokenizer, world.engine.chat = tokenizer, ChatFormatter(tokenizer)
    world.engine.script = say(written)
    body = {"tools": [WEATHER], "stop": stop, **wanted}
    (choice,) = (await world.chat(**body)).json()["choices"]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == arguments
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    last = bodies((await world.chat(**body, stream=True)).text)[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (reason, stop)


async def test_parallel_calls_can_be_turned_off(world: World):
    world.engine.script = say(f"{CALL}\n{CALL}")
    both = (await world.chat(tools=[WEATHER])).json()
    one = (await world.chat(tools=[WEATHER], parallel_tool_calls=False)).json()
    assert len(both["choices"][0]["message"]["tool_calls"]) == 2
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_required_call_is_held_to_a_grammar(world: World, choice: Any):
    world.engine.script = say(CALL)
    answer = (await world.chat(tools=[WEATHER], tool_choice=choice)).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert allows(world, CALL)
    await world.chat(tools=[WEATHER], tool_choice=choice)
    assert not allows(world, "Hello")


def allows(world: World, text: str) -> bool:
    """Whether the constraint of the latest request takes all of `text`. Asked once a request."""
    constraint = world.engine.requests[-1].constraint
    assert constraint is not None
    return all(constraint.accept(i) for i in world.engine.tokenizer.encode(text, add_special_tokens=False))


async def test_a_tool_that_must_not_be_called_is_not_shown(world: World):
    world.engine.script = say(CALL)
    answer = (await world.chat(tools=[WEATHER], tool_choice="none")).json()
    assert answer["choices"][0]["message"]["content"] == CALL
    prompt = world.engine.tokenizer.decode(world.engine.requests[0].prompt_token_ids)
    assert "weather" not in prompt
    assert world.engine.requests[0].constraint is None


async def test_reasoning_is_split_off_under_both_names(world: World):
    world.engine.script = say("<think>Hmm.</think>Yes.")
    answer = (await world.chat()).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Hmm.", "Hmm.", "Yes.")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6  # both markers and 4 characters
    streamed = [chunk["choices"][0]["delta"] for chunk in bodies((await world.chat(stream=True)).text)]
    assert "".join(delta.get("reasoning_content", "") for delta in streamed) == "Hmm."
    assert "".join(delta.get("content", "") for delta in streamed) == "Yes."


@pytest.mark.parametrize("tokens_per_delta", range(1, 10))
async def test_of_a_run_of_tokens_those_behind_the_reasoning_are_not_counted_as_such(
    world: World, tokens_per_delta: int
):
    world.engine.script = say("<think>Hmm.</think>Yes.")
    world.engine.tokens_per_delta = tokens_per_delta
    answer = (await world.chat()).json()
    assert answer["choices"][0]["message"]["content"] == "Yes."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 11  # with the end of sequence


async def test_reasoning_can_be_left_out_or_left_in_place(world: World):
    world.engine.script = say("<think>Hmm.</think>Yes.")
    hidden = (await world.chat(include_reasoning=False)).json()["choices"][0]["message"]
    assert "reasoning" not in hidden
    assert hidden["content"] == "Yes."
    whole = (await world.chat(separate_reasoning=False)).json()["choices"][0]["message"]
    assert whole["content"] == "<think>Hmm.</think>Yes."


async def test_a_thinking_budget_bounds_the_reasoning(world: World):
    await world.chat(thinking_token_budget=3)
    constraint = world.engine.requests[0].constraint
    assert constraint is not None
    start, end = (world.engine.tokenizer.token_to_id(marker) for marker in ("<think>", "</think>"))
    letter = world.engine.tokenizer.encode("a")[0]
    assert constraint.accept(start)
    assert [constraint.accept(letter) for _ in range(3)] == [True, True, True]
    assert list(constraint.forced_tokens()) == [end]


async def test_an_answer_in_json_is_held_to_its_schema(world: World):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    await world.chat(**body)
    assert allows(world, '{"a": 1}')
    await world.chat(**body)
    assert not allows(world, '{"a": x')


async def test_with_a_response_format_and_tools_the_model_may_do_either(world: World):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for text, is_allowed in [('{"a": 1}', True), (CALL, True), ("Hello", False), ('{"b": 1}', False)]:
        await world.chat(response_format=response_format, tools=[WEATHER])
        assert allows(world, text) is is_allowed, text


async def test_a_client_may_lower_its_priority_only(world: World):
    for priority in (None, 0, -5, 1, 9):
        await world.chat(priority=priority)
    expected = [Priority.NORMAL, Priority.NORMAL, Priority.NORMAL, Priority.LOW, Priority.LOW]
    assert [request.priority for request in world.engine.requests] == expected


async def test_a_salt_separates_the_cache(world: World):
    await world.chat(cache_salt="mine")
    assert world.engine.requests[0].extra_keys == ("key:anonymous", "mine")


async def test_the_client_s_request_id_comes_back(world: World):
    response = await world.http.post(
        "/v1/chat/completions", json={"messages": user("Hi")}, headers={"x-request-id": "abc-1"}
    )
    assert response.json()["id"] == "chatcmpl-abc-1"
    assert response.headers["x-request-id"] == "abc-1"
    assert (await world.chat(request_id="def")).json()["id"] == "chatcmpl-def"


async def test_two_requests_may_have_the_same_id(world: World):
    for _ in range(2):
        assert (await world.chat(request_id="same")).status_code == 200
    assert len({request.request_id for request in world.engine.requests}) == 2


async def test_a_message_can_be_continued(world: World):
    messages = [*user("Hi"), {"role": "assistant", "content": "Hel"}]
    await world.chat(messages=messages, continue_final_message=True)
    prompt = world.engine.tokenizer.decode(world.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|assistant|>Hel")
    assert world.engine.requests[0].continues_text


async def test_what_was_said_of_the_markers_does_not_open_reasoning(world: World):
    world.engine.script = say("reasoning.")
    asked = user("What does <think> do?")
    for begun, split in (("It opens", ("reasoning.", None)), ("<think>It opens", ("", "reasoning."))):
        messages = [*asked, {"role": "assistant", "content": [{"type": "text", "text": begun}]}]
        answer = (await world.chat(messages=messages, continue_final_message=True)).json()["choices"][0]["message"]
        assert (answer["content"], answer.get("reasoning")) == split


async def test_long_prompts_are_cut_on_request(world: World):
    whole = (await world.chat(return_token_ids=True)).json()["prompt_token_ids"]
    left = (await world.chat(return_token_ids=True, truncate_prompt_tokens=5)).json()["prompt_token_ids"]
    right = (await world.chat(return_token_ids=True, truncate_prompt_tokens=5, truncation_side="right")).json()[
        "prompt_token_ids"
    ]
    assert (left, right) == (whole[-5:], whole[:5])
    long = await world.chat(messages=user("x" * 1000), truncate_prompt_tokens=-1, max_tokens=1)
    assert long.json()["usage"]["prompt_tokens"] == world.engine.max_model_len - 1


async def test_schemas_may_be_as_deep_as_they_are_long(world: World):
    """Compiled on a thread with a usual stack, any of these would end the server."""
    nodes = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2500)}
    schema = {"$defs": {**nodes, "d2500": {"type": "integer"}}, "$ref": "#/$defs/d0", "type": "array"}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert (await world.chat(response_format=wanted)).status_code == 200
    assert (await world.complete(response_format=wanted)).status_code == 200
    tool = {"type": "function", "function": {"name": "f", "parameters": {**schema, "type": "object"}}}
    world.engine.max_model_len = 1_000_000  # the model is shown the tool
    assert (await world.chat(tools=[tool], tool_choice="required")).status_code == 200


@pytest.mark.parametrize(
    "content", ["def f():\n", [{"type": "text", "text": "def f"}, {"type": "text", "text": "():\n"}]]
)
async def test_a_prediction_s_tokens_are_drafted_for_each_answer(world: World, content: Any):
    answer = await world.chat(prediction={"type": "content", "content": content}, n=2)
    assert answer.status_code == 200
    predicted = {request.prediction_token_ids for request in world.engine.requests}
    assert predicted == {tuple(world.engine.tokenizer.encode("def f():\n", add_special_tokens=False))}
    assert (await world.chat()).status_code == 200
    assert world.engine.requests[-1].prediction_token_ids == ()


async def test_a_prediction_is_cut_to_the_context(world: World):
    most = world.engine.max_model_len
    answer = await world.chat(prediction={"type": "content", "content": "x " * 4 * most})
    assert answer.status_code == 200
    assert len(world.engine.requests[0].prediction_token_ids) <= most


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"type": "content"},
        {"type": "other", "content": "x"},
        {"type": "content", "content": [{"type": "text"}]},
    ],
)
async def test_a_prediction_of_another_form_is_refused(world: World, prediction: Any):
    answer = await world.chat(prediction=prediction)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prediction")
