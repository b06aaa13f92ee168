"""Images over HTTP, in every protocol: what reaches the engine, what is counted, and what is refused or noted."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse

from mlx_server.api.answers import images
from mlx_server.config import Config, ServerConfig
from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.request_stream import GenerationRequest, ModelLimits, make_request
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.vision import decoding, parts
from mlx_server.engine.vision.parts import UNREADABLE_NOTE
from mlx_server.engine.vision.seeing import SeeingModel
from mlx_server.errors import ContextLengthError
from mlx_server.request import PromptImage
from mlx_server.sampling_params import SamplingParams
from tests.api.worlds import World, running, until, user
from tests.picture_worlds import QWEN, data_url, encoded, picture

pytestmark = pytest.mark.asyncio(loop_scope="session")

CAT, DOG = (encoded(picture(seed)) for seed in (0, 1))
CAT_URL, DOG_URL = data_url(CAT), data_url(DOG)
CAT_BASE64 = CAT_URL.partition(",")[2]
NUM_CAT_TOKENS = 6
CAT_PART = {"type": "image_url", "image_url": {"url": CAT_URL}}
CAT_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CAT_BASE64}}
ASK = {"type": "text", "text": "What?"}


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> tuple[SeeingModel, Tokenizer, GrammarCompiler]:
    tokenizer = QWEN.tokenizer()
    return QWEN.load(tmp_path_factory.mktemp("seer"), tokenizer), tokenizer, GrammarCompiler(tokenizer)


@pytest.fixture
def seer(world: World, eyes: tuple[SeeingModel, Tokenizer, GrammarCompiler]) -> World:
    engine = world.engine
    engine.vision, engine.tokenizer, engine.grammars = eyes
    engine.chat = ChatFormatter(engine.tokenizer)
    return world


def digest_of(world: World, data: bytes) -> bytes:
    assert world.engine.vision is not None
    return world.engine.vision.prepare(data).pieces[0].digest


def seen(world: World) -> list[PromptImage]:
    """The images of the last request, whose places are checked."""
    request, model = world.engine.requests[-1], world.engine.vision
    assert model is not None
    for image in request.images:
        assert list(request.prompt_token_ids[image.start : image.end]) == [model.image_token_id] * image.num_tokens
    assert list(request.prompt_token_ids).count(model.image_token_id) == sum(i.num_tokens for i in request.images)
    return list(request.images)


def prompt_of(world: World) -> str:
    return world.engine.tokenizer.decode(world.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": user([ASK, CAT_PART])}),
    "chat by string": ("/v1/chat/completions", {"messages": user([ASK, {"type": "image_url", "image_url": CAT_URL}])}),
    "responses": (
        "/v1/responses",
        {"input": user([{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": CAT_URL}])},
    ),
    "messages": ("/v1/messages", {"max_tokens": 5, "messages": user([ASK, CAT_BLOCK])}),
    "ollama chat": ("/api/chat", {"stream": False, "messages": [{**user("What?")[0], "images": [CAT_BASE64]}]}),
    "ollama generate": ("/api/generate", {"stream": False, "prompt": "What?", "images": [CAT_BASE64]}),
}
COUNTS = ("prompt_tokens", "input_tokens", "prompt_eval_count")


@pytest.mark.parametrize("name", ASKS)
async def test_each_protocols_image_reaches_the_engine_and_is_counted(seer: World, name: str):
    path, body = ASKS[name]
    response = await seer.http.post(path, json=body)
    assert response.status_code == 200, response.text
    (image,) = seen(seer)
    assert (image.digest, image.num_tokens) == (digest_of(seer, CAT), NUM_CAT_TOKENS)
    usage = response.json().get("usage", response.json())
    (count,) = (usage[key] for key in COUNTS if key in usage)
    assert count == len(seer.engine.requests[-1].prompt_token_ids)
    pad = "<|vision_start|>" + "<|image_pad|>" * NUM_CAT_TOKENS + "<|vision_end|>"
    order = f"{pad}What?" if name.startswith("ollama") else f"What?{pad}"
    assert f"<|im_start|>user\n{order}<|im_end|>" in prompt_of(seer)


@pytest.mark.parametrize(
    ("path", "name", "key"),
    [
        ("/v1/messages/count_tokens", "messages", "input_tokens"),
        ("/v1/responses/input_tokens", "responses", "input_tokens"),
        ("/tokenize", "chat", "count"),
        ("/v1/chat/completions/render", "chat", "token_ids"),
    ],
)
async def test_counts_without_an_answer_are_the_same(seer: World, path: str, name: str, key: str):
    route, body = ASKS[name]
    counted = await seer.http.post(path, json=body)
    await seer.http.post(route, json=body)
    num_tokens = counted.json()[key]
    num_tokens = len(num_tokens) if isinstance(num_tokens, list) else num_tokens
    assert num_tokens == len(seer.engine.requests[-1].prompt_token_ids)


CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
ITEM = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
RESULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [
                *user("Look."),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": [CAT_PART]},
            ]
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                *user("Look."),
                ITEM,
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [{"type": "input_image", "image_url": CAT_URL}],
                },
            ]
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                *user("Look."),
                {"role": "assistant", "content": [USE]},
                *user([{"type": "tool_result", "tool_use_id": "a", "content": [CAT_BLOCK]}]),
            ],
        },
    ),
    "ollama": (
        "/api/chat",
        {
            "stream": False,
            "messages": [
                *user("Look."),
                {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
                {"role": "tool", "content": "", "images": [CAT_BASE64]},
            ],
        },
    ),
}


@pytest.mark.parametrize("name", RESULTS)
async def test_results_of_tools_are_seen(seer: World, name: str):
    path, body = RESULTS[name]
    response = await seer.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert [image.digest for image in seen(seer)] == [digest_of(seer, CAT)]


@pytest.mark.parametrize("name", RESULTS)
async def test_results_that_cannot_be_read_are_noted(seer: World, name: str):
    """An agent cannot take back what its tool has returned."""
    path, body = RESULTS[name]
    broken = json.loads(json.dumps(body).replace(CAT_BASE64, "JVBERg=="))
    response = await seer.http.post(path, json=broken)
    assert response.status_code == 200, response.text
    assert seen(seer) == []
    assert UNREADABLE_NOTE in prompt_of(seer)


async def test_a_kept_response_keeps_its_images(seer: World):
    first = await seer.http.post("/v1/responses", json=ASKS["responses"][1])
    begun = list(seer.engine.requests[-1].prompt_token_ids)
    more = user([{"type": "input_image", "image_url": DOG_URL}])
    asks = {"input": more, "previous_response_id": first.json()["id"]}
    assert (await seer.http.post("/v1/responses", json=asks)).status_code == 200
    assert [image.digest for image in seen(seer)] == [digest_of(seer, CAT), digest_of(seer, DOG)]
    end = seen(seer)[0].end
    assert list(seer.engine.requests[-1].prompt_token_ids[:end]) == begun[:end]


async def test_images_go_with_grammars_samples_and_context(seer: World):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    response = await seer.chat(messages=user([CAT_PART]), response_format=schema, n=2)
    assert response.status_code == 200, response.text
    first, second = seer.engine.requests
    assert first.constraint is not None
    assert first.images[0] is second.images[0]
    asks = {**ASKS["ollama generate"][1], "context": [5, 6, 7]}
    assert (await seer.http.post("/api/generate", json=asks)).status_code == 200
    assert list(seer.engine.requests[-1].prompt_token_ids[:3]) == [5, 6, 7]
    assert len(seen(seer)) == 1


async def test_models_say_that_they_see(seer: World):
    (card,) = (await seer.http.get("/v1/models")).json()["data"][:1]
    assert card["capabilities"] == ["completion", "vision"]
    shown = await seer.http.post("/api/show", json={"model": "fake"})
    assert "vision" in shown.json()["capabilities"]
    assert "vision" in (await seer.http.get("/api/tags")).json()["models"][0]["capabilities"]
    seer.engine.vision = None
    assert "vision" not in (await seer.http.get("/api/tags")).json()["models"][0]["capabilities"]
    assert (await seer.http.get("/v1/models")).json()["data"][0]["capabilities"] == ["completion"]


async def test_the_log_has_counts_and_no_contents(seer: World, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        await seer.http.post(*ASKS["chat"][:1], json=ASKS["chat"][1])
        await seer.settle()
    assert CAT_BASE64[:40] not in caplog.text
    (record,) = [record for record in caplog.records if record.name == "mlx_server.requests"]
    assert record.fields["image_tokens"] == NUM_CAT_TOKENS  # type: ignore[attr-defined]
    assert CAT_BASE64[:40] not in str(record.fields)  # type: ignore[attr-defined]


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "http": ("http://example.org/cat.png", "is at 'example.org', and images are fetched from these hosts only: none"),
    "https": ("https://example.org/cat.png", "start the server with --allowed-media-domains"),
    "file": ("file:///etc/passwd", "start the server with --allowed-media-path"),
    "other scheme": ("ftp://example.org/cat.png", "is neither a URL nor base64"),
    "no base64": ("data:image/png,abc", "is a data URL without base64"),
    "no image": ("data:image/png;base64,JVBERg==", "cannot be decoded (4 bytes; PNG, JPEG, WEBP, GIF are supported)"),
    "words": ("a cat", "is neither a URL nor base64: it begins with 'a cat'"),
    "narrow": (
        data_url(encoded(picture(size=(1, 300)))),
        "cannot be prepared for qwen2_5_vl (1 x 300 pixels): absolute aspect ratio must be smaller than 200, got "
        "300.0. Send it with other proportions.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_users_image_is_refused_with_the_reason(seer: World, name: str):
    source, reason = REFUSED[name]
    asked = await seer.chat(messages=user([ASK, {"type": "image_url", "image_url": {"url": source}}]))
    error = asked.json()["error"]
    assert (asked.status_code, error["param"]) == (400, "messages[0].content[1]")
    assert error["message"].startswith("messages[0].content[1] is an image that ")
    assert reason in error["message"]
    block = {"type": "image", "source": {"type": "url", "url": source}}
    answer = await seer.http.post("/v1/messages", json={"max_tokens": 5, "messages": user([block])})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert reason in answer.json()["error"]["message"]
    assert not seer.engine.requests


PLACES = {
    "/v1/chat/completions": "messages[0].content[",
    "/v1/messages": "messages[0].content[",
    "/v1/responses": "input[0].content[",
    "/api/chat": "messages[0].images[0]",
    "/api/generate": "images[0]",
}


async def test_an_image_in_anthropics_system_is_refused_for_its_place(seer: World):
    document = {"type": "document", "source": {"type": "content", "content": [CAT_BLOCK]}}
    for block, place in ((CAT_BLOCK, "system[0]"), (document, "system[0].source.content[0]")):
        body = {"max_tokens": 5, "system": [block], "messages": user("Hi")}
        response = await seer.http.post("/v1/messages", json=body)
        assert response.status_code == 400
        error = response.json()["error"]["message"]
        assert error == f"{place} is an image, and system takes text only. Send it in a message of the user."


async def test_ollama_takes_urls_as_well_as_base64(seer: World):
    for name in ("ollama chat", "ollama generate"):
        path, body = ASKS[name]
        response = await seer.http.post(path, json=json.loads(json.dumps(body).replace(CAT_BASE64, CAT_URL)))
        assert response.status_code == 200, response.text
        assert [image.digest for image in seen(seer)] == [digest_of(seer, CAT)]
        refused = await seer.http.post(
            path, json=json.loads(json.dumps(body).replace(CAT_BASE64, "http://a.example/b"))
        )
        assert refused.status_code == 400
        assert "images are fetched from these hosts only" in refused.json()["error"]


@pytest.mark.parametrize(
    "given", [CAT_BASE64, {"a": CAT_BASE64}, [{"a": 1}], [5]], ids=["string", "object", "objects", "numbers"]
)
async def test_ollamas_images_are_a_list_of_strings(seer: World, given: Any):
    chat = {"stream": False, "messages": [{**user("What?")[0], "images": given}]}
    for path, body in (("/api/chat", chat), ("/api/generate", {"stream": False, "prompt": "What?", "images": given})):
        response = await seer.http.post(path, json=body)
        assert response.status_code == 400, path
        assert "images" in response.json()["error"]
    assert not seer.engine.requests


async def test_a_context_does_not_lose_images_silently(seer: World):
    path, body = ASKS["ollama generate"]
    context = (await seer.http.post(path, json=body)).json()["context"]
    place = context.index(seer.engine.vision.image_token_id)  # type: ignore[union-attr]
    response = await seer.http.post(path, json={"stream": False, "prompt": "And?", "context": context})
    assert response.status_code == 400
    told = f"context[{place}] is the token of an image, and a context does not keep images. Leave context out"
    assert told in response.json()["error"]
    assert len(seer.engine.requests) == 1


async def test_each_protocol_tells_in_its_shape(seer: World):
    for path, body in ASKS.values():
        broken = json.loads(json.dumps(body).replace(CAT_BASE64, "JVBERg=="))
        response = await seer.http.post(path, json=broken)
        assert response.status_code == 400
        error = response.json()["error"]
        message = error if path.startswith("/api") else error["message"]
        assert "cannot be decoded" in message
        assert message.startswith(PLACES[path])


async def test_images_are_bounded_in_bytes(seer: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "MAX_BYTES", 100)
    response = await seer.chat(messages=user([CAT_PART] * 2))
    assert response.status_code == 400
    assert "a file may have 100 bytes. Send a smaller one" in response.json()["error"]["message"]
    monkeypatch.undo()
    monkeypatch.setattr(images, "MAX_PREPARED_BYTES", 200_000)
    response = await seer.chat(messages=user([CAT_PART] * 2))
    assert response.status_code == 400
    assert "The first 2 images take 225,840 bytes as the model's inputs" in response.json()["error"]["message"]


async def test_images_of_all_open_requests_are_bounded(seer: World, monkeypatch: pytest.MonkeyPatch):
    """Counted once while anybody has them, and no longer."""
    monkeypatch.setattr(seer.engine.vision._kept, "_limit", 0)
    monkeypatch.setattr(images, "MAX_HELD_BYTES", 450_000)  # of 112,920 for each

    async def send(*seeds: int) -> Any:
        parts = [part(data_url(encoded(picture(seed)))) for seed in seeds]
        return await seer.chat(messages=user(parts))

    assert [(await send(seed)).status_code for seed in (70, 71, 72)] == [200] * 3
    refused = await send(73)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    told = refused.json()["error"]["message"]
    assert "Images of this key's open requests take 338,760 bytes" in told
    assert "more than twice what is left of the 450,000 for all keys" in told
    assert (await seer.chat()).status_code == 200
    assert len(seer.engine.requests) == 4
    del seer.engine.requests[1:]
    gc.collect()
    assert (await send(74, 75)).status_code == 200


async def test_the_images_of_one_key_leave_room_for_those_of_others(seer: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seer.engine.vision._kept, "_limit", 0)
    monkeypatch.setattr(images, "MAX_HELD_BYTES", 560_000)  # of 112,920 for each
    seer.configure_server(api_key="many", admin_key="one")

    async def send(key: str, seed: int) -> int:
        message = user([part(data_url(encoded(picture(seed))))])
        return (await seer.chat(headers={"authorization": f"Bearer {key}"}, messages=message)).status_code

    assert [await send("many", seed) for seed in range(80, 86)][-1] == 503
    assert await send("one", 86) == 200


async def test_images_are_made_smaller_by_the_setting(seer: World):
    large = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(size=(448, 448))))}}
    seer.configure_server(max_image_pixels=20_000)
    assert (await seer.chat(messages=user([large] * 5))).status_code == 200
    assert [image.num_tokens for image in seen(seer)] == [25] * 5


async def test_images_that_cannot_fit_are_reported_before_all_are_prepared(seer: World):
    large = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(size=(448, 448))))}}
    response = await seer.chat(messages=user([large] * 5))
    assert response.status_code == 400
    error = response.json()["error"]
    assert "at least 512 tokens > 511 maximum" in error["message"]
    assert "its first 2 images have so many. Send fewer or smaller" in error["message"]


async def test_a_context_that_is_full_tells_how_much_of_it_are_images():
    image = PromptImage(2, 6, b"", {})
    request = GenerationRequest(
        request_id="a", prompt_token_ids=[1] * 20, sampling=SamplingParams(), images=(image, image)
    )
    limits = ModelLimits(
        model_name="m",
        vocab_size=9,
        max_model_len=16,
        eos_token_ids=frozenset(),
        no_vision="",
        count_placeholders=lambda *_: None,
        largest_chunk=16,
    )
    with pytest.raises(ContextLengthError, match=r"20 tokens > 15 max.* images have 12 tokens; send fewer or smaller"):
        make_request(request, limits, arrival_s=0.0)


@pytest.mark.parametrize("keep", [3, -1])
async def test_prompts_with_images_are_not_cut(seer: World, keep: int):
    asks = {"messages": user([CAT_PART, {"type": "text", "text": "a " * 300}])}
    response = await seer.chat(**asks, truncate_prompt_tokens=keep)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    fits = await seer.chat(messages=user([CAT_PART]), truncate_prompt_tokens=400)
    assert fits.status_code == 200


# --- where images come from -------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gallery() -> AsyncIterator[str]:
    """A site with images, and with what a bad one has."""

    async def show(scope: Any, receive: Any, send: Any) -> None:
        await answer(Request(scope))(scope, receive, send)

    def answer(request: Request) -> Response:
        port = request.url.port
        known: dict[str, Callable[[], Response]] = {
            "/cat.png": lambda: Response(CAT, media_type="image/png"),
            "/moved": lambda: RedirectResponse("/cat.png"),
            "/away": lambda: RedirectResponse(f"http://localhost:{port}/cat.png"),
            "/round": lambda: RedirectResponse("/round"),
            "/inside": lambda: RedirectResponse("file:///etc/passwd"),
            "/harbour": lambda: RedirectResponse("http://127.0.0.1:99999/cat.png"),
            "/flood": lambda: StreamingResponse(flood()),
            "/packed": lambda: Response(CAT, headers={"content-encoding": "gzip"}),
            "/slow": lambda: StreamingResponse(crawl()),
        }
        return known.get(request.url.path, lambda: PlainTextResponse("no", 404))()

    async def flood() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65536)
            await asyncio.sleep(0)  # or nobody else would have a turn once the reader has gone

    async def crawl() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(1)

    async with running(show) as url:
        yield url


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("path", ["/cat.png", "/moved"])
async def test_an_allowed_host_is_asked(seer: World, gallery: str, path: str):
    seer.configure_server(allowed_media_domains="127.0.0.1, example.org")
    response = await seer.chat(messages=user([part(gallery + path)]))
    assert response.status_code == 200, response.text
    assert [image.digest for image in seen(seer)] == [digest_of(seer, CAT)]


async def test_a_chat_with_too_many_images_is_cut_like_one_that_is_too_long(
    seer: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parts, "MAX_IMAGES", 4)
    shot = user([{"type": "input_image", "image_url": CAT_URL}])
    body = {"input": [*shot, {"role": "assistant", "content": "Yes"}] * 6 + shot, "truncation": "auto"}
    answer = await seer.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert 2 <= len(seen(seer)) <= 4
    answer = await seer.http.post("/v1/responses", json={**body, "truncation": "disabled"})
    assert "is image 5 of the request; the most is 4" in answer.text
    broken = user([{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}])
    answer = await seer.http.post("/v1/responses", json={**body, "input": [*body["input"], *broken]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[13].content[0]")
    alone = user([shot[0]["content"][0]] * 5)
    answer = await seer.http.post("/v1/responses", json={**body, "input": [*body["input"], *alone]})
    assert "is image 5 of the request; the most is 4" in answer.text


async def test_an_image_that_cannot_be_read_matters_only_where_it_is_not_left_out(seer: World):
    shot = user([{"type": "input_image", "image_url": CAT_URL}])
    broken = user([{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}])
    old = [*user("Old " + "word " * 50), {"role": "assistant", "content": "Yes"}]
    seer.engine.max_model_len = 200

    async def ask(*items: Any) -> tuple[int, str | None]:
        answer = await seer.http.post("/v1/responses", json={"input": items, "truncation": "auto"})
        return answer.status_code, answer.json()["error"]["param"] if answer.is_error else None

    assert await ask(*broken, *old * 3, *shot) == (200, None)
    assert len(seen(seer)) == 1
    assert "Old" in prompt_of(seer)
    assert UNREADABLE_NOTE not in prompt_of(seer)
    assert await ask(*broken, *shot) == (400, "input[0].content[0]"), "the chat fits, so nothing is left out"
    assert await ask(*old * 4, *broken, *shot) == (400, "input[8].content[0]"), "it stays"


async def test_an_image_is_fetched_once_however_often_its_chat_is_cut(
    seer: World, gallery: str, monkeypatch: pytest.MonkeyPatch
):
    fetch, fetched, prepared = images.fetch, list[str](), list[bytes]()
    prepare = seer.engine.vision.prepare  # type: ignore[union-attr]

    async def watched(url: str, *args: Any) -> bytes:
        fetched.append(url)
        return await fetch(url, *args)

    def prepare_watched(data: bytes, *args: Any) -> Any:
        prepared.append(data)
        return prepare(data, *args)

    monkeypatch.setattr(images, "fetch", watched)
    monkeypatch.setattr(seer.engine.vision, "prepare", prepare_watched)
    seer.configure_server(allowed_media_domains="127.0.0.1")
    image = {"type": "input_image", "image_url": f"{gallery}/cat.png"}
    told = {"type": "function_call_output", "call_id": "1", "output": [{**image, "image_url": f"{gallery}/missing"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    old = [*user("Old " + "word " * 50), {"role": "assistant", "content": "Yes"}]
    body = {"input": [*old * 3, *user([image, image]), call, told], "truncation": "auto"}
    seer.engine.max_model_len = 200
    answer = await seer.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert (len(seen(seer)), UNREADABLE_NOTE in prompt_of(seer), "Old" in prompt_of(seer)) == (2, True, False)
    assert (sorted(fetched), len(prepared)) == ([f"{gallery}/cat.png", f"{gallery}/missing"], 1)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/away", "redirects must stay on their host. Send the last address"),
        ("/inside", "redirects must stay on their host"),
        ("/harbour", "is at port 99999; the highest is 65535. Check the URL"),
        ("/round", "is redirected more than 3 times"),
        ("/flood", "or more; 20,971,520 are read at most"),
        ("/missing", "was answered with status 404"),
        ("/packed", "is sent compressed"),
        ("/slow", "took more than 0.2 s to fetch"),
    ],
)
async def test_what_an_allowed_host_may_not_do(
    seer: World, gallery: str, path: str, reason: str, monkeypatch: pytest.MonkeyPatch
):
    seer.configure_server(allowed_media_domains="127.0.0.1")
    if path == "/slow":
        monkeypatch.setattr(images, "FETCH_S", 0.2)
    response = await seer.chat(messages=user([part(gallery + path)]))
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


async def test_what_cannot_be_read_is_noted_for_a_tool_wherever_it_is(seer: World, media: Path):
    seer.configure_server(allowed_media_domains="127.0.0.1", allowed_media_path=str(media))
    path, body = RESULTS["chat"]
    for source in ("http://127.0.0.1:99999/cat.png", (media / "loop.png").as_uri()):
        response = await seer.http.post(path, json=json.loads(json.dumps(body).replace(CAT_URL, source)))
        assert response.status_code == 200, response.text
        assert UNREADABLE_NOTE in prompt_of(seer)


@pytest.mark.parametrize("url", ["http://localhost:{}/cat.png", "http://127.0.0.2:{}/cat.png", "http://0:{}/cat.png"])
async def test_hosts_are_compared_exactly(seer: World, gallery: str, url: str):
    seer.configure_server(allowed_media_domains="127.0.0.1")
    response = await seer.chat(messages=user([part(url.format(gallery.rpartition(":")[2]))]))
    assert response.status_code == 400
    assert "images are fetched from these hosts only: 127.0.0.1" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.8", "169.254.169.254", "100.64.0.1", "224.0.0.1"),
        *("::1", "fe80::1%eth0", "fec0::1", "ff02::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
        *(
            "::ffff:10.0.0.8",
            "::7f00:1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::808:808",
            "2002:7f00:1::",
        ),
    ],
)
async def test_a_name_must_not_lead_into_the_private_network(
    seer: World, gallery: str, address: str, monkeypatch: pytest.MonkeyPatch
):
    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        return [(2, 1, 6, "", ("93.184.216.34", port)), (2, 1, 6, "", (address, port))]

    monkeypatch.setattr(images.socket, "getaddrinfo", look_up)
    seer.configure_server(allowed_media_domains="cats.example")
    port = gallery.rpartition(":")[2]
    response = await seer.chat(messages=user([part(f"http://cats.example:{port}/cat.png")]))
    assert response.status_code == 400
    assert (
        f"is at cats.example, which is {address}: names must lead to public addresses"
        in response.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "[2606:4700::1]", "[::ffff:5db8:d822]", "[64:ff9b::5db8:d822]", "[2002:5db8:d822::]"]
)
async def test_a_name_is_looked_up_once_and_asked_for_by_name(address: str):
    async def look_up(host: str, port: int) -> list[str]:
        assert (host, port) == ("cats.example", 8443)
        return [address.strip("[]")]

    async with images.httpx.AsyncClient() as client:
        request = await images._request(client, images.httpx.URL("https://cats.example:8443/a?b=c"), look_up)
    assert str(request.url) == f"https://{address}:8443/a?b=c"
    assert (request.headers["host"], request.extensions["sni_hostname"]) == ("cats.example:8443", "cats.example")


async def test_look_ups_that_hang_take_no_threads_from_others(monkeypatch: pytest.MonkeyPatch):
    """Clients that leave do not get more of them."""
    asked, may_answer = [], threading.Event()

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        may_answer.wait()
        raise OSError("no answer")

    monkeypatch.setattr(images.socket, "getaddrinfo", look_up)
    loader = images.ImageLoader(ServerConfig(allowed_media_domains="cats.example"))
    for _ in range(2):
        looking = [asyncio.create_task(loader._look_up("cats.example", 80)) for _ in range(40)]
        await until(lambda: len(asked) == images._NUM_FETCHES)
        await asyncio.to_thread(lambda: None)
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
    assert len(asked) == images._NUM_FETCHES
    may_answer.set()
    with pytest.raises(OSError, match="no answer"):
        await loader._look_up("cats.example", 80)


@pytest.fixture
def media(seer: World, tmp_path: Path) -> Path:
    """A folder that may be read from, beside a secret."""
    folder = tmp_path / "media files"
    folder.mkdir()
    (folder / "cat.png").write_bytes(CAT)
    (tmp_path / "secret.png").write_bytes(DOG)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "inner.png").symlink_to(folder / "cat.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe")
    (folder / "large").write_bytes(b"")
    os.truncate(folder / "large", 2**40)
    seer.configure_server(allowed_media_path=str(folder))
    return folder


@pytest.mark.parametrize("name", ["cat.png", "inner.png"])
async def test_a_file_of_the_allowed_folder_is_read(seer: World, media: Path, name: str):
    assert " " in str(media)
    response = await seer.chat(messages=user([part((media / name).as_uri())]))
    assert response.status_code == 200, response.text
    assert [image.digest for image in seen(seer)] == [digest_of(seer, CAT)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../secret.png", "is not in the folder that files may be read from"),
        ("link.png", "is not in the folder that files may be read from"),
        ("missing.png", "cannot be read from"),
        ("loop.png", "cannot be read from"),
        ("pipe", "is no file"),
        (".", "is no file"),
        ("large", "20,971,520 are read at most"),
        ("%00", "cannot be read from"),
    ],
)
async def test_other_files_are_not(seer: World, media: Path, name: str, reason: str):
    response = await seer.chat(messages=user([part(f"{media.as_uri()}/{name}")]))
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


async def test_a_file_of_another_machine_is_not_read(seer: World, media: Path):
    response = await seer.chat(messages=user([part(f"file://example.org{media}/cat.png")]))
    assert response.status_code == 400


# --- beside others ----------------------------------------------------------------------------------------------------


def _held_prepare(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Preparing sets the first event, and waits for the second."""
    started, go_on = threading.Event(), threading.Event()
    prepare = SeeingModel.prepare

    def held(*asked: Any) -> Any:
        started.set()
        assert go_on.wait(10)
        return prepare(*asked)

    monkeypatch.setattr(SeeingModel, "prepare", held)
    return started, go_on


async def test_others_are_answered_while_an_image_is_decoded(seer: World, monkeypatch: pytest.MonkeyPatch):
    started, go_on = _held_prepare(monkeypatch)
    waiting = [asyncio.create_task(seer.chat(messages=user([CAT_PART]))) for _ in range(4)]
    await until(started.is_set)
    assert (await seer.chat()).status_code == 200
    waiting[0].cancel()  # its slot comes back when its work is done
    go_on.set()
    assert [response.status_code for response in await asyncio.gather(*waiting[1:])] == [200] * 3


async def test_waiting_for_the_servers_own_threads_is_not_fetching(
    seer: World, gallery: str, monkeypatch: pytest.MonkeyPatch
):
    seer.configure_server(allowed_media_domains="127.0.0.1")
    monkeypatch.setattr(images, "ALL_FETCHES_S", 0.5)
    prepare, acquire = SeeingModel.prepare, images.FairSlots.acquire

    def slow(*asked: Any) -> Any:
        time.sleep(0.4)
        return prepare(*asked)

    async def slow_turn(*asked: Any, **how: Any) -> Any:
        await asyncio.sleep(0.1)
        return await acquire(*asked, **how)

    monkeypatch.setattr(SeeingModel, "prepare", slow)
    monkeypatch.setattr(images.FairSlots, "acquire", slow_turn)
    response = await seer.chat(messages=user([part(gallery + "/cat.png")] * 2))
    assert response.status_code == 200, response.text


async def test_a_wait_for_the_server_is_its_own_fault(seer: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "MAX_WAIT_S", 0.2)
    started, go_on = _held_prepare(monkeypatch)
    holders = [asyncio.create_task(seer.chat(messages=user([CAT_PART]))) for _ in range(2)]
    await until(started.is_set)
    try:
        refused = await seer.http.post("/v1/messages", json=ASKS["messages"][1])
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "has waited 0.2 s to be decoded" in refused.json()["error"]["message"]
    finally:
        go_on.set()
        await asyncio.gather(*holders)


async def test_nothing_is_named_by_default():
    assert (ServerConfig().allowed_media_domains, Config().server.allowed_media_path) == ("", None)
