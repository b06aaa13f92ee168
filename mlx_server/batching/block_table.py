"""The blocks of one request in one layer group."""

from __future__ import annotations

from mlx_server.batching.block import Block
from mlx_server.outputs import NULL_BLOCK_ID


class BlockTable:
    """Block i holds tokens 32 * i to 32 * i + 31. Grows at its end; its first `num_gone` entries are given up."""

    __slots__ = ("blocks", "num_gone")

    def __init__(self, blocks: list[Block], num_gone: int) -> None:
        """`blocks` come behind `num_gone` entries that were never held."""
        self.blocks = blocks
        self.num_gone = num_gone

    def __len__(self) -> int:
        """Entries, those given up included."""
        return self.num_gone + len(self.blocks)

    def ids(self, start: int = 0) -> tuple[int, ...]:
        """The entries from index `start` on."""
        num_null = max(0, self.num_gone - start)
        held = self.blocks[max(0, start - self.num_gone) :]
        return (NULL_BLOCK_ID,) * num_null + tuple([block.block_id for block in held])

    def give_up(self, num_gone: int) -> list[Block]:
        """Makes the first `num_gone` entries empty; the blocks that were held there, in order."""
        count = max(0, num_gone - self.num_gone)
        assert count <= len(self.blocks), "a block is given up before it is there"
        gone = self.blocks[:count]
        del self.blocks[:count]
        self.num_gone += count
        return gone
