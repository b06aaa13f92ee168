"""What a model's prefixes on disk are known by, where they are kept, and how the scheduler learns of them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_server.config import BLOCK_SIZE, MemoryConfig
from mlx_server.engine.prefixes import model_on_disk
from mlx_server.engine.prefixes.model_on_disk import ModelOnDisk, fingerprint, flush, open_configured
from mlx_server.kv_disk.disk import ModelRecords
from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.slab import Space
from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput
from tests.batching.worlds import FakeStore, World, make_request, make_world
from tests.kv_disk.faults import FaultyFiles


def test_a_fingerprint_is_that_of_the_contents_wherever_they_lie(tmp_path):
    prints = set()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(100_000))
        (folder / "config.json").write_text("{}")
        (folder / "README.md").write_text(name)
        prints.add(fingerprint(folder, Files(tmp_path / "disk")))
    assert len(prints) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.py"])
def test_any_byte_of_weights_configuration_and_code_changes_it(tmp_path, name):
    files = Files(tmp_path / "disk")
    for made in ("model.safetensors", "config.json", "model.py"):
        (tmp_path / made).write_bytes(bytes(1000))
    before = fingerprint(tmp_path, files)
    assert fingerprint(tmp_path, files) == before
    changed = bytearray(1000)
    changed[617] = 1
    (tmp_path / name).write_bytes(changed)
    assert fingerprint(tmp_path, files) != before


def test_a_full_disk_does_not_keep_a_fingerprint_from_being_known(tmp_path, monkeypatch):
    files = FaultyFiles(tmp_path / "disk", random.Random(0))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    before = fingerprint(tmp_path, Files(tmp_path / "other"))
    files.fails_in, files.fault = 0, OSError(errno.ENOSPC, "No space left on device")
    assert fingerprint(tmp_path, files) == before


def test_weights_are_read_once(tmp_path, monkeypatch):
    files = Files(tmp_path / "disk")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    before = fingerprint(tmp_path, files)
    monkeypatch.setattr(
        "mlx_server.engine.prefixes.model_on_disk._content_digest", lambda path: pytest.fail("read again")
    )
    assert fingerprint(tmp_path, files) == before


def test_weights_that_took_the_place_of_others_are_read_whatever_their_time(tmp_path):
    files, path, other = Files(tmp_path / "disk"), tmp_path / "model.safetensors", tmp_path / "new"
    path.write_bytes(bytes(1000))
    before, stat = fingerprint(tmp_path, files), path.stat()
    other.write_bytes(b"x" * 1000)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)
    assert fingerprint(tmp_path, files) != before


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"other": "file"}'])
def test_what_was_remembered_may_be_lost_or_broken(tmp_path: Path, content: bytes) -> None:
    files = Files(tmp_path / "disk")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    before = fingerprint(tmp_path, files)
    files.replace("fingerprints.json", content)
    assert fingerprint(tmp_path, files) == before
    known = json.loads((tmp_path / "disk" / "fingerprints.json").read_bytes())
    assert ("other" in known, len(known)) == (b"other" in content, 1 + (b"other" in content))


def test_of_remembered_files_the_longest_known_are_forgotten(tmp_path: Path) -> None:
    files = Files(tmp_path / "disk")
    files.replace("fingerprints.json", json.dumps({f"file {n}": "digest" for n in range(1000)}).encode())
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    fingerprint(tmp_path, files)
    known = list(json.loads((tmp_path / "disk" / "fingerprints.json").read_bytes()))
    assert (len(known), known[0], "model.safetensors" in known[-1]) == (1000, "file 1", True)


def test_without_space_there_is_no_tier() -> None:
    assert open_configured(MemoryConfig()) is None


async def test_reads_and_writes_wake_the_scheduler_on_its_own_thread(tmp_path: Path) -> None:
    disk = open_configured(MemoryConfig(kv_disk="64MB", kv_disk_dir=str(tmp_path)))
    assert disk is not None
    try:
        records = ModelRecords(disk, Space(bytes(16), "m", 1000))
        woken: list[threading.Thread] = []
        is_woken = asyncio.Event()
        model = ModelOnDisk(disk, records, "key")
        model.on_change(lambda: (woken.append(threading.current_thread()), is_woken.set()))  # type: ignore[arg-type,func-returns-value]
        await asyncio.to_thread(records.notify)
        await asyncio.wait_for(is_woken.wait(), 10)
        assert woken == [threading.current_thread()]
    finally:
        disk.close()


def test_nobody_is_woken_after_the_end_of_the_loop(tmp_path: Path) -> None:
    disk = open_configured(MemoryConfig(kv_disk="64MB", kv_disk_dir=str(tmp_path)))
    assert disk is not None
    records = ModelRecords(disk, Space(bytes(16), "m", 1000))

    async def join() -> None:
        ModelOnDisk(disk, records, "key").on_change(lambda: pytest.fail("woken"))

    try:
        asyncio.run(join())
        records.notify()
    finally:
        disk.close()


# --- at the end -------------------------------------------------------------------------------------------


class AtOnce:
    """Runs each step as soon as it is submitted."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.steps: list[SchedulerOutput] = []

    async def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(output)
        self._world.runner.submit(output)
        return self._world.runner.fetch()


def finished_world(store: FakeStore) -> World:
    """A request has left 10 blocks."""
    world = make_world(20, store=store)
    world.add(make_request("a", 10 * BLOCK_SIZE, 5))
    world.finish()
    return world


async def flushed(world: World, store: FakeStore, **disk: Any) -> AtOnce:
    executor = AtOnce(world)
    model = SimpleNamespace(
        disk=SimpleNamespace(**{"is_on": True, "drain": lambda left_s: True, **disk}), records=store
    )
    await flush(model, world.scheduler, executor)  # type: ignore[arg-type]
    return executor


async def test_all_that_is_worth_it_is_saved_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = finished_world(store := FakeStore())
    busy: list[bool] = []
    store.set_busy = busy.append  # type: ignore[method-assign]
    executor = await flushed(world, store)
    assert len(store.blocks) == 10
    assert busy == [False], "nothing is put off for steps any more"
    assert all(step.copies is not None and step.copies.saved for step in executor.steps), "no step does nothing"
    assert (await flushed(world, store)).steps == []
    assert caplog.messages == []


async def test_what_was_to_be_saved_before_a_cut_is_saved_with_the_rest() -> None:
    world = finished_world(store := FakeStore())
    assert world.scheduler.shrink(15, saves_first=True) == 0, "it waits for the disk"
    executor = await flushed(world, store)
    assert executor.steps[0].copies is not None
    assert len(store.blocks) == 10


async def test_blocks_are_saved_as_soon_as_the_disk_has_room_again() -> None:
    world = finished_world(store := FakeStore())
    store.most_room = 0

    def drain(left_s: float) -> bool:
        store.most_room = 2**30
        return True

    await flushed(world, store, drain=drain)
    assert len(store.blocks) == 10


@pytest.mark.parametrize(("is_on", "num_drains"), [(False, 1), (True, 2)])
async def test_what_is_left_at_the_end_is_told(caplog: pytest.LogCaptureFixture, is_on: bool, num_drains: int) -> None:
    """The disk has failed, or the day's limit on writes is reached, for which nobody waits."""
    drains: list[float] = []

    def drain(left_s: float) -> bool:
        drains.append(left_s)
        return True

    caplog.set_level("INFO")
    world = finished_world(store := FakeStore())
    store.most_room = 0
    await flushed(world, store, is_on=is_on, drain=drain)
    assert len(drains) == num_drains
    assert caplog.messages == ["10 of 10 blocks were not written to disk at the end"]
    assert store.blocks == {}


async def test_a_disk_that_is_slow_is_waited_for_only_so_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_on_disk, "FLUSH_S", 0.1)
    caplog.set_level("INFO")
    world = finished_world(store := FakeStore())
    store.most_room = 0
    waits: list[float] = []

    def drain(left_s: float) -> bool:
        waits.append(left_s)
        time.sleep(min(left_s, 0.03))
        return False

    await asyncio.wait_for(flushed(world, store, drain=drain), 10)
    assert 1 < len(waits) < 10
    assert all(0 <= wait <= 0.1 for wait in waits)
    assert "not written to disk at the end" in caplog.text
