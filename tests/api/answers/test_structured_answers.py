"""JSON schemas of many kinds, filled in by the bundled model at temperature 1 through every protocol, in batches."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import jsonschema
import pytest

from tests.api.real_worlds import RealWorld
from tests.api.worlds import user
from tests.schema_maker import Made, make_schemas

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

MAX_TOKENS = 96
NUM_AT_ONCE = 24
PROMPT = "Answer with one short example as JSON."


def chat(schema: Any) -> tuple[str, dict[str, Any]]:
    named = {"name": "answer", "strict": True, "schema": schema}
    return "/v1/chat/completions", {
        "messages": user(PROMPT),
        "max_tokens": MAX_TOKENS,
        "response_format": {"type": "json_schema", "json_schema": named},
    }


def text(schema: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "structured_outputs": {"json": schema}}


def responses(schema: Any) -> tuple[str, dict[str, Any]]:
    format_ = {"type": "json_schema", "name": "answer", "schema": schema}
    return "/v1/responses", {"input": PROMPT, "max_output_tokens": MAX_TOKENS, "text": {"format": format_}}


def messages(schema: Any) -> tuple[str, dict[str, Any]]:
    format_ = {"type": "json_schema", "schema": schema}
    return "/v1/messages", {"messages": user(PROMPT), "max_tokens": MAX_TOKENS, "output_config": {"format": format_}}


PROTOCOLS = (chat, text, responses, messages)


def finished_text(answer: dict[str, Any]) -> str | None:
    """What was written, if it came to its own end."""
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"] if answer["status"] == "completed" else None
    if "content" in answer:
        return answer["content"][0]["text"] if answer["stop_reason"] == "end_turn" else None
    choice = answer["choices"][0]
    if choice["finish_reason"] != "stop":
        return None
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize(
    "schemas",
    [
        pytest.param(make_schemas()[::11], id="some"),
        pytest.param(make_schemas(), id="all", marks=[pytest.mark.full, pytest.mark.timeout(1200)]),
    ],
)
async def test_whatever_is_finished_fits_and_whatever_is_refused_says_why(real: RealWorld, schemas: list[Made]):
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(index: int, made: Made) -> str:
        path, body = PROTOCOLS[index % len(PROTOCOLS)](made.schema)
        async with gate:
            body = {**body, "temperature": 1.0, "seed": index}
            response = await real.http.post(path, json=body, timeout=300)
        if made.reason is not None:
            check_refusal(made, response)
            return "refused"
        assert response.status_code == 200, (made, response.text)
        text = finished_text(response.json())
        if text is None:
            return "cut"
        checker = jsonschema.Draft202012Validator
        checker(made.schema, format_checker=checker.FORMAT_CHECKER).validate(json.loads(text))
        return "finished"

    ends = Counter(await asyncio.gather(*(ask(index, made) for index, made in enumerate(schemas))))
    assert ends["refused"] == sum(made.reason is not None for made in schemas)
    assert ends["finished"] >= 0.8 * (len(schemas) - ends["refused"]), ends


def check_refusal(made: Made, response: httpx.Response) -> None:
    assert response.status_code == 400, (made, response.text)
    assert made.reason is not None
    message = response.json()["error"]["message"]
    assert "cannot be compiled: " in message
    assert made.reason in message, (made, message)
