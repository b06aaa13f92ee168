"""A simulated disk for the scheduler's real disk tier: it has transfer rates and stores no bytes."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from mlx_server.kv_disk.disk import BUSY_BYTES_PER_S, MAX_WAITING_BYTES

_CONTENT = memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCost:
    """A disk that holds `num_records` blocks. `bytes_per_day` bounds the writes."""

    num_records: int
    block_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    bytes_per_day: int


class SimulatedDisk:
    """Records by digest, evicted least recently used first. Reads are served one at a time, and so are writes, in
    parallel to reads. Bounds are those of `KvDisk`, except for files. The caller keeps `now` up to date."""

    state_bytes = 0
    is_rounded = False

    def __init__(self, cost: DiskCost) -> None:
        self.now = 0.0
        self.cost = cost
        self.block_bytes = cost.block_bytes
        self._records: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: set[bytes] = set()
        self._is_busy = False
        self._read_free_s = self._write_free_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0
        self._budget_bytes, self._budget_s = float(cost.bytes_per_day), 0.0
        self._asked_s = 0.0

    @property
    def next_s(self) -> float:
        """When the next read or write ends."""
        return self._due[0][0] if self._due else math.inf

    def finish_due(self) -> None:
        """Completes the reads and writes that have ended by now."""
        while self.next_s <= self.now:
            heapq.heappop(self._due)[2]()

    @property
    def is_quiet(self) -> bool:
        return not self._due

    @property
    def read_time_s(self) -> float:
        return self._asked_s - max(0.0, self._read_free_s - self.now)

    def has(self, digest: bytes) -> bool:
        return digest in self._records or digest in self._waiting

    def read(
        self,
        digest: bytes,
        on_done: Callable[[memoryview | None], None],
        is_wanted: Callable[[], bool],
        *,
        is_state: bool,
    ) -> None:
        def done() -> None:
            is_there = is_wanted() and self.has(digest)
            if digest in self._records:
                self._records.move_to_end(digest)
            on_done(_CONTENT if is_there else None)

        seconds = self.block_bytes / self.cost.read_bytes_per_s
        self._asked_s += seconds
        self._read_free_s = max(self._read_free_s, self.now) + seconds
        self._at(self._read_free_s, done)

    def room(self) -> int:
        per_s = self.cost.bytes_per_day / 86_400
        left = min(self.cost.bytes_per_day, self._budget_bytes + per_s * (self.now - self._budget_s))
        self._budget_bytes, self._budget_s = left, self.now
        return max(0, min(MAX_WAITING_BYTES - len(self._waiting) * self.block_bytes, int(left)))

    def write(self, digest: bytes, owner: bytes, content: memoryview, *, is_state: bool) -> None:
        def done() -> None:
            self._waiting.discard(digest)
            self._records[digest] = None
            if len(self._records) > self.cost.num_records:
                self._records.popitem(last=False)

        rate = min(BUSY_BYTES_PER_S, self.cost.write_bytes_per_s) if self._is_busy else self.cost.write_bytes_per_s
        self._waiting.add(digest)
        self._budget_bytes -= self.block_bytes
        self._write_free_s = max(self._write_free_s, self.now) + self.block_bytes / rate
        self._at(self._write_free_s, done)

    def set_busy(self, is_busy: bool) -> None:
        self._is_busy = is_busy

    def _at(self, due_s: float, done: Callable[[], None]) -> None:
        self._num_asked += 1
        heapq.heappush(self._due, (due_s, self._num_asked, done))
