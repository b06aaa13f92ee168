"""Adapters that come and go while their model serves."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.config import BLOCK_SIZE, CacheConfig, Config, ModelConfig
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.loading import find_content
from mlx_server.engine.memory.need import adapter_bytes
from mlx_server.engine.parts import Surroundings
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.errors import DownloadError, InsufficientMemoryError, ModelLoadError
from mlx_server.model_entries import Adapter
from mlx_server.outputs import CompletionDelta
from tests.adapter_files import plain_model, save_as_peft, write_adapter, write_model
from tests.api.worlds import until
from tests.engine_worlds import greedy, random_prompts
from tests.tiny_models import reference_generate

PROMPTS = random_prompts((40, 5, 33), seed=5)
NUM_TOKENS = 6


@asynccontextmanager
async def serving(folder: Path, **cache: Any) -> AsyncIterator[AsyncEngine]:
    model = ModelConfig(model=str(folder), served_model_name="tiny", max_model_len=256)
    engine = AsyncEngine(Config(model=model, cache=CacheConfig(num_kv_blocks=64, **cache)))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def load(engine: AsyncEngine, name: str, path: Path) -> None:
    adapter = find_content(Adapter(name, str(path)))
    await engine.adapters.load(adapter, adapter_bytes(adapter, engine.config.model))
    engine.names = replace(engine.names, adapters=tuple(dict.fromkeys((*engine.names.adapters, name))))


async def unload(engine: AsyncEngine, name: str) -> None:
    """Returns when the adapter is freed."""
    engine.names = replace(engine.names, adapters=tuple(one for one in engine.names.adapters if one != name))
    engine.adapters.unload(name)
    await until_freed(engine)


async def until_freed(engine: AsyncEngine) -> None:
    rows = engine._loaded_parts().loaded.adapters
    await until(lambda: all(key is None or key in rows.by_name.values() for key in rows.keys))


async def ask(
    engine: AsyncEngine, prompt: Sequence[int], adapter: str | None, num_tokens: int = NUM_TOKENS
) -> tuple[list[int], CompletionDelta]:
    request_id = f"{adapter} {len(prompt)} {asyncio.get_running_loop().time()}"
    sampling = greedy(num_tokens)
    stream = engine.submit(
        GenerationRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling, adapter=adapter)
    )
    deltas = [delta async for delta in stream]
    return [token_id for delta in deltas for token_id in delta.token_ids], deltas[-1]


async def answers(engine: AsyncEngine, adapters: Sequence[str | None]) -> dict[str | None, list[list[int]]]:
    """All in one batch."""
    asked = [ask(engine, prompt, adapter) for adapter in adapters for prompt in PROMPTS]
    got = [token_ids for token_ids, _ in await asyncio.gather(*asked)]
    return {adapter: got[3 * place : 3 * place + 3] for place, adapter in enumerate(adapters)}


def wanted(folder: Path, path: Path | None) -> list[list[int]]:
    model = plain_model(folder, path)
    return [reference_generate(model, prompt, NUM_TOKENS).token_ids for prompt in PROMPTS]


def kinds(engine: AsyncEngine) -> list[str]:
    return [type(module).__name__ for module in engine._loaded_parts().loaded.model.modules()]


@pytest.mark.parametrize(
    ("architecture", "bits", "keys"),
    [
        ("llama", None, None),
        ("llama", 4, ["model.embed_tokens", "lm_head"]),
        ("qwen3_moe", 4, None),
        ("qwen3_5", None, None),
    ],
)
async def test_they_join_and_leave_a_model_that_answers_as_mlx_lm_does(
    architecture: str, bits: int | None, keys: list[str] | None, tmp_path: Path
) -> None:
    """Of unlike ranks and layers: one comes beside the other, one goes, a third takes its place, and at the end the
    layers are those of the model again."""
    folder = write_model(architecture, tmp_path / "base", bits=bits, tie_word_embeddings=keys is None)
    paths = {
        None: None,
        "wide": write_adapter(folder, tmp_path / "wide", rank=6, scale=3.0, seed=1, keys=keys),
        "late": write_adapter(folder, tmp_path / "late", rank=2, scale=8.0, num_layers=1, seed=2),
        "third": write_adapter(folder, tmp_path / "third", rank=3, seed=3),
    }
    expected = {name: wanted(folder, path) for name, path in paths.items()}
    assert len({str(some) for some in expected.values()}) == 4
    async with serving(folder) as engine:
        share, plain = engine._loaded_parts().share, kinds(engine)
        need = share.need
        assert (await answers(engine, [None]))[None] == expected[None]
        for name in ("wide", "late"):
            await load(engine, name, paths[name])
        assert await answers(engine, [None, "wide", "late"]) == {
            name: expected[name] for name in (None, "wide", "late")
        }
        assert engine.stats().weight_bytes == share.need.weights_bytes > need.weights_bytes
        await unload(engine, "wide")
        await load(engine, "third", paths["third"])
        assert engine._loaded_parts().loaded.adapters.keys.count(None) == 0, "the free place was taken"
        assert await answers(engine, ["third", None, "late"]) == {
            name: expected[name] for name in ("third", None, "late")
        }
        await unload(engine, "late")
        await unload(engine, "third")
        await until(lambda: share.need == need)
        assert kinds(engine) == plain
        assert (await answers(engine, [None]))[None] == expected[None]


async def test_files_that_are_overwritten_while_they_are_loaded_are_refused(tmp_path: Path) -> None:
    """What is cached for the digest of the old ones is not theirs."""
    folder = write_model("llama", tmp_path / "base")
    own = write_adapter(folder, tmp_path / "own", seed=1)
    other = write_adapter(folder, tmp_path / "other", seed=2)
    async with serving(folder) as engine:
        need, plain = engine._loaded_parts().share.need, kinds(engine)
        adapter = find_content(Adapter("own", str(own)))
        shutil.copytree(other, own, dirs_exist_ok=True)
        with pytest.raises(
            ModelLoadError, match=r"The files of the adapter .*/own changed while they were read: load it"
        ):
            await engine.adapters.load(adapter, adapter_bytes(adapter, engine.config.model))
        await until(lambda: (engine._loaded_parts().share.need, kinds(engine)) == (need, plain))
        await load(engine, "own", own)
        assert (await answers(engine, ["own"]))["own"] == wanted(folder, other)


async def test_files_that_are_gone_from_the_hubs_cache_once_they_are_loaded_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("llama", tmp_path / "base")
    own = write_adapter(folder, tmp_path / "own")

    def refetch(_: object) -> None:
        raise DownloadError("The hub cannot be reached.")

    monkeypatch.setattr("mlx_server.engine.adapters.check_unchanged", refetch)
    async with serving(folder) as engine:
        need, plain = engine._loaded_parts().share.need, kinds(engine)
        with pytest.raises(DownloadError):
            await load(engine, "own", own)
        await until(lambda: (engine._loaded_parts().share.need, kinds(engine)) == (need, plain))


async def test_files_that_are_overwritten_while_their_model_is_loaded_are_refused(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    own, other = (write_adapter(folder, tmp_path / name, seed=seed) for seed, name in enumerate(("own", "other")))
    config = Config(model=ModelConfig(model=str(folder), adapter=f"own={own}"))

    def overwrite(_: float) -> None:
        shutil.copytree(other, own, dirs_exist_ok=True)

    around = Surroundings.alone(config.memory)
    with pytest.raises(ModelLoadError, match="changed while they were read"):
        await AsyncEngine(config, replace(around, on_progress=overwrite)).start()
    around.close()


async def test_a_request_keeps_the_adapter_with_which_it_began(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    first = write_adapter(folder, tmp_path / "first", seed=1)
    second = save_as_peft(write_adapter(folder, tmp_path / "second", rank=2, seed=2), tmp_path / "peft")
    prompt, num_tokens = PROMPTS[0], 60
    long = reference_generate(plain_model(folder, first), prompt, num_tokens).token_ids
    async with serving(folder) as engine:
        await load(engine, "own", first)
        task = asyncio.create_task(ask(engine, prompt, "own", num_tokens))
        await until(lambda: engine.stats().num_running > 0)
        await load(engine, "own", second)
        assert len(engine._loaded_parts().loaded.adapters.keys) == 2
        new, _ = await ask(engine, prompt, "own")
        assert new == reference_generate(plain_model(folder, tmp_path / "second"), prompt, NUM_TOKENS).token_ids
        assert (await task)[0] == long
        await until_freed(engine)
        assert (await ask(engine, prompt, "own"))[0] == new


async def test_steps_run_between_the_pieces_of_a_load(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    async with serving(folder) as engine:
        task = asyncio.create_task(ask(engine, PROMPTS[1], None, 200))
        await until(lambda: engine.stats().num_running > 0)
        adapter = write_adapter(folder, tmp_path / "own")
        before = engine.stats().num_steps
        await load(engine, "own", adapter)
        assert engine.stats().num_steps > before + 10
        task.cancel()


async def test_cached_prefixes_are_those_of_the_content(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    paths = [write_adapter(folder, tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    (prompt,) = random_prompts((3 * BLOCK_SIZE + 1,))
    async with serving(folder) as engine:

        async def num_cached(path: Path) -> int | None:
            await load(engine, "own", path)
            return (await ask(engine, prompt, "own"))[1].num_cached_tokens

        hit = 3 * BLOCK_SIZE
        assert [await num_cached(paths[place]) for place in (0, 1, 1, 0)] == [0, 0, hit, hit]


async def test_what_is_refused_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    other = write_adapter(write_model("llama", tmp_path / "small", hidden_size=32), tmp_path / "other")
    broken = write_adapter(folder, tmp_path / "broken")
    weights = mx.load(str(broken / "adapters.safetensors"))
    mx.save_safetensors(
        str(broken / "adapters.safetensors"), {name: array * float("nan") for name, array in weights.items()}
    )
    dora = write_adapter(folder, tmp_path / "dora", "dora")
    good = write_adapter(folder, tmp_path / "good")
    async with serving(folder) as engine:
        share, plain, expected = engine._loaded_parts().share, kinds(engine), wanted(folder, None)
        need = share.need
        refused = ((other, "does not fit"), (broken, "logits are NaN"), (dora, "cannot differ by request"))
        gc.collect()
        gc.disable()  # what is refused is freed at once
        try:
            num_bytes = mx.get_active_memory()
            for path, words in refused:
                with pytest.raises(ModelLoadError, match=words):
                    await load(engine, path.name, path)
                assert mx.get_active_memory() < num_bytes + 4096, "nothing but constants of modules is left"
        finally:
            gc.enable()
        with pytest.raises(InsufficientMemoryError, match="The adapter good needs 1048576 MiB, and no more than"):
            await engine.adapters.load(find_content(Adapter("good", str(good))), 2**40)
        assert (share.need, kinds(engine)) == (need, plain)
        assert engine._loaded_parts().loaded.adapters.by_name == {}
        assert (await answers(engine, [None]))[None] == expected


async def test_an_adapter_that_is_held_stays_for_requests_to_come(tmp_path: Path) -> None:
    """A job of many inputs may have none in the engine for a moment."""
    folder = write_model("llama", tmp_path / "base")
    paths = {name: write_adapter(folder, tmp_path / name, seed=seed) for seed, name in enumerate(("held", "other"))}
    async with serving(folder) as engine:
        await load(engine, "held", paths["held"])
        key, end_hold = engine.hold_adapter("held")
        engine.names = replace(engine.names, adapters=())
        engine.adapters.unload("held")
        await load(engine, "other", paths["other"])  # one change at a time
        request = GenerationRequest(
            request_id="late",
            prompt_token_ids=list(PROMPTS[0]),
            sampling=greedy(NUM_TOKENS),
            adapter="held",
            adapter_key=key,
        )
        got = [token_id async for delta in engine.submit(request) for token_id in delta.token_ids]
        assert got == wanted(folder, paths["held"])[0]
        end_hold()
        await until_freed(engine)
        assert key not in engine._loaded_parts().loaded.adapters.keys
