"""Images in prompts: what an engine answers is what mlx-vlm answers, whoever is in the batch, and no image stands for
another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from mlx_server.batching.speculation import drafting
from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.parts import GivenModels
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.errors import InvalidRequestError
from mlx_server.request import PoolingParams
from mlx_server.runtime import image_executor
from mlx_server.runtime.models.loader import LoadedModel
from mlx_server.runtime.vision import ImagePieces
from tests.conformance import preempt_every
from tests.drafters import always
from tests.engine_worlds import built, greedy
from tests.heads import head_weights, save_head
from tests.tiny_models import byte_tokenizer, save_model_folder
from tests.vision_configs import CONFIGS, IMAGE
from tests.vision_worlds import Prompt, picture, plain_greedy, prompt_of, tiny_vlm

QUESTION = list(range(40, 60))
NUM_TOKENS = 8


@asynccontextmanager
async def engine_of(
    model_type: str,
    *,
    cache: dict[str, Any] | None = None,
    chunk: int | None = None,
    backend: Any = "auto",
    **scheduler: Any,
) -> AsyncIterator[AsyncEngine]:
    settings = Config(
        model=ModelConfig(model="tiny", max_model_len=512, attention_backend=backend),
        cache=CacheConfig(**{"num_kv_blocks": 64, **(cache or {})}),
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "speculate": "off", **scheduler}),
    )
    """`chunk` bounds a prompt's share of a step."""
    engine = AsyncEngine(settings, given=GivenModels(tiny_vlm(model_type).loaded), max_chunk_tokens=chunk)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def ask(name: str, prompt: Prompt, num_tokens: int = NUM_TOKENS, **more: Any) -> GenerationRequest:
    ids, images = prompt
    return GenerationRequest(request_id=name, prompt_token_ids=ids, images=images, sampling=greedy(num_tokens), **more)


async def answer(engine: AsyncEngine, name: str, prompt: Prompt, num_tokens: int = NUM_TOKENS) -> list[int]:
    stream = engine.submit(ask(name, prompt, num_tokens))
    return [token_id async for delta in stream for token_id in delta.token_ids]


async def answers(engine: AsyncEngine, prompts: Sequence[Prompt]) -> list[list[int]]:
    return list(await asyncio.gather(*[answer(engine, f"r{n}", prompt) for n, prompt in enumerate(prompts)]))


def mixed(model_type: str) -> list[Prompt]:
    """Text alone, one image, two images, and text again."""
    first, second = picture(model_type, 1), picture(model_type, 2)
    return [
        prompt_of([range(1, 50)]),
        prompt_of([range(5, 15), first, QUESTION]),
        prompt_of([range(5, 25), second, range(30, 40), first, QUESTION]),
        prompt_of([range(90, 97)]),
    ]


@lru_cache(maxsize=32)
def mixed_answers(model_type: str) -> list[list[int]]:
    """mlx-vlm's own."""
    return [plain_greedy(tiny_vlm(model_type), prompt, NUM_TOKENS) for prompt in mixed(model_type)]


@pytest.mark.parametrize("model_type", CONFIGS)
async def test_answers_are_those_of_mlx_vlm_alone_and_in_mixed_batches(model_type):
    prompts, wanted = mixed(model_type), mixed_answers(model_type)
    async with engine_of(model_type) as engine:
        assert engine.info.no_vision == ""
        assert [await answer(engine, f"a{n}", prompt) for n, prompt in enumerate(prompts)] == wanted
        engine.reset_prefix_cache()
        assert await answers(engine, prompts) == wanted
    chunk = 17 if prompts[1][1][0].is_bidirectional else 11
    async with engine_of(model_type, chunk=chunk) as engine:  # chunks end within images, where they may
        assert await answers(engine, prompts) == wanted


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5", "gemma4", "gemma4_moe"])
async def test_text_is_answered_the_same_beside_images(model_type):
    """But for the order of sums in float32: in gemma4_moe, mlx-vlm's own logprobs differ by 2.3e-4 between chunks of a
    prompt, and by 3.5e-4 after rounding of all weights."""
    prompt = prompt_of([range(1, 50), [IMAGE], range(50, 60)])  # a placeholder by its id, without an image, is text
    text = greedy(NUM_TOKENS, logprobs=2)
    async with engine_of(model_type, cache={"prefix_caching": False}) as engine:

        async def logprobs(*others: Prompt) -> list[Any]:
            streams = [engine.submit(ask(f"o{n}", other)) for n, other in enumerate(others)]
            stream = engine.submit(GenerationRequest(request_id="text", prompt_token_ids=prompt[0], sampling=text))
            seen = [entry async for delta in stream for entry in delta.logprobs]
            for other in streams:
                async for _ in other:
                    pass
            return seen

        alone, beside = await logprobs(), await logprobs(*mixed(model_type)[1:3])
    ids = [entry.token.token_id for entry in alone]
    assert ids == [entry.token.token_id for entry in beside]
    for one, other in zip(alone, beside, strict=True):
        assert other.token.logprob == pytest.approx(one.token.logprob, abs=1e-3)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3", "gemma4_moe"])
async def test_equal_placeholders_of_other_images_are_never_hit(model_type):
    vlm = tiny_vlm(model_type)
    first, second = picture(model_type, 1), picture(model_type, 3)
    assert first.num_tokens == second.num_tokens
    prompts = [prompt_of([range(5, 40), image, QUESTION]) for image in (first, second)]
    assert prompts[0][0] == prompts[1][0]
    wanted = [plain_greedy(vlm, prompt, NUM_TOKENS) for prompt in prompts]
    assert wanted[0] != wanted[1]
    async with engine_of(model_type) as engine:
        for turn in range(3):
            assert await answers(engine, prompts) == wanted
            stats = engine.stats()
            hits = stats.num_prefix_hit_tokens
            # The text before the image is one block; of an image's own prompt all whole blocks but the last token's.
            own = (len(prompts[0][0]) - 1) // 32 * 32
            assert hits == 32 * (turn == 0) + 2 * own * turn + 32 * (turn > 0)
            assert stats.num_images_encoded == 2


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5", "gemma3", "gemma4", "lfm2_vl"])
async def test_the_second_turn_computes_no_image_token_and_runs_no_encoder(model_type):
    vlm = tiny_vlm(model_type)
    ids, images = prompt_of([range(5, 15), picture(model_type, 2), QUESTION, range(100, 140)])
    async with engine_of(model_type) as engine:
        said = await answer(engine, "first", (ids, images), 40)
        assert IMAGE not in said, "mlx-vlm itself would take it for a placeholder"
        before = engine.stats()
        assert before.num_images_encoded == 1
        turn = (ids + said + QUESTION, images)
        assert await answer(engine, "second", turn) == plain_greedy(vlm, turn, NUM_TOKENS)
        after = engine.stats()
    assert after.num_images_encoded == 1
    assert after.num_prompt_tokens_computed - before.num_prompt_tokens_computed < len(turn[0]) - images[0].end


async def test_an_image_is_encoded_once_while_its_embeddings_are_kept():
    image = picture("qwen2_5_vl", 1)
    prompts = [prompt_of([range(first, first + 40), image, QUESTION]) for first in (5, 50, 95)]
    async with engine_of("qwen2_5_vl") as engine:
        for number, prompt in enumerate(prompts):
            await answer(engine, f"r{number}", prompt)
        assert engine.stats().num_images_encoded == 1
        runner = engine._loaded_parts().runner  # what it keeps has no other place to be read
        assert runner.images is not None
        assert 0 < runner.images.num_bytes <= runner.images.max_bytes
        runner.images.max_bytes = 0  # as with many images: what nobody is in the middle of goes
        for count in (1, 2):
            await answer(engine, "again", prompt_of([range(count, count + 40), image, QUESTION]))
            assert (engine.stats().num_images_encoded, runner.images.num_bytes) == (count, 0)


async def test_images_that_a_chunk_has_cut_are_kept_for_the_next():
    async with engine_of("qwen2_5_vl", chunk=8) as engine:
        runner = engine._loaded_parts().runner
        assert runner.images is not None
        runner.images.max_bytes = 0
        await answers(engine, mixed("qwen2_5_vl"))
        assert engine.stats().num_images_encoded == 3
        assert runner.images.num_bytes == 0


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3n", "deepseekocr"])
async def test_a_stream_has_steps_between_the_pieces_of_an_image(monkeypatch, model_type):
    monkeypatch.setattr(image_executor, "_PIECE_S", 0.0)  # else tiny models have few pieces
    happened: list[str] = []

    def noting(name, original):
        def call(*args):
            happened.append(name)
            return original(*args)

        return call

    monkeypatch.setattr(ImagePieces, "submit", noting("piece", ImagePieces.submit))
    settle = image_executor.ImageExecutor.settle  # on a device where a piece takes 10 ms
    monkeypatch.setattr(image_executor.ImageExecutor, "settle", lambda self, *_: settle(self, 0.01, 0.0))
    prompt = prompt_of([range(5, 15), picture(model_type, 1), QUESTION])
    async with engine_of(model_type) as engine:
        stream = engine.submit(ask("stream", prompt_of([range(1, 50)]), 400))
        await anext(aiter(stream))
        runner = engine._loaded_parts().runner
        monkeypatch.setattr(runner, "launch", noting("step", runner.launch))
        assert await answer(engine, "seeing", prompt) == plain_greedy(tiny_vlm(model_type), prompt, NUM_TOKENS)
        assert engine.stats().num_images_encoded == 1
        stream.abort()
    first, last = happened.index("piece"), len(happened) - happened[::-1].index("piece")
    assert happened[first:last].count("piece") > 20
    assert happened[first:last].count("step") >= 10


async def test_no_image_is_encoded_twice():
    """Whoever shares it."""
    prompts = [prompt_of([range(first, first + 3), *[picture("qwen2_5_vl", first + n) for n in (1, 2)], QUESTION])
               for first in (10, 20, 30)]  # fmt: skip
    prompts += [prompt_of([range(60, 90), *[replace(image, start=0) for image in prompts[1][1]], QUESTION])]
    vlm = tiny_vlm("qwen2_5_vl")
    wanted = [plain_greedy(vlm, prompt, NUM_TOKENS) for prompt in prompts]
    async with engine_of("qwen2_5_vl", max_num_batched_tokens=512) as engine:
        assert await answers(engine, prompts) == wanted
        assert engine.stats().num_images_encoded == 6


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5", "gemma3", "gemma4_moe", "glm4v", "lfm2_vl"])
async def test_preempted_requests_see_their_images_again(model_type):
    async with engine_of(model_type, cache={"prefix_caching": False}) as engine:
        preempt_every(4, engine.scheduler)
        assert await answers(engine, mixed(model_type)) == mixed_answers(model_type)
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5", "gemma4"])
async def test_drafts_do_not_change_what_images_are_answered_with(monkeypatch, model_type):
    monkeypatch.setattr(drafting, "choose_depths", always)
    vlm = tiny_vlm(model_type)
    ids, images = prompt_of([range(5, 15), picture(model_type, 1), QUESTION])
    expected = plain_greedy(vlm, (ids, images), 24)
    prompt = (ids + expected[:12] + QUESTION + expected[:6], images)
    wanted = plain_greedy(vlm, prompt, 24)
    async with engine_of(model_type, speculate="ngram") as engine:
        stream = engine.submit(ask("drafts", prompt, 24, prediction_token_ids=tuple(wanted)))
        assert [token_id async for delta in stream for token_id in delta.token_ids] == wanted
        assert engine.stats().num_accepted_tokens > 0


async def test_aborted_requests_leave_nothing():
    async with engine_of("qwen2_5_vl", chunk=16) as engine:
        runner = engine._loaded_parts().runner
        assert runner.images is not None
        runner.images.max_bytes = 0
        for number in range(8):  # the last one ends within its image
            image = picture("qwen2_5_vl", number)
            stream = engine.submit(ask(f"r{number}", prompt_of([range(5, 19), image, QUESTION])))
            steps = engine.stats().num_steps
            while number % 3 and engine.stats().num_steps < steps + number % 3:  # noqa: ASYNC110 - no event of ours
                await asyncio.sleep(0)
            stream.abort()
        assert await answer(engine, "last", prompt_of([range(90, 97)]))
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
        assert runner.images.num_bytes == 0


async def test_what_cannot_be_is_refused_at_the_door():
    ids, (image,) = prompt_of([range(5, 15), picture("qwen2_5_vl", 1), QUESTION])
    async with engine_of("qwen2_5_vl") as engine:
        for images, expected in (
            ((replace(image, start=len(ids) - 3),), "within it"),
            ((replace(image, start=-1),), "within it"),
            ((image, image), "behind those of the image before"),
            ((replace(image, num_tokens=0),), "at least one"),
            ((replace(image, digest=b"short"),), "has 5 bytes; it must have 32"),
            ((replace(image, num_tokens=image.num_tokens - 1),), "Image 0 has 19 placeholders, and its arrays make 20"),
            ((replace(image, inputs={**image.inputs, "image_grid_thw": [[1, 3, 8]]}),), "arrays .* do not fit"),
            ((replace(image, inputs={}),), "arrays .* do not fit"),
            ((replace(image, start=image.start - 1),), "placeholders .* do not fit"),
        ):
            with pytest.raises(InvalidRequestError, match=expected):
                engine.submit(ask("wrong", (ids, images)))
        with pytest.raises(InvalidRequestError, match="made of text"):
            engine.submit(ask("vector", (ids, (image,)), pooling=PoolingParams()))
        assert engine.num_streams == 0
    ids, (tile,) = prompt_of([picture("idefics3", 1), QUESTION])
    async with engine_of("idefics3") as engine:
        for inputs in ({"pixel_attention_mask": np.ones((1, 1, 9, 9))}, {"pixel_values": np.zeros((1, 1, 3, 56, 56))}):
            with pytest.raises(InvalidRequestError, match=r"arrays .* do not fit"):
                engine.submit(ask("wrong", (ids, (replace(tile, inputs={**tile.inputs, **inputs}),))))
    model, config = built("llama")
    settings = Config(model=ModelConfig(model="text"), cache=CacheConfig(num_kv_blocks=32))
    engine = AsyncEngine(settings, given=GivenModels(LoadedModel("text", model, dict(config), None)))
    await engine.start()
    try:
        assert engine.info.no_vision == "it is a text model"
        with pytest.raises(InvalidRequestError, match="text takes no images: it is a text model"):
            engine.submit(ask("blind", (ids, (image,))))
    finally:
        await engine.stop()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
async def test_a_prefix_may_end_within_an_image_that_sees_both_ways(backend):
    """What is cached of it has seen all of it, and its rest is computed in one step."""
    vlm, image = tiny_vlm("gemma3"), picture("gemma3", 1)
    prompts = [prompt_of([range(5, 28), image, range(first, first + 30)]) for first in (40, 80)]
    assert prompts[0][1][0].start < 32 < prompts[0][1][0].end
    async with engine_of("gemma3", backend=backend, chunk=20) as engine:
        for count, prompt in enumerate(prompts):
            assert await answer(engine, f"r{count}", prompt) == plain_greedy(vlm, prompt, NUM_TOKENS)
            assert engine.stats().num_prefix_hit_tokens == 32 * count


async def test_an_image_that_is_larger_than_a_step_is_refused():
    ids, images = prompt_of([range(5, 15), picture("gemma3", 1), QUESTION])
    async with engine_of("gemma3", chunk=15) as engine:
        with pytest.raises(InvalidRequestError, match="has 16 tokens, which tiny computes in one step; here a step has "
                           r"at most 15\. Start the server with --max-num-batched-tokens 16 or more"):  # fmt: skip
            engine.submit(ask("large", (ids, images)))
        assert await answer(engine, "text", prompt_of([range(5, 15)]))


def test_the_placeholder_is_what_the_configuration_says():
    assert prompt_of([picture("qwen2_5_vl", 1)])[0].count(IMAGE) == picture("qwen2_5_vl", 1).num_tokens


@pytest.mark.usefixtures("always_drafts")
async def test_a_models_own_head_drafts_behind_images(tmp_path):
    vlm = tiny_vlm("qwen3_5")
    folder = save_model_folder(vlm.loaded.model, vlm.loaded.config, tmp_path, byte_tokenizer())
    save_head(folder, head_weights("qwen3_5", text_config=CONFIGS["qwen3_5"]["text_config"]))
    prompts = mixed("qwen3_5")
    settings = Config(
        model=ModelConfig(model=str(folder), max_model_len=512),
        cache=CacheConfig(num_kv_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, speculate="mtp"),
    )
    engine = AsyncEngine(settings)
    await engine.start()
    try:
        assert await answers(engine, prompts) == mixed_answers("qwen3_5")
        assert engine.stats().num_draft_tokens > 0
        assert engine.stats().num_images_encoded == 2
    finally:
        await engine.stop()
