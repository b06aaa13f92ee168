"""The K/V of layers that share blocks: one of each layer group."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention import AttentionBackend, LayerSpec, ReferenceBackend
from mlx_server.runtime.row_pool import RowPool


class LayerPool:
    """One pool of blocks and the backend that attends over it. MLX thread only.

    `content` is the backend's. Once a layer is read by groups of rows it `is_viewed`: the pool is then one of plain
    rows, since no backend attends over it.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.content: Any = None
        self.is_viewed = False
        self._num_blocks = 0
        self._backend: AttentionBackend | None = None

    @property
    def backend(self) -> AttentionBackend:
        assert self._backend is not None, "a pool is allocated before it is used"
        return self._backend

    def allocate(self, backend: AttentionBackend, num_blocks: int, max_blocks: int | None = None) -> None:
        """Takes memory, which may grow to `max_blocks`."""
        self._backend = ReferenceBackend() if self.is_viewed else backend
        self._num_blocks = num_blocks
        self.content = self._backend.make_pool(self.spec, num_blocks, max_blocks)

    def rows(self) -> RowPool:
        """The pool as rows. The first call makes it one, and loses what was in it."""
        if not self.is_viewed:
            self.is_viewed = True
            self.allocate(ReferenceBackend(), self._num_blocks)
        assert isinstance(self.content, RowPool)
        return self.content

    def change(self, change: PoolChange) -> None:
        """Moves, cuts or grows the blocks. Every step launched must have finished."""
        self._num_blocks = change.num_blocks
        self.content = self.backend.change_pool(self.content, change)

    def release(self) -> None:
        self.content = None

    def state(self) -> list[mx.array]:
        """What must be evaluated with a step for its K/V to be written."""
        return self.backend.state(self.content)
