"""Which blocks of K/V and which recurrent states are worth keeping on disk, and those on their way there."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from mlx_server.batching.blocks.block import Block
from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.layer_groups import first_seen
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import STATES, CopyPlace
from mlx_server.request import Request

MIN_PROMPT_TOKENS = 512
"""Prefixes of shorter prompts are kept only if they were hit: they are soon computed, and most are never seen again."""

PIECE_BYTES = 64 * 2**20
"""The most that is copied into or out of the pools between two steps: about 20 ms at 3 GB/s."""

BESIDE_BYTES = 16 * 2**20
"""Copied out at a time while somebody runs, and no more before that is written."""

_MOST_PASSED = 64
_OWNER_BYTES = 8
_ROOT = bytes(16)


@dataclass(slots=True)
class DiskTierCounters:
    """Totals since start; `EngineStats` says what each means."""

    num_disk_loads: int = 0
    num_blocks_loaded: int = 0
    num_blocks_not_loaded: int = 0
    num_blocks_saved: int = 0
    num_blocks_not_saved: int = 0
    disk_load_time_s: float = 0.0


class BlockStore(Protocol):
    """Contents of blocks, and of recurrent states, by digest. Every method returns at once."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def state_bytes(self) -> int: ...

    @property
    def is_rounded(self) -> bool:
        """Whether blocks come back in fewer bits than they had."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be read or written."""
        ...

    def has(self, digest: bytes) -> bool:
        """Whether a content need not be written."""
        ...

    def is_stored(self, digest: bytes) -> bool:
        """Whether a content can be read."""
        ...

    def read(
        self,
        digest: bytes,
        on_done: Callable[[memoryview | None], None],
        is_wanted: Callable[[], bool],
        *,
        is_state: bool,
    ) -> None:
        """`on_done` gets the content, or None, on any thread. What is not wanted any more when its turn comes is not
        read."""
        ...

    def room(self) -> int:
        """How many bytes may be given to write now."""
        ...

    def write(self, digest: bytes, parent: bytes, owner: bytes, content: memoryview, *, is_state: bool) -> None:
        """Keeps a content, if nothing comes in between."""
        ...

    def set_busy(self, is_busy: bool) -> None:
        """Whether answers are computed just now, which writing must not slow down."""
        ...


def content_bytes(store: BlockStore, group: int) -> int:
    """Of a block of a layer group, or of a state."""
    return store.state_bytes if group == STATES else store.block_bytes


def record_digest(block_hash: bytes, group: int) -> bytes:
    """What a block of a layer group, or the state at its end (`STATES`), is stored by: its own hash in the first group,
    and else a hash of that and the group."""
    if group == 0:
        return block_hash
    return blake2b(block_hash + group.to_bytes(2, "little", signed=True), digest_size=len(_ROOT)).digest()


def owner_tag(extra_keys: tuple[str, ...]) -> bytes:
    """Stands for the callers who may hit a block, by which their blocks can be found; zeros for everyone."""
    if not extra_keys:
        return bytes(_OWNER_BYTES)
    return blake2b(extra_keys[0].encode(), digest_size=_OWNER_BYTES).digest()


@dataclass(frozen=True, slots=True)
class _Save:
    """A content worth keeping, and what its record says beside it."""

    block_hash: bytes
    group: int
    parent: bytes
    owner: bytes


class DiskSaves:
    """Event-loop thread only.

    What a request leaves behind is worth keeping if its prompt was long, or as far as it was a hit. Where layers see
    everything, that is all full blocks. Where some see a window only, or keep a state, the prefix can be gone on from
    at three of its boundaries: its end, the prompt's, and that of what was hit, and of those layers only what is seen
    from there is kept.

        window of 2 blocks, prompt of 7.5, of which 3 were hit, 10 with the answer
        all tokens   0 1 2 3 4 5 6 7 8 9
        window         1 2     5 6   8 9
        state            2       6     9
    """

    def __init__(self, blocks: PagedBlockManager, store: BlockStore, counters: DiskTierCounters) -> None:
        self.min_prompt_tokens = MIN_PROMPT_TOKENS
        self.landing: set[bytes] = set()  # digests of what the step that is composed next loads
        self._counters = counters
        self._blocks = blocks
        self.store = store
        self._worth: OrderedDict[bytes, _Save] = OrderedDict()  # cached contents that are to be saved, by digest
        self._next: list[tuple[CopyPlace, _Save]] = []  # of the step that is composed next
        self._next_bytes = 0
        self._submitted: deque[list[_Save]] = deque()
        blocks.before_eviction = self._on_eviction
        if blocks.checkpoints is not None:
            blocks.checkpoints.before_eviction = self._on_state_eviction

    def __len__(self) -> int:
        """Cached contents that are worth saving and are not saved."""
        return len(self._worth)

    @property
    def is_due(self) -> bool:
        """Whether something can be saved now, and nothing is on its way."""
        if not self._worth or self._submitted:
            return False
        return self._has_room(next(iter(self._worth.values())).group)

    def on_leave(self, request: Request) -> None:
        """A request does not run any more; its full blocks are cached."""
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
                parent = hashes[index - 1] if index else _ROOT
                self._worth.setdefault(digest, _Save(hashes[index], group, parent, owner))

    def forget(self) -> None:
        """The prefix cache was reset: nothing of it is worth saving."""
        self._worth.clear()

    def save_some(self) -> None:
        """Saves the oldest contents that are worth it with the next step, as many as fit. Nobody runs."""
        while self._worth:
            digest, save = next(iter(self._worth.items()))
            if not self._has_room(save.group):
                return
            self._save(digest, save)

    def save_beside(self, most_bytes: int) -> int:
        """The same while requests run, `most_bytes` or a single content, of blocks that nobody holds: what is held may
        be written by a step in flight still. How much."""
        before = self._next_bytes
        for _ in range(min(_MOST_PASSED, len(self._worth))):
            digest, save = next(iter(self._worth.items()))
            if not self._has_room(save.group, most_bytes):
                break
            block = self._blocks.cached_block(save.block_hash, save.group)
            if block is not None and block.ref_cnt:
                self._worth.move_to_end(digest)
            else:
                self._save(digest, save)
        return self._next_bytes - before

    def take(self) -> tuple[CopyPlace, ...]:
        """What the step that was just composed saves; `on_copied` follows."""
        places = tuple([place for place, _ in self._next])
        self._submitted.append([save for _, save in self._next])
        self._next, self._next_bytes = [], 0
        self.landing.clear()
        return places

    @property
    def is_empty(self) -> bool:
        """Whether the step that is composed next saves nothing."""
        return not self._next

    def on_copied(self, contents: Sequence[memoryview]) -> None:
        """The oldest step of `take` is over; `contents` are those that it saved."""
        for save, content in zip(self._submitted.popleft(), contents, strict=True):
            digest, is_state = record_digest(save.block_hash, save.group), save.group == STATES
            self.store.write(digest, save.parent, save.owner, content, is_state=is_state)
        self._counters.num_blocks_saved += len(contents)

    # --- inside ---------------------------------------------------------------------------------------------

    def _worth_keeping(self, num_blocks: int, ends: set[int]) -> Iterator[tuple[int, int]]:
        """Places in a prefix and groups (see above), the first blocks first."""
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
        """Where a content lies before the change of the pools that waits to be taken, if it is cached."""
        if group == STATES:
            checkpoints = self._blocks.checkpoints
            slot = None if checkpoints is None else checkpoints.find(block_hash)
            return None if slot is None else CopyPlace(slot, STATES)
        block = self._blocks.cached_block(block_hash, group)
        return None if block is None else CopyPlace(self._blocks.content_id(block), group)

    def _on_eviction(self, block: Block) -> None:
        if self._worth and block.block_hash is not None:
            place = CopyPlace(self._blocks.content_id(block), block.layer_group)
            self._save_or_lose(block.block_hash, place)

    def _on_state_eviction(self, block_hash: bytes, slot: int) -> None:
        if self._worth:
            self._save_or_lose(block_hash, CopyPlace(slot, STATES))

    def _save_or_lose(self, block_hash: bytes, place: CopyPlace) -> None:
        """A content is lost unless the next step saves it."""
        digest = record_digest(block_hash, place.group)
        save = self._worth.pop(digest, None)
        if save is None:
            return
        if self._has_room(save.group) and digest not in self.landing:
            self._add(place, save)
        else:
            self._counters.num_blocks_not_saved += 1

    def _save(self, digest: bytes, save: _Save) -> None:
        """Saves a content with the next step, if it is there still."""
        del self._worth[digest]
        place = self._find(save.block_hash, save.group)
        if place is not None and digest not in self.landing and not self.store.has(digest):
            self._add(place, save)

    def _add(self, place: CopyPlace, save: _Save) -> None:
        self._next.append((place, save))
        self._next_bytes += content_bytes(self.store, save.group)

    def _has_room(self, group: int, piece_bytes: int = PIECE_BYTES) -> bool:
        """Whether the next step may save one more: a piece, or a single content that is larger."""
        num_bytes = self._next_bytes + content_bytes(self.store, group)
        if self._next and num_bytes > piece_bytes:
            return False
        submitted = sum([content_bytes(self.store, save.group) for saves in self._submitted for save in saves])
        return num_bytes <= self.store.room() - submitted
