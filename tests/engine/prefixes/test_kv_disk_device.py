"""Streams beside the tier on disk, on a made-up device with a GPU's costs: what copies add by its own clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from mlx_server.batching.blocks.disk_saves import BESIDE_BYTES, PIECE_BYTES
from mlx_server.config import BLOCK_SIZE
from mlx_server.kv_disk.disk import BUSY_BYTES_PER_S
from tests.batching.worlds import FakeStore, expected_tokens, make_request, make_world, prompt
from tests.device_worlds import ALL_KINDS, GPU, DeviceWorld, Kind, Model

NUM_TOKENS = 8192
LONG = prompt(NUM_TOKENS + 1)
TARGET_S = 0.06
BLOCK_BYTES = 9 * 2**19
"""4.5 MiB: an 8B model's, in 16 bits."""

READ_BYTES_PER_S = 3e9
COPYING = replace(GPU, copy_s=BLOCK_BYTES / 3e9)


class TimedStore(FakeStore):
    """Writes take as long as they may beside who runs."""

    block_bytes = BLOCK_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.now = lambda: 0.0
        self.written_s = 0.0

    @property
    def is_quiet(self) -> bool:  # type: ignore[override]
        return self.now() >= self.written_s

    def write(self, block_hash: bytes, owner: bytes, content: memoryview, *, is_state: bool) -> None:
        super().write(block_hash, owner, content, is_state=is_state)
        self.written_s = max(self.written_s, self.now()) + self.block_bytes / BUSY_BYTES_PER_S


def with_streams(model: Model) -> list[str]:
    for number in range(4):
        model.add(make_request(f"stream-{number}", 64, max_tokens=400))
    return [f"stream-{number}" for number in range(4)]


def gaps(model: Model, names: list[str], from_s: float, to_s: float) -> list[float]:
    times = [[time_s for time_s in model.times(name) if from_s <= time_s <= to_s] for name in names]
    return [after - before for of_one in times for before, after in pairwise(of_one)]


@ALL_KINDS
@pytest.mark.parametrize("copies_per_s", [3e9, 5e8], ids=["unified", "slow"])
def test_streams_beside_the_load_of_8192_tokens(
    kind: Kind, copies_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gap is longer than twice the target, however slow copies are, and nothing of the prefix is computed."""
    store = TimedStore()
    before = make_world(300, store=store)
    before.add(make_request("before", LONG, 1))
    before.finish()
    before.now += 10.0
    while before.schedule() is not None:
        before.deliver()
    assert len(store.blocks) == NUM_TOKENS // BLOCK_SIZE
    world = DeviceWorld(kind, monkeypatch, replace(GPU, copy_s=BLOCK_BYTES / copies_per_s))

    async def read(model: Model) -> None:
        while True:
            await asyncio.sleep(BLOCK_BYTES / READ_BYTES_PER_S)
            store.arrive(1)
            model.scheduler.wake()

    async def main() -> None:
        async with world.model(store=store, target_step_s=TARGET_S) as model:
            names = with_streams(model)
            await asyncio.sleep(3.0)
            reading = asyncio.create_task(read(model))
            from_s = world.threads.now_s
            model.add(make_request("load", LONG, 1))
            await model.until_done("load")
            reading.cancel()
            worst_s = max(gaps(model, names, from_s - 0.1, world.threads.now_s))
            assert worst_s <= 2 * TARGET_S
            steps = [step.step for step in model.true_steps() if step.began_s >= from_s]
            loaded = [len(step.copies.loaded) for step in steps if step.copies is not None]
            assert sum(loaded) == NUM_TOKENS // BLOCK_SIZE
            assert max(loaded) * BLOCK_BYTES <= PIECE_BYTES
            assert model.scheduler.counters.num_prompt_tokens_from_disk == NUM_TOKENS
            (output,) = [d.output for d in model.deliveries if d.output.request_id == "load"]
            assert list(output.new_token_ids) == expected_tokens(LONG, 1)

    world.run(main())


def test_a_gpu_does_not_wait_while_blocks_are_saved_beside_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of each piece are made while the step before runs."""
    world = DeviceWorld(Kind.SELF_RUNNING, monkeypatch, COPYING)
    store = TimedStore()
    store.now = world.threads.clock

    async def main() -> None:
        async with world.model(store=store, target_step_s=TARGET_S) as model:
            model.add(make_request("gone", LONG, 1))
            await model.until_done("gone")
            with_streams(model)
            await asyncio.sleep(1.0)
            from_s, num_before = world.threads.now_s, len(store.blocks)
            await asyncio.sleep(5.0)
            num_saved = len(store.blocks) - num_before
            assert num_saved * BLOCK_BYTES >= 0.5 * 5.0 * BUSY_BYTES_PER_S
            assert world.device.idle_s(from_s, from_s + 5.0) <= 0.005 * 5.0
            steps = [step.step for step in model.true_steps() if step.began_s >= from_s]
            saved = [len(step.copies.saved) for step in steps if step.copies is not None]
            assert max(saved) * BLOCK_BYTES <= BESIDE_BYTES

    world.run(main())


def test_a_cpu_saves_no_faster_beside_its_streams_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps are short: then a launch waits for the device, and is no copy."""
    world = DeviceWorld(Kind.FILLED, monkeypatch, replace(COPYING, base_s=0.012))
    store = TimedStore()
    store.now = world.threads.clock

    async def main() -> None:
        async with world.model(store=store, target_step_s=TARGET_S) as model:
            model.add(make_request("gone", LONG, 1))
            await model.until_done("gone")
            with_streams(model)
            await asyncio.sleep(1.0)
            num_before = len(store.blocks)
            await asyncio.sleep(5.0)
            num_saved = len(store.blocks) - num_before
            assert 0 < num_saved * BLOCK_BYTES <= 1.2 * 5.0 * 32e6

    world.run(main())
