"""The tier of a process: reads and writes on its threads, its bounds, and what an error of the disk does."""

from __future__ import annotations

import errno
import logging
import random
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_server.config import MemoryConfig
from mlx_server.kv_disk import disk as disks
from mlx_server.kv_disk.disk import KvDisk, ModelRecords, WriteBudget, open_disk
from mlx_server.kv_disk.files import Files, disk_folder
from mlx_server.kv_disk.slab import Rounding
from tests.kv_disk.faults import FaultyFiles
from tests.kv_disk.test_store import SPACE, content_of, digest_of

DAY = 10**12


class Wiped(Rounding):
    """Stores all, and gives zeros back."""

    def pack(self, content: memoryview) -> memoryview:
        return content

    def unpack(self, packed: memoryview) -> memoryview:
        return memoryview(bytes(len(packed)))


def write(disk: KvDisk, *numbers: int) -> None:
    records = ModelRecords(disk, SPACE)
    for number in numbers:
        records.write(digest_of(number), bytes(8), content_of(number))
    assert disk.drain(10)


def read(disk: KvDisk, number: int) -> memoryview | None:
    done, found = threading.Event(), []
    ModelRecords(disk, SPACE, notify=done.set).read(digest_of(number), found.append)
    assert done.wait(10), "a read that is never answered"
    return found[0]


@pytest.fixture
def disk(tmp_path):
    disk = KvDisk(Files(tmp_path), 2**20, DAY)
    yield disk
    disk.close()


def test_blocks_are_written_and_read_on_threads(disk):
    write(disk, 1, 2)
    assert disk.has(digest_of(1))
    assert disk.is_stored(digest_of(2))
    assert (read(disk, 2), read(disk, 3)) == (content_of(2), None)
    assert (disk.counters.num_bytes_written, disk.counters.num_bytes_read) == (10_000, 5_000)


def test_what_waits_to_be_written_can_be_read_as_it_was_given(disk, monkeypatch):
    put, may_write = disk.store.put, threading.Event()
    monkeypatch.setattr(disk.store, "put", lambda *args: may_write.wait(10) and put(*args))
    records = ModelRecords(disk, SPACE, rounding=Wiped("float32", SPACE.content_bytes))
    for number in (1, 2):
        records.write(digest_of(number), bytes(8), content_of(number))
    assert (records.has(digest_of(2)), disk.is_stored(digest_of(2))) == (True, False)
    done, found = threading.Event(), []
    records.notify = done.set
    records.read(digest_of(2), found.append)
    assert done.wait(10)
    assert found == [content_of(2)]
    assert disk.counters.num_bytes_read == 0
    may_write.set()
    assert disk.drain(10)
    assert disk.is_stored(digest_of(2))
    done.clear()
    records.read(digest_of(2), found.append)
    assert done.wait(10)
    assert found[1] == bytes(len(content_of(2)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_the_first_error_turns_it_off_with_one_line(tmp_path, caplog, number):
    files = FaultyFiles(tmp_path, random.Random(0))
    disk = KvDisk(files, 2**20, DAY)
    write(disk, 1)
    files.fails_in, files.fault = 0, OSError(number, "the disk says no")
    write(disk, 2, 3, 4)
    assert not disk.is_on
    assert (disk.has(digest_of(1)), disk.is_stored(digest_of(1)), disk.room()) == (False, False, 0)
    assert read(disk, 1) is None
    disk.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the disk says no" in caplog.text
    assert disk.counters.num_errors == 1


def test_a_read_error_is_answered_with_none(tmp_path, monkeypatch, disk):
    write(disk, 1)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(disk.files, "read", fail)
    assert read(disk, 1) is None
    assert disk.error == "[Errno 5] bad sector"


def test_what_is_not_wanted_any_more_is_not_read(disk):
    write(disk, 1)
    done, found = threading.Event(), []
    ModelRecords(disk, SPACE, notify=done.set).read(digest_of(1), found.append, lambda: False)
    assert done.wait(10)
    assert (found, disk.counters.num_bytes_read) == ([None], 0)


def test_the_time_of_reads_is_that_in_which_some_are_in_progress(disk, monkeypatch):
    """Of two at once, one second by the clock counts once; and what waits for a disk that hangs counts, too."""
    write(disk, 1, 2)
    now, may_read, done = [0.0], threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(disks.time, "monotonic", lambda: now[0])
    get = disk.store.get
    monkeypatch.setattr(disk.store, "get", lambda digest: get(digest) if may_read.wait(10) else None)
    records = ModelRecords(disk, SPACE, notify=done.release)
    for number in (1, 2):
        records.read(digest_of(number), lambda content: None)
    now[0] = 1.0
    assert records.read_time_s == 1.0
    may_read.set()
    assert done.acquire(timeout=10)
    assert done.acquire(timeout=10)
    now[0] = 5.0
    assert (records.read_time_s, ModelRecords(disk, SPACE).read_time_s) == (1.0, 0.0)


def test_no_more_may_wait_than_has_room(disk, monkeypatch):
    monkeypatch.setattr(disks, "MAX_WAITING_BYTES", 12_000)
    assert disk.room() == 12_000
    assert disk.room(20_000) == 20_000, "what is larger comes alone"


def test_the_days_writes_are_bounded_over_restarts(tmp_path):
    for limit, wanted in ((12_000, [1, 2]), (12_000, [1, 2]), (20_000, [1, 2])):
        disk = KvDisk(Files(tmp_path), 2**20, limit)
        write(disk, 1, 2, 3, 4)
        assert [number for number in range(1, 5) if disk.is_stored(digest_of(number)) or number > 2] == [*wanted, 3, 4]
        assert not disk.is_stored(digest_of(3))
        assert disk.room() < SPACE.content_bytes
        disk.close()


def test_what_little_was_written_is_remembered_at_the_end(tmp_path):
    disk = KvDisk(Files(tmp_path), 2**20, 400_000)
    write(disk, 1)
    disk.close()
    assert 395_000 <= WriteBudget(Files(tmp_path), 400_000, lambda: 0.0).left < 396_000


def test_a_budget_fills_up_within_a_day_whatever_the_clock_does(tmp_path):
    now = [1e9]
    files = Files(tmp_path)
    budget = WriteBudget(files, 86_400, lambda: now[0])
    budget.spend(86_400)
    assert budget.left == 0
    now[0] += 3600
    assert budget.left == 3600
    now[0] -= 1e8
    assert budget.left == 3600
    now[0] += 1e9
    assert budget.left == 86_400
    budget.spend(400)
    budget.write(budget.state())
    assert WriteBudget(files, 86_400, lambda: now[0]).left == 86_000
    many = "1" + 400 * "0"
    huge = [f'{{"left": {many}, "at_s": {at_s}}}' for at_s in ("0", f"-{many}")]
    for broken in ("{", '{"left": NaN, "at_s": 0}', '{"left": 0, "at_s": -Infinity}', *huge, "[" * 4096):
        (tmp_path / "budget.json").write_text(broken)
        assert WriteBudget(files, 86_400, lambda: now[0]).left == 86_400
    (tmp_path / "budget.json").write_text(f'{{"left": -1e30, "at_s": {now[0] - 3600}}}')
    assert WriteBudget(files, 86_400, lambda: now[0]).left == 3600


def test_the_budget_is_written_down_without_the_lock(tmp_path, monkeypatch):
    """The event loop takes it at each step, and a disk may take its time."""
    files = Files(tmp_path)
    disk = KvDisk(files, 2**20, 12_000)
    replace, met = files.replace, []

    def slow(name: str, content: bytes) -> None:
        asking = threading.Thread(target=lambda: met.append(disk.room()))
        asking.start()
        asking.join(5)
        met.append(asking.is_alive())
        replace(name, content)

    monkeypatch.setattr(files, "replace", slow)
    write(disk, 1)
    assert met == [2000, False], "one of two waits to be written still"
    disk.close()


def test_reads_come_before_writes(tmp_path, monkeypatch, disk):
    write(disk, 1)
    order, gate = [], threading.Event()
    get, put = disk.store.get, disk.store.put
    monkeypatch.setattr(disk.store, "get", lambda digest: (gate.wait(10), order.append("read"), get(digest))[-1])
    monkeypatch.setattr(disk.store, "put", lambda *record: (order.append("write"), put(*record))[-1])
    done = threading.Event()
    ModelRecords(disk, SPACE, done.set).read(digest_of(1), lambda content: None)
    ModelRecords(disk, SPACE).write(digest_of(2), bytes(8), content_of(2))
    time.sleep(0.05)
    gate.set()
    assert disk.drain(10)
    assert order == ["read", "write"]


def test_a_folder_has_one_server_at_a_time(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(disks, "_LOCK_TIMEOUT_S", 0.1)
    first = open_disk(tmp_path, "1MB", DAY)
    assert first is not None
    assert open_disk(tmp_path, "1MB", DAY) is None
    assert "Another server uses" in caplog.text
    first.close()
    second = open_disk(tmp_path, "auto", DAY)
    assert second is not None
    assert second.store.limit_bytes == pytest.approx(second.files.free_bytes() / 10, rel=0.05)
    second.close()


def test_the_end_of_the_server_before_is_waited_for_two_seconds(tmp_path, monkeypatch):
    first, now_s = open_disk(tmp_path, "1MB", DAY), 100.0
    assert first is not None

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s > 103.0:
            first.close()

    monkeypatch.setattr("mlx_server.kv_disk.files.time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    assert open_disk(tmp_path, "1MB", DAY) is None
    assert now_s == pytest.approx(102.0, abs=0.1)
    second = open_disk(tmp_path, "1MB", DAY)
    assert second is not None
    second.close()


@pytest.mark.parametrize("gone", ["folder", "lock"])
def test_a_deleted_folder_is_left_to_who_makes_it_again(tmp_path, caplog, gone):
    """Otherwise two servers use one folder, and keep twice the limit in it."""
    folder = tmp_path / "kv"
    first = open_disk(folder, "1MB", DAY)
    assert first is not None
    write(first, 1)
    if gone == "folder":
        shutil.rmtree(folder)
    else:
        (folder / "lock").unlink()
    second = open_disk(folder, "1MB", DAY)
    assert second is not None
    write(second, 2)
    taken = sorted(folder.iterdir())
    write(first, 3, 4)
    assert not first.is_on
    first.close()
    assert sorted(folder.iterdir()) == taken
    assert read(second, 2) == content_of(2)
    second.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "was deleted while this server used it" in caplog.text


def test_a_deleted_folder_is_said_once(tmp_path, caplog):
    disk = open_disk(tmp_path / "kv", "1MB", DAY)
    assert disk is not None
    write(disk, 1)
    shutil.rmtree(tmp_path / "kv")
    write(disk, 2, 3)
    assert not disk.is_on
    disk.close()
    assert not (tmp_path / "kv").exists()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert open_disk(tmp_path / "file" / "kv", "1MB", DAY) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_the_folder_is_the_home_s_unless_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", "/somewhere")
    assert disk_folder(MemoryConfig()) == tmp_path / "kv-disk"
    assert disk_folder(MemoryConfig(kv_disk_dir="~/other")) == Path("/somewhere/other")
