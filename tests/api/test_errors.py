"""Everything that can be refused, with its status, type and parameter."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from mlx_server import errors
from mlx_server.api.errors import validation_info
from mlx_server.api.http.request_bounds import MAX_BODY_BYTES
from tests.api.sse import bodies
from tests.api.worlds import ALL_ERRORS, World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(("error", "status", "kind", "param"), ALL_ERRORS, ids=lambda value: type(value).__name__)
async def test_an_error_has_its_status(world: World, error: errors.ServeError, status: int, kind: str, param: str):
    world.engine.refuse_with = error
    response = await world.chat()
    assert response.status_code == status
    assert response.json() == {"error": {"message": error.message, "type": kind, "param": param, "code": status}}
    needs_remedy = status == 503 and isinstance(error, errors.EngineDeadError | errors.DownloadError)
    is_retryable = status in (429, 503) and not needs_remedy
    assert response.headers.get("x-should-retry") == (None if is_retryable else "false")
    has_delay = isinstance(error, errors.OverloadedError)
    assert response.headers.get("retry-after") == ("4" if has_delay else "5" if needs_remedy else None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": user("Hi"), "temperature": "hot"}, "temperature"),
        ({"messages": user("Hi"), "max_tokens": "5"}, "max_tokens"),
        ({"messages": user("Hi"), "max_tokens": 1.5}, "max_tokens"),
        ({"messages": user("Hi"), "stream": "yes"}, "stream"),
        ({"messages": user("Hi"), "n": 0}, "n"),
        ({"messages": user("Hi"), "stop": [1]}, "stop[0]"),
        ({"messages": user("Hi"), "logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({}, "messages"),
        # Values that are of the right type, but wrong.
        ({"messages": user("Hi"), "max_tokens": 0}, "max_tokens"),
        ({"messages": user("Hi"), "max_completion_tokens": -2}, "max_completion_tokens"),
        ({"messages": user("Hi"), "temperature": -1}, "temperature"),
        ({"messages": user("Hi"), "top_p": -0.1}, "top_p"),
        ({"messages": user("Hi"), "top_k": -2}, "top_k"),
        ({"messages": user("Hi"), "top_k": 2**70}, "top_k"),
        ({"messages": user("Hi"), "min_p": 2}, "min_p"),
        ({"messages": user("Hi"), "repetition_penalty": 0}, "repetition_penalty"),
        ({"messages": user("Hi"), "presence_penalty": 3}, "presence_penalty"),
        ({"messages": user("Hi"), "frequency_penalty": -3}, "frequency_penalty"),
        ({"messages": user("Hi"), "logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"messages": user("Hi"), "logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"messages": user("Hi"), "allowed_token_ids": []}, "allowed_token_ids"),
        ({"messages": user("Hi"), "seed": 2**63}, "seed"),
        ({"messages": user("Hi"), "stop": ""}, "stop[0]"),
        ({"messages": user("Hi"), "stop": [f"{i}" for i in range(65)]}, "stop"),
        ({"messages": user("Hi"), "stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"messages": user("Hi"), "logit_bias": {str(i): 1 for i in range(16_385)}}, "logit_bias"),
        ({"messages": user("Hi"), "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"messages": user("Hi"), "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": user("Hi"), "top_logprobs": 2}, "top_logprobs"),
        ({"messages": user("Hi"), "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"messages": user("Hi"), "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"messages": user("Hi"), "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": user("Hi"), "cache_salt": ""}, "cache_salt"),
        ({"messages": user("Hi"), "cache_salt": "a/b"}, "cache_salt"),
        ({"messages": user("Hi"), "cache_salt": "a" * 129}, "cache_salt"),
        ({"messages": user("Hi"), "request_id": "a\r\nb"}, "request_id"),
        ({"messages": user("Hi"), "tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"messages": user("Hi"), "tools": [{"type": "function"}]}, "tools[0]"),
        ({"messages": user("Hi"), "tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"messages": user("Hi"), "tool_choice": "auto"}, "tool_choice"),
        ({"messages": user("Hi"), "tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        (
            {
                "messages": user("Hi"),
                "tool_choice": {"type": "function", "function": {"name": "g"}},
                "tools": [TOOL],
            },
            "tool_choice",
        ),
        (
            {"messages": user("Hi"), "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"messages": user("Hi"), "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": [*user("Hi"), {"role": "function", "content": "x"}]}, "messages[1].role"),
        ({"messages": user("Hi"), "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": user("Hi"), "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"messages": user("Hi"), "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"messages": user("Hi"), "regex": "a", "tools": [TOOL]}, "regex"),
        ({"messages": user("x" * 600)}, "input_tokens"),
    ],
)
async def test_a_wrong_chat_names_its_parameter(world: World, body: dict[str, Any], param: str):
    response = await world.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)
    assert error["message"]
    assert world.engine.requests == []


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/chat/completions", {"messages": user("Hi"), "max_completion_tokens": 4}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
    ],
)
async def test_too_many_tokens_at_least_are_refused_in_words_that_fit_each_protocol(
    world: World, path: str, limit: dict[str, Any]
):
    message = (await world.http.post(path, json={**limit, "min_tokens": 5})).json()["error"]["message"]
    assert message == "min_tokens must be at most 4, the most output tokens, got 5."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], "a", 5]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "Hi", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "Hi", "logprobs": 21}, "logprobs"),
        ({"prompt": "Hi", "best_of": 3}, "best_of"),
        ({"prompt": "Hi", "suffix": "x"}, "suffix"),
        ({"prompt": ["Hi"] * 9, "n": 128}, "prompt"),
    ],
)
async def test_a_wrong_completion_names_its_parameter(world: World, body: dict[str, Any], param: str):
    response = await world.http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert "Value error" not in response.json()["error"]["message"]


async def test_several_problems_are_reported_at_once(world: World):
    error = (await world.chat(temperature="hot", top_k="many")).json()["error"]
    assert "temperature: " in error["message"]
    assert "top_k: " in error["message"]
    assert error["param"] == "temperature"


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"messages": [', b"\xff\xfe", b"[" * 100_000],
)
async def test_a_body_that_is_no_json(world: World, content: bytes):
    headers = {"content-type": "application/json"}
    response = await world.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"


async def test_a_body_of_another_type(world: World):
    headers = {"content-type": "text/plain"}
    response = await world.http.post("/v1/chat/completions", content=b"Hi", headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "The body is empty; send a JSON object."), (b'"Hi"', "The body must be a JSON object.")],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_body_that_is_no_object_says_so(world: World, path: str, content: bytes, message: str):
    response = await world.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


async def test_what_should_be_an_object_is_called_so(world: World):
    response = await world.http.post("/v1/chat/completions", json={"messages": ["Hi"], "logit_bias": []})
    message = response.json()["error"]["message"]
    assert message == 'logit_bias: Input should be an object; messages[0]: Input should be an object, got "Hi"'


async def test_a_wrong_value_is_shown_unless_it_is_long(world: World):
    for value, shown in ((0, "than or equal to 1, got 0"), ("two", 'integer, got "two"'), ("x" * 100, "valid integer")):
        assert (await world.chat(n=value)).json()["error"]["message"].endswith(shown)


async def test_a_wrong_value_is_not_encoded_if_it_is_long():
    problem = {"type": "int_type", "loc": ("body", "n"), "msg": "Input should be a valid integer", "input": "x" * 2**20}
    tracemalloc.start()
    try:
        assert validation_info([problem]).message == "n: Input should be a valid integer"
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()


async def test_an_unknown_model(world: World):
    response = await world.chat(model="gpt-9")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert "`gpt-9` does not exist" in error["message"]


@pytest.mark.parametrize("model", [None, "", "fake", "alias"])
async def test_names_of_the_model_that_is_there(world: World, model: str | None):
    response = await world.chat(model=model)
    assert response.status_code == 200
    assert response.json()["model"] == "fake"


async def test_content_that_is_no_text(world: World):
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    response = await world.chat(messages=user(image))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[0]")
    assert "image_url" in error["message"]
    legacy = (await world.chat(functions=[{"name": "f"}])).json()["error"]
    assert (legacy["param"], legacy["message"].endswith("use tools.")) == ("functions", True)


async def test_a_body_beyond_the_limit_is_not_read(world: World):
    reader, writer = await world.connect()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    await writer.wait_closed()


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(world: World):
    async def endless() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    headers = {"content-type": "application/json"}
    response = await world.http.post("/v1/chat/completions", content=endless(), headers=headers)
    assert response.status_code == 413


async def test_unknown_paths_and_methods(world: World):
    missing = await world.http.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == 404
    wrong = await world.http.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == 405
    assert wrong.headers["allow"] == "POST"
    assert "/v1/chat/completions takes POST, not GET" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "remedy"),
    [
        ("/v1/v1/messages", "but /v1/messages is; remove /v1 from the base URL"),
        ("/chat/completions", "but /v1/chat/completions is; add /v1 to the base URL"),
        ("/v1/nothing", "see /docs"),
    ],
)
async def test_a_wrong_base_url_is_reported(world: World, sent: str, remedy: str):
    answer = await world.http.post(sent, json={})
    assert answer.status_code == 404
    assert remedy in answer.json()["error"]["message"]


async def test_what_the_model_does_not_do_is_not_to_be_tried_again(world: World):
    response = await world.http.post("/v1/embeddings", json={"input": "Hi", "model": "fake"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
    assert response.headers["x-should-retry"] == "false"


async def test_a_dead_engine(world: World):
    """The client's library does not repeat at once what may have been the reason."""
    world.engine.die(errors.EngineDeadError("out of luck"))
    response = await world.chat()
    assert response.status_code == 503
    assert (response.headers["x-should-retry"], response.headers["retry-after"]) == ("false", "5")
    assert "out of luck" in response.json()["error"]["message"]


async def test_a_full_queue_refuses_all_samples_or_none(world: World):
    world.engine.max_open = 2
    response = await world.chat(n=3)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "7"
    assert world.engine.open == {}
    assert len(world.engine.aborted) == 2


async def test_an_error_in_the_middle_of_a_stream(world: World):
    world.engine.fail_with = errors.EngineDeadError("The engine has died.")
    response = await world.chat(stream=True)
    assert response.status_code == 200
    *chunks, last = bodies(response.text)
    assert chunks[-1]["choices"][0]["delta"]["content"] == "H"
    assert last["error"] == {
        "message": "The engine has died.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    assert response.text.endswith("data: [DONE]\n\n")


async def test_an_error_before_the_end_of_a_whole_answer(world: World):
    world.engine.fail_with = errors.QueueTimeoutError("Waited too long.", 2.0)
    response = await world.chat(n=2)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert world.engine.open == {}
