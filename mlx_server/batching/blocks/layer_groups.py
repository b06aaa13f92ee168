"""The layer groups of a model: how far back each attends, and which blocks a request needs and has for that."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_server.batching.blocks.block import Block
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import NULL_BLOCK_ID

_NO_BOUND = 2**31
"""The most tokens of a request if all layers have windows, so that its blocks never run out."""


def num_blocks_for(num_tokens: int) -> int:
    """Blocks of `num_tokens` tokens in one layer group."""
    return -(-num_tokens // BLOCK_SIZE)


class LayerGroups:
    """Layers that share blocks. A block holds 32 tokens of one group, and a request has a block table for each group.

    `windows` says how many tokens each group's layers attend to, the token itself included; None for all. One token
    counts as two, so that every prefix has a block in each group. Blocks before the window of a request's next token
    are given up, so it never holds more than `most_held` blocks of a group: those of the window and of one chunk, of at
    most `max_chunk_tokens`.

        window 40, chunk 32        |-- window --|- chunk -|
        blocks          .    .   [      |      |      |     ]
                       given up                        held
    """

    def __init__(self, windows: Sequence[int | None] = (None,), max_chunk_tokens: int = 2048) -> None:
        assert windows, "a model has a layer group"
        self.windows = tuple([window and max(2, window) for window in windows])
        self.max_chunk_tokens = max_chunk_tokens
        self.has_windows = any(window is not None for window in windows)
        # Consecutive tokens lie in the most blocks if the first of them is the last token of its block.
        most_tokens = [None if window is None else window - 1 + max_chunk_tokens for window in self.windows]
        self.most_held = tuple(num and num_blocks_for(num + BLOCK_SIZE - 1) for num in most_tokens)

    def __len__(self) -> int:
        return len(self.windows)

    def num_needed(self, num_tokens: int) -> int:
        """The most blocks, of all groups, that a request holds on its way to `num_tokens` tokens."""
        num_blocks = num_blocks_for(num_tokens)
        return sum([num_blocks if most is None else min(num_blocks, most) for most in self.most_held])

    def max_tokens(self, num_blocks: int) -> int:
        """How many tokens a request can grow to, alone in a pool of `num_blocks` blocks."""
        if None not in self.windows and num_blocks >= self.num_needed(_NO_BOUND):
            return _NO_BOUND
        fits = bisect_right(range(num_blocks + 1), num_blocks, key=lambda num: self.num_needed(num * BLOCK_SIZE))
        return BLOCK_SIZE * (fits - 1)


def first_seen(position: int, window: int | None) -> int:
    """Index of the first block that the token at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1) // BLOCK_SIZE


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one layer group. Block i holds tokens 32 * i to 32 * i + 31. The table grows at its
    end. Its first `num_gone` entries are empty: they were given up, or never held."""

    blocks: list[Block]
    num_gone: int

    def __len__(self) -> int:
        """The number of entries, empty ones included."""
        return self.num_gone + len(self.blocks)

    def ids(self, start: int = 0) -> tuple[int, ...]:
        """The block ids from entry `start` on, `NULL_BLOCK_ID` for empty entries."""
        num_null = max(0, self.num_gone - start)
        held = self.blocks[max(0, start - self.num_gone) :]
        return (NULL_BLOCK_ID,) * num_null + tuple([block.block_id for block in held])

    def end(self, num_tokens: int, most_held: int | None) -> int:
        """The length of a table with room for `num_tokens` tokens; with `most_held`, at most that many blocks are held
        at once, and the rest follows as others are given up."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)  # `num_blocks_for` without a call, as each step asks each table
        return num_blocks if most_held is None else min(num_blocks, self.num_gone + most_held)

    def give_up(self, num_gone: int) -> list[Block]:
        """Empties the first `num_gone` entries and returns the blocks that they held, in order."""
        count = max(0, num_gone - self.num_gone)
        assert count <= len(self.blocks), "a block is given up before it is allocated"
        gone = self.blocks[:count]
        del self.blocks[:count]
        self.num_gone += count
        return gone
