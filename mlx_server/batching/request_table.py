"""All requests of one scheduler and the submitted steps that compute them. Only this code moves requests between
waiting, running and finished."""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from itertools import takewhile

from mlx_server.batching.blocks.block import Block
from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.disk_tier import DiskTier
from mlx_server.batching.blocks.layer_groups import num_blocks_for
from mlx_server.batching.blocks.prefix_cache import CachedPrefix
from mlx_server.batching.limits import QueueLoad, SchedulerLimits
from mlx_server.batching.priority_queue import PriorityQueueWithAging
from mlx_server.batching.refusals import expiry, starvation
from mlx_server.batching.speculation.drafting import Drafts, Speculation
from mlx_server.batching.step_budget import StepShape
from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ServeError
from mlx_server.outputs import (
    BlockCopies,
    BlockIds,
    NewRequestData,
    PoolChange,
    PositionLogprobs,
    RequestOutput,
    SampledToken,
    ScheduledChunk,
    SchedulerOutput,
)
from mlx_server.request import FinishReason, Request, RequestStatus, Vector, append_token

Rank = tuple[bool, int, float]
"""A smaller rank is better. All models' requests age at the same rate, so ranks of different models can be compared."""


class Step:
    """A step while it is composed and while its result is awaited.

    - `requests` are those that it computes. Once it is submitted, requests that end or are preempted are removed: when
      the result comes, their rows are dropped and their `detached` blocks are freed.
    - `given` counts the prompt tokens of each request that computes its prompt; `block_ids` are the new entries of such
      requests' block tables.
    - `filled` are requests that may have full blocks to share, because their chunk begins a block or ends one. `drafts`
      are those of each request that has some.
    - `closed_because` says why no more requests start in the step, and `closed_by` which request found no room.
      `no_overtaking` says why no request starts before the oldest one of its tier.
    - `starving` is who lacks memory for the step, and would run alone.
    - `waits_to_draft` says whether the step after it waits for its result, once that is known.
    """

    output: SchedulerOutput  # what the executor gets, once the step is submitted

    def __init__(self) -> None:
        self.closed_because: str | None = None
        self.closed_by: Request | None = None
        self.no_overtaking: str | None = None
        self.requests: dict[str, Request] = {}
        self.given: Counter[Request] = Counter()
        self.block_ids: dict[str, BlockIds] = {}
        self.filled: list[Request] = []
        self.drafts: dict[str, Drafts] = {}
        self.starving: Request | None = None
        self.waits_to_draft: bool | None = None
        self.new_requests: list[NewRequestData] = []
        self.num_decode_tokens = 0
        self.prompt_cost = 0.0
        self.detached: list[list[Block]] = []
        self.singles: list[ScheduledChunk] = []  # chunks of one token
        self.longer: list[ScheduledChunk] = []

    @property
    def chunks(self) -> list[ScheduledChunk]:
        return self.singles + self.longer

    @property
    def shape(self) -> StepShape:
        return StepShape(self.num_decode_tokens, self.given.total(), self.prompt_cost)

    def submit(
        self, step_id: int, dropped: tuple[str, ...], change: PoolChange | None, copies: BlockCopies | None
    ) -> SchedulerOutput:
        """Fixes the step and returns it in the form that the executor takes."""
        chunks, new_requests, num_given = tuple(self.chunks), tuple(self.new_requests), self.given.total()
        self.output = SchedulerOutput(step_id, chunks, new_requests, dropped, num_given, change, copies)
        return self.output


class RequestTable:
    """The states of requests, and the effects of each change of state: on blocks, queue counts and the runner's state.

    The attributes are for reading; the methods of this class change them.

    - `running` is sorted by `rank`; of equals, the one admitted earlier comes first.
    - `unscheduled` are requests that have never run, by arrival. `queued_requests` counts the waiting requests of each
      tier.
    - `prompt_logprobs` are those collected so far, of prompts that are not completely computed.

    If a submitted step uses blocks of a request that leaves, they are detached and not freed, because the device may
    still write them.
    """

    def __init__(self, blocks: PagedBlockManager, limits: SchedulerLimits, speculation: Speculation | None) -> None:
        self.blocks = blocks
        self.limits = limits
        self.counters = blocks.counters
        self.speculation = speculation
        self.disk: DiskTier | None = None
        self.requests: dict[str, Request] = {}
        self.waiting = PriorityQueueWithAging(blocks, limits.aging_rate, deduplicates=limits.deduplicate_prefixes)
        self.running: list[Request] = []
        self.unscheduled: OrderedDict[str, Request] = OrderedDict()
        self.prompt_logprobs: dict[str, list[PositionLogprobs]] = {}
        self.submitted: deque[Step] = deque()
        self.failed: list[RequestOutput] = []  # the last outputs of those ended between steps, until `take_failed`
        self.starving_since: float | None = None
        self._dropped: list[str] = []
        self._queued_tokens: Counter[str] = Counter()
        self.queued_requests: Counter[str] = Counter()

    @property
    def has_waiting(self) -> bool:
        return len(self.requests) > len(self.running)

    def queued(self, tier: str | None = None) -> QueueLoad:
        """The requests and tokens that wait now, of one tier or of all."""
        if tier is None:
            return QueueLoad(len(self.waiting), self._queued_tokens.total())
        return QueueLoad(self.queued_requests[tier], self._queued_tokens[tier])

    def add(self, request: Request) -> None:
        """Queues a new request, or one that has left before it ran."""
        assert request.request_id not in self.requests, f"{request} is here already"
        request.status, request.finish_reason = RequestStatus.WAITING, None
        self.requests[request.request_id] = request
        self.unscheduled[request.request_id] = request
        self._enqueue(request)

    def rank(self, request: Request) -> Rank:
        """The order in which requests keep running if not all can: promoted ones first, then by tier, then by effective
        priority."""
        return not request.is_promoted, request.priority, self.waiting.key(request)

    def is_prefilling(self, request: Request) -> bool:
        """Whether the next tokens of a running request without tokens in flight count against the prompts' share. They
        do if it has no output yet, or if it computes more than a block or part of an image again after a preemption, in
        blocks that it has had since it started."""
        if not request.output_token_ids:
            return True
        num_tokens, num_computed = request.num_tokens, request.num_computed_tokens
        is_much = num_tokens - num_computed > BLOCK_SIZE or (request.images and request.images[-1].end > num_computed)
        return bool(is_much) and self.blocks.holds(request, num_tokens)

    def admit(self, step: Step, request: Request, prefix: CachedPrefix, *, is_promoted: bool = False) -> BlockIds:
        """Starts a waiting request with blocks for all its tokens, and returns its whole block tables. There must be
        room."""
        self._leave_waiting(request)
        block_ids = self.blocks.allocate(request, request.num_tokens, prefix)
        assert block_ids is not None, "admission checks that the blocks are there"
        request.is_promoted = is_promoted
        insort(self.running, request, key=self.rank)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = len(prefix) * BLOCK_SIZE
        request.num_rounded_tokens = max(request.num_rounded_tokens, prefix.num_rounded * BLOCK_SIZE)
        self.waiting.start(request)
        step.new_requests.append(NewRequestData.of(request, self.blocks.resumed_checkpoint(request)))
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self.waiting.now
            request.num_cached_tokens = request.num_computed_tokens
            if self.blocks.may_hit(request):
                self._count_hit(request)
        return block_ids

    def _count_hit(self, request: Request) -> None:
        counters, num_cached = self.counters, request.num_computed_tokens
        counters.num_prefix_query_tokens += request.num_prompt_tokens
        counters.num_prefix_hit_tokens += num_cached
        counters.num_prompt_tokens_from_disk += min(request.num_loaded_tokens, num_cached)

    def publish(self, request: Request) -> None:
        """Lets later steps hit the full blocks of a running request that are computed, or will be by a submitted step.
        Then gives up the blocks that no later token attends to. No drafts of the request may be in flight: it may go
        back behind them."""
        num_tokens = _num_computed(request)
        self.blocks.cache_full_blocks(request, num_tokens)
        self.blocks.give_up_unseen(request)
        self.waiting.advance(request, num_tokens)

    def publish_filled(self, step: Step) -> None:
        """Lets later steps hit what this step computes. The step itself must not: a model may run the requests of a
        step one after the other, in any order."""
        for request in step.filled:
            self.publish(request)

    def cut_back(self, request: Request, drafts: Drafts, num_before: int, num_accepted: int) -> None:
        """Takes the result of `drafts`, which followed `num_before` tokens of output: the request's computed tokens now
        end before the first draft that is not in the output. The last token of the output is not computed yet:
        computing it gives the logits for the next one.

        Example: drafts 5 6 7 follow 40 tokens, of which 39 were computed, and the output is 5 6 9. Then 42 tokens are
        computed, and 9 is next. With recurrent state, which has seen all drafts or none, 39 are computed; the 40th, 5,
        6 and 9 are next.
        """
        assert self.speculation is not None
        proposed = drafts.token_ids
        pairs = zip(proposed, request.output_token_ids[num_before:-1])
        num_right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        request.num_in_flight = 0
        request.num_computed_tokens = request.num_prompt_tokens + num_before + num_right
        if self.speculation.num_spares is not None and num_right < len(proposed):
            request.num_computed_tokens = request.num_prompt_tokens + num_before - drafts.num_known
            if self.blocks.checkpoints is not None:
                self.blocks.checkpoints.void(request)
        request.num_ever_computed = max(request.num_ever_computed, request.num_computed_tokens)
        self.speculation.on_result(request.request_id, len(proposed), num_accepted)
        num_shown = min(num_accepted, request.num_output_tokens - num_before)
        request.num_accepted_drafts += num_shown
        request.num_rejected_drafts += len(proposed) - num_shown
        self.publish(request)

    def promote(self, request: Request) -> None:
        """Makes a running request keep its seat against better tiers from now on."""
        self.running.remove(request)
        request.is_promoted = True
        insort(self.running, request, key=self.rank)

    def preempt(self, request: Request) -> None:
        """Makes a running request wait again, at its old place in the order. Its tokens in flight are discarded."""
        assert request.status is RequestStatus.RUNNING
        self._leave_running(request)
        request.status = RequestStatus.WAITING
        request.is_promoted = False
        request.num_computed_tokens = 0
        request.num_in_flight = 0
        request.num_preemptions += 1
        by_tier = self.counters.preemptions_by_tier
        by_tier[request.tier] = by_tier.get(request.tier, 0) + 1
        request.was_sought_on_disk, request.num_blocks_lacked = False, 0
        if self.speculation is not None:
            self.speculation.release(request)
        self._enqueue(request)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Ends a request, waiting or running."""
        if request.status is RequestStatus.WAITING:
            self._leave_waiting(request)
            self.blocks.forget(request)
        else:
            self._leave_running(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if self.speculation is not None:
            self.speculation.forget(request)
        del self.requests[request.request_id]

    def fail(self, request: Request, error: ServeError) -> RequestOutput:
        """Ends a request like `end`, because of an error, and returns its last output."""
        self.end(request, FinishReason.ERROR)
        return RequestOutput(request.request_id, (), FinishReason.ERROR, error=error)

    def expires_s(self) -> float | None:
        """When the next request has waited for its first step as long as the queue timeout; None if none will."""
        first, timeout_s = next(iter(self.unscheduled.values()), None), self.limits.queue_timeout_s
        return None if first is None or timeout_s is None else first.arrival_s + timeout_s

    def expire(self, now: float) -> list[RequestOutput]:
        """Ends requests that have waited for their first step longer than the queue timeout."""
        timeout_s = self.limits.queue_timeout_s
        expired: list[RequestOutput] = []
        while timeout_s is not None and self.unscheduled:
            request = next(iter(self.unscheduled.values()))
            waited_s = now - request.arrival_s
            if waited_s <= timeout_s:
                break
            expired.append(self.fail(request, expiry(waited_s, timeout_s)))
        return expired

    def end_pooled(self, computed: Mapping[str, Request], pooled: Mapping[str, Vector]) -> list[RequestOutput]:
        """Ends pooling requests whose results have come, and returns their outputs. Skips requests that are not in
        `computed`, the remaining requests of the step."""
        outputs = []
        for request_id, vector in pooled.items():
            if request_id in computed:
                self.end(computed[request_id], FinishReason.STOP)
                outputs.append(RequestOutput(request_id, (), FinishReason.STOP, pooled=vector))
        return outputs

    # --- lack of memory -------------------------------------------------------------------------------------

    def is_memory_coming(self) -> bool:
        """Whether a draft model gives memory back before the next step. If the pool can grow, the draft model is asked
        to."""
        model = None if self.speculation is None else self.speculation.model
        if model is not None and self.blocks.num_blocks < self.blocks.max_blocks:
            model.give_way()
        return model is not None and model.blocks.is_changed

    def settle_starving(self, step: Step) -> None:
        """Call when a step is composed: ends the request that is `starving` if it has been for `memory_wait_s`. Memory
        may come back meanwhile."""
        request = step.starving
        if request is None or request.request_id in step.requests:
            self.starving_since = None
            return
        now = self.waiting.now
        self.starving_since = now if self.starving_since is None else self.starving_since
        if now - self.starving_since >= self.limits.memory_wait_s:
            self.starving_since = None
            most_tokens = self.blocks.groups.max_tokens(self.blocks.num_blocks)
            self.failed.append(self.fail(request, starvation(request, most_tokens, self.limits.memory_wait_s)))

    def take_dropped(self) -> tuple[str, ...]:
        """The requests that have stopped running since the last call: the runner must drop their state."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def check_integrity(self) -> None:
        """Asserts the invariants of queue, blocks and requests."""
        self.blocks.check_integrity()
        self.waiting.check_integrity()
        ranks = [self.rank(request) for request in self.running]
        assert ranks == sorted(ranks), "running requests are out of order"
        running_ids = {request.request_id for request in self.running}
        waiting_ids = {request.request_id for request in self.waiting}
        assert not running_ids & waiting_ids, "a request runs and waits"
        assert running_ids | waiting_ids == set(self.requests), "a request neither runs nor waits"
        assert set(self.unscheduled) <= waiting_ids, "a request that never ran does not wait"
        assert set(self.prompt_logprobs) <= running_ids, "prompt logprobs are kept of one that does not run"
        for request in self.requests.values():
            self._check_request(request)
        load = self.queued()
        assert load.num_waiting == self.queued_requests.total() == len(waiting_ids), "the queue's count is wrong"
        assert load.num_tokens == sum(request.num_tokens for request in self.waiting)
        for step in self.submitted:
            assert set(step.requests) <= running_ids, "a submitted step names a request that has left"
        if not self.submitted:
            assert self.blocks.num_detached_blocks == 0, "blocks wait for no step"

    def _check_request(self, request: Request) -> None:
        tables = [self.blocks.block_ids(request.request_id, group) for group in range(len(self.blocks.groups))]
        held = len(tables[0])
        needed = num_blocks_for(request.num_computed_tokens)
        assert all(len(table) >= needed for table in tables), f"{request} has too few blocks"
        assert request.num_computed_tokens <= request.num_tokens + request.num_in_flight
        assert (held == 0) == (request.status is RequestStatus.WAITING), f"{request} holds {held} blocks"

    def _enqueue(self, request: Request) -> None:
        self.waiting.push(request)
        self.queued_requests[request.tier] += 1
        self._queued_tokens[request.tier] += request.num_tokens

    def _leave_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        self.unscheduled.pop(request.request_id, None)
        self.queued_requests[request.tier] -= 1
        self._queued_tokens[request.tier] -= request.num_tokens

    def _leave_running(self, request: Request) -> None:
        request_id = request.request_id
        self.running.remove(request)
        self.blocks.cache_full_blocks(request, _num_computed(request))
        if self.disk is not None:
            self.disk.saves.on_leave(request)
        self._dropped.append(request_id)
        self.waiting.stop(request)
        self.prompt_logprobs.pop(request_id, None)
        last_step = None
        for step in self.submitted:
            if step.requests.pop(request_id, None) is not None:
                last_step = step
        if last_step is None:
            self.blocks.free(request_id)
        else:
            last_step.detached.append(self.blocks.detach(request_id))


def needs_no_result(request: Request) -> bool:
    """Whether a request's next token can be computed while its last one is in flight. False if the output may have no
    more tokens, and with a grammar, whose next mask depends on the one in flight."""
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + request.num_in_flight
    is_last = num_tokens >= request.max_total_tokens
    return not is_last and request.constraint is None


def _num_computed(request: Request) -> int:
    """How many tokens have known ids and K/V that are computed, or will be by a submitted step."""
    return min(request.num_computed_tokens, request.num_tokens)


def append_drafted(request: Request, sampled: SampledToken) -> tuple[FinishReason | None, tuple[PositionLogprobs, ...]]:
    """Appends accepted drafts and the token after them, each with `append_token`. Returns why the request has ended, or
    None, and the logprobs of the tokens that count. Discards the tokens after one that ends the output, and, if a
    grammar forced another token than was sampled, the sampled one and all after it."""
    output_token_ids, reason = request.output_token_ids, None
    logprobs: list[PositionLogprobs] = []
    for place, token in enumerate((*sampled.accepted, sampled), start=len(output_token_ids)):
        if place < len(output_token_ids):  # a grammar has forced the token here
            if output_token_ids[place] != token.token_id:
                break
            continue
        reason = append_token(request, token.token_id)
        if token.logprobs is not None:
            logprobs.append(token.logprobs)
        if reason is not None:
            break
    return reason, tuple(logprobs)
