"""Which prefixes are loaded from disk and for whom; how contents are kept is the store's matter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from mlx_server.batching.blocks.block import Block
from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.disk_saves import (
    BESIDE_BYTES,
    PIECE_BYTES,
    BlockStore,
    DiskSaves,
    DiskTierCounters,
    content_bytes,
    record_digest,
)
from mlx_server.batching.blocks.layer_groups import first_seen
from mlx_server.batching.blocks.prefix_cache import SeenBlock
from mlx_server.batching.priority_queue import PriorityQueueWithAging
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import STATES, BlockCopies, CopyPlace, ModelRunnerOutput
from mlx_server.request import Priority, Request
from mlx_server.sampling_params import SamplingParams

IDLE_S = 1.0
"""So long nobody has run before blocks are saved without need."""

_MOST_LOADS = 2

_AHEAD_BYTES = 2 * PIECE_BYTES
"""Of a load, read and not yet copied."""

_MOST_LOAD_S = 10.0
"""A load that takes longer is given up as far as it has not come: the rest is computed."""

_LATE_S = 0.01

_COPY_SHARE = 0.25
"""Of a step's target, what may be spent on copying while somebody runs."""

_BESIDE_SHARE = 0.01
"""Of the time, what may go into copies for saves where they are made by what computes: to write takes as much again."""

_BESIDE_S_PER_BYTE = 1 / 32e6
"""And the least between them: 90 MB a second slowed streams on two cores by 4 to 7 %."""

_IN_TURN_BYTES = 2 * 2**20
"""Copied at a time there, or a single content, so that saving is spread evenly over steps."""

_FIRST_COPY_BYTES_PER_S = 1e9
_COPY_MEMORY_BYTES = 2 * PIECE_BYTES
"""Copies before the last so many bytes hardly tell how fast they are."""

_FIRST_BYTES_PER_S = 1e9
_RATE_GAIN = 0.3
_LOAD_FIXED_S = 0.005
_NOTHING = memoryview(b"")


class _Item(NamedTuple):
    """A block of a layer group, or the state at the end of a block, for a checkpoint's slot."""

    number: int
    group: int
    block: Block | None
    slot: int = 0

    @property
    def place(self) -> CopyPlace:
        """Now; a change of the pools moves blocks."""
        return CopyPlace(self.slot if self.block is None else self.block.block_id, self.group)


@dataclass(slots=True, eq=False)
class _Load:
    """`items` from `next` on of a prefix of `end` blocks are on their way for `wanted_by`, of which those before
    `asked` are being read or are `staged`. `first` blocks of the prefix were a hit in memory. `holder` holds the blocks
    as a running request would, and to others who need them it is the one who computes them."""

    holder: Request
    wanted_by: Request
    first: int
    end: int
    items: list[_Item]
    began_s: float
    next: int = 0
    asked: int = 0
    bytes_ahead: int = 0
    bytes_landed: int = 0
    is_broken: bool = False
    staged: dict[int, memoryview | None] = field(default_factory=dict)
    is_over: bool = False

    @property
    def is_complete(self) -> bool:
        return self.next == len(self.items)


class DiskTier:
    """Loads prefixes from a store into blocks, and saves blocks there (`saves`). Event-loop thread only, but for the
    store's answers.

    When a waiting request is the next of its tier and a longer prefix of it is in memory and on disk than in memory
    alone, what is missing is read if that is foretold to be faster than computing it. The blocks are held meanwhile by
    a request of the tier's own, which the queue takes for one that computes them: who needs them is parked, the request
    itself and all others with that prefix, so that nothing is loaded twice. With each step a piece of what was read is
    copied into the pool, and is cached from then on like anything that a step computes. The load ends with its last
    block, at the first that cannot be read, after ten seconds, or when the pool is needed for those who run; what is
    cached by then is hit, and the rest computed.

        request   |-- in memory: 40 blocks --|-- on disk: 60 blocks --|-- neither --|
        load                                 0 ... 59, in pieces of some, each cached once it is scheduled
        request                                                       starts here, 100 blocks counted as cached

    A prefix whose layers see windows ends where all of them are whole, and one with recurrent states where a state is:
    it is hit when all of it has come, the state first.
    """

    def __init__(
        self,
        blocks: PagedBlockManager,
        waiting: PriorityQueueWithAging,
        store: BlockStore,
        compute_s: Callable[[int, int], float],
        room_beside: Callable[[], int],
        target_s: Callable[[], float],
    ) -> None:
        """`compute_s` says how long a prompt's tokens from a position on take to compute, 0 if that is not known.
        `room_beside` is how many blocks a load must leave free, `target_s` the target time of a step beside decodes."""
        self.counters = DiskTierCounters()
        self.saves = DiskSaves(blocks, store, self.counters)
        self._blocks = blocks
        self._waiting = waiting
        self._store = store
        self._compute_s = compute_s
        self._room_beside = room_beside
        self.target_s = target_s
        self._loads: list[_Load] = []
        self._arrived: deque[tuple[_Load, int, memoryview | None]] = deque()
        self._loaded: list[tuple[CopyPlace, memoryview]] = []
        self._bytes_per_s = _FIRST_BYTES_PER_S
        self._is_busy = False
        self._busy_until_s = 0.0
        self._num_loads = 0
        self._copied_bytes = float(_COPY_MEMORY_BYTES)
        self._copied_s = _COPY_MEMORY_BYTES / _FIRST_COPY_BYTES_PER_S
        self._is_copied_beside = False  # a GPU computes meanwhile
        self._next_save_s = 0.0

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    # --- between steps --------------------------------------------------------------------------------------

    def advance(self, now: float, *, is_busy: bool) -> None:
        """Before a step is composed: takes what was read, and begins what is wanted. `is_busy`: somebody runs."""
        self._is_busy = is_busy
        if is_busy:
            self._busy_until_s = now
        self._store.set_busy(is_busy and not self.saves.is_hasty)
        while self._arrived:
            load, number, content = self._arrived.popleft()
            if not load.is_over:
                load.staged[number] = content
        room = piece = self._piece_bytes() if is_busy else PIECE_BYTES
        self.saves.begin_step(piece)
        for load in list(self._loads):
            room -= self._land(load, room, now, is_first=room == piece)
        if len(self._loads) < _MOST_LOADS:
            self._begin_loads(now)
        may_save = is_busy and not self._loads and self._blocks.grows_block_by_block and now >= self._next_save_s
        if may_save and self.saves.is_due and self._store.is_quiet:
            self.saves.ask(min(BESIDE_BYTES if self._is_copied_beside else _IN_TURN_BYTES, piece))

    def rest_s(self, now: float, *, is_idle: bool) -> float | None:
        """For how long there is nothing to do if nobody comes: until a load takes too long, or, where no request is
        there (`is_idle`), until blocks are to be saved. None until something is read or written, or for ever."""
        if self._loads:
            return max(0.0, min(load.began_s for load in self._loads) + _MOST_LOAD_S - now) + _LATE_S
        if is_idle and self.saves.is_due:
            return max(0.0, self._busy_until_s + IDLE_S - now)
        return None

    def save_idle(self, now: float) -> None:
        """Where nothing else is to be computed: saves a piece of what is worth it, once that has been so for a while.
        Loads come first."""
        if not self._loads and now - self._busy_until_s >= IDLE_S:
            self.saves.ask(PIECE_BYTES)

    def take_copies(self) -> BlockCopies | None:
        """What the step that was just composed copies; None if nothing. `saves.on_copied` follows."""
        saved, loaded = self.saves.take(), tuple(self._loaded)
        self._loaded = []
        if saved and self._is_busy and not self._is_copied_beside:
            num_bytes = sum([content_bytes(self._store, place.group) for place in saved])
            pause_s = num_bytes * max(self._copy_s_per_byte / _BESIDE_SHARE, _BESIDE_S_PER_BYTE)
            self._next_save_s = self._busy_until_s + pause_s
        return BlockCopies(saved, loaded) if saved or loaded else None

    def on_copied(
        self, copies: BlockCopies, output: ModelRunnerOutput, foretold_s: float | None, launch_s: float
    ) -> None:
        """The oldest step of `take_copies` is over, which was to take `foretold_s` without them, and `launch_s` of that
        to be launched; None where more than tokens and copies took its time."""
        self.saves.on_copied(output.saved_blocks)
        if foretold_s is None:
            return
        # A launch that takes most of the step waits until it is computed, as on a CPU.
        self._is_copied_beside = 0.0 < output.launch_time_s < 0.5 * output.step_time_s
        seconds = output.launch_time_s - launch_s if self._is_copied_beside else output.step_time_s - foretold_s
        places = [*copies.saved, *[place for place, _ in copies.loaded]]
        num_bytes = self._copied_bytes + sum([content_bytes(self._store, place.group) for place in places])
        share = min(1.0, _COPY_MEMORY_BYTES / num_bytes)
        self._copied_bytes = share * num_bytes
        self._copied_s = share * (self._copied_s + max(0.0, seconds))

    def _piece_bytes(self) -> int:
        """What may be copied with a step that somebody waits for, by what copies took so far."""
        return int(min(PIECE_BYTES, _COPY_SHARE * self.target_s() / self._copy_s_per_byte))

    @property
    def _copy_s_per_byte(self) -> float:
        return max(self._copied_s, 1e-6) / self._copied_bytes

    # --- loads ----------------------------------------------------------------------------------------------

    def give_up_load(self) -> bool:
        """Ends the newest load, whose blocks are free then; False if there is none."""
        if not self._loads:
            return False
        self._end(self._loads[-1])
        return True

    def close(self) -> None:
        """Ends all loads; nobody runs any more."""
        while self.give_up_load():
            pass
        self._store.set_busy(False)

    def _begin_loads(self, now: float) -> None:
        for head in self._waiting.heads(now):
            shortest = self._waiting.shortest(head.priority, now)
            for request in dict.fromkeys((head, shortest)):
                if request is None or request.was_sought_on_disk or len(self._loads) >= _MOST_LOADS:
                    continue
                lacked = request.num_blocks_lacked
                if lacked and not self._blocks.make_room(lacked + self._room_beside()):
                    continue
                request.was_sought_on_disk, request.num_blocks_lacked = True, 0
                if self._blocks.may_hit(request):
                    self._begin(request, now)

    def _begin(self, request: Request, now: float) -> None:
        first = len(self._blocks.find_prefix(request))
        end = self._blocks.reach(request, self._is_stored)
        if not self._pays(first, end):
            return
        seen = self._blocks.seen(request, end)
        num_blocks = sum([block is None or not block.ref_cnt for _, _, block in seen])
        if not self._blocks.make_room(num_blocks + self._room_beside()):
            request.was_sought_on_disk, request.num_blocks_lacked = False, num_blocks  # when there is room
            return
        checkpoints, items = self._blocks.checkpoints, []
        if checkpoints is not None:
            last = request.block_hashes[end - 1]
            slot = checkpoints.slot(last) if last in checkpoints else checkpoints.reserve()
            if slot is None:
                return
            if last not in checkpoints:
                items.append(_Item(end - 1, STATES, None, slot))
        self.counters.num_disk_loads += 1
        holder = self._holder(request, first, end)
        items += [_Item(*missing) for missing in sorted(self._blocks.hold(holder, seen), key=_order)]
        self._waiting.start(holder, is_load=True)
        load = _Load(holder, request, first, end, items, now)
        self._loads.append(load)
        self._ask(load)

    def _is_stored(self, block_hash: bytes, group: int) -> bool:
        """Where layers keep states only, blocks are nothing but places in a prefix."""
        return not content_bytes(self._store, group) or self._store.has(record_digest(block_hash, group))

    def _pays(self, first: int, end: int) -> bool:
        """Whether a prefix of `end` blocks is read sooner than computed behind its first blocks, as far as either is
        known."""
        if end <= first:
            return False
        compute_s = self._compute_s(first * BLOCK_SIZE, (end - first) * BLOCK_SIZE)
        windows = self._blocks.groups.windows
        num_blocks = sum([end - max(first, first_seen(end * BLOCK_SIZE, window)) for window in windows])
        num_bytes = num_blocks * self._store.block_bytes + self._store.state_bytes
        return compute_s == 0.0 or _LOAD_FIXED_S + num_bytes / self._bytes_per_s < compute_s

    def _holder(self, request: Request, first: int, end: int) -> Request:
        """A request of our own that holds the first `end` blocks."""
        num_tokens = end * BLOCK_SIZE
        self._num_loads += 1
        holder = Request(
            f"disk load {self._num_loads} for {request.request_id}",
            request.token_ids(0, num_tokens),
            SamplingParams(),
            arrival_s=request.arrival_s,
            max_total_tokens=num_tokens + 1,
            priority=Priority.HIGH,
            extra_keys=request.extra_keys,
            adapter=request.adapter,
            adapter_key=request.adapter_key,
        )
        holder.block_hashes = request.block_hashes[:end]
        holder.num_computed_tokens = first * BLOCK_SIZE
        return holder

    def _ask(self, load: _Load) -> None:
        """Has contents read, as many as may be staged."""
        while load.asked < len(load.items):
            number, item = load.asked, load.items[load.asked]
            num_bytes = content_bytes(self._store, item.group)
            if load.asked > load.next and load.bytes_ahead + num_bytes > _AHEAD_BYTES:
                break
            load.asked += 1
            load.bytes_ahead += num_bytes
            if not num_bytes:
                load.staged[number] = _NOTHING
                continue
            digest = record_digest(load.holder.block_hashes[item.number], item.group)
            on_read, is_state = partial(self._on_read, load, number), item.group == STATES
            self._store.read(digest, on_read, lambda: not load.is_over, is_state=is_state)

    def _on_read(self, load: _Load, number: int, content: memoryview | None) -> None:
        """On any thread."""
        self._arrived.append((load, number, content))

    def _land(self, load: _Load, most_bytes: int, now: float, *, is_first: bool) -> int:
        """Copies what was read of a load with the next step, `most_bytes`, or a single content that is larger if it
        `is_first`; how much."""
        before = load.bytes_landed
        while not load.is_complete and load.next in load.staged:
            item = load.items[load.next]
            num_bytes, landed = content_bytes(self._store, item.group), load.bytes_landed - before
            if landed + num_bytes > most_bytes and (landed or not is_first):
                break
            content = load.staged.pop(load.next)
            if content is None:
                load.is_broken = True
                break
            if num_bytes:
                self._loaded.append((item.place, content))
                self.saves.landing.add(record_digest(load.holder.block_hashes[item.number], item.group))
            self._cache(load.holder, item)
            load.next += 1
            load.bytes_ahead -= num_bytes
            load.bytes_landed += num_bytes
        load.holder.num_computed_tokens = self._num_hit(load) * BLOCK_SIZE
        self._waiting.advance(load.holder, load.holder.num_computed_tokens)
        if load.is_complete or load.is_broken or now - load.began_s > _MOST_LOAD_S:
            self._learn(load, now)
            self._end(load)
        else:
            self._ask(load)
        return load.bytes_landed - before

    def _cache(self, holder: Request, item: _Item) -> None:
        checkpoints = self._blocks.checkpoints
        if item.block is not None:
            seen = SeenBlock(item.number, item.group, item.block)
            self._blocks.cache_loaded(holder, seen, is_rounded=self._store.is_rounded)
        elif checkpoints is not None:
            checkpoints.fill(holder.block_hashes[item.number], item.slot)

    def _num_hit(self, load: _Load) -> int:
        """Blocks that can be hit of a load's prefix with what has landed."""
        if load.is_complete:
            return load.end
        return load.items[load.next].number if self._blocks.grows_block_by_block else load.first

    def _learn(self, load: _Load, now: float) -> None:
        took_s = now - load.began_s
        self.counters.disk_load_time_s += took_s
        if load.bytes_landed and took_s > 0.0:
            rate = load.bytes_landed / max(took_s - _LOAD_FIXED_S, _LOAD_FIXED_S)
            self._bytes_per_s += _RATE_GAIN * (rate - self._bytes_per_s)

    def _end(self, load: _Load) -> None:
        """What is cached of it stays, at the end of the queue of those that are evicted."""
        load.is_over = True
        self._loads.remove(load)
        self._waiting.stop(load.holder.request_id)
        self._blocks.free(load.holder.request_id)
        for item in load.items[load.next :]:
            if item.block is None and self._blocks.checkpoints is not None:
                self._blocks.checkpoints.give_back(item.slot)
        load.wanted_by.num_loaded_tokens = (self._num_hit(load) - load.first) * BLOCK_SIZE
        self.counters.num_blocks_loaded += load.next
        self.counters.num_blocks_not_loaded += len(load.items) - load.next


def _order(missing: SeenBlock) -> tuple[int, int]:
    """Blocks are loaded from the first on: what has come can be hit where all layers see everything."""
    return missing.number, missing.group
