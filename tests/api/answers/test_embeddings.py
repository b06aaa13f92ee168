"""/v1/embeddings over a real server, by OpenAI's client and plain HTTP: shapes, errors, quotas, and who goes beside."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio

from mlx_server.api.answers.vectors import MAX_INPUTS
from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.context import ServerContext
from mlx_server.api.ollama.request import NOT_ENFORCED_HEADER
from mlx_server.config import CacheConfig, Config, SchedulerConfig, ServerConfig
from mlx_server.engine.engine import AsyncEngine
from mlx_server.errors import QueueFullError
from mlx_server.model_entries import ModelEntry
from mlx_server.outputs import EngineStats
from mlx_server.pool.model_pool import ModelPool, build_pool
from mlx_server.request import Priority
from mlx_server.tiers import Tier, default_tiers
from tests.api.http.test_text_turns import Encoder
from tests.api.worlds import Site, until
from tests.embedders import PROMPTS, TinyEmbedder, cosine, embedder_tokenizer, save_embedder
from tests.tiny_models import save_model_folder, tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_SEATS = 8
TIERS = {
    "plain": Tier(name="plain"),
    "two": Tier(name="two", max_concurrent_requests=2),
    "four": Tier(name="four", max_concurrent_requests=4),
    "minute": Tier(name="minute", tokens_per_minute=50, requests_per_minute=3),
    "small": Tier(name="small", max_context_tokens=20),
    "floored": Tier(name="floored", floors={"/v1/embeddings": Priority.LOW, "/v1/rerank": Priority.LOW}),
}


@dataclass
class PoolingWorld:
    """A server of three models: `embed`, which only embeds; `both`, which writes text and embeds; and `rank`."""

    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    context: ServerContext
    pool: ModelPool
    tiny: TinyEmbedder
    keys: dict[str, str]

    def engine(self, name: str = "embed") -> AsyncEngine:
        return next(engine for engine in self.pool.engines() if engine.model_name == name)

    def stats(self, name: str = "embed") -> EngineStats:
        return self.engine(name).stats()

    async def post(self, path: str = "/v1/embeddings", tier: str = "plain", **body: Any) -> httpx.Response:
        headers = {"x-api-key": self.keys[tier]}
        return await self.http.post(path, json={"model": "embed", **body}, headers=headers, timeout=120)

    async def ok(self, path: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert isinstance(answer, dict)
        return answer

    async def error(self, path: str = "/v1/embeddings", status: int = 400, **body: Any) -> tuple[str | None, str]:
        """The parameter and the message of a refusal."""
        response = await self.post(path, **body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        return error["param"], error["message"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyEmbedder, Path, Path]:
    path = tmp_path_factory.mktemp("models")
    llama, qwen = tiny_model("llama"), tiny_model("qwen3")
    return (
        save_embedder(path / "embed", max_seq_length=100),
        save_model_folder(llama.model, llama.config, path / "both", embedder_tokenizer()),
        save_model_folder(qwen.model, qwen.config, path / "Qwen3-Reranker", embedder_tokenizer()),
    )


@contextlib.asynccontextmanager
async def opened(folders: tuple[TinyEmbedder, Path, Path], path: Path) -> AsyncIterator[tuple[ModelPool, Config, Any]]:
    tiny, both, rank = folders
    config = Config(
        models=(
            ModelEntry(id="embed", model=str(tiny.folder), pinned=True),
            ModelEntry(id="both", model=str(both), pinned=True, overrides={"pooling": "mean"}),
            ModelEntry(id="rank", model=str(rank), pinned=True),
        ),
        cache=CacheConfig(num_kv_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEATS, max_num_batched_tokens=256),
        server=ServerConfig(key_file=str(path)),
        tiers={**default_tiers(), **TIERS},
    )
    with KeyFile.create(path) as file:
        keys = {tier: file.add(tier, "").text for tier in TIERS}
    pool = build_pool(config)
    await pool.start()
    try:
        yield pool, config, keys
    finally:
        await pool.stop(0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def models(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    async with opened(folders, tmp_path_factory.mktemp("keys") / "keys") as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def world(site: Site, folders: Any, models: Any) -> AsyncIterator[PoolingWorld]:
    pool, config, keys = models
    context = site.serve(pool, config)
    client = site.openai.with_options(api_key=keys["plain"])
    world = PoolingWorld(site.http, client, context, pool, folders[0], keys)
    yield world
    await until(lambda: not context.generations.num_in_progress)
    for name in ("embed", "both", "rank"):
        await until(lambda name=name: world.stats(name).num_free_blocks == world.stats(name).num_blocks)


# --- shapes -----------------------------------------------------------------------------------------------------------


async def test_openai_s_client_gets_vectors_which_it_asks_for_in_base64(world: PoolingWorld):
    answer = await world.openai.embeddings.create(model="embed", input=["hello", "bye"], user="me")
    encode = world.engine().tokenizer.encode
    assert [item.index for item in answer.data] == [0, 1]
    for text, item in zip(("hello", "bye"), answer.data):
        assert cosine(np.array(item.embedding), world.tiny.expected(encode(text))) >= 0.9999
    num_tokens = len(encode("hello")) + len(encode("bye"))
    assert (answer.model, answer.object) == ("embed", "list")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


async def test_base64_is_the_same_numbers_as_little_endian_float32(world: PoolingWorld):
    plain = (await world.ok(input="hi"))["data"][0]["embedding"]
    packed = (await world.ok(input="hi", encoding_format="base64"))["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == plain
    assert len(plain) == 64


async def test_inputs_may_be_token_ids(world: PoolingWorld):
    ids = world.engine().tokenizer.encode("hello")
    text, one, several = [(await world.ok(input=value))["data"] for value in ("hello", ids, [ids, [5, 6]])]
    assert text == one == several[:1]
    assert len(several) == 2


async def test_dimensions_and_prompts(world: PoolingWorld):
    encode = world.engine().tokenizer.encode
    answer = await world.openai.embeddings.create(model="embed", input="hello", dimensions=8)
    assert cosine(np.array(answer.data[0].embedding), world.tiny.expected(encode("hello"), 8)) >= 0.9999
    wanted = world.tiny.expected(encode(PROMPTS["query"] + "hello"))
    for field in ({"prompt_name": "query"}, {"input_type": "query"}, {"input_type": "search_query"}):
        found = (await world.ok(input="hello", **field))["data"][0]["embedding"]
        assert cosine(np.array(found), wanted) >= 0.9999
    assert (await world.ok(model="both", input="hello", input_type="query"))["data"], "it has no prompts"
    assert (await world.error(input="hello", input_type="image"))[0] == "input_type"


async def test_long_inputs_are_cut_where_the_client_says_so(world: PoolingWorld):
    answer = await world.ok(input="x" * 500, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 100
    left = await world.ok(input="ab" + "x" * 9, truncate_prompt_tokens=10, truncation_side="left")
    assert left["data"] == (await world.ok(input="x" * 9))["data"]


async def test_a_model_may_write_text_and_embed(world: PoolingWorld):
    answer = await world.ok(model="both", input=[[1, 2, 3]])
    vector = np.array(answer["data"][0]["embedding"])
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    written = await world.post("/v1/completions", model="both", prompt="Hi", max_tokens=3)
    assert written.status_code == 200


async def test_ollama_s_routes_give_the_same_vectors(world: PoolingWorld):
    wanted = [entry["embedding"] for entry in (await world.ok(model="embed", input=["one", "two"]))["data"]]
    answer = (await world.post("/api/embed", model="embed:latest", input=["one", "two"])).json()
    np.testing.assert_allclose(answer["embeddings"], wanted, atol=1e-6)
    assert answer["prompt_eval_count"] > 2
    older = (await world.post("/api/embeddings", model="embed", prompt="two")).json()
    np.testing.assert_allclose(older["embedding"], wanted[1], atol=1e-6)
    refused = await world.post("/api/embed", model="embed", input="one", dimensions=10**6)
    assert refused.status_code == 400
    assert "dimensions" in refused.json()["error"]
    long = await world.post("/api/embed", model="embed", input="x" * 200, truncate=False)
    assert "send truncate: true to have it cut" in long.json()["error"]
    many = await world.post("/api/embed", model="embed", input=["a"] * (MAX_INPUTS + 1))
    assert (many.status_code, "at most 2048 texts" in many.json()["error"]) == (400, True)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_vectors_are_encoded_one_by_one_off_the_event_loop(world: PoolingWorld, monkeypatch, path: str):
    encoder = Encoder(monkeypatch)
    answer = await world.post(path, input=["one"] * 100)
    assert answer.status_code == 200
    assert encoder.threads == {"text"}
    assert max(encoder.sizes) < len(answer.content) / 50


@pytest.mark.parametrize(("path", "body"), [("/api/embed", {"input": "one"}), ("/api/embeddings", {"prompt": "one"})])
async def test_how_long_a_model_stays_is_not_for_everyone_who_embeds(world: PoolingWorld, path: str, body: Any):
    for more, note in (({}, None), ({"keep_alive": "5m"}, "keep_alive")):
        answer = await world.post(path, model="embed", **body, **more)
        assert (answer.status_code, answer.headers.get(NOT_ENFORCED_HEADER)) == (200, note)


async def test_ollama_s_clients_learn_what_a_model_does(world: PoolingWorld):
    wanted = {
        "embed:latest": ["embedding", "rerank"],
        "both:latest": ["completion", "embedding", "rerank", "tools"],
        "rank:latest": ["completion", "rerank", "tools"],
    }
    headers = {"x-api-key": world.keys["plain"]}
    cards = (await world.http.get("/api/tags", headers=headers)).json()["models"]
    assert {card["name"]: card["capabilities"] for card in cards} == wanted
    for name, kinds in wanted.items():
        assert (await world.post("/api/show", model=name)).json()["capabilities"] == kinds


async def test_models_say_what_they_do(world: PoolingWorld):
    cards = (await world.http.get("/v1/models", headers={"x-api-key": world.keys["plain"]})).json()["data"]
    assert {card["id"]: card["capabilities"] for card in cards} == {
        "embed": ["embedding", "rerank"],
        "both": ["completion", "embedding", "rerank"],
        "rank": ["completion", "rerank"],
    }


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ""}, "input", "is an empty text"),
        ({"input": []}, "input", "must be a string, a list of strings"),
        ({"input": ["a", ""]}, "input[1]", "is an empty text"),
        ({"input": ["a", 5]}, "input", "must be a string, a list of strings"),
        ({"input": [[]]}, "input", "has no tokens"),
        ({"input": [[99999]]}, "input", "ids are 0 to 319"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "at most 2048"),
        ({"input": "x" * 100}, "input", "has 101 tokens; .* takes 100.*truncate_prompt_tokens"),
        ({"input": "a", "dimensions": 65}, "dimensions", "1 to 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "prompt_name": "nobody"}, "prompt_name", "document, query"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype", "not supported"),
        ({"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "the tokenizer adds 1"),
        ({"input": "a", "model": "rank"}, "model", "is no embedding model"),
        ({}, "input", "required"),
    ],
)
async def test_what_is_wrong_is_a_400_that_names_it(
    world: PoolingWorld, body: dict[str, Any], param: str, message: str
):
    found, text = await world.error(**body)
    assert found == param
    assert re.search(message, text), text


async def test_what_is_too_long_names_the_model_as_it_is_served(world: PoolingWorld):
    _, message = await world.error("/rerank", model="rank", query="a", documents=["b" * 4000])
    assert "; rank takes" in message


async def test_unknown_models_are_a_404(world: PoolingWorld):
    assert (await world.error(status=404, input="a", model="nobody"))[0] == "model"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_a_model_that_only_embeds_writes_no_text(world: PoolingWorld, path: str, body: dict[str, Any]):
    param, message = await world.error(path, **body)
    assert param == "model"
    assert "gives vectors at /v1/embeddings, and generates no text" in message


# --- many inputs ------------------------------------------------------------------------------------------------------


async def test_many_inputs_hold_half_of_the_seats_and_come_in_order(
    world: PoolingWorld, monkeypatch: pytest.MonkeyPatch
):
    engine, most = world.engine(), 0
    submit = engine.submit

    def counted(*args: Any) -> Any:
        nonlocal most
        stream = submit(*args)
        most = max(most, engine.num_streams)
        return stream

    monkeypatch.setattr(engine, "submit", counted)
    inputs = [[1 + index % 50] * (1 + index % 40) for index in range(300)]
    answer = await world.ok(input=inputs)
    assert most == NUM_SEATS // 2
    assert [item["index"] for item in answer["data"]] == list(range(300))
    for index in (0, 7, 299):
        assert cosine(np.array(answer["data"][index]["embedding"]), world.tiny.expected(inputs[index])) >= 0.9999
    assert answer["usage"]["total_tokens"] == sum(map(len, inputs))
    assert world.stats().num_cached_blocks == 0


async def test_an_input_that_loses_its_place_in_a_full_queue_enters_again(
    world: PoolingWorld, monkeypatch: pytest.MonkeyPatch
):
    submit, num_submitted = world.engine().submit, 0

    def displaced(*args: Any) -> Any:
        nonlocal num_submitted
        num_submitted += 1
        stream = submit(*args)
        if num_submitted in (3, 20, 21):
            stream.abort()
            stream.fail(QueueFullError("The queue is full.", "displaced"))
        return stream

    monkeypatch.setattr(world.engine(), "submit", displaced)
    inputs = [[1 + index] * 30 for index in range(30)]
    answer = await world.ok(input=inputs)
    assert num_submitted == 33
    for item, token_ids in zip(answer["data"], inputs, strict=True):
        assert cosine(np.array(item["embedding"]), world.tiny.expected(token_ids)) >= 0.9999
    num_submitted = 2
    _, message = await world.error(input=[[5] * 30], status=503)
    assert message == "The queue is full."


async def test_a_client_that_leaves_ends_its_inputs(world: PoolingWorld):
    task = asyncio.create_task(world.post(input=[[7] * 90] * MAX_INPUTS))
    await until(lambda: world.stats().num_running)
    task.cancel()
    await until(lambda: not world.engine().num_streams)
    assert world.engine().metrics.finished["abort"] > 0 or not world.context.generations.num_in_progress


async def test_an_admin_ends_a_request_by_its_id(world: PoolingWorld):
    task = asyncio.create_task(world.post(input=[[7] * 90] * MAX_INPUTS, request_id="mine"))
    await until(lambda: world.stats().num_running)
    assert world.context.generations.abort({"mine"}) == 1
    response = await task
    assert response.status_code == 503
    assert "aborted" in response.json()["error"]["message"]


async def test_another_s_input_is_not_behind_all_of_them(world: PoolingWorld):
    task = asyncio.create_task(world.post(input=[[7] * 90] * MAX_INPUTS))
    await until(lambda: world.stats().num_running)
    await world.ok(input="me, too")
    assert not task.done()
    task.cancel()


# --- tiers ------------------------------------------------------------------------------------------------------------


async def test_inputs_hold_no_more_seats_than_the_tier_allows(world: PoolingWorld, monkeypatch: pytest.MonkeyPatch):
    engine, most = world.engine(), 0
    submit = engine.submit

    def counted(*args: Any) -> Any:
        nonlocal most
        stream = submit(*args)
        most = max(most, engine.num_streams)
        return stream

    monkeypatch.setattr(engine, "submit", counted)
    await world.ok(tier="two", input=[[5] * 20] * 50)
    assert most == 2


async def test_all_inputs_of_a_request_take_one_of_the_tier_s_seats(world: PoolingWorld):
    task = asyncio.create_task(world.post(tier="two", input=[[7] * 90] * MAX_INPUTS, request_id="many"))
    await until(lambda: world.stats().num_running)
    chat = {"model": "both", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    await world.ok("/v1/chat/completions", tier="two", **chat)
    other = asyncio.create_task(world.post(tier="two", input=[[7] * 90] * MAX_INPUTS, request_id="more"))
    await until(lambda: world.context.generations.num_in_progress == 2)
    _, message = await world.error("/v1/chat/completions", 429, tier="two", **chat)
    assert "2 answers are in progress and the request asks for 1" in message
    world.context.generations.abort({"many", "more"})
    await asyncio.gather(task, other)


async def test_inputs_of_several_requests_share_the_tier_s_seats(world: PoolingWorld, monkeypatch: pytest.MonkeyPatch):
    engine, found = world.engine(), []
    submit = engine.submit

    def counted(*args: Any) -> Any:
        stream = submit(*args)
        if world.context.generations.num_in_progress == 2:
            found.append(engine.num_streams)
        return stream

    monkeypatch.setattr(engine, "submit", counted)
    both = [world.ok(tier="four", input=[[5] * 20] * 100) for _ in range(2)]
    await asyncio.gather(*both)
    assert len(found) > 50
    assert max(found[10:]) == 4, "beyond the first ones, which entered before there were two requests"


async def test_tokens_and_requests_a_minute_count(world: PoolingWorld):
    await world.ok(tier="minute", input=[[5] * 20] * 2)
    _, message = await world.error(status=429, tier="minute", input=[[5] * 20])
    assert "40 tokens were used within a minute" in message
    assert (await world.error(tier="minute", input=[[5] * 20] * 3))[0] == "input_tokens"


async def test_a_tier_s_context_bounds_each_input(world: PoolingWorld):
    await world.ok(tier="small", input=[[5] * 19] * 3)
    param, _ = await world.error(tier="small", input=[[5] * 30])
    assert param == "input_tokens"


async def test_floors_make_them_wait(world: PoolingWorld, monkeypatch: pytest.MonkeyPatch):
    engine = world.engine()
    submit, found = engine.submit, []

    def seen(request: Any) -> Any:
        found.append(request.priority)
        return submit(request)

    monkeypatch.setattr(engine, "submit", seen)
    await world.ok(tier="floored", input="a")
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        await world.ok(path, tier="floored", query="a", documents=["b"])
    await world.ok(tier="plain", input="a", priority=1)
    await world.ok(tier="plain", input="a")
    assert set(found[:-1]) == {Priority.LOW}
    assert found[-1] is Priority.NORMAL


# --- rerank and score -------------------------------------------------------------------------------------------------

DOCUMENTS = ["Paris", "Beijing is the capital of China.", "Gravity"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_rerank_gives_the_best_first_with_their_places(world: PoolingWorld, path: str):
    body = {
        "model": "rank",
        "query": "capital of China?",
        "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, {"text": DOCUMENTS[2], "title": None}],
    }
    answer = await world.ok(path, **body)
    scored = await world.ok("/v1/score", model="rank", text_1="capital of China?", text_2=DOCUMENTS)
    scores = [item["score"] for item in scored["data"]]
    results = answer["results"]
    assert [item["relevance_score"] for item in results] == sorted(scores, reverse=True)
    assert [scores[item["index"]] for item in results] == [item["relevance_score"] for item in results]
    assert [item["document"]["text"] for item in results] == [DOCUMENTS[item["index"]] for item in results]
    assert answer["model"] == "rank"
    assert answer["usage"]["total_tokens"] == scored["usage"]["total_tokens"] > 0
    short = await world.ok(path, **body, top_n=1, return_documents=False)
    assert short["results"] == [{key: results[0][key] for key in ("index", "relevance_score")}]


async def test_an_instruction_is_part_of_what_is_asked(world: PoolingWorld):
    body = {"model": "rank", "query": "q", "documents": ["d"]}
    plain, asked = [(await world.ok("/rerank", **body, **more))["results"] for more in ({}, {"instruction": "Be odd"})]
    assert plain[0]["relevance_score"] != asked[0]["relevance_score"]


async def test_scores_pair_one_with_all_or_each_with_each(world: PoolingWorld):
    async def scores(**body: Any) -> list[float]:
        answer = await world.ok("/v1/score", **body)
        assert answer["object"] == "list"
        assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
        return [item["score"] for item in answer["data"]]

    each = await scores(text_1=["a", "b"], text_2=["c", "d"])
    assert each == [(await scores(text_1=a, text_2=b))[0] for a, b in (("a", "c"), ("b", "d"))] == pytest.approx(each)
    assert await scores(queries="a", documents=["c", "d"]) == pytest.approx(await scores(text_1="a", text_2=["c", "d"]))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "", "documents": ["a", "b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["b", {"image": "x"}]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["b", {"text": "c", "title": "d"}]}, "documents[1]"),
        ("/rerank", {"query": {"text": "a", "title": "b"}, "documents": ["c"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["b" * 4000], "model": "rank"}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "", "text_2": ["a", "b"]}, "text_1"),
        ("/v1/score", {"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1[1]"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ],
)
async def test_wrong_pairs_are_named(world: PoolingWorld, path: str, body: dict[str, Any], param: str):
    assert (await world.error(path, **body))[0] == param


async def test_a_member_of_a_document_that_would_not_be_read_is_named(world: PoolingWorld):
    _, message = await world.error("/rerank", query="a", documents=[{"text": "b", "image": None, "title": "c"}])
    assert "documents[0]: 'title' would not be read, only text is" in message
