"""The vision encoder fails at an image: that request ends, and nothing else changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from mlx_server.engine.engine import EngineState
from mlx_server.errors import ServeError
from mlx_server.request import Priority
from mlx_server.runtime import image_executor, vision
from tests.engine.vision.test_image_answers import NUM_TOKENS, QUESTION, answer, answers, ask, engine_of
from tests.vision_worlds import picture, plain_greedy, prompt_of, tiny_vlm


def fail_at(monkeypatch: pytest.MonkeyPatch, image: object, times: int) -> Callable[[], int]:
    """Has the encoder fail as often at an image; how often it has been asked for it."""
    asked = 0

    class Failing(vision.ImagePieces):
        def __init__(self, model, token_ids, inputs):
            nonlocal asked
            super().__init__(model, token_ids, inputs)
            self.fails = inputs is image.inputs and asked < times
            asked += inputs is image.inputs

        def submit(self, num_outputs):
            if self.fails and self.num_left < 10:  # most of it is done
                raise RuntimeError("[metal::malloc] no room")
            return super().submit(num_outputs)

    monkeypatch.setattr(vision, "ImagePieces", Failing)
    monkeypatch.setattr(image_executor, "_PIECE_S", 0.0)  # else tiny models have few pieces
    return lambda: asked


@pytest.mark.parametrize("chunk", [None, 11])
async def test_a_request_whose_image_cannot_be_encoded_ends_alone(monkeypatch, chunk):
    vlm = tiny_vlm("qwen2_5_vl")
    bad, good = picture("qwen2_5_vl", 1), picture("qwen2_5_vl", 2)
    others = [
        prompt_of([range(1, 50)]),
        prompt_of([range(5, 15), good, QUESTION]),
        prompt_of([range(90, 97)]),
    ]
    failing = prompt_of([range(5, 40), bad, QUESTION, QUESTION, QUESTION])
    wanted = [plain_greedy(vlm, prompt, NUM_TOKENS) for prompt in others]
    async with engine_of("qwen2_5_vl", chunk=chunk) as engine:
        num_asked = fail_at(monkeypatch, bad, times=1)
        expected = asyncio.create_task(answer(engine, "bad", failing))
        assert await answers(engine, others) == wanted
        with pytest.raises(ServeError, match=r"encoder failed on an image .* RuntimeError: \[metal::malloc\]"):
            await expected
        assert num_asked() == 1, "what is left of its chunks asks no more"
        assert engine.state is EngineState.READY
        engine.scheduler.check_integrity()
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert await answer(engine, "again", failing) == plain_greedy(vlm, failing, NUM_TOKENS)


async def test_nobody_hits_what_was_computed_without_its_image(monkeypatch):
    vlm, image = tiny_vlm("qwen2_5_vl"), picture("qwen2_5_vl", 1)
    prompt = prompt_of([range(5, 40), image, QUESTION, QUESTION, QUESTION])
    wanted = plain_greedy(vlm, prompt, NUM_TOKENS)
    async with engine_of("qwen2_5_vl", max_num_batched_tokens=256) as engine:
        fail_at(monkeypatch, image, times=1)
        said = await asyncio.gather(*[answer(engine, f"r{n}", prompt) for n in range(4)], return_exceptions=True)
        assert [isinstance(one, ServeError) for one in said].count(True) == 1
        assert [one for one in said if not isinstance(one, ServeError)] == [wanted] * 3
        assert engine.stats().num_images_encoded == 2


async def test_embeddings_of_cut_images_are_kept_for_one_at_a_time(monkeypatch):
    prompts = [prompt_of([range(n, n + 3), picture("qwen2_5_vl", n), QUESTION]) for n in (5, 6, 7, 8)]
    async with engine_of("qwen2_5_vl", chunk=8) as engine:
        images = engine._loaded_parts().runner.images
        images.max_bytes = 0
        held: list[int] = []
        rows = images.rows

        def counting(*args):
            result = rows(*args)
            held.append(len(images._encoded))
            return result

        monkeypatch.setattr(images, "rows", counting)
        await answers(engine, prompts)
        assert max(held) == 1, "each image takes three chunks"
        assert engine.stats().num_images_encoded == 4


@pytest.mark.parametrize("ends", ["request", "model"])
async def test_the_encoder_stops_in_the_middle_of_an_image(monkeypatch, ends):
    monkeypatch.setattr(image_executor, "_PIECE_S", 0.0)
    left: list[int] = []
    submit = vision.ImagePieces.submit

    def counting(pieces, num_outputs):
        left.append(pieces.num_left)
        if len(left) == 3:
            loop.call_soon_threadsafe(lambda: (ends == "request" and stream.abort(), stopped.set()))
        time.sleep(0.01)
        return submit(pieces, num_outputs)

    monkeypatch.setattr(vision.ImagePieces, "submit", counting)
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    async with engine_of("gemma3n") as engine:
        stream = engine.submit(ask("seeing", prompt_of([range(5, 15), picture("gemma3n", 1), QUESTION])))
        if ends == "request":
            await stopped.wait()
            assert await answer(engine, "other", prompt_of([range(1, 50)]))
            assert engine.stats().num_running == engine.stats().num_waiting == 0
            assert engine._loaded_parts().runner.images.num_bytes == 0
        else:
            await stopped.wait()
    assert 3 <= len(left) < left[0] / 2


async def test_an_image_that_gives_way_to_a_better_tier_s_is_encoded_after_it(monkeypatch):
    monkeypatch.setattr(image_executor, "_PIECE_S", 0.0)
    vlm, low, high = tiny_vlm("gemma3n"), picture("gemma3n", 1), picture("gemma3n", 2)
    prompts = [prompt_of([range(5, 15), image, QUESTION]) for image in (low, high)]
    wanted = [plain_greedy(vlm, prompt, NUM_TOKENS) for prompt in prompts]
    begun: list[tuple[str, int]] = []

    class Slow(vision.ImagePieces):
        def __init__(self, model, token_ids, inputs):
            super().__init__(model, token_ids, inputs)
            self.name = "low" if inputs is low.inputs else "high"

        def submit(self, num_outputs):
            begun.append((self.name, self.num_left))
            if len(begun) == 3:
                loop.call_soon_threadsafe(is_begun.set)
            time.sleep(0.01)
            return super().submit(num_outputs)

    monkeypatch.setattr(vision, "ImagePieces", Slow)
    loop, is_begun = asyncio.get_running_loop(), asyncio.Event()
    async with engine_of("gemma3n") as engine:
        stream = engine.submit(ask("low", prompts[0], priority=Priority.LOW))
        await is_begun.wait()
        said = [token_id async for delta in engine.submit(ask("high", prompts[1])) for token_id in delta.token_ids]
        assert said == wanted[1]
        assert [token_id async for delta in stream for token_id in delta.token_ids] == wanted[0]
        assert engine.stats().num_images_encoded == 3
    names = [name for name, _ in begun]
    first, last = names.index("high"), len(names) - names[::-1].index("high")
    assert set(names[first:last]) == {"high"}
    assert begun[first - 1][1] > 1, "it was not finished"
    assert begun[last:] == [("low", left) for _, left in begun[first:last]], "it is begun again, and has as many pieces"
