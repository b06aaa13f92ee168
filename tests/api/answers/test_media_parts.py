"""Parts of messages that are no text: whatever the official clients can send is read as text, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import anthropic
import openai
import pytest
from anthropic.types import ContentBlockParam
from openai.types.chat import ChatCompletionContentPartParam
from openai.types.responses import ResponseFunctionCallOutputItemParam, ResponseInputContentParam

from mlx_server.engine.models.facts import read_facts
from tests.api.real_worlds import RealWorld, started
from tests.api.worlds import Site, World, user
from tests.runtime.models.test_vision_models import make_vision_folder

pytestmark = pytest.mark.asyncio(loop_scope="session")

PNG = "data:image/png;base64,iVBORw0KGgo="
REASON = "which this model cannot read"
REMEDY = "Leave the part out, or send its content as a part of type text."
TEXT = {"type": "text", "text": "What is this?"}

CHAT: dict[str, dict[str, Any]] = {
    "image_url": {"image_url": {"url": PNG}},
    "input_audio": {"input_audio": {"data": "UklGRg==", "format": "wav"}},
    "file": {"file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="}},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "input_image": {"image_url": PNG, "detail": "auto"},
    "input_file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="},
}
OTHER_SERVERS = ("audio_url", "video_url", "input_video", "image", "video", "computer_screenshot")
"""Types that clients of other servers send, and newer ones of OpenAI's."""

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}}
READ = {"text", "document", "search_result", "tool_result"}
"""Blocks of a user's message that may be text."""


def kinds_of(parts: Any) -> set[str]:
    """The types of a client's union of parts."""
    return {kind for part in get_args(parts) for kind in get_args(get_type_hints(part)["type"])}


async def test_the_clients_have_no_parts_that_are_not_tried_here() -> None:
    assert kinds_of(ChatCompletionContentPartParam) == {"text", *CHAT}
    assert kinds_of(ResponseInputContentParam) == {"input_text", *RESPONSES}
    assert kinds_of(ResponseFunctionCallOutputItemParam) == {"input_text", *RESPONSES}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [*CHAT, *OTHER_SERVERS])
async def test_chat_names_the_part(world: World, kind: str, stream: bool) -> None:
    where, messages = "messages[0].content[1]", user([TEXT, {"type": kind, **CHAT.get(kind, {kind: PNG})}])
    with pytest.raises(openai.BadRequestError) as caught:
        await world.openai.chat.completions.create(model="fake", messages=messages, stream=stream)  # type: ignore[call-overload]
    assert caught.value.param == where
    assert f"{where} is of type {kind}, {REASON}" in caught.value.message
    assert REMEDY in caught.value.message
    assert not world.engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [*RESPONSES, "input_audio", *OTHER_SERVERS])
async def test_responses_name_the_part(world: World, kind: str, stream: bool) -> None:
    part = {"type": kind, **RESPONSES.get(kind, {kind: PNG})}
    where, items = "input[0].content[1]", user([{"type": "input_text", "text": "What is this?"}, part])
    with pytest.raises(openai.BadRequestError) as caught:
        await world.openai.responses.create(model="fake", input=items, stream=stream)  # type: ignore[call-overload]
    assert caught.value.param == where
    assert f"{where} is of type {kind}, {REASON}" in caught.value.message
    assert not world.engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([TEXT, IMAGE], "messages[0].content[1] is of type image, "),
        ([PDF], "messages[0].content[0] is of type document with a source of type base64, "),
        (
            [{"type": "document", "source": {"type": "content", "content": [IMAGE]}}],
            "messages[0].content[0].source.content[0] is of type image, ",
        ),
    ],
    ids=["image", "pdf", "document"],
)
async def test_messages_name_the_block(world: World, content: list[Any], found: str, stream: bool) -> None:
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="x", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(model="fake", max_tokens=5, messages=user(content), stream=stream)
    error = caught.value.body
    assert isinstance(error, dict)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(f"{found}{REASON}")
    assert error["error"]["message"].endswith(REMEDY)
    assert not world.engine.requests


@pytest.mark.parametrize("kind", sorted(kinds_of(ContentBlockParam) - READ))
async def test_every_other_block_of_a_user_is_refused_by_name(world: World, kind: str) -> None:
    body = {"max_tokens": 5, "messages": user([{"type": kind}])}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await world.http.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(f"messages[0].content[0] is of type {kind}")


async def test_documents_and_search_results_of_text_are_read(world: World) -> None:
    content = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}},
        {
            "type": "document",
            "title": "Title",
            "context": "Context",
            "source": {"type": "content", "content": [{"type": "text", "text": "two"}]},
        },
        {"type": "document", "source": {"type": "content", "content": "three"}},
        {"type": "search_result", "title": "Found", "source": "http://x", "content": [{**TEXT, "text": "four"}]},
    ]
    response = await world.http.post("/v1/messages", json={"max_tokens": 5, "messages": user(content)})
    assert response.status_code == 200
    prompt = world.engine.tokenizer.decode(world.engine.requests[0].prompt_token_ids)
    assert "one\nTitle\nContext\ntwo\nthree\nFound\nhttp://x\nfour" in prompt


@pytest.mark.parametrize(
    ("block", "where"),
    [
        ({"type": "document"}, "source must be an object"),
        ({"type": "document", "source": {"type": "text"}}, "source.data must be a string"),
        ({"type": "document", "title": 5, "source": {"type": "text", "data": "x"}}, "title must be a string"),
        ({"type": "search_result", "title": "a", "source": "b"}, "content must be a string or a list of blocks"),
    ],
)
async def test_broken_blocks_are_named(world: World, block: dict[str, Any], where: str) -> None:
    response = await world.http.post("/v1/messages", json={"max_tokens": 5, "messages": user([block])})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"messages[0].content[0].{where}."


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # transformers, of the configuration
async def test_a_model_that_could_see_answers_text_and_names_images(site: Site, tmp_path: Path) -> None:
    async with started(make_vision_folder(tmp_path / "seer", "qwen2_5_vl"), "seer") as model:
        world = RealWorld(site, site.serve(*model))
        parts: list[Any] = [TEXT, {"type": "image_url", **CHAT["image_url"]}]
        completions = world.openai.chat.completions
        answer = await completions.create(
            model="seer", messages=user(parts[:1]), max_tokens=4, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (4, "length")
        with pytest.raises(openai.BadRequestError, match=f"{REASON}: its vision encoder cannot be loaded") as caught:
            await completions.create(model="seer", messages=user(parts), max_tokens=4)
        assert str(tmp_path) not in caught.value.message
        await world.settled()


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
async def test_a_family_that_is_not_served_is_named(site: Site, tmp_path: Path) -> None:
    """Its text is served; what computes images is missing, and the client gets that as the error."""
    async with started(make_vision_folder(tmp_path / "seer", "llama4"), "seer") as model:
        world = RealWorld(site, site.serve(*model))
        parts: list[Any] = [TEXT, {"type": "image_url", **CHAT["image_url"]}]
        with pytest.raises(openai.BadRequestError, match=f"{REASON}: .* this one is of type llama4") as caught:
            await world.openai.chat.completions.create(model="seer", messages=user(parts), max_tokens=4)
        assert caught.value.param == "messages[0].content[1]"
        assert str(tmp_path) not in caught.value.message
        assert (await world.http.get("/v1/models")).json()["data"][0]["capabilities"] == ["completion"]
    facts = read_facts(str(tmp_path / "seer"))
    assert facts is not None
    assert not facts.may_see
