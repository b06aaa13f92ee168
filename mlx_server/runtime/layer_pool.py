"""The K/V of layers that share blocks: of one layer of each group, or of a few small ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention import AttentionBackend, LayerSpec, ReferenceBackend
from mlx_server.runtime.row_pool import RowPool


class LayerPool:
    """One pool of blocks and the backend that attends over it. MLX thread only.

    Its blocks are those of a layer like `spec`. Layers of other shapes see the same memory as blocks of theirs, several
    in one of the pool's: `content_for` each. A content is the backend's; once a layer is read by groups of rows the
    pool `is_viewed`: it is then one of plain rows, since no backend attends over it.
    """

    def __init__(self, spec: LayerSpec, seen_as: Sequence[LayerSpec] = ()) -> None:
        """`seen_as` are the layers of other shapes."""
        self.spec = spec
        self.content: Any = None
        self.is_viewed = False
        self._seen_as = [other for other in dict.fromkeys(seen_as) if other != spec]
        self._contents: dict[LayerSpec, Any] = {}
        self._num_blocks = 0
        self._backend: AttentionBackend | None = None

    @property
    def backend(self) -> AttentionBackend:
        assert self._backend is not None, "a pool is allocated before it is used"
        return self._backend

    def quantize(self, bits: int) -> None:
        """From the next allocation on, K/V are stored in so many bits a number."""
        self.spec = replace(self.spec, bits=bits)
        self._seen_as = [replace(other, bits=bits) for other in self._seen_as]

    def allocate(self, backend: AttentionBackend, num_blocks: int, max_blocks: int | None = None) -> None:
        """Takes memory, which may grow to `max_blocks`."""
        self._backend = ReferenceBackend() if self.is_viewed else backend
        self._num_blocks = num_blocks
        self._show(self._backend.make_pool(self.spec, num_blocks, max_blocks))

    def content_for(self, spec: LayerSpec) -> Any:
        """The pool as a layer like `spec` sees it."""
        return self._contents[spec]

    def rows_for(self, spec: LayerSpec) -> RowPool:
        """The same as rows. The first call makes it so, and loses what was in it."""
        if not self.is_viewed:
            self.is_viewed = True
            self.allocate(ReferenceBackend(), self._num_blocks)
        rows = self._contents[spec]
        assert isinstance(rows, RowPool)
        return rows

    def change(self, change: PoolChange) -> None:
        """Moves, cuts or grows the blocks. Every step launched must have finished."""
        self._num_blocks = change.num_blocks
        self._contents.clear()
        self._show(self.backend.change_pool(self.content, change))

    def release(self) -> None:
        self.content = None
        self._contents.clear()

    def state(self) -> list[mx.array]:
        """What must be evaluated with a step for its K/V to be written."""
        return self.backend.state(self.content)

    def _show(self, content: Any) -> None:
        self.content = content
        self._contents = {self.spec: content}
        for other in self._seen_as:
            num_parts = self.spec.block_bytes // other.block_bytes
            self._contents[other] = self.backend.view_pool(content, other, num_parts)
