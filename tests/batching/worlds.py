"""Small worlds around the scheduler: requests by size, and a runner whose K/V memory can be wrong.

The fake runner stores in every slot a digest of all tokens up to it and samples from that digest. So a block
that was shared wrongly, freed too early or written by two is seen at once: by an assertion, or by a wrong
token. It runs the requests of a step one after the other in any order, as a model may.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.layer_groups import LayerGroups, first_seen
from mlx_server.batching.blocks.state_checkpoints import StateCheckpoints
from mlx_server.batching.limits import SchedulerLimits
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.batching.speculation.drafting import Speculation
from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import InvalidRequestError
from mlx_server.outputs import (
    STATES,
    BlockCopies,
    CopyPlace,
    ImageJob,
    ImageResult,
    ModelRunnerOutput,
    PoolChange,
    PositionLogprobs,
    RequestOutput,
    SampledToken,
    ScheduledChunk,
    SchedulerOutput,
    TokenLogprob,
)
from mlx_server.request import FinishReason, PoolingParams, Request, RequestStatus, Vector
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.sampling_params import SamplingParams

VOCAB_SIZE = 997
_SEED = 17


def num_held(blocks: PagedBlockManager, request_id: str, group: int = 0) -> int:
    """How many blocks of a group the request holds."""
    tables = blocks._tables.get(request_id)
    return 0 if tables is None else len(tables[group].blocks)


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    """`num_tokens` ids that count up from `first`: prompts of different `first` share no block."""
    return [(first + index) % VOCAB_SIZE for index in range(num_tokens)]


def make_request(
    request_id: str = "r",
    prompt_token_ids: int | Sequence[int] = 8,
    max_tokens: int = 4,
    *,
    arrival_s: float = 0.0,
    **extra: Any,
) -> Request:
    """Keywords of `Request` go there, all others to `SamplingParams`. A prompt given by its length is unlike
    those of other ids."""
    if isinstance(prompt_token_ids, int):
        prompt_token_ids = prompt(prompt_token_ids, first=_digest(_SEED, map(ord, request_id)) % VOCAB_SIZE)
    of_request = {name: extra.pop(name) for name in list(extra) if name in Request.__slots__}
    return Request(
        request_id,
        prompt_token_ids,
        SamplingParams(max_tokens=max_tokens, **extra),
        arrival_s=arrival_s,
        max_total_tokens=of_request.pop("max_total_tokens", len(prompt_token_ids) + max_tokens),
        **of_request,
    )


class FakeStore:
    """Blocks and states by digest. Reads are answered by `arrive`; what was written can be read at once. Each takes so
    much that four are a piece. `lost` ones are found and cannot be read. Without `is_quiet` it always has
    something to do."""

    block_bytes = 16 * 2**20
    state_bytes = 0
    is_rounded = False
    is_quiet = False
    read_time_s = 0.0

    def __init__(self) -> None:
        self.blocks: dict[bytes, memoryview] = {}
        self.lost: set[bytes] = set()
        self.reads: list[tuple[bytes, Callable[[memoryview | None], None], Callable[[], bool]]] = []
        self.num_read = 0
        self.most_room = 100
        self.owners: dict[bytes, bytes] = {}

    def has(self, block_hash: bytes) -> bool:
        return block_hash in self.blocks

    def read(
        self,
        block_hash: bytes,
        on_done: Callable[[memoryview | None], None],
        is_wanted: Callable[[], bool],
        *,
        is_state: bool,
    ) -> None:
        self.reads.append((block_hash, on_done, is_wanted))

    def arrive(self, count: int | None = None, rng: random.Random | None = None) -> None:
        """Answers some reads, in any order if there is an `rng`."""
        for _ in range(len(self.reads) if count is None else min(count, len(self.reads))):
            block_hash, on_done, is_wanted = self.reads.pop(rng.randrange(len(self.reads)) if rng else 0)
            wanted = is_wanted()
            self.num_read += wanted
            on_done(None if block_hash in self.lost or not wanted else self.blocks.get(block_hash))

    def room(self) -> int:
        return self.most_room * self.block_bytes

    def write(self, block_hash: bytes, owner: bytes, content: memoryview, *, is_state: bool) -> None:
        self.blocks[block_hash] = content
        self.owners[block_hash] = owner
        self.lost.discard(block_hash)

    def set_busy(self, is_busy: bool) -> None:
        return None


class ScriptedSupply:
    """Memory for `num_left` more blocks, while it `is_open`. `taken` are the growths."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left
        self.is_open = True
        self.taken: list[int] = []

    def take(self, least: int, most: int, *, is_needed: bool) -> int:
        assert 0 < least <= most
        if not self.is_open or least > self.num_left:
            return 0
        self.taken.append(min(most, self.num_left))
        self.num_left -= self.taken[-1]
        return self.taken[-1]

    def give_back(self, num_blocks: int) -> None:
        self.num_left += num_blocks


def make_scheduler(
    num_blocks: int = 64,
    *,
    is_async: bool = False,
    max_blocks: int | None = None,
    supply: ScriptedSupply | None = None,
    num_checkpoints: int | None = None,
    windows: Sequence[int | None] = (None,),
    is_device_shared: Callable[[], bool] = lambda: False,
    speculation: Speculation | None = None,
    store: FakeStore | None = None,
    **more: Any,
) -> ContinuousBatchingScheduler:
    """With `num_checkpoints`, of a model with recurrent state. `windows` are those of its layer groups. In a `store`,
    prefixes of any prompt with a full block are kept."""
    more.setdefault("max_num_seqs", min(64, more.get("max_num_batched_tokens", 64)))
    limits = SchedulerLimits(**more)
    checkpoints = None if num_checkpoints is None else StateCheckpoints(num_checkpoints)
    if store is not None and checkpoints is not None:
        store.state_bytes = store.block_bytes
    groups = LayerGroups(windows, limits.largest_chunk)
    blocks = PagedBlockManager(num_blocks, groups, max_blocks=max_blocks, supply=supply, checkpoints=checkpoints)
    scheduler = ContinuousBatchingScheduler(
        blocks, limits, is_async=is_async, is_device_shared=is_device_shared, speculation=speculation, store=store
    )
    if scheduler.disk is not None:
        scheduler.disk.saves.min_prompt_tokens = BLOCK_SIZE
    return scheduler


def is_starving(scheduler: ContinuousBatchingScheduler) -> bool:
    """Whether nothing can be computed for lack of memory."""
    return scheduler._table.starving_since is not None


def waiting(scheduler: ContinuousBatchingScheduler) -> list[Request]:
    return [request for request in scheduler.in_order() if request.status is RequestStatus.WAITING]


def expected_tokens(prompt_token_ids: Sequence[int], count: int) -> list[int]:
    """What the fake model answers to a prompt, whoever else runs and whatever is cached, cut or preempted."""
    digest = _digest(_SEED, prompt_token_ids)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(digest % VOCAB_SIZE)
        digest = _digest(digest, tokens[-1:])
    return tokens


def _digest(digest: int, token_ids: Iterable[int]) -> int:
    for token_id in token_ids:
        digest = hash((digest, token_id))
    return digest


@dataclass(slots=True)
class RunnerState:
    """What the runner knows of a request: ids (None: on the device only), and its block table in each layer group."""

    token_ids: list[int]
    num_prompt_tokens: int
    wants_prompt_logprobs: bool
    tables: list[list[int]]
    digests: list[int] = field(default_factory=list)
    num_planned: int = 0
    has_drafted: bool = False
    pooling: PoolingParams | None = None

    def slot(self, group: int, position: int) -> int:
        return self.tables[group][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def seen(self, windows: Sequence[int | None]) -> set[int]:
        """Blocks that the request's tokens from the next to be planned on see or are in."""
        return {
            block_id
            for table, window in zip(self.tables, windows, strict=True)
            for block_id in table[first_seen(self.num_planned, window) :]
        }

    def digest(self, position: int) -> int:
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else _SEED
            self.digests.append(_digest(before, (self.token_ids[len(self.digests)],)))
        return self.digests[position]


class _RecurrentStates:
    """The digest of all tokens of each request, in the slots that a runner's block tables give them."""

    def __init__(self, num_groups: int, most_slots: int) -> None:
        self.tables = BlockTables((None,) * num_groups)
        self._most_slots = most_slots
        self._content: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self._slots: deque[dict[str, tuple[int, int]]] = deque()
        self._resumed: deque[list[tuple[int, int]]] = deque()

    def submit(self, output: SchedulerOutput) -> None:
        """The slots that a step reads and writes."""
        for request_id in output.dropped_request_ids:
            self.tables.drop(request_id)
        for data in output.new_requests:
            self.tables.add(data.request_id)
        resumed = [(data.checkpoint, data.request_id) for data in output.new_requests if data.checkpoint is not None]
        self._resumed.append([(checkpoint, self.tables.state_slot(request_id)) for checkpoint, request_id in resumed])
        if output.pool_change is not None:
            self.tables.move(output.pool_change.moves)
        if not output.chunks:
            self._slots.append({})
            return
        plan = self.tables.plan(output.chunks)[0]
        reads, writes = plan.state_slots.tolist(), plan.next_slots.tolist()
        assert max(writes) < self._most_slots, "there are not so many slots for states"
        assert len(set(reads)) == len(set(writes)) == len(reads), "two requests have one slot"
        for index, slot in enumerate(writes):
            assert slot not in reads or reads[index] == slot, "a step writes what it reads for another request"
        self._slots.append({chunk.request_id: pair for chunk, *pair in zip(output.chunks, reads, writes)})

    def start(self) -> None:
        """The oldest submitted step is executed, chunk by chunk."""
        self._now = self._slots.popleft()
        for checkpoint, slot in self._resumed.popleft():
            self._content[slot] = self.kept[checkpoint]

    def compute(self, chunk: ScheduledChunk, state: RunnerState) -> None:
        read, write = self._now[chunk.request_id]
        if chunk.start:
            before = state.digest(chunk.start - 1)
            assert self._content[read] == before, f"{chunk.request_id} goes on from another state than it has left"
        self._content[write] = state.digest(chunk.start + chunk.num_tokens - 1)

    def keep(self, chunk: ScheduledChunk) -> None:
        self.kept[chunk.checkpoint or 0] = self._content[self._now[chunk.request_id][1]]


class FakeRunner:
    """Runs steps in order on a K/V memory of digests. `submit` takes a step, `fetch` executes the oldest.

    Layer groups with one of `windows` look no further back than that. With `num_states`, each request has a
    recurrent state besides, in one of so many slots.
    """

    def __init__(
        self, num_blocks: int, seed: int = 0, *, windows: Sequence[int | None] = (None,), num_states: int = 0
    ) -> None:
        self._windows = windows
        self.num_prompt_tokens_computed = 0
        self.seconds = step_seconds
        self.copy_seconds = lambda num_blocks: 0.0
        self._slots = [0] * (num_blocks * BLOCK_SIZE)
        self._states: dict[str, RunnerState] = {}
        self._submitted: deque[tuple[SchedulerOutput, dict[str, RunnerState]]] = deque()
        self._rng = random.Random(seed)
        self.recurrent = _RecurrentStates(len(windows), num_states) if num_states else None
        self._saved: deque[tuple[memoryview, ...]] = deque()
        self._results: deque[ModelRunnerOutput] = deque()

    @property
    def num_submitted(self) -> int:
        return len(self._submitted) + len(self._results)

    def submit(self, output: SchedulerOutput) -> None:
        for request_id in output.dropped_request_ids:
            self._states.pop(request_id, None)
        for data in output.new_requests:
            assert data.request_id not in self._states, "a request is new twice"
            self._states[data.request_id] = RunnerState(
                [*data.prompt_token_ids, *data.output_token_ids],
                len(data.prompt_token_ids),
                data.sampling.prompt_logprobs is not None,
                [[] for _ in self._windows],
                pooling=data.pooling,
            )
        _check_shape(output)
        copies = output.copies or BlockCopies()
        if output.copies is not None and (self.recurrent is not None or any(self._windows)):
            self._finish_submitted()
        self._saved.append(tuple([self._save(place) for place in copies.saved]))
        if output.pool_change is not None:
            self._change_pool(output.pool_change)
        for place, content in copies.loaded:
            self._load(place, content)
        for chunk in output.chunks:
            state = self._states[chunk.request_id]
            for table, new_ids in zip(state.tables, chunk.new_block_ids):
                table.extend(new_ids)
            state.num_planned = chunk.start
        if self.recurrent is not None:
            self.recurrent.submit(output)
        states = {chunk.request_id: self._states[chunk.request_id] for chunk in output.chunks}
        self._submitted.append((output, states))
        for chunk in output.chunks:
            self._check_writes(chunk, states[chunk.request_id])
        for chunk in output.chunks:
            states[chunk.request_id].num_planned = chunk.start + chunk.num_tokens

    def fetch(self) -> ModelRunnerOutput:
        return self._results.popleft() if self._results else self._execute()

    def _execute(self) -> ModelRunnerOutput:
        output, states = self._submitted.popleft()
        if self.recurrent is not None:
            self.recurrent.start()
        prompt_logprobs = {}
        sampled = {}
        pooled = {}
        for chunk in self._rng.sample(output.chunks, len(output.chunks)):
            state = states[chunk.request_id]
            self._compute(chunk, state)
            if self.recurrent is not None:
                self.recurrent.compute(chunk, state)
            if state.wants_prompt_logprobs and chunk.start < state.num_prompt_tokens - 1:
                prompt_logprobs[chunk.request_id] = _prompt_logprobs(chunk, state)
        for chunk in output.chunks:
            if self.recurrent is not None and chunk.checkpoint is not None:
                self.recurrent.keep(chunk)
            state = states[chunk.request_id]
            if chunk.is_sampling:
                sampled[chunk.request_id] = self.sample(chunk, state)
            if state.pooling is not None:
                end = chunk.start + chunk.num_tokens
                assert chunk.start == 0 or not state.pooling.is_whole, "a part of what must be whole"
                if end == state.num_prompt_tokens:
                    pooled[chunk.request_id] = pooled_vector(state.token_ids)
        copies = output.copies or BlockCopies()
        copy_time_s = self.copy_seconds(len(copies.saved) + len(copies.loaded))
        return ModelRunnerOutput(
            output.step_id,
            sampled,
            prompt_logprobs,
            step_time_s=self.seconds(output) + copy_time_s,
            copy_time_s=copy_time_s,
            pooled=pooled,
            saved_blocks=self._saved.popleft(),
        )

    def _finish_submitted(self) -> None:
        while self._submitted:
            self._results.append(self._execute())

    def _save(self, place: CopyPlace) -> memoryview:
        """At once, as early as can be: no step in flight may still write the block."""
        block_id, group = place
        if group == STATES:
            assert self.recurrent is not None
            return memoryview(array("q", [self.recurrent.kept[block_id]]))
        assert block_id not in self._in_use(writes_only=True), "a block is saved before it is computed"
        start = block_id * BLOCK_SIZE
        return memoryview(array("q", self._slots[start : start + BLOCK_SIZE]))

    def _load(self, place: CopyPlace, content: memoryview) -> None:
        block_id, group = place
        if group == STATES:
            assert self.recurrent is not None
            (self.recurrent.kept[block_id],) = content.tolist()
            return
        assert block_id not in self._in_use(), "a block is loaded while it is in use"
        self._slots[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE] = content.tolist()

    def _in_use(self, *, writes_only: bool = False) -> set[int]:
        used = set()
        for output, states in self._submitted:
            for chunk in output.chunks:
                last = (chunk.start + chunk.num_tokens - 1) // BLOCK_SIZE
                first = chunk.start // BLOCK_SIZE if writes_only else 0
                used.update(states[chunk.request_id].tables[0][first : last + 1])
        return used

    def sample(self, chunk: ScheduledChunk, state: RunnerState) -> SampledToken:
        return _sample(chunk, state)

    def _change_pool(self, change: PoolChange) -> None:
        """Once all steps before have been executed: a runner waits for them, since they may use what it moves."""
        self._finish_submitted()
        sources = {move.source for move in change.moves}
        destinations = {move.destination: move.source for move in change.moves}
        assert len(sources) == len(destinations) == len(change.moves), "two moves from or to one block"
        assert not sources & set(destinations), "a move ends where another begins"
        blocks = [self._slots[start : start + BLOCK_SIZE] for start in range(0, len(self._slots), BLOCK_SIZE)]
        content = {destination: blocks[source] for destination, source in destinations.items()}
        for destination, slots in content.items():
            blocks[destination] = slots
        del blocks[change.num_blocks :]
        blocks += [[0] * BLOCK_SIZE for _ in range(change.num_blocks - len(blocks))]
        self._slots = [slot for block in blocks for slot in block]
        moved = dict(change.moves)
        for state in self._states.values():
            state.tables = [[moved.get(block_id, block_id) for block_id in table] for table in state.tables]

    def _compute(self, chunk: ScheduledChunk, state: RunnerState) -> None:
        end = chunk.start + chunk.num_tokens
        if chunk.token_ids is None:
            assert len(state.token_ids) == end, "the last sampled token is what the device has"
        else:
            known = state.token_ids[chunk.start : end]
            if state.has_drafted:  # a grammar may have forced other tokens than those that were sampled behind a draft
                del state.token_ids[chunk.start :], state.digests[chunk.start :]
                known = []
            assert list(chunk.token_ids[: len(known)]) == known, "other ids than the request's"
            state.token_ids.extend(chunk.token_ids[len(known) :])  # forced by a grammar, or drafts
        state.has_drafted = chunk.num_drafts > 0
        for group, window in enumerate(self._windows):
            for position in range(0 if window is None else max(0, chunk.start - window + 1), chunk.start):
                stored = self._slots[state.slot(group, position)]
                assert stored == state.digest(position) + group, f"wrong K/V for {chunk.request_id}"
            for position in range(chunk.start, end):
                self._slots[state.slot(group, position)] = state.digest(position) + group
        self.num_prompt_tokens_computed += max(0, min(end, state.num_prompt_tokens) - chunk.start)

    def _check_writes(self, chunk: ScheduledChunk, state: RunnerState) -> None:
        """No step may write a block that it or a submitted one reads or writes for somebody else, but for what that
        one has left behind its window: steps run in order."""
        first = chunk.start // BLOCK_SIZE
        last = (chunk.start + chunk.num_tokens - 1) // BLOCK_SIZE
        assert all(last < len(table) for table in state.tables), f"{chunk.request_id} has no block for its tokens"
        written = {block_id for table in state.tables for block_id in table[first : last + 1]}
        for _, others in self._submitted:
            for request_id, other in others.items():
                is_in_use = other is not state and written & other.seen(self._windows)
                assert not is_in_use, f"a block of {request_id} is in use"


def _sample(chunk: ScheduledChunk, state: RunnerState) -> SampledToken:
    """The token after the last known one, or after the drafts that are what is sampled in their place."""
    accepted: list[SampledToken] = []
    position = chunk.start + chunk.num_tokens - chunk.num_drafts
    drafts = state.token_ids[position : position + chunk.num_drafts]
    while True:
        token_id = state.digest(position - 1) % VOCAB_SIZE
        if len(accepted) == len(drafts) or drafts[len(accepted)] != token_id:
            break
        accepted.append(SampledToken(token_id))
        position += 1
    del state.token_ids[position:], state.digests[position:]
    state.token_ids.append(token_id)
    return SampledToken(token_id, None, tuple(accepted))


def pooled_vector(token_ids: Sequence[int]) -> Vector:
    """What the fake model makes of a whole input."""
    return _digest(_SEED, token_ids).to_bytes(8, "little", signed=True)


def _check_shape(output: SchedulerOutput) -> None:
    ids = [chunk.request_id for chunk in output.chunks]
    assert len(ids) == len(set(ids)), "a request is in a step twice"
    sizes = [chunk.num_tokens for chunk in output.chunks]
    assert sizes or output.pool_change is not None or output.copies is not None, "an empty step"
    assert min(sizes, default=1) >= 1, "an empty chunk"
    assert sorted(sizes, key=lambda size: size > 1) == sizes, "single tokens do not come first"


def _prompt_logprobs(chunk: ScheduledChunk, state: RunnerState) -> list[PositionLogprobs]:
    end = min(chunk.start + chunk.num_tokens, state.num_prompt_tokens - 1)
    return [prompt_logprob(state.token_ids[position + 1]) for position in range(chunk.start, end)]


def prompt_logprob(token_id: int) -> PositionLogprobs:
    """What the fake model says of a prompt token."""
    return PositionLogprobs(TokenLogprob(token_id, -1.0, 1))


class World:
    """A scheduler and a fake runner, driven by hand: `depth` steps are submitted before one is fetched."""

    def __init__(
        self, scheduler: ContinuousBatchingScheduler, *, depth: int = 1, store: FakeStore | None = None
    ) -> None:
        self.scheduler = scheduler
        self.store = store
        blocks = scheduler.blocks
        speculation = scheduler.speculation
        num_states = 0 if blocks.checkpoints is None else scheduler.limits.max_num_seqs
        if speculation is not None and speculation.num_spares is not None:
            num_states = scheduler.limits.max_num_seqs + speculation.num_spares
        self.runner = FakeRunner(blocks.num_blocks, windows=blocks.groups.windows, num_states=num_states)
        self.now = 0.0
        self.step_s = 0.05
        self.depth = depth
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.outputs: list[RequestOutput] = []
        self.image: ImageJob | None = None  # that is being encoded

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.requests[request.request_id] = request
            self.tokens[request.request_id] = []

    def add_unchecked(self, request: Request) -> None:
        """Adds a request whose tokens `check_tokens` does not predict."""
        self.scheduler.add_request(request)
        self.tokens[request.request_id] = []

    def schedule(self) -> SchedulerOutput | None:
        """Schedules and submits one step, if there is one."""
        output = self.scheduler.schedule(self.now)
        self._take(self.scheduler.take_failed())
        self.image = self.scheduler.images.begin() or self.image
        self.now += self.step_s
        self.scheduler.check_integrity()
        if output is not None:
            images = [image for request in self.requests.values() for image in request.images]
            beyond = max([image.num_tokens - 1 for image in images if image.is_bidirectional], default=0)
            assert output.num_tokens <= self.scheduler.limits.max_num_batched_tokens + beyond
            self.runner.submit(output)
        return output

    def deliver(self) -> list[RequestOutput]:
        """Fetches the oldest step and takes its result."""
        outputs = self.scheduler.update(self.runner.fetch())
        self.scheduler.check_integrity()
        self._take(outputs)
        return outputs

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons, "output after the end"
            self.tokens[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        self.outputs.extend(outputs)

    def encode(self, error: str | None = None) -> None:
        """The image that was begun is encoded, or fails."""
        job, self.image = self.image, None
        assert job is not None, "no image was begun"
        is_encoded = error is None and job.is_wanted
        self.scheduler.images.end(ImageResult(is_encoded, was_run=True, error=error))
        self.scheduler.check_integrity()

    def step(self) -> SchedulerOutput | None:
        """One turn of the loop: the image that was begun is encoded; submits a step if there is one, and fetches one
        unless there is room ahead."""
        num_ended = len(self.reasons)
        if self.image is not None:
            self.encode()
        output = self.schedule()
        if self.runner.num_submitted == 0 and self.is_loading:
            assert self.store is not None
            self.store.arrive()
        elif self.runner.num_submitted == 0:
            is_stuck = self.has_requests and len(self.reasons) == num_ended and not is_starving(self.scheduler)
            is_stuck &= self.scheduler.speculation is None or not self.scheduler.speculation.changes_pool
            assert not is_stuck or self.image is not None, "nothing can run and nothing is awaited"
        elif output is None or self.runner.num_submitted >= self.depth:
            self.deliver()
        return output

    @property
    def is_loading(self) -> bool:
        return self.scheduler.disk is not None and self.scheduler.disk.is_loading

    @property
    def has_requests(self) -> bool:
        return self.scheduler.num_waiting + self.scheduler.num_running > 0

    def finish(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left, and nothing has leaked."""
        for _ in range(max_steps):
            if not self.has_requests and not self.runner.num_submitted and not self.is_loading:
                break
            self.step()
        else:
            raise AssertionError("it does not come to an end")
        self.scheduler.check_integrity()
        assert self.scheduler.blocks.num_free_blocks == self.scheduler.blocks.num_blocks
        checkpoints = self.scheduler.blocks.checkpoints
        assert checkpoints is None or not checkpoints._reserved, "a slot is reserved for nobody"

    def check_tokens(self) -> None:
        """Every request has the tokens that it would have alone; those not ended from outside have all."""
        for request_id, request in self.requests.items():
            got = self.tokens[request_id]
            expected = expected_tokens(request.prompt_token_ids, request.max_total_tokens - request.num_prompt_tokens)
            assert got == expected[: len(got)], request_id
            if self.reasons.get(request_id) is FinishReason.LENGTH:
                assert got == expected, request_id

    def running_ids(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running()]

    def waiting_ids(self) -> list[str]:
        return sorted(request.request_id for request in waiting(self.scheduler))


def make_world(num_blocks: int = 64, *, is_async: bool = False, **limits: Any) -> World:
    scheduler = make_scheduler(num_blocks, is_async=is_async, **limits)
    return World(scheduler, depth=2 if is_async else 1, store=limits.get("store"))


def step_seconds(output: SchedulerOutput) -> float:
    """How long the fake model takes: 50 ms if anyone decodes, and 1 ms for each token of longer chunks."""
    sizes = [chunk.num_tokens for chunk in output.chunks]
    return 0.05 * (1 in sizes) + 0.001 * sum(size for size in sizes if size > 1)


def chunks(output: SchedulerOutput | None) -> dict[str, tuple[int, int]]:
    """Start and size of each chunk of a step, in its order."""
    assert output is not None
    return {chunk.request_id: (chunk.start, chunk.num_tokens) for chunk in output.chunks}


def count_held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Gets the blocks that a request holds in each group whenever it has taken some."""
    held: list[tuple[int, ...]] = []
    allocate = PagedBlockManager.allocate

    def counted(self: PagedBlockManager, request: Request, *args: Any) -> Any:
        ids = allocate(self, request, *args)
        held.append(tuple(num_held(self, request.request_id, group) for group in range(len(self.groups))))
        return ids

    monkeypatch.setattr(PagedBlockManager, "allocate", counted)
    return held


class FakeExecutor:
    """An executor whose steps are over at the loop's next turn.

    While it `is_held` no step comes to its end. Steps from number `fails_at` on fail.
    """

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.num_most_submitted = 0
        self.is_held = False
        self.fails_at: int | None = None
        self._futures: deque[asyncio.Future[ModelRunnerOutput]] = deque()

    def submit(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        future = asyncio.get_running_loop().create_future()
        self.runner.submit(output)
        self._futures.append(future)
        self.num_most_submitted = max(self.num_most_submitted, len(self._futures))
        asyncio.get_running_loop().call_soon(self._fetch)
        return future

    def release(self) -> None:
        self.is_held = False
        for _ in range(len(self._futures)):
            self._fetch()

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def _fetch(self) -> None:
        if self._futures and not self.is_held:
            future = self._futures.popleft()
            result = self.runner.fetch()
            if self.fails_at is not None and result.step_id >= self.fails_at:
                future.set_exception(RuntimeError(f"step {result.step_id} failed"))
            else:
                future.set_result(result)


class FakeConstraint:
    """A grammar over token ids: `allowed` says what may follow what has been accepted, `forced` what must;
    the output is complete after `length` tokens."""

    def __init__(
        self,
        length: int,
        forced: dict[int, tuple[int, ...]] | None = None,
        refused: frozenset[int] = frozenset(),
        error: InvalidRequestError | None = None,
    ):
        self.error = error
        self.accepted: list[int] = []
        self._length = length
        self._forced = forced or {}
        self._refused = refused

    def accept(self, token_id: int) -> bool:
        if token_id in self._refused:
            return False
        self.accepted.append(token_id)
        return True

    def forced_tokens(self) -> Sequence[int]:
        forced = self._forced.get(len(self.accepted), ())
        self.accepted.extend(forced)
        return forced

    def bitmask(self) -> bytes | None:
        return bytes([len(self.accepted)])

    def fork(self) -> FakeConstraint:
        other = FakeConstraint(self._length, self._forced, self._refused, self.error)
        other.accepted = list(self.accepted)
        return other

    def is_terminated(self) -> bool:
        return len(self.accepted) >= self._length
