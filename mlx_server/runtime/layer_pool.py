"""The K/V of layers that share blocks: of one layer of each group, or of a few small ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention import AttentionBackend, LayerSpec, ReferenceBackend
from mlx_server.runtime.kernels.gpu_pool import GpuPool
from mlx_server.runtime.row_pool import RowPool


class LayerPool:
    """One pool of blocks and the backend that attends over it. MLX thread only.

    Its blocks are those of a layer like `spec`. Layers of other shapes see the same memory as blocks of theirs, several
    in one of the pool's; `contents[seat_of(spec)]` is what layers like `spec` see, and is the backend's. Once a layer
    is read by groups of rows the pool `is_viewed`: it is then one of rows, since no backend attends over it.
    """

    def __init__(self, spec: LayerSpec, seen_as: Sequence[LayerSpec] = ()) -> None:
        """`seen_as` are the layers that share it."""
        self.contents: list[Any] = []
        self.is_viewed = False
        self._specs = list(dict.fromkeys([spec, *seen_as]))
        self._num_blocks = 0
        self.backend: AttentionBackend  # from the first allocation on

    @property
    def spec(self) -> LayerSpec:
        return self._specs[0]

    def seat_of(self, spec: LayerSpec) -> int:
        return self._specs.index(spec)

    def quantize(self, bits: int) -> None:
        """From the next allocation on, K/V are stored in so many bits a number."""
        self._specs = [replace(spec, bits=bits) for spec in self._specs]

    def allocate(self, backend: AttentionBackend, num_blocks: int, max_blocks: int | None = None) -> None:
        """Takes memory, which may grow to `max_blocks`."""
        self.backend = ReferenceBackend(backend.make_rows) if self.is_viewed else backend
        self._num_blocks = num_blocks
        self._show(self.backend.make_pool(self.spec, num_blocks, max_blocks))

    def rows(self, seat: int = 0) -> RowPool:
        """What is seen from there as rows. The first call makes the pool one of rows, and loses what was in it."""
        if not self.is_viewed:
            self.is_viewed = True
            self.allocate(self.backend, self._num_blocks)
        rows = self.contents[seat]
        assert isinstance(rows, RowPool)
        return rows

    @property
    def needs_synchronous_steps(self) -> bool:
        """Whether its writes would copy it while another step runs, since it is one of rows."""
        return self.is_viewed and any(rows.needs_synchronous_steps for rows in self.contents)

    def change(self, change: PoolChange) -> None:
        """Moves, cuts or grows the blocks. Every step launched must have finished."""
        self._num_blocks = change.num_blocks
        del self.contents[1:]  # or the memory before would be held
        self._show(self.backend.change_pool(self.contents[0], change))

    def release(self) -> None:
        self.contents.clear()

    def state(self) -> list[mx.array]:
        """What must be evaluated with a step for its K/V to be written."""
        return self.backend.state(self.contents[0])

    def check_moves(self) -> int:
        """As `GpuPool.check_moves`; 0 for pools that no kernel writes."""
        content = self.contents[0]
        return content.check_moves() if isinstance(content, GpuPool) else 0

    def _show(self, content: Any) -> None:
        views = [
            self.backend.view_pool(content, spec, self.spec.block_bytes // spec.block_bytes) for spec in self._specs[1:]
        ]
        self.contents = [content, *views]
