"""Which prefixes' recurrent states are kept, and in which slots: without its state, a cached prefix cannot be
resumed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_server.batching.blocks.prefix_cache import PrefixListener, StateChanged
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Request

INTERVAL_BLOCKS = 64
"""A long prompt has a checkpoint every 64 blocks, besides the one at its end."""


class _Pending(NamedTuple):
    """A slot that a scheduled step writes: the state after `num_blocks` blocks, whose hash may not be known yet."""

    num_blocks: int
    slot: int
    is_latest: bool


@dataclass(slots=True)
class _Progress:
    """One running request: the boundaries (in tokens) at which its prompt's state will be kept, the slots that are
    being written, and the hash of its latest checkpoint in the output."""

    boundaries: list[int]
    known_tokens: int
    pending: list[_Pending] = field(default_factory=list)
    latest: bytes | None = None


class StateCheckpoints:
    """A fixed number of slots for recurrent states at block boundaries, found by the block's hash.

    A request resumes from the longest cached prefix that ends at a checkpoint. States are kept

    - at the last block boundary of a prompt: the same prompt, or the next turn of the chat, resumes there;
    - where a prompt begins to differ from cached ones: the next prompt with the same beginning resumes there;
    - every `INTERVAL_BLOCKS` blocks of a prompt;
    - at the latest block boundary of the output: the next turn, or the request after a preemption, resumes there.

    A prompt's chunks end at its boundaries, since a state exists only at the end of a step. A hash stands for the whole
    prefix, so a checkpoint stays correct when its blocks are evicted. It cannot be found then, and its slot is reused
    as the least recently used.

        a prompt of 5,000 tokens begins with 1,024 cached tokens (32 blocks): boundaries at tokens 1,024 (where it
        begins to differ), 2,048, 4,096 (each 64 blocks) and 4,992 (the last before its end)
    """

    def __init__(self, num_slots: int) -> None:
        self.listener: PrefixListener | None = None  # gets each change of which states are kept
        self.before_eviction: Callable[[bytes, int], None] = lambda block_hash, slot: None
        self._free = list(range(num_slots))[::-1]
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._requests: dict[str, _Progress] = {}
        self._reserved: set[int] = set()
        self._num_slots = num_slots

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: object) -> bool:
        """Whether the state at the end of this block is kept."""
        return block_hash in self._slots

    def slot(self, block_hash: bytes) -> int:
        """The slot of the state at the end of this block, which counts as used now."""
        self._slots.move_to_end(block_hash)
        return self._slots[block_hash]

    def find(self, block_hash: bytes) -> int | None:
        """The slot of the state at the end of this block; None if it is not kept."""
        return self._slots.get(block_hash)

    def reserve(self) -> int | None:
        """A slot for a state that is loaded, for `fill` or `give_back`; None if all slots are being written."""
        slot = self._take()
        if slot is not None:
            self._reserved.add(slot)
        return slot

    def fill(self, block_hash: bytes, slot: int) -> None:
        """The next step begins with copying the state at the end of this block into a reserved slot."""
        if block_hash in self._slots:
            self.give_back(slot)
            return
        self._reserved.remove(slot)
        self._slots[block_hash] = slot
        self._on_change(block_hash, is_kept=True)

    def give_back(self, slot: int) -> None:
        """A reserved slot is not needed."""
        self._reserved.remove(slot)
        self._free.append(slot)

    def start(self, request: Request, num_resumed_blocks: int, num_cached_blocks: int) -> None:
        """A request was admitted. It resumes after `num_resumed_blocks` blocks; `num_cached_blocks` of its blocks are
        cached, with or without a state."""
        if request.pooling is not None:  # no request resumes from a pooled input
            self._requests[request.request_id] = _Progress([], request.num_tokens)
            return
        last = request.num_tokens
        wanted = {num_cached_blocks * BLOCK_SIZE, (last - 1) // BLOCK_SIZE * BLOCK_SIZE}
        wanted.update(range(0, last, INTERVAL_BLOCKS * BLOCK_SIZE))
        if last % BLOCK_SIZE == 0:
            wanted.add(last)
        start = num_resumed_blocks * BLOCK_SIZE
        self._requests[request.request_id] = _Progress(sorted(b for b in wanted if b > start), last)

    def stop(self, request_id: str) -> None:
        """The request has left. Slots whose hash never became known are free."""
        progress = self._requests.pop(request_id, None)
        if progress is not None:
            self._free += [pending.slot for pending in progress.pending]

    def cut(self, request: Request, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens of a prompt a step may compute."""
        boundaries = self._requests[request.request_id].boundaries
        return min(num_tokens, boundaries[0] - request.num_computed_tokens) if boundaries else num_tokens

    def save(self, request: Request, end: int) -> int | None:
        """The slot for the state after a step that computes the request's tokens up to `end`; None if that state is not
        to be kept, or if all slots are being written."""
        progress = self._requests[request.request_id]
        boundaries = progress.boundaries
        is_wanted = bool(boundaries) and boundaries[0] == end
        while boundaries and boundaries[0] <= end:
            boundaries.pop(0)
        is_latest = end > progress.known_tokens
        if end % BLOCK_SIZE or not (is_wanted or is_latest):
            return None
        slot = self._take()
        if slot is not None:
            progress.pending.append(_Pending(end // BLOCK_SIZE, slot, is_latest))
        return slot

    def commit(self, request: Request, num_blocks: int) -> None:
        """The hashes of the request's first `num_blocks` blocks are known: states at their ends can be found."""
        progress = self._requests[request.request_id]
        while progress.pending and progress.pending[0].num_blocks <= num_blocks:
            pending = progress.pending.pop(0)
            block_hash = request.block_hashes[pending.num_blocks - 1]
            is_new = block_hash not in self._slots
            if is_new:
                self._slots[block_hash] = pending.slot
                self._on_change(block_hash, is_kept=True)
            else:
                self._free.append(pending.slot)
                self._slots.move_to_end(block_hash)
            if pending.is_latest:
                if progress.latest is not None and progress.latest in self._slots:
                    self._free.append(self._slots.pop(progress.latest))
                    self._on_change(progress.latest, is_kept=False)
                progress.latest = block_hash if is_new else None

    def void(self, request: Request) -> None:
        """Drops the states that steps have left beyond the request's computed tokens: they have seen wrong drafts."""
        pending = self._requests[request.request_id].pending
        while pending and pending[-1].num_blocks * BLOCK_SIZE > request.num_computed_tokens:
            self._free.append(pending.pop().slot)

    def clear(self) -> None:
        """Forgets all states; no request may be running."""
        self._free += self._slots.values()
        self._slots.clear()

    def check_integrity(self) -> None:
        """Asserts that every slot is free, found by one hash, reserved, or being written."""
        pending = [entry.slot for progress in self._requests.values() for entry in progress.pending]
        slots = [*self._free, *self._slots.values(), *self._reserved, *pending]
        assert sorted(slots) == list(range(self._num_slots)), "a checkpoint's slot is lost or used twice"

    def _take(self) -> int | None:
        if self._free or not self._slots:
            return self._free.pop() if self._free else None
        block_hash, slot = self._slots.popitem(last=False)
        self.before_eviction(block_hash, slot)
        self._on_change(block_hash, is_kept=False)
        return slot

    def _on_change(self, block_hash: bytes, *, is_kept: bool) -> None:
        if self.listener is not None:
            self.listener(StateChanged(block_hash, is_kept))
