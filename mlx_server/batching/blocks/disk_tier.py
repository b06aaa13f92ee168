"""Which prefixes are loaded from disk, and for which requests. How contents are stored is the store's concern."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.disk_saves import (
    BESIDE_BYTES,
    PIECE_BYTES,
    BlockStore,
    DiskSaves,
    content_bytes,
    record_digest,
)
from mlx_server.batching.blocks.disk_speeds import CopySpeed, ReadSpeed
from mlx_server.batching.blocks.layer_groups import first_seen
from mlx_server.batching.blocks.prefix_cache import SeenBlock
from mlx_server.batching.priority_queue import PriorityQueueWithAging
from mlx_server.batching.step_budget import PromptBudget
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import STATES, BlockCopies, CopyPlace, ModelRunnerOutput
from mlx_server.request import Priority, Request, RequestStatus
from mlx_server.sampling_params import SamplingParams

IDLE_S = 1.0
"""How long no request has run before blocks are saved without need."""

_MAX_LOADS = 2

_MAX_QUEUED = 32
"""How many loads of its own or better tiers a request may find before it, not counting those that it has aged past. If
there are more, it does not start, nor do those behind it: so a step looks up few prefixes, however many requests
wait."""

_AHEAD_BYTES = 2 * PIECE_BYTES
"""Contents of one load that may be read but not yet copied."""

_MAX_LOAD_S = 10.0
"""A load that takes longer ends: what has not been read by then is computed. Nor does a load wait longer for its
turn."""

_LATE_S = 0.01
"""Added to that time, so that the loop wakes up after it and not just before."""

_COPY_SHARE = 0.25
"""Share of the target step time, or of the last step's if that is longer, that copies may take while requests run."""

_BESIDE_SHARE = 0.01
"""Share of the time that copies for saves may take if the computing threads make them; writing takes as much again."""

_BESIDE_S_PER_BYTE = 1 / 32e6
"""The least time between them: 90 MB a second slowed streams on two cores by 4 to 7 %."""

_IN_TURN_BYTES = 2 * 2**20
"""Copied at a time in that case, or a single larger content, so that saving is spread evenly over steps."""

_NOTHING = memoryview(b"")


@dataclass(slots=True, eq=False)
class _Load:
    """A load of a prefix of `end` blocks for the request `wanted_by`. `began_s` is when it began, or else since when it
    has waited for its turn. When it began, its first `first` blocks were a hit in memory.

    Of the `items` to load, those before `next` have landed in the pool, and those from `next` to `requested` are being
    read or are `staged`. If the state at the prefix's end is to be loaded, it is the first item, without a block, and
    `slot` is reserved for it. `holder` holds the blocks as a running request would. For other requests that need the
    blocks, the holder is the request that computes them.
    """

    holder: Request
    wanted_by: Request
    end: int
    began_s: float
    first: int = 0
    items: list[SeenBlock] = field(default_factory=list)
    slot: int | None = None
    next: int = 0
    requested: int = 0
    bytes_ahead: int = 0
    bytes_landed: int = 0
    staged: dict[int, memoryview | None] = field(default_factory=dict)
    is_over: bool = False

    def place(self, item: SeenBlock) -> CopyPlace:
        """An item's place now; a later change of the pool may move its block."""
        number = self.slot if item.block is None else item.block.block_id
        assert number is not None, "a slot is reserved for the state"
        return CopyPlace(number, item.group)

    @property
    def is_complete(self) -> bool:
        return self.next == len(self.items)

    def is_late(self, now: float) -> bool:
        return now - self.began_s > _MAX_LOAD_S


class DiskTier:
    """Loads prefixes from a store into blocks, and saves blocks there (`saves`). Event-loop thread only, except for the
    store's answers.

    A waiting request is looked up once: when it is next in its tier, or else when it would start. If more of its prefix
    is in memory and on disk together than in memory alone, the rest is read if that is expected to be faster than
    computing it. Loads begin in the order of tier and age of those who wait for them, two at a time. Meanwhile a
    request of the tier's own, the holder, holds the blocks, and the queue takes it for the request that computes them.
    So the waiting request and all others with that prefix are parked, and nothing is loaded twice. Each step copies a
    piece of what was read into the pool; from then on it is cached like anything that a step computes.

    A load ends with its last block, at the first block that cannot be read, after ten seconds, or when running requests
    need the pool. The request hits what is cached by then and computes the rest.

        request   |-- in memory: 40 blocks --|-- on disk: 60 blocks --|-- neither --|
        load                                 0 ... 59, in pieces, each cached once it is scheduled
        request                                                       starts here, with 100 blocks cached

    A prefix of layers with windows ends where all windows are complete, and one with recurrent states where a state is
    stored. It can be hit when all of it has landed, the state first.
    """

    def __init__(
        self,
        blocks: PagedBlockManager,
        waiting: PriorityQueueWithAging,
        store: BlockStore,
        budget: PromptBudget,
        room_beside: Callable[[], int],
        target_s: Callable[[], float],
    ) -> None:
        """`budget` knows how long computing takes. `room_beside` is how many blocks a load must leave free, `target_s`
        the target time of a step while requests decode."""
        self.saves = DiskSaves(blocks, store)
        self._counters = blocks.counters
        self._blocks = blocks
        self._waiting = waiting
        self._store = store
        self._budget = budget
        self._room_beside = room_beside
        self.target_s = target_s
        self._loads: list[_Load] = []
        self._queue: list[_Load] = []  # those that wait for their turn
        self._arrived: deque[tuple[_Load, int, memoryview | None]] = deque()
        self._loaded: list[tuple[CopyPlace, memoryview]] = []
        self._reads, self._copies = ReadSpeed(store.read_time_s), CopySpeed()
        self._is_busy = False
        self._busy_until_s = 0.0
        self._num_loads = 0
        self._is_copied_beside = False  # as on a GPU, which computes meanwhile
        self._next_save_s = 0.0
        self._step_s = 0.0  # of the last step, without copies

    @property
    def is_loading(self) -> bool:
        return bool(self._loads or self._queue)

    # --- between steps --------------------------------------------------------------------------------------

    def advance(self, *, is_busy: bool) -> None:
        """Before a step is composed: takes what was read, and begins loads. `is_busy` says that requests run."""
        now, self._is_busy = self._waiting.now, is_busy
        if is_busy:
            self._busy_until_s = now
        self._store.set_busy(is_busy and not self.saves.is_urgent)
        while self._arrived:
            load, number, content = self._arrived.popleft()
            self._reads.num_bytes += 0 if content is None else content_bytes(self._store, load.items[number].group)
            if not load.is_over:
                load.staged[number] = content
        room = piece = self._piece_bytes() if is_busy else PIECE_BYTES
        self.saves.begin_step(piece)
        for load in list(self._loads):
            room -= self._land(load, room, is_first=room == piece)
        for load in [load for load in self._queue if load.is_late(now)]:
            self._queue.remove(load)
            self._waiting.stop(load.holder)
        self._seek_next()
        may_save = is_busy and not self._loads and self._blocks.grows_block_by_block and now >= self._next_save_s
        if may_save and self.saves.is_due and self._store.is_quiet:
            self.saves.request(min(BESIDE_BYTES if self._is_copied_beside else _IN_TURN_BYTES, piece))

    def rest_s(self, now: float, *, is_idle: bool) -> float | None:
        """How long the loop may sleep if no request arrives: until a load takes too long, or, if there is no request at
        all (`is_idle`), until blocks are to be saved. None if nothing is due; a read or a write wakes the loop
        anyway."""
        if any(load.next in load.staged for load in self._loads):
            return 0.0  # a block without content, which nothing must be read for
        if self.is_loading:
            began_s = min([load.began_s for load in (*self._loads, *self._queue)])
            return max(0.0, began_s + _MAX_LOAD_S - now) + _LATE_S
        if is_idle and self.saves.is_due:
            return max(0.0, self._idle_from_s - now)
        return None

    @property
    def _idle_from_s(self) -> float:
        """From when on blocks are saved without need, unless a request comes."""
        return self._busy_until_s + IDLE_S

    def save_idle(self) -> None:
        """Call when there is nothing else to compute: after an idle second, saves a piece of what is worth keeping.
        Loads come first."""
        if not self._loads and self._waiting.now >= self._idle_from_s:
            self.saves.request(PIECE_BYTES)

    def take_copies(self) -> BlockCopies | None:
        """What the step that was just composed copies; None if nothing. `on_step` follows."""
        saved, loaded = self.saves.take(), tuple(self._loaded)
        self._loaded = []
        if saved and self._is_busy and not self._is_copied_beside:
            num_bytes = sum([content_bytes(self._store, place.group) for place in saved])
            pause_s = num_bytes * max(self._copies.s_per_byte / _BESIDE_SHARE, _BESIDE_S_PER_BYTE)
            self._next_save_s = self._busy_until_s + pause_s
        return BlockCopies(saved, loaded) if saved or loaded else None

    def on_step(self, copies: BlockCopies | None, output: ModelRunnerOutput) -> None:
        """The oldest submitted step is over. `copies` are what `take_copies` returned for it."""
        self._step_s = output.step_time_s - output.copy_time_s
        if copies is None:
            return
        self.saves.on_copied(output.saved_blocks)
        # If a launch takes most of the step, it waits for the computing, as on a CPU.
        self._is_copied_beside = 0.0 < output.launch_time_s < 0.5 * output.step_time_s
        places = [*copies.saved, *[place for place, _ in copies.loaded]]
        num_bytes = sum([content_bytes(self._store, place.group) for place in places])
        self._copies.observe(num_bytes, output.copy_time_s)

    def _piece_bytes(self) -> int:
        """How much may be copied with a step while requests run, by the measured speed of copies."""
        most_s = _COPY_SHARE * max(self.target_s(), self._step_s)
        return int(min(PIECE_BYTES, most_s / self._copies.s_per_byte))

    # --- loads ----------------------------------------------------------------------------------------------

    def give_up_load(self) -> bool:
        """Ends the newest load, which frees its blocks; False if there is none."""
        if not self._loads:
            return False
        self._end(self._loads[-1])
        return True

    def close(self) -> None:
        """Ends all loads; no request runs any more."""
        while self._queue:
            self._waiting.stop(self._queue.pop().holder)
        while self.give_up_load():
            pass
        self._store.set_busy(False)

    def defers(self, request: Request) -> bool:
        """Call for a waiting request that would start otherwise. Whether it must wait: for a load, in which case it is
        parked, or because too many loads come before it."""
        if request.was_sought_on_disk or not self._blocks.may_hit(request):
            return False
        return self._num_before(request) >= _MAX_QUEUED or self._seek(request)

    def _seek_next(self) -> None:
        """Looks up the next requests of each tier even if they cannot start yet."""
        for head in self._waiting.heads():
            for request in dict.fromkeys((head, self._waiting.shortest(head))):
                if request is not None and self._num_before(request) < _MAX_LOADS:
                    self._seek(request)
        self._begin_next()

    def _num_before(self, request: Request) -> int:
        key, turn = self._waiting.key, self._waiting.turn

        def is_before(other: Request) -> bool:
            if other.priority == request.priority:
                return turn(other) <= turn(request)
            return other.priority < request.priority and key(other) <= key(request)

        return sum([is_before(load.wanted_by) for load in (*self._loads, *self._queue)])

    def _seek(self, request: Request) -> bool:
        """Looks up a waiting request, and queues a load if that pays. Whether the request is parked."""
        if self._waiting.parks(request):
            return True
        lacked = request.num_blocks_lacked
        if request.was_sought_on_disk or (lacked and not self._blocks.make_room(lacked + self._room_beside())):
            return False
        request.was_sought_on_disk, request.num_blocks_lacked = True, 0
        if not self._blocks.may_hit(request):
            return False
        first = len(self._blocks.find_prefix(request))
        end = self._blocks.reach(request, self._is_stored)
        if not self._pays(first, end):
            return False
        holder = self._holder(request, end)
        self._waiting.start(holder, is_load=True)
        if not self._waiting.parks(request):  # it may wait no longer, or a worse tier computes the prefix
            self._waiting.stop(holder)
            return False
        self._queue.append(_Load(holder, request, end, self._waiting.now))
        self._begin_next()
        return self._waiting.parks(request)

    def _begin_next(self) -> None:
        """Begins the loads whose turn it is. Drops those whose requests have left, whose prefixes have been computed
        meanwhile, or that have no room."""
        while self._queue and len(self._loads) < _MAX_LOADS:
            load = min(self._queue, key=self._turn)
            self._queue.remove(load)
            if load.wanted_by.status is not RequestStatus.WAITING or not self._begin(load):
                self._waiting.stop(load.holder)

    def _turn(self, load: _Load) -> tuple[int, int, float]:
        """The turn of the first request that waits for a load."""
        parked = self._waiting.parked_behind(load.holder)
        return min(map(self._waiting.turn, [load.wanted_by, *parked]))

    def _begin(self, load: _Load) -> bool:
        request, end = load.wanted_by, load.end
        load.first, load.began_s = len(self._blocks.find_prefix(request)), self._waiting.now
        if load.first >= end:
            return False
        seen = self._blocks.seen(request, end)
        num_blocks = sum([block is None or not block.ref_cnt for _, _, block in seen])
        if not self._blocks.make_room(num_blocks + self._room_beside()):
            request.was_sought_on_disk, request.num_blocks_lacked = False, num_blocks  # tried again when there is room
            return False
        checkpoints, last = self._blocks.checkpoints, request.block_hashes[end - 1]
        if checkpoints is not None and last in checkpoints:
            checkpoints.slot(last)  # which counts as used
        elif checkpoints is not None:
            load.slot = checkpoints.reserve()
            if load.slot is None:
                return False
        # In order of the blocks: without windows, what has landed can be hit at once.
        missing = sorted(self._blocks.hold(load.holder, seen), key=lambda block: (block.number, block.group))
        load.items = missing if load.slot is None else [SeenBlock(end - 1, STATES, None), *missing]
        self._loads.append(load)
        self._request_reads(load)
        return True

    def _is_stored(self, block_hash: bytes, group: int) -> bool:
        """Whether the store has a content. If only states are stored, blocks have no content and always count as
        stored."""
        return not content_bytes(self._store, group) or self._store.has(record_digest(block_hash, group))

    def _pays(self, first: int, end: int) -> bool:
        """Whether reading a prefix of `end` blocks is expected to be faster than computing it after its first `first`
        blocks; true while the speed of computing is unknown, and once in a while, to renew the speed of reads."""
        if end <= first:
            return False
        compute_s = self._budget.expected_s(self._budget.alone(first * BLOCK_SIZE, (end - first) * BLOCK_SIZE))
        windows = self._blocks.groups.windows
        num_blocks = sum([end - max(first, first_seen(end * BLOCK_SIZE, window)) for window in windows])
        num_bytes = num_blocks * self._store.block_bytes + self._store.state_bytes
        return self._reads.pays(num_bytes, compute_s, self._waiting.now)

    def _holder(self, request: Request, end: int) -> Request:
        """A request of the tier's own that holds the first `end` blocks of `request`."""
        num_tokens = end * BLOCK_SIZE
        self._num_loads += 1
        holder = Request(
            f"disk load {self._num_loads} for {request.request_id}",
            request.token_ids(0, num_tokens),
            SamplingParams(),
            arrival_s=request.arrival_s,
            max_total_tokens=num_tokens + 1,
            priority=Priority.HIGH,
            client=request.client,
            extra_keys=request.extra_keys,
            adapter=request.adapter,
            adapter_key=request.adapter_key,
            images=request.images,
        )
        holder.block_hashes = request.block_hashes[:end]
        return holder

    def _request_reads(self, load: _Load) -> None:
        """Asks the store for contents, as many as may be staged."""
        while load.requested < len(load.items):
            number, item = load.requested, load.items[load.requested]
            num_bytes = content_bytes(self._store, item.group)
            if load.requested > load.next and load.bytes_ahead + num_bytes > _AHEAD_BYTES:
                break
            load.requested += 1
            load.bytes_ahead += num_bytes
            if not num_bytes:
                load.staged[number] = _NOTHING
                continue
            digest = record_digest(load.holder.block_hashes[item.number], item.group)
            on_read, is_state = partial(self._on_read, load, number), item.group == STATES
            self._store.read(digest, on_read, lambda: not load.is_over, is_state=is_state)

    def _on_read(self, load: _Load, number: int, content: memoryview | None) -> None:
        """Called on any thread."""
        self._arrived.append((load, number, content))

    def _land(self, load: _Load, most_bytes: int, *, is_first: bool) -> int:
        """Copies what was read with the next step: up to `most_bytes`, or a single larger content if `is_first`.
        Returns how many bytes."""
        now, before, is_broken = self._waiting.now, load.bytes_landed, False
        while not load.is_complete and load.next in load.staged:
            item = load.items[load.next]
            num_bytes, landed = content_bytes(self._store, item.group), load.bytes_landed - before
            if landed + num_bytes > most_bytes and (landed or not is_first):
                break
            content = load.staged.pop(load.next)
            if content is None:
                is_broken = True
                break
            if num_bytes:
                self._loaded.append((load.place(item), content))
                self.saves.landing.add(record_digest(load.holder.block_hashes[item.number], item.group))
                self._counters.num_blocks_loaded += 1
            self._cache(load, item)
            load.next += 1
            load.bytes_ahead -= num_bytes
            load.bytes_landed += num_bytes
        self._counters.num_disk_loads += before == 0 < load.bytes_landed
        self._waiting.advance(load.holder, self._num_hit(load) * BLOCK_SIZE)
        if load.is_complete or is_broken or load.is_late(now):
            if load.bytes_landed:
                self._counters.disk_load_time_s += now - load.began_s
            self._reads.renew(self._store.read_time_s, now, is_late=load.is_late(now))
            self._end(load)
        else:
            self._request_reads(load)
        return load.bytes_landed - before

    def _cache(self, load: _Load, item: SeenBlock) -> None:
        if item.block is not None:
            self._blocks.cache_loaded(load.holder, item, is_rounded=self._store.is_rounded)
        elif self._blocks.checkpoints is not None and load.slot is not None:
            self._blocks.checkpoints.fill(load.holder.block_hashes[item.number], load.slot)

    def _num_hit(self, load: _Load) -> int:
        """Blocks of a load's prefix that can be hit with what has landed."""
        if load.is_complete:
            return load.end
        return load.items[load.next].number if self._blocks.grows_block_by_block else load.first

    def _end(self, load: _Load) -> None:
        """Ends a load. What it has cached stays, and is evicted last."""
        load.is_over = True
        self._loads.remove(load)
        self._waiting.stop(load.holder)
        self._blocks.free(load.holder.request_id)
        if load.slot is not None and load.next == 0 and self._blocks.checkpoints is not None:
            self._blocks.checkpoints.give_back(load.slot)
        load.wanted_by.num_loaded_tokens = (self._num_hit(load) - load.first) * BLOCK_SIZE
        sizes = [content_bytes(self._store, item.group) for item in load.items[load.next :]]
        self._counters.num_blocks_not_loaded += len(sizes) - sizes.count(0)
