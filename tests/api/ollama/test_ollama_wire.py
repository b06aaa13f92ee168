"""Ollama's routes by plain HTTP: lines, their fields, options, names and errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mlx_server.api.ollama.request import NOT_ENFORCED_HEADER
from mlx_server.config import Config, ServerConfig
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.errors import EngineDeadError
from mlx_server.sampling_params import SamplingParams
from tests.api.fakes import say
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")
CALL = '<tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def lines(world: World, path: str, **body: Any) -> list[dict[str, Any]]:
    """What a streamed answer says, one object a line."""
    response = await world.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.removesuffix("\n").split("\n")]


async def ask(world: World, path: str, **body: Any) -> dict[str, Any]:
    response = await world.http.post(path, json={"stream": False, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()  # type: ignore[no-any-return]


async def refusal(world: World, path: str, status: int, **body: Any) -> str:
    response = await world.http.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    return response.json()["error"]  # type: ignore[no-any-return]


# --- answers ----------------------------------------------------------------------------------------------


async def test_a_chat_is_streamed_by_line_unless_told_otherwise(world: World):
    *parts, last = await lines(world, "/api/chat", model="fake:latest", messages=user("Hi"))
    assert [part.keys() for part in parts] == [{"model", "created_at", "message", "done"}] * len(parts)
    assert len(parts) > 1
    assert "".join(part["message"]["content"] for part in parts) == "Hello world"
    assert all(part["model"] == "fake:latest" and part["created_at"].endswith("Z") for part in parts)
    assert not any(part["done"] for part in parts)
    assert last.keys() == {"model", "created_at", "message", "done", "done_reason", *COUNTS}
    assert (last["done"], last["done_reason"], last["message"]) == (True, "stop", {"role": "assistant", "content": ""})
    (request,) = world.engine.requests
    assert last["prompt_eval_count"] == len(request.prompt_token_ids)
    assert last["eval_count"] > 1
    assert all(isinstance(last[name], int) for name in COUNTS)
    assert last["total_duration"] >= last["load_duration"]


async def test_a_whole_chat_has_the_same_fields(world: World):
    world.engine.script = say("<think>Hm.</think>Hello")
    answer = await ask(world, "/api/chat", messages=user("Hi"))
    assert answer.keys() == {"model", "created_at", "message", "done", "done_reason", *COUNTS}
    assert answer["message"] == {"role": "assistant", "content": "Hello", "thinking": "Hm."}


async def test_thoughts_come_on_lines_of_their_own(world: World):
    world.engine.script = say("<think>Hm, well.</think>Hello")
    parts = await lines(world, "/api/chat", messages=user("Hi"), think=True)
    assert "".join(part["message"].get("thinking", "") for part in parts) == "Hm, well."
    assert "".join(part["message"]["content"] for part in parts) == "Hello"
    parts = await lines(world, "/api/generate", prompt="Hi", think=True)
    assert "".join(part.get("thinking", "") for part in parts) == "Hm, well."
    assert "".join(part["response"] for part in parts) == "Hello"


async def test_calls_are_whole_and_have_objects_for_arguments(world: World):
    world.engine.script = say(f"Well.{CALL}{CALL}")
    parts = await lines(world, "/api/chat", messages=user("Hi"), tools=[TOOL])
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    functions = [call["function"] for call in calls]
    assert functions == [{"index": n, "name": "f", "arguments": {"city": "Rome"}} for n in range(2)]
    assert len({call["id"] for call in calls}) == 2
    assert "".join(part["message"]["content"] for part in parts) == "Well."
    assert parts[-1]["done_reason"] == "stop"
    assert "tool_calls" not in parts[-1]["message"]
    whole = await ask(world, "/api/chat", messages=user("Hi"), tools=[TOOL])
    assert [call["function"] for call in whole["message"]["tool_calls"]] == functions


async def test_a_call_that_is_cut_off_is_not_shown(world: World):
    world.engine.script = say(CALL + CALL)
    parts = await lines(world, "/api/chat", messages=user("Hi"), tools=[TOOL], options={"num_predict": 80})
    (call,) = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert call["function"]["arguments"] == {"city": "Rome"}
    assert parts[-1]["done_reason"] == "length"
    whole = await ask(world, "/api/chat", messages=user("Hi"), tools=[TOOL], options={"num_predict": 42})
    assert (whole["message"], whole["done_reason"]) == ({"role": "assistant", "content": ""}, "length")


async def test_a_completion_gives_a_context_that_goes_on(world: World):
    *parts, last = await lines(world, "/api/generate", prompt="Hi", system="Be brief.")
    assert "".join(part["response"] for part in parts) == "Hello world"
    (first,) = world.engine.requests
    assert last.keys() == {"model", "created_at", "response", "done", "done_reason", "context", *COUNTS}
    assert last["context"][: len(first.prompt_token_ids)] == list(first.prompt_token_ids)
    assert len(last["context"]) == last["prompt_eval_count"] + last["eval_count"]
    whole = await ask(world, "/api/generate", prompt="More", context=last["context"])
    second = world.engine.requests[-1]
    assert list(second.prompt_token_ids[: len(last["context"])]) == last["context"]
    assert whole["context"][: len(second.prompt_token_ids)] == list(second.prompt_token_ids)
    shown = world.engine.tokenizer.decode(second.prompt_token_ids, skip_special_tokens=False)
    assert "Be brief." in shown
    assert "More" in shown


async def test_a_raw_prompt_is_sent_as_it_is(world: World):
    answer = await ask(world, "/api/generate", prompt="Hi <think>", raw=True)
    (request,) = world.engine.requests
    assert world.engine.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) == "Hi <think>"
    assert "context" not in answer
    assert answer["response"] == "Hello world"


async def test_log_probabilities(world: World):
    parts = await lines(world, "/api/chat", messages=user("Hi"), logprobs=True, top_logprobs=2)
    tokens = [token for part in parts for token in part.get("logprobs", ())]
    assert len(tokens) == parts[-1]["eval_count"]
    assert all(token.keys() == {"token", "logprob", "bytes", "top_logprobs"} for token in tokens)
    whole = await ask(world, "/api/generate", prompt="Hi", logprobs=True)
    assert [token["token"] for token in whole["logprobs"]] == [token["token"] for token in tokens]
    assert "top_logprobs" not in whole["logprobs"][0]


async def test_a_silent_stream_gets_lines_without_news(world: World):
    world.configure(Config(server=ServerConfig(sse_keep_alive_s=0.05)))
    world.engine.gate.clear()
    async with world.http.stream("POST", "/api/chat", json={"messages": user("Hi")}) as response:
        read = response.aiter_lines()
        first = json.loads(await anext(read))
        assert (first["message"]["content"], first["done"]) == ("", False)
        world.engine.gate.set()
        rest = [json.loads(line) async for line in read]
    assert "".join(part["message"]["content"] for part in rest) == "Hello world"


async def test_an_error_on_the_way_is_a_line(world: World):
    world.engine.fail_with = EngineDeadError("The engine has died.")
    *parts, last = await lines(world, "/api/generate", prompt="Hi")
    assert parts
    assert last == {"error": "The engine has died."}


# --- what is asked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"num_predict": 5}, {"max_tokens": 5}),
        ({"num_predict": -1}, {}),
        ({"num_predict": -2}, {}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_k": 40.0}, {"top_k": 40}),
        ({"top_k": -3}, {"top_k": 0}),
        ({"top_p": 1.5}, {"top_p": 1.0}),
        ({"min_p": 0.05}, {"min_p": 0.05}),
        ({"seed": 42}, {"seed": 42}),
        ({"seed": -1}, {}),
        ({"stop": ["\n"]}, {"stop": ("\n",)}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, {}),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, {"presence_penalty": 0.5, "frequency_penalty": 0.25}),
        ({"num_gpu": 1, "num_thread": 8, "use_mmap": True, "num_keep": 4, "num_batch": 512, "unheard_of": 1}, {}),
        ({"num_ctx": 8192}, {}),
        ({"typical_p": 1.0, "mirostat": 0, "temperature": None}, {}),
    ],
    ids=str,
)
async def test_options_become_parameters(world: World, options: dict[str, Any], changed: dict[str, Any]):
    await ask(world, "/api/chat", messages=user("Hi"), options=options)
    await ask(world, "/api/generate", prompt="Hi", options=options)
    for request in world.engine.requests:
        assert request.sampling == SamplingParams(**changed)


async def test_the_best_token_alone_is_a_top_p_of_nothing(world: World):
    await ask(world, "/api/chat", messages=user("Hi"), options={"top_p": 0})
    await ask(world, "/v1/chat/completions", messages=user("Hi"), top_p=0)
    assert [request.sampling.is_greedy for request in world.engine.requests] == [True, True]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"typical_p": 0.5}, "typical_p"),
        ({"mirostat": 2}, "mirostat"),
        ({"temperature": "hot"}, "options.temperature"),
        ({"top_k": "40"}, "options.top_k"),
        ({"num_predict": True}, "options.num_predict"),
        ({"min_p": 2}, "options.min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repeat_penalty": -1}, "options.repeat_penalty"),
        ({"repeat_last_n": -2}, "options.repeat_last_n"),
        ({"seed": 1e300}, "options.seed"),
    ],
    ids=str,
)
async def test_options_that_are_wrong_are_named(world: World, options: dict[str, Any], what: str):
    assert what in await refusal(world, "/api/chat", 400, messages=user("Hi"), options=options)


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"num_ctx": 512}, None),
        ({"num_ctx": 513}, "num_ctx"),
        ({"repeat_last_n": 64}, None),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1, "num_ctx": 99999}, "num_ctx, repeat_last_n"),
    ],
    ids=str,
)
async def test_what_is_not_kept_to_is_reported(world: World, options: dict[str, Any], noted: str | None):
    for stream in (False, True):
        body = {"messages": user("Hi"), "options": options, "stream": stream}
        response = await world.http.post("/api/chat", json=body)
        assert response.status_code == 200
        assert response.headers.get(NOT_ENFORCED_HEADER) == noted


@pytest.mark.parametrize("format_", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}], ids=str)
async def test_a_format_is_a_grammar(world: World, format_: Any):
    for path, body in (("/api/chat", {"messages": user("Hi")}), ("/api/generate", {"prompt": "Hi"})):
        await ask(world, path, **body, format=format_)
        assert world.engine.requests[-1].constraint is not None
        await ask(world, path, **body, format="")
        assert world.engine.requests[-1].constraint is None
    await ask(world, "/api/generate", prompt="Hi", raw=True, format=format_)
    assert world.engine.requests[-1].constraint is not None


async def test_think_reaches_the_template(rich_world: World):
    shown = {}
    for think in (None, True, False, "low", "max"):
        await ask(rich_world, "/api/chat", messages=user("Hi"), think=think)
        ids = rich_world.engine.requests[-1].prompt_token_ids
        shown[think] = rich_world.engine.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown[True].startswith("True")
    assert shown[False].startswith("False")
    assert shown["low"].startswith("lowTrue")
    assert shown["max"].startswith("maxTrue")
    assert len(set(shown.values())) == 5


async def test_messages_are_read_in_ollamas_forms(world: World):
    call = {"function": {"name": "f", "arguments": {"city": "Rome"}}}
    other = {"function": {"name": "g", "arguments": {}}}
    chat = [
        {"role": "System", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, other]},
        {"role": "tool", "tool_name": "g", "content": "second"},
        {"role": "tool", "content": "first"},
        {"role": "user", "content": "And?", "images": []},
    ]
    world.engine.max_model_len = 2000
    answer = await ask(world, "/api/chat", messages=chat, tools=[TOOL])
    shown = world.engine.tokenizer.decode(world.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert answer["message"]["content"] == "Hello world"
    assert shown.index("first") < shown.index("second") < shown.index("And?")  # the order of the calls


async def test_an_answer_that_is_the_last_message_is_gone_on_with(world: World):
    await ask(world, "/api/chat", messages=[*user("Hi"), {"role": "assistant", "content": "Well,"}])
    (request,) = world.engine.requests
    assert request.continues_text
    assert world.engine.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False).endswith("Well,")


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}, "messages[0].images[0] "),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi", "images": 5}]}, "messages[0].images must be"),
        ("/api/chat", {"messages": user([{"type": "image_url", "image_url": "x"}])}, "messages[0].content[0] is"),
        ("/api/chat", {"messages": user([{"type": "messages[9].content[9]"}])}, "messages[0].content[0] is of type"),
        ("/api/generate", {"prompt": "Hi", "images": ["aGk="], "system": "x"}, "images[0] is"),
        ("/api/generate", {"prompt": "Hi", "context": [-1]}, "context has the token id -1"),
        ("/api/generate", {"prompt": "Hi", "context": [10**6]}, "context has the token id 1000000"),
        ("/api/generate", {"prompt": "Hi", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "Hi", "raw": True, "system": "x"}, "raw"),
        ("/api/generate", {"prompt": "Hi", "raw": True, "think": True}, "think"),
        ("/api/chat", {"messages": user("Hi"), "think": "deeply"}, "think"),
        ("/api/chat", {"messages": user("Hi"), "keep_alive": "soon"}, "keep_alive"),
        ("/api/chat", {"messages": user("Hi"), "keep_alive": "5 m"}, "keep_alive"),
        ("/api/chat", {"messages": user("Hi"), "format": "xml"}, "format is 'xml'; send `json` or a JSON schema."),
        ("/api/chat", {"messages": user("Hi"), "stream": "yes"}, "stream"),
        ("/api/chat", {"messages": [{"content": "Hi"}]}, "role"),
        ("/api/chat", {"messages": user("word " * 600)}, "too long"),
        ("/api/show", {}, "model: Field required"),
    ],
    ids=str,
)
async def test_wrong_requests_are_refused_in_ollamas_shape(world: World, path: str, body: dict[str, Any], what: str):
    message = await refusal(world, path, 400, **body)
    assert what in message
    assert path == "/api/chat" or "messages[" not in message


async def test_a_model_that_cannot_think_says_so(world: World):
    from tests.text_worlds import make_tokenizer

    world.engine.tokenizer = make_tokenizer(added=("<tool_call>", "</tool_call>"))
    world.engine.chat = ChatFormatter(world.engine.tokenizer)
    assert "does not support thinking" in await refusal(world, "/api/chat", 400, messages=user("Hi"), think=True)
    assert "does not support thinking" in await refusal(world, "/api/generate", 400, prompt="Hi", think="low")
    await ask(world, "/api/chat", messages=user("Hi"), think=False)


async def test_a_body_need_not_say_that_it_is_json(world: World):
    content = json.dumps({"messages": user("Hi"), "stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in (form, {}):
        request = world.http.build_request("POST", "/api/chat", content=content, headers=headers)
        if not headers:
            request.headers.pop("content-type", None)
        assert (await world.http.send(request)).status_code == 200
    page = {**form, "origin": "http://localhost:3000"}
    refused = await world.http.post("/api/chat", content=content, headers=page)
    assert refused.status_code == 400
    assert "application/json" in refused.json()["error"]


# --- names, keys and errors -------------------------------------------------------------------------------


NAMES = ["fake", "fake:latest", "FAKE", "Fake:latest", "alias", "alias:latest", "ALIAS", "Alias:latest", "", None]


@pytest.mark.parametrize("name", NAMES)
async def test_names_find_the_model(world: World, name: str | None):
    answer = await ask(world, "/api/chat", model=name, messages=user("Hi"))
    assert answer["model"] == (name or "fake")


async def test_an_unknown_model_is_a_404(world: World):
    for path, body in (
        ("/api/chat", {"messages": user("Hi")}),
        ("/api/generate", {"prompt": "Hi"}),
        ("/api/show", {}),
        ("/api/chat", {}),
        ("/api/chat", {"keep_alive": 0}),
    ):
        assert "`nobody`" in await refusal(world, path, 404, model="nobody:latest", **body)
    assert "characters" in await refusal(world, "/api/chat", 400, model="x" * 2000, messages=user("Hi"))


async def test_unknown_routes_have_the_shape_too(world: World):
    assert "not served here" in await refusal(world, "/api/blobs", 404)
    wrong: httpx.Response = await world.http.get("/api/chat")
    assert (wrong.status_code, wrong.json().keys()) == (405, {"error"})


async def test_keys_are_asked_for_as_everywhere(world: World):
    world.configure_server(api_key="secret")
    assert "key" in await refusal(world, "/api/chat", 401, messages=user("Hi"))
    for path in ("/api/tags", "/api/ps", "/api/version"):
        assert (await world.http.get(path)).status_code == 401
    headers = {"authorization": "Bearer secret"}
    answer = await world.http.post("/api/chat", json={"messages": user("Hi")}, headers=headers)
    assert answer.status_code == 200
    for path in ("/api/pull", "/api/push"):  # admins only
        assert (await world.http.post(path, json={"model": "fake"}, headers=headers)).status_code == 403


async def test_quotas_and_floors_hold(world: World):
    from mlx_server.request import Priority
    from mlx_server.tiers import Tier

    world.configure_server(Tier(requests_per_minute=1, floors={"/api/chat": "low"}))
    await ask(world, "/api/chat", messages=user("Hi"))
    assert world.engine.requests[0].priority is Priority.LOW
    assert "1" in await refusal(world, "/api/generate", 429, prompt="Hi")


async def test_what_is_counted_goes_by_route(world: World):
    await ask(world, "/api/chat", messages=user("Hi"))
    metrics = (await world.http.get("/metrics")).text
    assert 'handler="/api/chat"' in metrics


async def test_a_model_that_does_not_embed_says_so(world: World):
    assert "embed" in await refusal(world, "/api/embed", 400, model="fake", input="Hi")
    assert "embed" in await refusal(world, "/api/embeddings", 400, model="fake", prompt="Hi")
