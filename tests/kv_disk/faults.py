"""A disk that fails on purpose: at the n-th write it ends the process or raises, and it may leave a part of it."""

from __future__ import annotations

import random
from pathlib import Path

from mlx_server.kv_disk.files import Files


class Killed(BaseException):
    """The process has ended here."""


class FaultyFiles(Files):
    """`fails_in` counts writes, creations and removals down; at 0 `fault` is raised, after a part of the write."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        super().__init__(folder)
        self.rng = rng
        self.fails_in = -1
        self.fault: BaseException = Killed()
        self.most_bytes = 0

    def create(self, name: str, content: bytes) -> None:
        if self._is_due():
            super().create(name, content[: self.rng.randrange(len(content) + 1)])
            raise self.fault
        super().create(name, content)
        self._watch()

    def write(self, name: str, offset: int, content: bytes | memoryview) -> None:
        if self._is_due():
            super().write(name, offset, memoryview(content)[: self.rng.randrange(len(content) + 1)])
            self._watch()
            raise self.fault
        super().write(name, offset, content)
        self._watch()

    def remove(self, name: str) -> None:
        if self._is_due():
            if self.rng.random() < 0.5:
                super().remove(name)
            raise self.fault
        super().remove(name)

    def _is_due(self) -> bool:
        if self.fails_in < 0:
            return False
        self.fails_in -= 1
        return self.fails_in < 0

    def _watch(self) -> None:
        """The most that all slabs had after any write."""
        self.most_bytes = max(self.most_bytes, sum(entry.num_bytes for entry in self.entries(".kvslab")))
