"""Prefixes on disk with real engines: after a restart the next turn computes what is new, and answers the same."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from mlx_server.batching.blocks.disk_saves import owner_tag
from mlx_server.batching.blocks.disk_tier import DiskTier
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.config import BLOCK_SIZE, load_config
from mlx_server.engine.engine import AsyncEngine, EngineState
from mlx_server.engine.loading import find_content
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.kv_disk.disk import KvDisk
from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.store import RecordStore
from mlx_server.model_entries import Adapter
from mlx_server.outputs import CompletionDelta
from tests.adapter_files import write_adapter
from tests.architectures import config_of
from tests.engine_worlds import greedy, make_folder, on_the_cpu, random_prompts
from tests.tiny_models import build_random, byte_tokenizer, save_model_folder
from tests.vision_worlds import tiny_vlm

pytestmark = on_the_cpu


@pytest.fixture(autouse=True)
def reading_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute a prompt in less than a read takes at least."""
    monkeypatch.setattr(DiskTier, "_pays", lambda self, first, end: end > first)


NUM_TOKENS = 700


@asynccontextmanager
async def serving(folder: Path, disk: Path, **settings: Any) -> AsyncIterator[AsyncEngine]:
    wanted = {
        "model": str(folder),
        "kv_cache_memory": "8MB",
        "max_model_len": 1024,
        "speculate": "off",
        "kv_disk": "64MB",
        "kv_disk_dir": str(disk),
        **settings,
    }
    engine = AsyncEngine(load_config(environ={}, flags={k: v for k, v in wanted.items() if v is not None}))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def answer(
    engine: AsyncEngine, prompt: Sequence[int], num_tokens: int = 20, name: str = "r", **more: Any
) -> tuple[list[int], CompletionDelta]:
    """The tokens, and the last delta."""
    stream = engine.submit(
        GenerationRequest(request_id=name, prompt_token_ids=list(prompt), sampling=greedy(num_tokens), **more)
    )
    deltas = [delta async for delta in stream]
    return [token_id for delta in deltas for token_id in delta.token_ids], deltas[-1]


def run(world: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(world(), 120))


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": False}], ids=["async", "sync"])
def test_a_conversation_goes_on_after_a_restart(tmp_path, settings):
    folder = make_folder(tmp_path / "model")
    (prompt,) = random_prompts([NUM_TOKENS])

    async def world() -> None:
        async with serving(folder, tmp_path / "disk", **settings) as engine:
            first, _ = await answer(engine, prompt)
        next_turn = [*prompt, *first, *random_prompts([50], seed=1)[0]]
        async with serving(folder, tmp_path / "other", kv_disk=None, **settings) as engine:
            wanted, _ = await answer(engine, next_turn)
        async with serving(folder, tmp_path / "disk", **settings) as engine:
            got, last = await answer(engine, next_turn)
            stats = engine.stats()
            num_cached = (NUM_TOKENS + 20 - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert got == wanted
            assert last.num_cached_tokens == stats.num_prompt_tokens_from_disk == num_cached
            assert stats.num_prompt_tokens_computed == len(next_turn) - num_cached
            assert (stats.num_disk_loads, stats.num_blocks_loaded) == (1, num_cached // BLOCK_SIZE)
            engine.scheduler.check_integrity()
            assert engine.scheduler.blocks.num_free_blocks == engine.scheduler.blocks.num_blocks

    run(world)


def test_copies_are_timed_and_nothing_else_is(tmp_path, monkeypatch):
    """Of each step with copies, and of no other."""
    folder, times = make_folder(tmp_path / "model"), Counter[bool]()
    on_step = DiskTier.on_step

    def seen(tier: DiskTier, copies: Any, output: Any) -> None:
        assert (copies is not None) == (output.copy_time_s > 0.0)
        assert output.copy_time_s <= output.step_time_s
        times[copies is not None] += 1
        on_step(tier, copies, output)

    monkeypatch.setattr(DiskTier, "on_step", seen)
    (prompt,) = random_prompts([NUM_TOKENS])

    async def world() -> None:
        for _ in range(2):
            async with serving(folder, tmp_path / "disk") as engine:
                await answer(engine, prompt)

    run(world)
    assert times[True] > 0
    assert times[False] > 0


def test_a_conversation_goes_on_after_its_pool_was_cut(tmp_path):
    """To a single block, as when memory is short; it grows again for the next turn, which has that block still."""
    folder = make_folder(tmp_path / "model")
    (prompt,) = random_prompts([NUM_TOKENS])

    async def world() -> None:
        async with serving(folder, tmp_path / "disk") as engine:
            first, _ = await answer(engine, prompt)
            next_turn = [*prompt, *first, *random_prompts([50], seed=1)[0]]
            blocks = engine.scheduler.blocks
            assert engine.scheduler.shrink(blocks.num_blocks - 1)
            num_blocks = (NUM_TOKENS + 20 - 1) // BLOCK_SIZE
            disk = engine._parts.disk.disk
            while len(disk.store) < num_blocks - 1:  # noqa: ASYNC110 - what is waited for is no event of ours
                await asyncio.sleep(0.01)
            got, last = await answer(engine, next_turn)
            assert blocks.counters.num_pool_cuts == 1
            assert last.num_cached_tokens == num_blocks * BLOCK_SIZE
            assert engine.stats().num_prompt_tokens_from_disk == (num_blocks - 1) * BLOCK_SIZE
        async with serving(folder, tmp_path / "other", kv_disk=None) as engine:
            assert (await answer(engine, next_turn))[0] == got

    run(world)


def test_a_short_prompt_is_not_kept_unless_it_was_hit(tmp_path):
    folder = make_folder(tmp_path / "model")
    (prompt,) = random_prompts([200])

    async def world() -> None:
        async with serving(folder, tmp_path / "disk") as engine:
            await answer(engine, prompt)
            assert len(engine.scheduler.disk.saves) == 0
        async with serving(folder, tmp_path / "disk") as engine:
            _, last = await answer(engine, prompt)
            assert last.num_cached_tokens == 0
            await answer(engine, prompt)
            assert len(engine.scheduler.disk.saves) == 6
        async with serving(folder, tmp_path / "disk") as engine:
            _, last = await answer(engine, prompt)
            assert last.num_cached_tokens == 192

    run(world)


def test_callers_and_weights_that_differ_share_nothing(tmp_path):
    (prompt,) = random_prompts([NUM_TOKENS])
    folder = make_folder(tmp_path / "model")
    other = make_folder(tmp_path / "other")
    config = other / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 10001.0') + "\n")

    async def world() -> None:
        async with serving(folder, tmp_path / "disk") as engine:
            await answer(engine, prompt, extra_keys=("key:ada",))
        async with serving(folder, tmp_path / "disk") as engine:
            _, last = await answer(engine, prompt, extra_keys=("key:bob",))
            assert last.num_cached_tokens == 0
            _, last = await answer(engine, prompt, extra_keys=("key:ada",))
            assert last.num_cached_tokens == NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
        for name, settings in ((other, {}), (folder, {"dtype": "float32", "batch_invariant": True})):
            async with serving(name, tmp_path / "disk", **settings) as engine:
                _, last = await answer(engine, prompt, extra_keys=("key:ada",))
                assert last.num_cached_tokens == 0

    run(world)


def test_adapters_are_known_by_their_files_and_are_nobody_s(tmp_path):
    """What is kept is of everyone who may use the adapter, and of no other adapter of its name."""
    (prompt,) = random_prompts([NUM_TOKENS])
    folder, disk = make_folder(tmp_path / "model"), tmp_path / "disk"
    adapters = [f"tuned={write_adapter(folder, tmp_path / name, seed=seed)}" for seed, name in enumerate("abc")]

    async def num_cached(adapter: str, **more: Any) -> int:
        async with serving(folder, disk, adapter=[adapter, f"other={tmp_path / 'c'}"], **more) as engine:
            _, last = await answer(engine, prompt, adapter="tuned")
            return last.num_cached_tokens

    async def world() -> None:
        assert [await num_cached(adapter) for adapter in adapters[:2]] == [0, 0]
        assert await num_cached(adapters[0]) == NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
        async with serving(folder, disk, adapter=[adapters[0]]) as engine:  # one takes the name while it serves
            await engine.adapters.load(find_content(Adapter("tuned", str(tmp_path / "c"))), 0)
            assert (await answer(engine, prompt, adapter="tuned"))[1].num_cached_tokens == 0
        store = RecordStore(Files(disk), 2**30)
        store.scan()
        assert {record.owner for _, record in store.entries()} == {owner_tag(())}

    run(world)


NOT_PLAIN = ("gemma3_text", "qwen3_next", "deepseek_v3", "recurrent_gemma", "mamba2", "gemma4_text")
"""Sliding windows, recurrent states beside K/V, K/V that modules read by group, windows beside states, states
only, and groups of unequal layers."""


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in ("qwen3_next", "gemma4_text", "deepseek_v3") else [pytest.mark.full])
        for name in NOT_PLAIN
    ],
)
def test_windows_states_and_latent_attention_go_on_after_a_restart(tmp_path, architecture):
    """The next turn computes what is new, and the first turn once more ends at an earlier boundary: both answer as they
    do where the prefix has stayed in memory."""
    config = config_of(architecture)
    folder = save_model_folder(build_random(config, 0), dict(config), tmp_path / "model", byte_tokenizer())
    prompt, more = random_prompts([300, 50])
    disk, at_end, in_prompt = tmp_path / "disk", 320, 288
    settings = {"max_model_len": 512}

    async def world() -> None:
        async with serving(folder, disk, **settings) as engine:
            engine.scheduler.disk.saves.min_prompt_tokens = BLOCK_SIZE
            first, _ = await answer(engine, prompt, 40)
        next_turn = [*prompt, *first, *more]
        async with serving(folder, tmp_path / "other", **{**settings, "kv_disk": None}) as engine:
            assert (await answer(engine, prompt, 40))[0] == first
            wanted, _ = await answer(engine, next_turn)
        for turn, tokens, num_cached in ((next_turn, wanted, at_end), (prompt, first[:20], in_prompt)):
            async with serving(folder, disk, **settings) as engine:
                got, last = await answer(engine, turn)
                assert got == tokens
                assert last.num_cached_tokens == engine.stats().num_prompt_tokens_from_disk == num_cached
                engine.scheduler.check_integrity()
                assert engine.scheduler.blocks.num_free_blocks == engine.scheduler.blocks.num_blocks

    run(world)


def test_blocks_of_few_bits_go_on_and_are_not_those_of_other_bits(tmp_path):
    config = {**config_of("qwen3"), "head_dim": 64}
    folder = save_model_folder(build_random(config, 0), config, tmp_path / "model", byte_tokenizer())
    (prompt,) = random_prompts([300])

    async def world() -> None:
        async with serving(folder, tmp_path / "disk", kv_bits="k8v4", max_model_len=512) as engine:
            engine.scheduler.disk.saves.min_prompt_tokens = BLOCK_SIZE
            wanted, _ = await answer(engine, prompt)
        for bits, num_cached in (("8", 0), ("4", 0), ("k8v4", 288)):
            async with serving(folder, tmp_path / "disk", kv_bits=bits, max_model_len=512) as engine:
                got, last = await answer(engine, prompt)
                assert last.num_cached_tokens == num_cached, bits
        assert got == wanted

    run(world)


def test_streams_go_on_while_a_prefix_is_loaded(tmp_path):
    """And who leaves in the middle leaves nothing behind."""
    folder = make_folder(tmp_path / "model")
    (prompt,) = random_prompts([NUM_TOKENS])
    shorts = random_prompts([30, 40, 50], seed=7)

    async def world() -> None:
        async with serving(folder, tmp_path / "none", kv_disk=None) as engine:
            wanted = [(await answer(engine, short, 40))[0] for short in [*shorts, prompt]]
        async with serving(folder, tmp_path / "disk") as engine:
            await answer(engine, prompt)
        async with serving(folder, tmp_path / "disk") as engine:
            gone = engine.submit(GenerationRequest(request_id="gone", prompt_token_ids=prompt, sampling=greedy(5)))
            await asyncio.sleep(0)
            gone.abort()
            names = [(*pair, f"r{index}") for index, pair in enumerate(zip([*shorts, prompt], [40] * 4))]
            got = await asyncio.gather(*(answer(engine, *name) for name in names))
            assert [tokens for tokens, _ in got] == wanted
            assert engine.stats().num_prefix_hit_tokens == NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
            assert not engine.scheduler.disk.is_loading
            engine.scheduler.check_integrity()
            assert engine.scheduler.blocks.num_free_blocks == engine.scheduler.blocks.num_blocks

    run(world)


def test_a_disk_that_fails_costs_nothing_but_its_hits(tmp_path, caplog, monkeypatch):
    folder = make_folder(tmp_path / "model")
    (prompt,) = random_prompts([NUM_TOKENS])

    async def world() -> None:
        async with serving(folder, tmp_path / "disk") as engine:
            wanted, _ = await answer(engine, prompt)
        monkeypatch.setattr("os.pread", fail)
        async with serving(folder, tmp_path / "disk") as engine:
            got, last = await answer(engine, prompt)
            assert (got, last.num_cached_tokens) == (wanted, 0)

    def fail(*args: object) -> bytes:
        raise OSError(5, "Input/output error")

    run(world)
    assert "Input/output error" in caplog.text


def test_what_was_damaged_is_computed(tmp_path):
    folder = make_folder(tmp_path / "model")
    (prompt,) = random_prompts([NUM_TOKENS])

    async def world() -> None:
        async with serving(folder, tmp_path / "disk") as engine:
            wanted, _ = await answer(engine, prompt)
            stride = engine._parts.disk.records.space.stride
        (slab,) = (tmp_path / "disk").glob("*.kvslab")
        packed = bytearray(slab.read_bytes())
        packed[4096 + 5 * stride + 1000] ^= 1
        slab.write_bytes(packed)
        async with serving(folder, tmp_path / "disk") as engine:
            got, last = await answer(engine, prompt)
            assert (got, last.num_cached_tokens) == (wanted, 5 * BLOCK_SIZE)

    run(world)


def test_records_of_8_bits_are_hit_only_by_who_asks_for_them(tmp_path, caplog):
    """A quarter of what float32 takes, beside the scales."""
    caplog.set_level(logging.INFO)
    folder = make_folder(tmp_path / "model", "qwen3")
    (prompt,) = random_prompts([NUM_TOKENS])
    disk, num_blocks = tmp_path / "disk", NUM_TOKENS // BLOCK_SIZE
    asks = {"kv_disk_bits": "8"}

    async def world() -> None:
        for settings, num_cached in (({}, 0), (asks, 0), (asks, num_blocks), ({}, num_blocks)):
            async with serving(folder, disk, **settings) as engine:
                tokens, last = await answer(engine, prompt)
                assert last.num_cached_tokens == num_cached * BLOCK_SIZE
                assert last.num_rounded_tokens == (num_cached * BLOCK_SIZE if settings else 0)
                assert len(tokens) == 20
        num_kept = (NUM_TOKENS + 20 - 1) // BLOCK_SIZE
        assert "take 28 % of the usual space on disk, in 8 bits" in caplog.text
        store = RecordStore(Files(disk), 2**30)
        store.scan()
        sizes = Counter(record.content_bytes for _, record in store.entries())
        assert sorted(sizes.values()) == [num_kept] * 2
        assert min(sizes) == max(sizes) * 36 // 128
        for settings, reason in (
            ({"kv_bits": "8"}, "its pool has no"),
            ({"batch_invariant": True}, "--batch-inv"),
        ):
            async with serving(folder, disk, **asks, **settings) as engine:
                await answer(engine, prompt)
            assert f"are not rounded on disk: {reason}" in caplog.text

    run(world)


def test_a_request_goes_on_as_soon_as_its_prefix_is_read(tmp_path, monkeypatch):
    """And not when the loop would look for late reads, or memory is measured the next time."""
    folder = make_folder(tmp_path / "model")
    (prompt,) = random_prompts([NUM_TOKENS])

    async def world() -> None:
        async with serving(folder, tmp_path / "disk") as engine:
            await answer(engine, prompt)
        monkeypatch.setattr(DiskTier, "rest_s", lambda self, now, is_idle: 3600.0)
        monkeypatch.setattr(ContinuousBatchingScheduler, "hold_admission", lambda self, is_held: None)
        fixed = {"kv_cache_memory": None, "num_kv_blocks": 64}  # no step of a growing pool wakes the loop
        async with serving(folder, tmp_path / "disk", **fixed) as engine:
            _, last = await asyncio.wait_for(answer(engine, prompt), 60)
            assert last.num_cached_tokens == engine.stats().num_prompt_tokens_from_disk > 0

    run(world)


def test_settings_that_keep_nothing_are_named(tmp_path, caplog, monkeypatch):
    folder, disk = make_folder(tmp_path / "model"), tmp_path / "disk"
    (prompt,) = random_prompts([NUM_TOKENS])

    async def world() -> None:
        async with serving(folder, disk, kv_disk=None):
            pass
        assert not disk.exists()
        monkeypatch.setattr("mlx_server.kv_disk.disk._limit", lambda files, size: 9000)
        async with serving(folder, disk) as engine:
            await answer(engine, prompt)
        assert re.search(
            r"--kv-disk is 9,000 bytes, and one of its blocks or states takes [1-9]\d,\d{3}\.", caplog.text
        )
        assert not list(disk.glob("*.kvslab"))

    run(world)


def test_a_model_ends_at_once_when_no_block_may_be_written_any_more(tmp_path, monkeypatch):
    """Less than a block is left for today."""
    folder = make_folder(tmp_path / "model")
    (prompt,) = random_prompts([NUM_TOKENS])
    waits: list[float] = []
    drain = KvDisk.drain

    def counted(disk: KvDisk, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return drain(disk, timeout_s)

    monkeypatch.setattr(KvDisk, "drain", counted)

    async def world() -> None:
        async with serving(folder, tmp_path / "disk", kv_disk_writes_per_day="1KB") as engine:
            await answer(engine, prompt)
            assert 0 < engine._parts.disk.records.room() < engine._parts.disk.records.block_bytes
            assert len(engine.scheduler.disk.saves) == NUM_TOKENS // BLOCK_SIZE + 1
        assert len(waits) <= 3

    run(world)


@pytest.mark.parametrize("sees", [False, True], ids=["text", "sees"])
def test_an_update_of_mlx_vlm_makes_prefixes_others_only_where_its_code_computed_them(tmp_path, monkeypatch, sees):
    folder = make_folder(tmp_path / "model")
    if sees:
        loaded = tiny_vlm("qwen2_vl").loaded
        folder = save_model_folder(loaded.model, loaded.config, tmp_path / "sees", byte_tokenizer())
    keys: list[str] = []
    find = metadata.version

    async def world() -> None:
        for version in ("0.7.10", "0.7.11"):
            monkeypatch.setattr(metadata, "version", lambda name, v=version: v if name == "mlx-vlm" else find(name))
            async with serving(folder, tmp_path / "disk") as engine:
                keys.append(engine._parts.disk.model_key)

    run(world)
    assert (keys[0] != keys[1]) is sees


def test_a_model_is_unloaded_even_if_its_prefixes_cannot_be_saved(tmp_path, monkeypatch, caplog):
    folder = make_folder(tmp_path / "model")

    async def explode(*_: object) -> None:
        raise RuntimeError("the device is gone")

    async def world() -> None:
        async with serving(folder, tmp_path / "disk") as engine:
            monkeypatch.setattr("mlx_server.engine.engine.flush", explode)
        assert (engine.state, engine.stats().weight_bytes) == (EngineState.STOPPED, 0)

    run(world)
    assert "were not all kept on disk" in caplog.text


@pytest.mark.parametrize("fault", ["unreadable", "no caching", "too small"])
def test_a_model_whose_prefixes_cannot_be_kept_is_served_without(tmp_path, monkeypatch, caplog, fault):
    folder = make_folder(tmp_path / "model")
    settings: dict[str, Any] = {}
    reason = {
        "unreadable": "its files cannot be read: it is locked",
        "no caching": "--no-prefix-caching",
        "too small": "--kv-disk is 1,000,000 bytes, and one of its blocks or states takes",
    }[fault]
    if fault == "unreadable":

        def refuse(*_: object) -> str:
            raise OSError("it is locked")

        monkeypatch.setattr("mlx_server.engine.prefixes.model_on_disk.fingerprint", refuse)
    elif fault == "no caching":
        settings["prefix_caching"] = False
    else:
        settings["kv_disk"] = "1MB"
        monkeypatch.setattr("mlx_server.engine.prefixes.model_on_disk.smallest_slab", lambda space: 2_000_000)

    async def world() -> None:
        async with serving(folder, tmp_path / "disk", **settings) as engine:
            assert len((await answer(engine, [1, 2, 3], 5))[0]) == 5
            assert engine._parts.disk is None

    run(world)
    assert f"are not kept on disk: {reason}" in caplog.text
