"""Tools that must be called, in the formats of different families of models."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from mlx_server.api.answers import chat_plan
from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.engine.tools.grammar import force_tool_calls
from tests.api.fakes import say
from tests.api.sse import bodies
from tests.api.worlds import World, user
from tests.constraint_worlds import RandomModel
from tests.text_worlds import CHAT_TEMPLATE, make_tokenizer
from tests.tool_worlds import LLAMA_TEMPLATE

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FAMILIES: dict[str, tuple[str, ...]] = {
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "llama3_json": (),
    "harmony": ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|start|>"),
}


def become(world: World, family: str) -> None:
    """Gives the engine the vocabulary of a family, and a model that writes anything that its grammar allows."""
    hint = f"{{# {LLAMA_TEMPLATE} #}}" if family == "llama3_json" else ""
    tokenizer = make_tokenizer(special=FAMILIES.get(family, ()), chat_template=CHAT_TEMPLATE + hint)
    if family == "harmony":  # the usual end stands in the middle of its answers
        tokenizer.eos_token_ids = frozenset([tokenizer.added_tokens["<|call|>"]])
    elif family != "llama3_json":
        tokenizer.hf.init_kwargs["tool_parser_type"] = family
    world.engine.tokenizer = tokenizer
    world.engine.chat = ChatFormatter(tokenizer)
    world.engine.grammars = GrammarCompiler(tokenizer)
    world.engine.max_model_len = 4000
    world.engine.script = writer(world, 0)


async def test_an_id_that_a_model_repeats_in_a_later_turn_is_replaced(world: World):
    """Kimi counts its calls anew in each turn, and clients tell results apart by ids alone."""
    become(world, "kimi_k2")
    written = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    world.engine.script = say(f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>")
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages: list[Any] = user("Hi")
    ids = []
    for _ in range(3):
        message = (await world.chat(messages=messages, tools=tools)).json()["choices"][0]["message"]
        ids.append(message["tool_calls"][0]["id"])
        messages += [message, {"role": "tool", "tool_call_id": ids[-1], "content": "Done."}]
    assert ids[0] == "functions.f:0"
    assert len({*ids}) == 3


def writer(world: World, seed: int) -> Any:
    tokenizer = world.engine.tokenizer
    model = RandomModel(tokenizer, ("</arg_value>\n", '<|"|>', "<escape>", "<|close|>argument<|sep|>"))

    def write(request: GenerationRequest) -> str:
        assert request.constraint is not None
        ids = model.write(request.constraint, seed, max_tokens=2000)
        assert ids is not None
        return tokenizer.decode([*ids, min(tokenizer.eos_token_ids)], skip_special_tokens=False)

    return write


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_call_is_forced_in_the_family_s_format(world: World, family: str, choice: Any):
    become(world, family)
    answer = (
        await world.chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, thinking_token_budget=0)
    ).json()
    (given,) = answer["choices"]
    (call,) = given["message"]["tool_calls"]
    assert (given["finish_reason"], given["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


@pytest.mark.parametrize("family", ["json_tools", *FAMILIES])
async def test_what_is_cut_off_of_forced_calls_is_no_content(world: World, family: str):
    become(world, family)
    write, texts = writer(world, 3), list[str]()

    def once(request: GenerationRequest) -> str:
        texts.extend([] if texts else [write(request)])
        return texts[0]

    world.engine.script = once
    asked = {"tools": [TOOL, OTHER], "tool_choice": "required", "thinking_token_budget": 0}
    for num_tokens in (*range(1, 20), *range(20, 150, 3)):
        (choice,) = (await world.chat(**asked, max_tokens=num_tokens)).json()["choices"]
        assert not choice["message"]["content"], (num_tokens, texts)
        if choice["finish_reason"] != "length":
            break
    assert num_tokens > 5
    text = (await world.chat(**asked, max_tokens=4, stream=True)).text
    assert not any(body["choices"][0]["delta"].get("content") for body in bodies(text))


@pytest.mark.parametrize("family", ["default", "harmony"])
async def test_what_is_cut_off_of_forced_calls_is_no_content_after_reasoning_that_is(world: World, family: str):
    thought, end = "<think>Hm < 2", "</think>"
    call = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    if family == "harmony":
        become(world, "harmony")
        thought, end = "<|channel|>analysis<|message|>Hm < 2", "<|end|><|start|>assistant"
        call = "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}<|call|>"
    world.engine.script = say(thought + end + call)
    asked = {"tools": [OTHER], "tool_choice": "required", "separate_reasoning": False}
    seen = set()
    for num_tokens in range(1, 400):
        (choice,) = (await world.chat(**asked, max_tokens=num_tokens)).json()["choices"]
        content = choice["message"]["content"] or ""
        assert (thought + end).startswith(content), num_tokens
        seen.add(content)
        if choice["finish_reason"] != "length":
            break
    assert choice["finish_reason"] == "tool_calls"
    assert {thought[:-1], thought, thought + end} <= seen


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (
            "<|open|>think<|sep|>Hm<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>",
            "Hm",
            "Yes.",
        ),
        ("<|open|>response<|sep|>Yes < no.<|close|>response<|sep|>", "", "Yes < no."),
        ("Yes < no.<|close|>response<|sep|>", "", "Yes < no."),
    ],
)
@pytest.mark.parametrize("tools", [None, [TOOL]])
async def test_markers_of_several_tokens_that_are_cut_off_are_not_shown(
    world: World, text: str, reasoning: str, content: str, tools: Any
):
    become(world, "kimi_k3")
    world.engine.script = say(text)
    for num_tokens in range(1, 100):
        (choice,) = (await world.chat(max_tokens=num_tokens, tools=tools)).json()["choices"]
        assert content.startswith(choice["message"]["content"] or ""), num_tokens
        assert reasoning.startswith(choice["message"].get("reasoning") or ""), num_tokens
        if choice["finish_reason"] != "length":
            break
    assert choice["message"]["content"] == content


async def test_a_forced_call_streams(world: World):
    become(world, "gemma4")
    text = (await world.chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True)).text
    deltas = [body["choices"][0]["delta"] for body in bodies(text)]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert (pieces[0]["function"]["name"], pieces[0]["index"]) == ("weather", 0)
    jsonschema.validate(json.loads("".join(piece["function"]["arguments"] for piece in pieces)), SCHEMA)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_long_text_between_tags_is_streamed_while_it_is_written(world: World, path: str):
    become(world, "glm47")
    words = "to be or not to be " * 20
    call = f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{words}</arg_value>\n</tool_call>"
    world.engine.script = say(call)
    tools = {
        "/v1/chat/completions": {"messages": user("Hi"), "tools": [TOOL]},
        "/v1/messages": {
            "messages": user("Hi"),
            "max_tokens": 2000,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
        },
        "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **TOOL["function"]}]},
    }
    text = (await world.http.post(path, json={**tools[path], "stream": True})).text
    pieces = re.findall(r'"(?:arguments|partial_json|delta)":"((?:[^"\\]|\\.)*)"', text)
    written = "".join(json.loads(f'"{piece}"') for piece in pieces)
    assert json.dumps({"city": words}) in written
    assert len(pieces) > 200


async def test_calls_without_markers_are_found_and_other_json_is_content(world: World):
    become(world, "llama3_json")
    world.engine.script = say('{"name": "weather", "parameters": {"city": "Rome", "days": 2}}')
    text = (await world.chat(tools=[TOOL], stream=True)).text
    deltas = [body["choices"][0]["delta"] for body in bodies(text)]
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert pieces[0]["name"] == "weather"
    assert len(pieces) > 5
    assert json.loads("".join(piece["arguments"] for piece in pieces)) == {"city": "Rome", "days": 2}
    assert not any(delta.get("content") for delta in deltas)
    world.engine.script = say('{"name": "Rome", "country": "Italy"}')
    (choice,) = (await world.chat(tools=[TOOL])).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"name": "Rome", "country": "Italy"}', "stop")


async def test_with_channels_an_answer_in_json_has_its_own(world: World):
    """Either the final channel with JSON, or a call in the channel of calls; never something else."""
    become(world, "harmony")
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    seen = set()
    for index in range(12):
        world.engine.script = writer(world, index)
        answer = (await world.chat(tools=[TOOL], response_format=wanted, thinking_token_budget=0)).json()
        message = answer["choices"][0]["message"]
        if message.get("tool_calls"):
            seen.add("call")
        else:
            assert isinstance(json.loads(message["content"]), int)
            seen.add("answer")
    assert seen == {"call", "answer"}


@pytest.mark.parametrize("separates", [True, False])
async def test_with_channels_a_call_is_read_in_any_of_them(world: World, separates: bool):
    """Markers stay only in reasoning that stays in the content."""
    become(world, "harmony")
    thought, arguments = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", '{"a": 1}<|call|>'
    ideal = f"{thought}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{arguments}"
    world.engine.script = say(ideal)
    choice = (await world.chat(tools=[TOOL], separate_reasoning=separates)).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"a": 1}'}
    assert choice["message"]["content"] == (None if separates else thought)
    world.engine.script = say(f"{thought} to=weather<|channel|>analysis code<|message|>{arguments}")
    choice = (await world.chat(tools=[TOOL])).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"a": 1}'}
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", None)


async def test_what_cannot_be_forced_is_refused_and_what_need_not_be_is_not(world: World):
    become(world, "muse_spark")
    refused = await world.chat(tools=[TOOL], tool_choice="required")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert "muse_spark" in refused.json()["error"]["message"]
    world.engine.script = say("Hello")
    assert (await world.chat(tools=[TOOL])).status_code == 200

    become(world, "pythonic")
    odd = {"type": "function", "function": {"name": "get-weather"}}
    refused = await world.chat(tools=[odd], tool_choice="required")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].function.name")


UNFIT = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]}


async def test_a_schema_that_no_call_can_fit_is_named_without_the_grammar(world: World):
    unfit = {"type": "function", "function": {"name": "unfit", "parameters": UNFIT}}
    for family in ("pythonic", "glm47", "llama3_json"):
        become(world, family)
        choice = allowing("required", "weather", "unfit")
        refused = (await world.chat(tools=[OTHER, TOOL, unfit, THIRD], tool_choice=choice)).json()["error"]
        assert refused["param"] == "tools[2].function.parameters", family
        assert re.fullmatch(
            r"tools\[2\].function.parameters cannot be compiled: Unsatisfiable schema: [^\n]*", refused["message"]
        ), family
    flat = [{"type": "function", **tool["function"]} for tool in (TOOL, unfit)]
    for tools, param in (
        (flat, "tools[1].parameters"),
        ([{"type": "namespace", "name": "n", "tools": flat}], "tools[0].tools[1].parameters"),
    ):
        answer = await world.http.post("/v1/responses", json={"input": "Hi", "tools": tools, "tool_choice": "required"})
        assert answer.json()["error"]["param"] == param
    answered = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    answer = await world.chat(tools=[TOOL, unfit], response_format=answered)
    assert answer.json()["error"]["param"] == "tools[1].function.parameters"


async def test_keywords_of_arguments_that_are_not_enforced_are_named(world: World):
    text: dict[str, Any] = {"anyOf": [{"type": "string", "pattern": "^(?!b)"}, {"$ref": "#/$defs/t"}]}
    schema = {"type": "object", "properties": {"a": text}, "$defs": {"t": {"type": "string", "maxLength": 3}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for family, named in (("glm47", "pattern, maxLength"), ("gemma4", "pattern, maxLength"), ("harmony", None)):
        if family == "harmony":
            text["anyOf"][0]["pattern"] = "^a"
        become(world, family)
        world.engine.script = writer(world, 1)
        answer = await world.chat(tools=[tool], tool_choice="required", thinking_token_budget=0)
        assert answer.headers.get("x-schema-not-enforced") == named, family


async def test_keywords_that_no_grammar_has_are_named_one_by_one(world: World):
    listed = {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": listed}, "propertyNames": {"pattern": "^a"}, "if": {}, "then": {}}
    become(world, "llama3_json")
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = await world.chat(tools=[tool], tool_choice="required")
    named = answer.headers["x-schema-not-enforced"].split(", ")
    assert sorted(named) == ["contains", "if", "propertyNames", "then", "uniqueItems"]


MARKED = "a[ARGS]<|im_start|>b"


@pytest.mark.parametrize(
    "asked",
    [
        {"choice": [MARKED]},
        {"choice": [MARKED, MARKED]},
        {"regex": re.escape(MARKED)},
        {"json": {"const": MARKED}},
        {"grammar": f'root ::= "{MARKED}"'},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": MARKED}}},
    ],
)
@pytest.mark.parametrize("skips", [True, False])
async def test_special_tokens_in_the_text_of_a_constraint_arrive(world: World, asked: dict[str, Any], skips: bool):
    world.engine.tokenizer = make_tokenizer(special=("[ARGS]", "<|im_start|>"))
    world.engine.chat = ChatFormatter(world.engine.tokenizer)
    world.engine.grammars = GrammarCompiler(world.engine.tokenizer)
    world.engine.script = writer(world, 0)
    body = {"structured_outputs": asked, "skip_special_tokens": skips}
    (choice,) = (await world.chat(**body)).json()["choices"]
    assert choice["message"]["content"].strip('"') == MARKED
    (choice,) = (await world.http.post("/v1/completions", json={"prompt": "Hi", **body})).json()["choices"]
    assert choice["text"].strip('"') == MARKED


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


OTHER = {"type": "function", "function": {"name": "other"}}
THIRD = {"type": "function", "function": {"name": "third"}}


WRITES_CALLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|end|>{% endfor %}"
)


async def test_a_model_that_is_asked_for_one_call_is_forced_to_one_unless_the_client_wants_more(world: World):
    async def most(path: str = "/v1/chat/completions", **body: Any) -> int:
        nums = []
        for seed in range(8):
            world.engine.script = writer(world, seed)
            answer = (await world.http.post(path, json={"messages": user("Hi"), **body})).json()
            choice = answer["choices"][0]["message"]["tool_calls"] if "choices" in answer else answer["content"]
            nums.append(len(choice))
        return max(nums)

    forced = {"tools": [OTHER], "tool_choice": "required"}
    tool = {"tools": [{"name": "other"}], "max_tokens": 300}
    become(world, "gemma4")  # its template here does not know tools, so that the prompt describes them in words
    assert await most(**forced) == 1
    assert await most(**forced, parallel_tool_calls=True) > 1
    assert await most("/v1/messages", **tool, tool_choice={"type": "any"}) == 1
    assert await most("/v1/messages", **tool, tool_choice={"type": "any", "disable_parallel_tool_use": False}) > 1
    tokenizer = make_tokenizer(chat_template=WRITES_CALLS)
    world.engine.tokenizer, world.engine.chat = tokenizer, ChatFormatter(tokenizer)
    world.engine.grammars = GrammarCompiler(tokenizer)
    assert await most(**forced) > 1
    assert await most(**forced, parallel_tool_calls=False) == 1


async def test_only_the_allowed_tools_are_called_and_the_prompt_stays_the_same(world: World):
    become(world, "pythonic")
    called = set()
    for seed in range(12):
        world.engine.script = writer(world, seed)
        choice = allowing("required", "other", "third")
        answer = (await world.chat(tools=[TOOL, OTHER, THIRD], tool_choice=choice)).json()
        called |= {call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]}
    assert called == {"other", "third"}
    world.engine.script = say("Hello")
    await world.chat(tools=[TOOL, OTHER, THIRD])
    assert len({request.prompt_token_ids for request in world.engine.requests}) == 1


async def test_a_grammar_is_written_once_for_the_same_tools(world: World, monkeypatch: pytest.MonkeyPatch):
    written = []
    monkeypatch.setattr(
        chat_plan, "force_tool_calls", lambda *given, **more: written.append(more) or force_tool_calls(*given, **more)
    )
    become(world, "glm47")
    for choice in (allowing("required", "other"), "required", "required", allowing("required", "other")):
        answer = (await world.chat(tools=[TOOL, OTHER], tool_choice=choice)).json()
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert [more["allowed"] for more in written] == [["other"], None]


async def test_tools_that_may_be_called_are_all_that_the_model_sees(world: World):
    await world.chat(tools=[TOOL, OTHER], tool_choice=allowing("auto", "other"))
    await world.chat(tools=[OTHER])
    restricted, alone = world.engine.requests
    assert restricted.prompt_token_ids == alone.prompt_token_ids
    assert restricted.constraint is None


async def test_allowed_tools_of_a_response(world: World):
    become(world, "pythonic")
    tools = [{"type": "function", **tool["function"]} for tool in (TOOL, OTHER)]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    body = (await world.http.post("/v1/responses", json={"input": "Hi", "tools": tools, "tool_choice": choice})).json()
    assert {item["name"] for item in body["output"]} == {"other"}
    assert body["tool_choice"] == choice


@pytest.mark.parametrize(
    "choice",
    [
        allowing("sometimes", "other"),
        allowing("auto"),
        allowing("auto", "nobody"),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"tools": ["other"]}},
    ],
)
async def test_odd_lists_of_allowed_tools_are_refused(world: World, choice: dict[str, Any]):
    refused = await world.chat(tools=[OTHER], tool_choice=choice)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
