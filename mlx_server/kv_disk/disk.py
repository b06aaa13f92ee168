"""The disk tier of one process: the threads that read and write records, their limits, and what turns the tier off."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.slab import SUFFIX, Rounding, Space
from mlx_server.kv_disk.store import RecordStore
from mlx_server.setting import parse_size

logger = logging.getLogger(__name__)
T = TypeVar("T")

AUTO = "auto"
LOCK = "lock"

_NUM_READERS = 4
_AUTO_SHARE = 0.1
"""Share of the bytes that are free on the disk or already used by the tier."""

_LOCK_TIMEOUT_S = 2.0
"""When a server is restarted, the old process may not have ended yet."""

_END_TIMEOUT_S = 2.0
"""How long to wait for a read or a write in progress: a hanging disk does not keep the server from ending."""

MAX_WAITING_BYTES = 128 * 2**20
"""The most bytes of blocks that wait to be written. Further blocks are not saved."""

BUSY_BYTES_PER_S = 128 * 10**6
"""The most that is written in a second while answers are computed."""

_BUDGET_NAME = "budget.json"
_DAY_S = 86_400.0
_SAVE_SHARE = 64

OnRead = Callable[[memoryview | None], None]
"""Takes the content of a block, or None, on a thread of the tier."""


class WriteBudget:
    """A token bucket that holds one day's bytes and refills within a day. It continues where the last server left off:
    the state is written after every 64th part of a day's bytes, and at the end.

    With 64 GB a day: after writing 64 GB, nothing is written for a while; an hour later 2.7 GB may be written.

    One thread at a time, except for `write`. If the clock is set back, nothing refills; if it is set forward, the
    bucket becomes at most full.
    """

    def __init__(self, files: Files, bytes_per_day: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives the seconds since the epoch. Raises `OSError`."""
        self._files = files
        self._most = float(bytes_per_day)
        self._clock = clock
        self._left, self._at_s = self._most, clock()
        self._unsaved = 0.0
        self._read()

    @property
    def left(self) -> int:
        """Bytes that may be written now."""
        now = self._clock()
        gained = max(0.0, now - self._at_s) / _DAY_S * self._most
        self._left, self._at_s = min(self._most, self._left + gained), now
        return int(self._left)

    def spend(self, num_bytes: int) -> bytes | None:
        """Books `num_bytes` as written. Returns the state for `write` if it is time to save it."""
        self._left -= num_bytes
        self._unsaved += num_bytes
        return self.state() if self._unsaved >= self._most / _SAVE_SHARE else None

    def state(self) -> bytes:
        """The state of the bucket, for `write`."""
        self._unsaved = 0.0
        return json.dumps({"left": self.left, "at_s": self._at_s}).encode()

    def write(self, state: bytes) -> None:
        """Saves a state. Waits for the disk; raises `OSError`."""
        self._files.replace(_BUDGET_NAME, state)

    def _read(self) -> None:
        """Continues from the saved state, unless its file is missing or broken."""
        try:
            (text,) = self._files.read(_BUDGET_NAME, [0], 4096)
            saved = json.loads(text)
            left, at_s = float(saved["left"]), float(saved["at_s"])
            if math.isfinite(left + at_s):
                self._left, self._at_s = min(self._most, max(0.0, left)), min(self._at_s, at_s)
        except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return


@dataclass(slots=True)
class DiskCounters:
    """Totals since start, in bytes of content. After the first of `num_errors` errors of the disk the tier is off."""

    num_bytes_read: int = 0
    num_bytes_written: int = 0
    num_errors: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """A block to be written, rounded if it has a `rounding`. `on_done` is called on the writer's thread in any case."""

    space: Space
    digest: bytes
    owner: bytes
    content: memoryview
    on_done: Callable[[], None]
    rounding: Rounding | None


class _ReadTimer:
    """For how long, in all, at least one read was waiting or in progress. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_reads = 0
        self._began_s = self._total_s = 0.0

    def begin(self) -> None:
        with self._lock:
            self._began_s = self._began_s if self._num_reads else time.monotonic()
            self._num_reads += 1

    def end(self) -> None:
        with self._lock:
            self._num_reads -= 1
            if not self._num_reads:
                self._total_s += time.monotonic() - self._began_s

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._total_s + (time.monotonic() - self._began_s if self._num_reads else 0.0)


@dataclass(slots=True)
class _Waiting:
    """What the threads have to do; read and changed with `condition` held."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    writes: deque[Write] = field(default_factory=deque)
    contents: dict[bytes, memoryview] = field(default_factory=dict)  # by digest, as given to `write`
    num_bytes: int = 0
    num_reads: int = 1  # the scan
    is_closing: bool = False


class KvDisk:
    """Records on disk for all models of a process. Any thread, except for `close`.

    Reads go before writes. The first error of the disk turns the tier off for good: from then on nothing is found, read
    or written, and one log line says why.
    """

    def __init__(self, files: Files, limit_bytes: int, bytes_per_day: int, lock: int | None = None) -> None:
        """The caller holds the folder's lock; `close` closes its descriptor `lock`. Raises `OSError`."""
        self.files = files
        self._lock = lock
        self.store = RecordStore(files, limit_bytes)
        self.counters = DiskCounters()
        self.error: str | None = None
        self._busy: set[Space] = set()
        self._budget = WriteBudget(files, bytes_per_day)
        self._waiting = _Waiting()
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._write_all, name="kv-disk-write", daemon=True),
            *(threading.Thread(target=self._read_all, name="kv-disk-read", daemon=True) for _ in range(_NUM_READERS)),
        ]
        for thread in self._threads:
            thread.start()
        self._reads.put(self._scan)

    @property
    def is_on(self) -> bool:
        return self.error is None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be read or written, and the scan at the start is over."""
        return not self._waiting.num_reads and not self._waiting.contents

    def has(self, digest: bytes) -> bool:
        """Whether a block can be read: it is on the disk or waits to be written."""
        return self.is_on and (digest in self.store or digest in self._waiting.contents)

    def is_stored(self, digest: bytes) -> bool:
        """Whether a block is on the disk."""
        return self.is_on and digest in self.store

    def read(
        self,
        digest: bytes,
        on_done: OnRead,
        is_wanted: Callable[[], bool] = lambda: True,
        rounding: Rounding | None = None,
    ) -> None:
        """Reads a block, which may be stored with a `rounding`. `on_done` gets the content on a thread of the tier, or
        None if it cannot be read or is not wanted when its turn comes. A block that waits to be written is returned as
        it was given."""

        def read() -> None:
            content = self._get(digest, rounding) if self.is_on and is_wanted() else None
            self._end_read()
            on_done(content)

        with self._waiting.condition:
            self._waiting.num_reads += 1
        self._reads.put(read)

    def room(self, largest: int = 0) -> int:
        """How many bytes `write` takes now. A content as large as `largest` is taken at least when nothing waits."""
        with self._waiting.condition:
            left = min(max(MAX_WAITING_BYTES, largest), self._budget.left) - self._waiting.num_bytes
        return max(0, left) if self.is_on else 0

    def set_busy(self, space: Space, is_busy: bool) -> None:
        """Says whether answers of a model are being computed: then less is written in a second."""
        (self._busy.add if is_busy else self._busy.discard)(space)

    def write(self, write: Write) -> None:
        """Queues a block, which is written if the budget allows."""
        with self._waiting.condition:
            self._waiting.writes.append(write)
            self._waiting.contents[write.digest] = write.content
            self._waiting.num_bytes += len(write.content)
            self._waiting.condition.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything that was given is written; whether it is."""
        with self._waiting.condition:
            return self._waiting.condition.wait_for(lambda: not self._waiting.contents or not self.is_on, timeout_s)

    def close(self) -> None:
        """Ends the threads after the reads and writes in progress; what waits is not written."""
        with self._waiting.condition:
            self._waiting.is_closing = True
            self._waiting.condition.notify_all()
        for _ in range(_NUM_READERS):
            self._reads.put(None)
        for thread in self._threads:
            thread.join(_END_TIMEOUT_S)
        if self.is_on:
            self._tried(self._save_budget)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- threads --------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Finds the stored records. Nothing is written meanwhile, since it might exist already."""
        self._tried(self.store.scan)
        self._end_read()

    def _end_read(self) -> None:
        with self._waiting.condition:
            self._waiting.num_reads -= 1
            self._waiting.condition.notify_all()

    def _get(self, digest: bytes, rounding: Rounding | None) -> memoryview | None:
        if (waiting := self._waiting.contents.get(digest)) is not None:
            return waiting
        stored = self._tried(lambda: self.store.get(digest))
        if stored is None:
            return None
        with self._waiting.condition:
            self.counters.num_bytes_read += len(stored)
        return stored if rounding is None else self._tried(partial(rounding.unpack, stored))

    def _read_all(self) -> None:
        while (read := self._reads.get()) is not None:
            read()

    def _write_all(self) -> None:
        while (write := self._next_write()) is not None:
            began_s = time.monotonic()
            if self.is_on:
                self._tried(partial(self._write, write))
            with self._waiting.condition:
                self._waiting.contents.pop(write.digest, None)
                self._waiting.num_bytes -= len(write.content)
                self._waiting.condition.notify_all()
            write.on_done()
            if self._busy:
                pause_s = len(write.content) / BUSY_BYTES_PER_S - (time.monotonic() - began_s)
                time.sleep(max(0.0, pause_s))

    def _next_write(self) -> Write | None:
        waiting = self._waiting
        with waiting.condition:
            waiting.condition.wait_for(lambda: waiting.is_closing or (waiting.writes and not waiting.num_reads))
            return None if waiting.is_closing else waiting.writes.popleft()

    def _write(self, write: Write) -> None:
        content = write.content if write.rounding is None else write.rounding.pack(write.content)
        num_bytes = 0 if content is None else len(content)
        with self._waiting.condition:
            if content is None or self._budget.left < num_bytes:
                return
        self._check_lock()
        if self.store.put(write.space, write.digest, write.owner, content):
            with self._waiting.condition:
                self.counters.num_bytes_written += num_bytes
                state = self._budget.spend(num_bytes)
            if state is not None:  # without the lock, which the event loop needs
                self._budget.write(state)

    def _save_budget(self) -> None:
        self._check_lock()
        self._budget.write(self._budget.state())

    def _check_lock(self) -> None:
        if self._lock is not None:
            self.files.check_lock(LOCK, self._lock)

    def _tried(self, action: Callable[[], T]) -> T | None:
        """The result of `action`; None if the disk fails, which turns the tier off."""
        try:
            return action()
        except Exception as error:  # any error: a result is waited for
            self.counters.num_errors += 1
            if self.error is None:
                self.error = str(error)
                logger.error("The K/V cache on disk in %s is off until a restart: %s", self.files.folder, error)
            return None


@dataclass(slots=True)
class ModelRecords:
    """What the scheduler of one model sees of the tier: blocks in one space, possibly rounded, and recurrent states, if
    the model has some, in another. `notify` is called on a thread of the tier after each read and write."""

    disk: KvDisk
    space: Space
    states: Space | None = None
    rounding: Rounding | None = None
    notify: Callable[[], None] = lambda: None
    _timer: _ReadTimer = field(default_factory=_ReadTimer, init=False)

    @property
    def read_time_s(self) -> float:
        """For how long, in all, reads of this model were waiting or in progress."""
        return self._timer.seconds

    @property
    def block_bytes(self) -> int:
        """The size of a block in the pool."""
        return self.space.content_bytes if self.rounding is None else self.rounding.num_bytes

    @property
    def state_bytes(self) -> int:
        """The size of a recurrent state; 0 for a model without them."""
        return 0 if self.states is None else self.states.content_bytes

    @property
    def is_rounded(self) -> bool:
        """Whether blocks come back in fewer bits than they had."""
        return self.rounding is not None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be read or written."""
        return self.disk.is_quiet

    def has(self, digest: bytes) -> bool:
        """Whether a block can be read and need not be written again."""
        return self.disk.has(digest)

    def read(
        self, digest: bytes, on_done: OnRead, is_wanted: Callable[[], bool] = lambda: True, *, is_state: bool = False
    ) -> None:
        """Reads a block or a state, if it is still wanted; its content, or None, comes on another thread."""

        def done(content: memoryview | None) -> None:
            self._timer.end()
            on_done(content)
            self.notify()

        self._timer.begin()
        self.disk.read(digest, done, is_wanted, None if is_state else self.rounding)

    def room(self) -> int:
        """How many bytes `write` takes now."""
        return self.disk.room(max(self.block_bytes, self.state_bytes))

    def write(self, digest: bytes, owner: bytes, content: memoryview, *, is_state: bool = False) -> None:
        """Queues a block or a state to be written."""
        space, rounding = (self.states, None) if is_state else (self.space, self.rounding)
        assert space is not None, "a model with states has a space for them"
        self.disk.write(Write(space, digest, owner, content, lambda: self.notify(), rounding))

    def set_busy(self, is_busy: bool) -> None:
        """Says whether answers are being computed."""
        self.disk.set_busy(self.space, is_busy)


def open_disk(folder: Path, size: str, bytes_per_day: int) -> KvDisk | None:
    """The tier in `folder`, of `size` bytes as a setting says it. None, and a warning, if another server uses the
    folder or it cannot be used: a server runs without the tier."""
    lock = None
    try:
        files = Files(folder)
        lock = files.lock(LOCK, _LOCK_TIMEOUT_S)
        if lock is not None:
            return KvDisk(files, _limit(files, size), bytes_per_day, lock)
        logger.warning(
            "Another server uses the K/V cache in %s, so this one runs without; give it a --kv-disk-dir of its own.",
            folder,
        )
    except OSError as error:
        logger.warning(
            "There is no K/V cache on disk: %s cannot be used: %s. Give another --kv-disk-dir.", folder, error
        )
        if lock is not None:
            os.close(lock)
    return None


def _limit(files: Files, size: str) -> int:
    if size != AUTO:
        return parse_size(size)
    taken = sum(entry.num_bytes for entry in files.entries(SUFFIX))
    return int(_AUTO_SHARE * (files.free_bytes() + taken))
