"""Which blocks of K/V and which recurrent states are worth keeping on disk, and which are on their way there."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from mlx_server.batching.blocks.block import Block
from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.layer_groups import first_seen
from mlx_server.batching.blocks.prefix_cache import DIGEST_BYTES
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import STATES, CopyPlace
from mlx_server.request import Request

MIN_PROMPT_TOKENS = 512
"""Prefixes of shorter prompts are kept only if they were hit: they are quick to compute, and most never come again."""

PIECE_BYTES = 64 * 2**20
"""The most that is copied into or out of the pools between two steps: about 20 ms at 3 GB/s."""

BESIDE_BYTES = 16 * 2**20
"""Copied out at a time while requests run, and no more until that is written."""

_MAX_PASSED = 256
_OWNER_BYTES = 8

OnRead = Callable[[memoryview | None], None]
"""Takes a content, or None if it is lost or no longer wanted. Any thread."""


class BlockStore(Protocol):
    """Contents of blocks and recurrent states, by digest. All methods return at once."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def state_bytes(self) -> int: ...

    @property
    def is_rounded(self) -> bool:
        """Whether blocks come back in fewer bits than they had."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be read or written."""

    @property
    def read_time_s(self) -> float:
        """For how long, in all, reads were waiting or in progress."""

    def has(self, digest: bytes) -> bool:
        """Whether a content is stored or waits to be written: it can be read, and need not be written again."""

    def read(self, digest: bytes, on_done: OnRead, is_wanted: Callable[[], bool], *, is_state: bool) -> None:
        """Reads a content, unless `is_wanted` is false when its turn comes."""

    def room(self) -> int:
        """How many bytes `write` takes now."""

    def write(self, digest: bytes, owner: bytes, content: memoryview, *, is_state: bool) -> None:
        """Queues a content to be written; it is lost if the tier is turned off or the process ends first."""

    def set_busy(self, is_busy: bool) -> None:
        """Says whether answers are being computed, which writing must not slow down."""


def content_bytes(store: BlockStore, group: int) -> int:
    """The size of a block of a layer group, or of a state (`STATES`)."""
    return store.state_bytes if group == STATES else store.block_bytes


def record_digest(block_hash: bytes, group: int) -> bytes:
    """The digest that stands for a stored block of a layer group, or for the state at its end (`STATES`): the block's
    own hash in the first group, otherwise a hash of that and the group."""
    if group == 0:
        return block_hash
    return blake2b(block_hash + group.to_bytes(2, "little", signed=True), digest_size=DIGEST_BYTES).digest()


def owner_tag(extra_keys: tuple[str, ...]) -> bytes:
    """Stands for the callers who may hit a block, so that `purge` can find their blocks; zeros for everyone."""
    if not extra_keys:
        return bytes(_OWNER_BYTES)
    return blake2b(extra_keys[0].encode(), digest_size=_OWNER_BYTES).digest()


@dataclass(frozen=True, slots=True)
class _Save:
    """A content worth keeping, with the rest of its record."""

    block_hash: bytes
    group: int
    owner: bytes


class DiskSaves:
    """What is saved, in which order. Event-loop thread only.

    A request's prefix is worth keeping if its prompt was long; of a shorter prompt, only the part that was a hit. Of
    layers without a window, all full blocks are kept. A prefix with windows or states can be resumed at three of its
    boundaries: its end, the end of the prompt, and the end of what was hit. Of these layers, only what the token at
    such a boundary attends to is kept.

        window of 2 blocks; a prompt of 7.5 blocks, of which 3 were hit; 10 blocks with the answer
        no window    0 1 2 3 4 5 6 7 8 9
        window         1 2     5 6   8 9
        state            2       6     9

    Without windows, a block on disk is worth nothing unless all blocks before it are there. So prefixes are saved from
    their beginnings, although the pool evicts their ends first. If a step evicts more than it can save, it does not
    save the evicted blocks but the next ones from the beginning, until eviction from the end reaches them.
    """

    def __init__(self, blocks: PagedBlockManager, store: BlockStore) -> None:
        self.min_prompt_tokens = MIN_PROMPT_TOKENS
        self.landing: set[bytes] = set()  # digests that the next step loads
        self._counters = blocks.counters
        self._blocks = blocks
        self.store = store
        self._worth: OrderedDict[bytes, _Save] = OrderedDict()  # cached contents to be saved, by digest
        self._evicted: dict[bytes, CopyPlace] = {}  # those of them that the next step overwrites
        self._piece_bytes = PIECE_BYTES
        self._requested_bytes = 0
        self.is_urgent = False  # someone waits for memory of blocks that must be saved first
        self._submitted: deque[list[_Save]] = deque()
        blocks.before_eviction = self._on_eviction
        if blocks.checkpoints is not None:
            blocks.checkpoints.before_eviction = self._on_state_eviction

    def __len__(self) -> int:
        """How many cached contents are still to be saved."""
        return len(self._worth)

    @property
    def is_due(self) -> bool:
        """Whether something can be saved now, and no save is on its way."""
        if not self._worth or self._submitted:
            return False
        return content_bytes(self.store, next(iter(self._worth.values())).group) <= self._room()

    def on_leave(self, request: Request) -> None:
        """A request no longer runs; its full blocks are cached."""
        if not self._blocks.may_hit(request):
            return
        num_blocks = min(request.num_computed_tokens // BLOCK_SIZE, len(request.block_hashes))
        num_hit = (request.num_cached_tokens or 0) // BLOCK_SIZE
        if request.num_prompt_tokens < self.min_prompt_tokens:
            num_blocks = min(num_blocks, num_hit)
        hashes = request.block_hashes
        owner = owner_tag(request.extra_keys)
        num_in_prompt = (request.num_prompt_tokens - 1) // BLOCK_SIZE
        for index, group in self._worth_keeping(num_blocks, {num_hit, num_in_prompt, num_blocks}):
            digest = record_digest(hashes[index], group)
            if self._find(hashes[index], group) is not None and not self.store.has(digest):
                self._worth.setdefault(digest, _Save(hashes[index], group, owner))

    def forget(self) -> None:
        """The prefix cache was reset: nothing of it is worth saving."""
        self._worth.clear()
        self._evicted.clear()

    def begin_step(self, piece_bytes: int) -> None:
        """A step is about to be composed. It may save `piece_bytes`, or a single larger content."""
        self._piece_bytes = piece_bytes
        self._requested_bytes = piece_bytes if self.is_urgent else 0

    def request(self, num_bytes: int) -> None:
        """The step is to save up to `num_bytes`, although nothing is evicted."""
        self._requested_bytes = max(self._requested_bytes, num_bytes)

    def defers(self, blocks: Iterable[Block]) -> bool:
        """Whether a cut of the pool must wait before it evicts `blocks`: some of them are to be saved, and each step
        saves a piece of them."""
        digests = (record_digest(block.block_hash, block.layer_group) for block in blocks if block.block_hash)
        is_going_on = bool(self._submitted) or not self.store.is_quiet
        self.is_urgent = any(digest in self._worth for digest in digests) and (is_going_on or self.is_due)
        return self.is_urgent

    def take(self) -> tuple[CopyPlace, ...]:
        """The saves of the step that was just composed, as places before its change of the pool; `on_copied` follows if
        there are any."""
        evicted, self._evicted = self._evicted, {}
        evicted_bytes = sum([content_bytes(self.store, place.group) for place in evicted.values()])
        room, most_bytes = self._room(), max(self._requested_bytes, self._piece_bytes if evicted else 0)
        fits = evicted_bytes <= min(room, most_bytes) or not self._blocks.grows_block_by_block
        chosen: list[tuple[CopyPlace, _Save]] = []
        num_bytes = 0
        for digest, place in self._candidates(
            evicted, evicted_first=fits, has_more=not fits or self._requested_bytes > 0
        ):
            size = content_bytes(self.store, place.group)
            if num_bytes + size > room or (chosen and num_bytes + size > most_bytes):
                break
            chosen.append((place, self._worth.pop(digest)))
            num_bytes += size
        else:
            self.is_urgent &= bool(chosen) and bool(self._worth)
        self._counters.num_blocks_not_saved += sum([self._worth.pop(digest, None) is not None for digest in evicted])
        self.landing.clear()
        if chosen:
            self._submitted.append([save for _, save in chosen])
        return tuple([place for place, _ in chosen])

    def on_copied(self, contents: Sequence[memoryview]) -> None:
        """A step with copies is over; `contents` are those that it saved."""
        if not contents:
            return
        for save, content in zip(self._submitted.popleft(), contents, strict=True):
            digest, is_state = record_digest(save.block_hash, save.group), save.group == STATES
            self.store.write(digest, save.owner, content, is_state=is_state)
        self._counters.num_blocks_saved += len(contents)

    # --- inside ---------------------------------------------------------------------------------------------

    def _worth_keeping(self, num_blocks: int, ends: set[int]) -> Iterator[tuple[int, int]]:
        """Block indices and groups that are kept of a prefix, in order of the blocks."""
        ends = {end for end in ends if 0 < end <= num_blocks}
        wanted: list[list[int]] = [[] for _ in range(num_blocks)]
        for group, window in enumerate(self._blocks.groups.windows if self.store.block_bytes else ()):
            for end in [num_blocks] if window is None else ends:
                for index in range(first_seen(end * BLOCK_SIZE, window), end):
                    wanted[index].append(group)
        if self._blocks.checkpoints is not None:
            for end in ends:
                wanted[end - 1].append(STATES)
        return ((index, group) for index, groups in enumerate(wanted) for group in dict.fromkeys(groups))

    def _find(self, block_hash: bytes, group: int) -> CopyPlace | None:
        """Where a cached content is until the pending change of the pool is made; None if it is not cached."""
        if group == STATES:
            checkpoints = self._blocks.checkpoints
            slot = None if checkpoints is None else checkpoints.find(block_hash)
            return None if slot is None else CopyPlace(slot, STATES)
        block = self._blocks.cached_block(block_hash, group)
        return None if block is None else CopyPlace(self._blocks.content_id(block), group)

    def _candidates(
        self, evicted: dict[bytes, CopyPlace], *, evicted_first: bool, has_more: bool
    ) -> Iterator[tuple[bytes, CopyPlace]]:
        """What can be saved, in order. The caller must take each from `_worth` before it asks for the next. Referenced
        blocks are left out: a step in flight may still write them."""
        if evicted_first:
            yield from evicted.items()
        num_left = min(_MAX_PASSED, len(self._worth)) if has_more else 0
        while num_left and self._worth:
            digest, save = next(iter(self._worth.items()))
            place = evicted.get(digest) or self._find(save.block_hash, save.group)
            block = None if save.group == STATES else self._blocks.cached_block(save.block_hash, save.group)
            if digest not in evicted and block is not None and block.ref_cnt:
                self._worth.move_to_end(digest)
                num_left -= 1
            elif place is None or digest in self.landing or self.store.has(digest):
                del self._worth[digest]
                num_left -= 1
            else:
                yield digest, place

    def _on_eviction(self, block: Block) -> None:
        if self._worth and block.block_hash is not None:
            self._on_lost(block.block_hash, CopyPlace(self._blocks.content_id(block), block.layer_group))

    def _on_state_eviction(self, block_hash: bytes, slot: int) -> None:
        if self._worth:
            self._on_lost(block_hash, CopyPlace(slot, STATES))

    def _on_lost(self, block_hash: bytes, place: CopyPlace) -> None:
        """A content will be lost unless the next step saves it."""
        digest = record_digest(block_hash, place.group)
        if digest in self._worth and digest not in self.landing:
            self._evicted[digest] = place

    def _room(self) -> int:
        """The bytes that the store takes now, less those that the steps in flight will save."""
        return self.store.room() - sum(
            [content_bytes(self.store, save.group) for saves in self._submitted for save in saves]
        )
