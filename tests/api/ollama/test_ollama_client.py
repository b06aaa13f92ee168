"""The ollama client for Python, over the real engine and the bundled model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest
import pytest_asyncio
from pydantic import BaseModel

from tests.api.real_worlds import RealWorld

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

HELLO = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0, "num_predict": 24}


class City(BaseModel):
    name: str
    is_capital: bool


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
      a: the first one
      b: the second one
    """
    return a + b


@pytest_asyncio.fixture(loop_scope="session")
async def client(real: RealWorld) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient(host=real.url)
    yield client
    await client._client.aclose()


async def test_a_chat_whole_and_streamed(client: ollama.AsyncClient):
    whole = await client.chat("smollm2", HELLO, options=GREEDY)
    assert whole.message.role == "assistant"
    assert whole.message.content
    assert whole.done
    assert whole.eval_count is not None
    assert 0 < whole.eval_count <= 24
    assert whole.total_duration is not None
    assert whole.eval_duration is not None
    assert whole.total_duration >= whole.eval_duration > 0
    assert whole.prompt_eval_duration is not None
    assert whole.prompt_eval_duration > 0
    parts = [part async for part in await client.chat("smollm2:latest", HELLO, stream=True, options=GREEDY)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 3
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, whole.eval_count)


async def test_a_completion_goes_on_by_its_context(client: ollama.AsyncClient):
    first = await client.generate("smollm2", "My name is Ada. Say hello to me.", options=GREEDY)
    assert first.response
    assert first.context is not None
    assert len(first.context) == (first.prompt_eval_count or 0) + (first.eval_count or 0)
    parts = await client.generate("smollm2", "What is my name?", context=first.context, stream=True, options=GREEDY)
    texts = [part async for part in parts]
    assert (texts[-1].prompt_eval_count or 0) > len(first.context)
    raw = await client.generate("smollm2", "The capital of France is", raw=True, options={**GREEDY, "num_predict": 8})
    assert "Paris" in (raw.response or "")
    with pytest.raises(ollama.ResponseError, match="token id") as caught:
        await client.generate("smollm2", "Hi", context=[-1])
    assert caught.value.status_code == 400


async def test_structured_output(client: ollama.AsyncClient):
    schema = City.model_json_schema()
    chat = await client.chat("smollm2", [{"role": "user", "content": "Rome?"}], format=schema, options={"seed": 1})
    City.model_validate_json(chat.message.content or "")
    text = await client.generate("smollm2", "Oslo?", format=schema, options={"seed": 1})
    City.model_validate_json(text.response or "")


async def test_a_tool_is_called_and_its_result_is_read(client: ollama.AsyncClient, real: RealWorld):
    messages: list[Any] = [{"role": "user", "content": "What is 3 plus 4? Use the tool."}]
    answer = await client.chat("smollm2", messages, tools=[add], options={"temperature": 0, "num_predict": 60})
    assert answer.done  # a model this small may answer in words; what a call looks like is below
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="add", arguments={"a": 3, "b": 4}))
    messages += [
        ollama.Message(role="assistant", tool_calls=[call]),
        {"role": "tool", "tool_name": "add", "content": str(add(3, 4))},
    ]
    after = await client.chat("smollm2", messages, tools=[add], options=GREEDY)
    assert (after.prompt_eval_count or 0) > (answer.prompt_eval_count or 0)


async def test_models_are_listed_shown_and_running(client: ollama.AsyncClient, real: RealWorld):
    (model,) = (await client.list()).models
    assert model.model == "smollm2:latest"
    assert model.size is not None
    assert model.size > 10_000_000
    assert model.details is not None
    assert model.details.family == "llama"
    shown = await client.show(model.model)
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert 130e6 < shown.modelinfo["general.parameter_count"] < 170e6
    assert shown.modelinfo["llama.context_length"] == real.engine.max_model_len
    assert "temperature" in (shown.parameters or "")
    assert shown.capabilities is not None
    assert {"completion", "tools"} <= set(shown.capabilities)
    (running,) = (await client.ps()).models
    assert (running.name, running.context_length) == ("smollm2:latest", real.engine.max_model_len)
    assert running.expires_at is not None


async def test_the_bundled_model_is_pulled(client: ollama.AsyncClient):
    assert (await client.pull("smollm2")).status == "success"
    statuses = [part.status async for part in await client.pull("smollm2", stream=True)]
    assert statuses == ["pulling manifest", "success"]


async def test_errors_are_the_clients_errors(client: ollama.AsyncClient):
    with pytest.raises(ollama.ResponseError, match="nobody") as caught:
        await client.chat("nobody", HELLO)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="does not support thinking") as caught:
        await client.chat("smollm2", HELLO, think=True)
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="image") as caught:
        await client.generate("smollm2", "What is this?", images=[b"picture"])
    assert caught.value.status_code == 400
    for refused in (client.copy("smollm2", "other"), client.push("smollm2")):
        with pytest.raises(ollama.ResponseError) as caught:
            await refused
        assert caught.value.status_code == 501


async def test_a_stream_that_is_left_gives_its_blocks_back(client: ollama.AsyncClient, real: RealWorld):
    parts = await client.chat("smollm2", HELLO, stream=True, options={"num_predict": 400, "temperature": 2})
    async for _ in parts:
        break
    await parts.aclose()  # type: ignore[attr-defined]
    await real.settled()


async def test_log_probabilities(client: ollama.AsyncClient):
    answer = await client.chat("smollm2", HELLO, logprobs=True, top_logprobs=3, options=GREEDY)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == answer.eval_count
    for position in answer.logprobs:
        assert position.top_logprobs is not None
        assert position.top_logprobs[0].logprob == position.logprob, "greedy"
