"""The scheduler of one model: queues its requests, has steps composed (`StepComposer`), and takes their results. Which
requests start, and how many tokens a prompt gets, is decided in policy.py.

No mlx, no clock of its own, no threads: `schedule(now)` and `update(output)` are synchronous, and `run(executor)` is a
short asyncio loop that feeds the MLX thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Protocol

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.disk_saves import BlockStore
from mlx_server.batching.blocks.disk_tier import DiskTier
from mlx_server.batching.fair_order import by_holdings
from mlx_server.batching.limits import SchedulerLimits
from mlx_server.batching.policy import Policy, headroom
from mlx_server.batching.refusals import check_size, displacements, grammar_error
from mlx_server.batching.request_table import Rank, RequestTable, Step, append_drafted
from mlx_server.batching.speculation.draft_room import DraftRoom
from mlx_server.batching.speculation.drafting import Drafts, Speculation
from mlx_server.batching.step_budget import PromptBudget, StepShape
from mlx_server.batching.step_composer import StepComposer
from mlx_server.outputs import (
    EngineCounters,
    ImageJob,
    ImageResult,
    ModelRunnerOutput,
    PositionLogprobs,
    RequestOutput,
    SampledToken,
    SchedulerOutput,
)
from mlx_server.request import FinishReason, Request, append_token

_LONG_STEP_S = 0.01
_LATE_SHARE = 0.9
_LATE_MARGIN_S = 0.004
_BESIDE_MARGIN_S = 0.008
"""After a long step, the next one is composed once `_LATE_SHARE` of the expected time has passed, less a margin. With a
margin of 10 ms, a request that arrived in the last 13 of 30 ms waited for a second step. A device that runs beside the
host would be idle for 1 % of the time with 4 ms. For such a device the margin is larger, the time of a launch is added,
and the share is smaller for a while after steps that ended early."""

_LATE_S = 0.001
"""By how much the loop wakes after a queue timeout, so that it is over then."""

_LAUNCH_DECAY = 0.98
_EARLY_DECAY = 0.8


class StepExecutor(Protocol):
    """Runs submitted steps in order, on the MLX thread."""

    def submit(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        """Queues a step. The future belongs to the running loop and is resolved when the step has ended."""


class Executor(StepExecutor, Protocol):
    def encode(self, job: ImageJob) -> asyncio.Future[ImageResult]:
        """Queues an image for the vision encoder, which begins it behind the steps submitted before and runs between
        steps. As `submit`, but without exceptions."""


class ContinuousBatchingScheduler:
    """Continuous batching over paged blocks, by tier and then by age. Event-loop thread only."""

    def __init__(
        self,
        blocks: PagedBlockManager,
        limits: SchedulerLimits,
        *,
        is_async: bool = True,
        is_device_shared: Callable[[], bool] = lambda: False,
        speculation: Speculation | None = None,
        store: BlockStore | None = None,
    ) -> None:
        """If `is_async`, `run` keeps the next step submitted while one runs. `is_device_shared` says whether requests
        of another model wait for the same device; then steps are kept short even if no request decodes here. `store`
        keeps prefixes outside the pool."""
        assert limits.max_num_batched_tokens >= limits.max_num_seqs, "a step must hold every decode"
        groups = blocks.groups
        assert groups.max_chunk_tokens >= limits.largest_chunk or not groups.has_windows, "a chunk needs its blocks"
        self.blocks = blocks
        self.limits = limits
        self.counters = EngineCounters() if speculation is None else speculation.counters
        blocks.counters = self.counters  # one object for all parts of the scheduler
        self._is_async = is_async
        self._is_device_shared = is_device_shared
        self._table = RequestTable(blocks, limits, speculation)
        self.speculation, self._budget = speculation, PromptBudget(limits.context_doubling_tokens)
        self._policy = Policy(self._table, self._budget, is_device_shared)
        self.images = self._policy.images
        self._draft_room = None if speculation is None else DraftRoom(speculation, self._table, self._policy)
        self._composer = StepComposer(self._table, self._budget, self._policy, self._draft_room)
        if store is not None:
            room_beside = partial(headroom, self._table.running, groups.windows)
            waiting, target_s = self._table.waiting, self._policy.target_s
            self._table.disk = DiskTier(blocks, waiting, store, self._budget, room_beside, target_s)
        self._launch_s = 0.0  # the longest recent launch
        self._early_share = 1.0  # the smallest recent ratio of actual to expected time of a long step
        self._wake = asyncio.Event()
        self._draft_model = None if speculation is None else speculation.model
        if self._draft_model is not None:
            self._draft_model.wake = self._wake.set
        self._is_stopping = False

    @property
    def num_waiting(self) -> int:
        return len(self._table.waiting)

    @property
    def num_deferred(self) -> int:
        """How many of the waiting requests wait for a prefix that another request computes, or for an image."""
        return self._table.waiting.num_parked

    @property
    def disk(self) -> DiskTier | None:
        """The prefixes on disk; None if there is no store."""
        return self._table.disk

    @property
    def num_running(self) -> int:
        return len(self._table.running)

    @property
    def num_waiting_by_tier(self) -> dict[str, int]:
        """The number of waiting requests of each tier that has or had some."""
        return dict(self._table.queued_requests)

    def in_order(self) -> Iterator[Request]:
        """Running requests, then waiting ones by effective priority. None may come or go meanwhile."""
        return chain(self._table.running, self._table.waiting)

    def running(self) -> Iterator[Request]:
        """Running requests, best rank first."""
        return iter(self._table.running)

    def effective_priority(self, request: Request, now: float) -> float:
        return self._table.waiting.effective_priority(request, now)

    def learn(self, num_prompt_tokens: int, prompt_s: float, decode_s: float) -> None:
        """Seeds the cost curve with the measured times of a prompt's chunk from position 0 and of one token. Otherwise
        the first steps could be of any length, because nothing has been measured yet."""
        self._budget.observe(self._budget.alone(0, num_prompt_tokens), prompt_s)
        self._budget.observe(StepShape(1, 0, 0.0), decode_s)

    # --- adding and ending requests -----------------------------------------------------------------------

    def add_request(self, request: Request, *, displaces: bool = True) -> list[RequestOutput]:
        """Queues a request. Raises what `check` does, `QuotaExceededError` at its tier's queue limit, and
        `QueueFullError` at the server's limit, unless it may and can displace requests that have not run yet, of worse
        tiers or of clients with more of them. Returns the last outputs of displaced requests, which may be added
        again."""
        table, waiting = self._table, self._table.unscheduled.values() if displaces else ()
        self.check(request)
        errors = displacements(request, waiting, table.queued(), table.queued(request.tier), self.limits)
        displaced = [table.fail(other, error) for other, error in errors]
        if request.finish_reason is None:  # else it has been here, and was counted
            self.counters.num_prompt_tokens += request.num_prompt_tokens
        table.add(request)
        self._wake.set()
        return displaced

    def check(self, request: Request) -> None:
        """Raises `ContextLengthError` for a request that does not fit the pool or the queue even if they are empty."""
        check_size(request, self.blocks, self.limits)

    def finish_request(self, request_id: str, reason: FinishReason = FinishReason.ABORT, num_void: int = 0) -> bool:
        """Ends a request from outside (client gone, stop string); its last `num_void` tokens are not counted. Its
        blocks are free once no submitted step uses them. False if it has ended already."""
        self.counters.num_generated_tokens -= num_void
        request = self._table.requests.get(request_id)
        if request is not None:
            self._table.end(request, reason)
            self._wake.set()
        return request is not None

    def fail_all(self) -> list[str]:
        """Ends all requests after the executor has died, and returns their ids."""
        ended = list(self._table.requests.values())
        try:
            for request in ended:
                self._table.end(request, FinishReason.ERROR)
        finally:
            if self.disk is not None:
                self.disk.close()
        while self._table.submitted:
            for blocks in self._table.submitted.popleft().detached:
                self.blocks.free_detached(blocks)
        return [request.request_id for request in ended]

    def expire(self, now: float) -> list[RequestOutput]:
        """Ends requests that have waited for their first step longer than the queue timeout."""
        return self._table.expire(now)

    # --- a step -------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Composes the next step and books its effects on blocks and progress. None if nothing can run now, because
        there are no requests or all of them wait for memory or for a submitted step's result. A step without requests
        only changes the pools or copies blocks, or runs a draft model."""
        if self._draft_room is not None and self._draft_room.waits():
            return None
        if self._draft_room is not None and (draft_steps := self._draft_room.compose_burst()):
            step = Step()
            step.output, step.waits_to_draft = SchedulerOutput(-1, (), draft_steps=draft_steps), True
            self._table.submitted.append(step)
            return step.output
        step = self._composer.compose(now)
        copies = None if self._table.disk is None else self._table.disk.take_copies()
        change = self.blocks.take_change() if self.blocks.is_changed else None
        if not step.requests and change is None and copies is None:
            return None
        self._table.submitted.append(step)
        self.counters.num_steps += 1
        return step.submit(self.counters.num_steps - 1, self._table.take_dropped(), change, copies)

    def update(self, output: ModelRunnerOutput) -> list[RequestOutput]:
        """Takes the result of the oldest submitted step. Drops the rows of requests that have ended or were preempted
        since, and frees the blocks that waited for the step."""
        submitted = self._table.submitted.popleft()
        step = submitted.output
        assert step.step_id == output.step_id, "results come in the order of submission"
        num_sampled = sum([chunk.is_sampling for chunk in step.chunks])
        assert num_sampled == len(output.sampled), "a step samples what it was asked to"
        if step.draft_steps and self.speculation is not None:
            self.speculation.take_burst(output)
        elif step.pool_change is not None:
            self.blocks.on_changed(step.pool_change)
        elif step.copies is None:  # copies take time, too
            self._observe(submitted, output)
        if self.disk is not None:
            self.disk.on_step(step.copies, output)
        requests = submitted.requests
        self._collect_prompt_logprobs(requests, output.prompt_logprobs)
        outputs = [
            self._take_tokens(requests[request_id], sampled, submitted.drafts.get(request_id))
            for request_id, sampled in output.sampled.items()
            if request_id in requests
        ]
        if output.pooled:
            outputs += self._table.end_pooled(requests, output.pooled)
        for blocks in submitted.detached:
            self.blocks.free_detached(blocks)
        counters = self.counters
        counters.num_generated_tokens += sum([len(one.new_token_ids) for one in outputs])
        counters.num_model_calls += output.num_model_calls
        counters.busy_time_s += output.step_time_s
        counters.idle_time_s += output.idle_time_s
        return outputs

    def next_schedule_s(self, began_s: float) -> float:
        """When to compose the step after the oldest submitted one, which began at `began_s`. If that step is long, late
        in it: a request that arrives meanwhile then waits for one step instead of two. Otherwise at once, as also if
        the step's time is unknown or the device is shared."""
        expected_s = self._budget.expected_s(self._table.submitted[0].shape)
        if expected_s < _LONG_STEP_S or self._is_device_shared():
            return began_s
        if not self._launch_s:
            return began_s + _LATE_SHARE * expected_s - _LATE_MARGIN_S
        return began_s + min(self._early_share, _LATE_SHARE) * expected_s - _BESIDE_MARGIN_S - self._launch_s

    def explain(self, request: Request) -> str:
        """Why the last composed step gives no more tokens to a request that has no output yet."""
        return self._composer.explain(request)

    def take_failed(self) -> list[RequestOutput]:
        """The last outputs of requests that were ended between steps: they ran alone and waited too long for memory, or
        an image failed."""
        failed, self._table.failed = self._table.failed, []
        return failed

    def _take_tokens(self, request: Request, sampled: SampledToken, drafts: Drafts | None) -> RequestOutput:
        """Appends a request's tokens of a step: its accepted drafts and the token after them."""
        output_token_ids = request.output_token_ids
        num_before = len(output_token_ids)
        logprobs: tuple[PositionLogprobs, ...] = ()
        if not sampled.accepted:
            reason = append_token(request, sampled.token_id)
            if sampled.logprobs is not None:
                logprobs = (sampled.logprobs,)
        else:
            reason, logprobs = append_drafted(request, sampled)
        if drafts is not None:
            self._table.cut_back(request, drafts, num_before, len(sampled.accepted))
        kept = self._table.prompt_logprobs
        prompt_logprobs = tuple(kept.pop(request.request_id, ())) if kept else ()
        if reason is not None:
            self._table.end(request, reason)
            self.counters.num_generated_tokens -= request.sampling.is_scoring
        is_one = len(output_token_ids) == num_before + 1
        return RequestOutput(
            request.request_id,
            (output_token_ids[-1],) if is_one else tuple(output_token_ids[num_before:]),
            reason,
            request.stop_reason,
            grammar_error(request, output_token_ids[-1]) if reason is FinishReason.ERROR else None,
            request.num_cached_tokens or 0,
            logprobs,
            prompt_logprobs,
        )

    def _observe(self, step: Step, output: ModelRunnerOutput) -> None:
        """Learns how long steps and their launches take. Decode steps with drafts do not count for the step budget,
        because their rows do not show how long plain decoding takes."""
        shape, step_time_s = step.shape, output.step_time_s
        if self.speculation is not None and shape.num_prompt_tokens == 0:
            num_rows, is_drafted = shape.num_decode_tokens, bool(step.drafts)
            self.speculation.observe(num_rows, step_time_s, output.idle_time_s, is_drafted=is_drafted)
        if not step.drafts or shape.num_prompt_tokens:
            expected_s = self._budget.expected_s(shape)
            if expected_s >= _LONG_STEP_S:
                self._early_share = min(step_time_s / expected_s, 1.0 - _EARLY_DECAY * (1.0 - self._early_share))
            self._budget.observe(shape, step_time_s)
        self._launch_s = max(output.launch_time_s, _LAUNCH_DECAY * self._launch_s)

    def _collect_prompt_logprobs(self, requests: dict[str, Request], found: dict[str, list[PositionLogprobs]]) -> None:
        for request_id, positions in found.items():
            request = requests.get(request_id)
            # A request with output has got them already; a preemption makes its prompt be computed again.
            if request is not None and not request.output_token_ids:
                self._table.prompt_logprobs.setdefault(request_id, []).extend(positions)

    # --- memory -------------------------------------------------------------------------------------------

    def shrink(self, num_blocks: int, *, saves_first: bool = False) -> int:
        """Calls `PagedBlockManager.shrink`; the cut is made before the next step. With `saves_first`, returns 0 while
        blocks that would be evicted are being saved. `shrink(0)` says that saving for a cut is no longer urgent."""
        self._wake.set()
        if self.disk is None:
            return self.blocks.shrink(num_blocks)
        self.disk.saves.is_urgent = False
        return self.blocks.shrink(num_blocks, self.disk.saves.defers if saves_first else None)

    def hold_admission(self, is_held: bool) -> None:
        """While it is held, no request starts beside running ones. Wakes `run`, which may wait for memory."""
        self._policy.is_held = is_held
        self._wake.set()

    def lowest_rank(self) -> Rank | None:
        """The rank of the request that `preempt_lowest` would preempt, to compare with those of other models; None if
        there is no such request."""
        running = by_holdings(self._table.running)
        return self._table.rank(running[-1]) if len(running) > 1 else None

    def preempt_lowest(self) -> bool:
        """Preempts the last running request in the order in which they keep their blocks, unless it is the only one.
        Returns whether it did."""
        running = by_holdings(self._table.running)
        if len(running) < 2:
            return False
        self._table.preempt(running[-1])
        return True

    def check_integrity(self) -> None:
        """Asserts the invariants of queue, blocks and requests. For tests and idle moments."""
        self._table.check_integrity()
        if self._draft_model is not None:
            self._draft_model.check_integrity()
        assert self.num_running <= self.limits.max_num_seqs, "too many requests run"

    # --- the loop -----------------------------------------------------------------------------------------

    async def run(
        self, executor: Executor, clock: Callable[[], float], deliver: Callable[[list[RequestOutput]], None]
    ) -> None:
        """Feeds `executor` until `stop()`, and passes outputs to `deliver`. Raises what the executor raised."""
        results: deque[asyncio.Future[ModelRunnerOutput]] = deque()
        max_submitted = 2 if self._is_async else 1
        began_s = 0.0  # of the oldest submitted step
        try:
            while not self._is_stopping:
                now = clock()
                if len(results) == 1 and (pause_s := self.next_schedule_s(began_s) - now) > 0:
                    is_result_here = bool((await asyncio.wait(results, timeout=pause_s))[0])
                else:
                    output = self._schedule_next(now, deliver)
                    if output is not None:
                        began_s = began_s if results else now
                        results.append(executor.submit(output))
                        results[-1].add_done_callback(lambda _: self._wake.set())
                    if self.images.is_active and (job := self.images.begin()) is not None:
                        executor.encode(job).add_done_callback(self._on_encoded)
                    if output is not None and len(results) < max_submitted:
                        continue
                    if not results:
                        await self._rest(now)
                        continue
                    is_result_here = len(results) == max_submitted or await self._is_result_first(results[0])
                if is_result_here:
                    deliver(self.update(await results.popleft()))
                    began_s = clock()
            while results:
                deliver(self.update(await results.popleft()))
        finally:
            for result in results:  # else asyncio would report an exception that nobody retrieves
                result.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _schedule_next(self, now: float, deliver: Callable[[list[RequestOutput]], None]) -> SchedulerOutput | None:
        """Calls `schedule`, and delivers the last outputs of requests that have waited too long."""
        if expired := self.expire(now):
            deliver(expired)
        self._wake.clear()
        output = self.schedule(now)
        while failed := self.take_failed():
            deliver(failed)
            output = output or self.schedule(now)
        return output

    def _on_encoded(self, future: asyncio.Future[ImageResult]) -> None:
        if not future.cancelled():  # by the end of the loop
            self.images.end(future.result())
            self._wake.set()

    def wake(self) -> None:
        """Makes `run` look for work, after a block was read or written."""
        self._wake.set()

    def stop(self) -> None:
        """Makes `run` return once the results of all submitted steps are delivered."""
        self._is_stopping = True
        self._wake.set()

    async def _rest(self, now: float) -> None:
        """Waits until something arrives, a request has waited too long, a load from disk takes too long, or blocks are
        to be saved because nothing arrives."""
        disk, expires_s = self._table.disk, self._table.expires_s()
        pauses = [
            None if disk is None else disk.rest_s(now, is_idle=not self._table.requests),
            None if expires_s is None else max(expires_s - now, 0.0) + _LATE_S,
        ]
        pause_s = min((pause_s for pause_s in pauses if pause_s is not None), default=None)
        with suppress(TimeoutError):
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with the event.
            async with asyncio.timeout(pause_s):
                await self._wake.wait()

    async def _is_result_first(self, result: asyncio.Future[ModelRunnerOutput]) -> bool:
        """Waits for the result, or for an arrival that may run beside it. Returns whether the result is there."""
        if not result.done():
            await self._wake.wait()
        return result.done()
