"""Decides which requests may draft in the next step, how many tokens, and whether that step should wait for a
result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlx_server.batching.limits import MIN_SAMPLED_ROWS
from mlx_server.batching.policy import Policy
from mlx_server.batching.request_table import RequestTable, Step, needs_no_result
from mlx_server.batching.speculation.draft_costs import MIN_GAIN, MIN_GAIN_BESIDE_PROMPTS, StepRoom
from mlx_server.batching.speculation.drafting import Drafts, Speculation
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import SchedulerOutput
from mlx_server.request import Request


class DraftRoom:
    """The room for drafts in the steps of one scheduler, beside what they must compute.

    With recurrent state, a request whose last chunk had drafts is undecided: until its next chunk it has two states,
    one from before the drafts and one from after them.
    """

    def __init__(self, speculation: Speculation, table: RequestTable, policy: Policy) -> None:
        self._speculation = speculation
        self._table = table
        self._policy = policy
        self._undecided: set[str] = set()  # and some that run no more
        self._is_burst_over = False

    def choose(self) -> dict[str, Drafts]:
        """The drafts that the step carries. They only use free blocks: no request is preempted for a draft."""
        num_known = self._num_known()
        if not num_known:
            return {}
        drafts = self._speculation.choose(self._rooms(num_known), self._beside(num_known))
        drafting = self._with_states({r: count for r, count in num_known.items() if r.request_id in drafts})
        return {r.request_id: drafts[r.request_id]._replace(num_known=count) for r, count in drafting.items()}

    def compose_burst(self) -> tuple[SchedulerOutput, ...]:
        """The steps of a draft model, for the requests whose drafts the next step can carry. At most one burst runs
        before each step, and none while a step runs."""
        steps: tuple[SchedulerOutput, ...] = ()
        if self._speculation.model is not None and not self._table.submitted and not self._is_burst_over:
            num_known = self._num_known()
            steps = self._speculation.compose_burst(self._rooms(self._with_states(num_known)), self._beside(num_known))
        self._is_burst_over = bool(steps)
        return steps

    def _num_known(self) -> dict[Request, int]:
        """The requests that may draft now, and how many known tokens the step computes before their drafts."""
        most_known = 1 if self._speculation.num_spares is None else BLOCK_SIZE
        num_known = {
            request: request.num_tokens - request.num_computed_tokens
            for request in self._table.running
            if not request.num_in_flight and _drafts(request)
        }
        return {request: count for request, count in num_known.items() if count <= most_known}

    def _with_states(self, num_known: dict[Request, int]) -> dict[Request, int]:
        """The requests that have a slot for the state after their drafts. Undecided ones have one already."""
        num_spares = self._speculation.num_spares
        if num_spares is None:
            return num_known
        undecided = self._undecided = self._undecided.intersection([other.request_id for other in self._table.running])
        others = [request.request_id for request in num_known if request.request_id not in undecided]
        able = undecided.union(others[: max(0, num_spares - len(undecided))])
        return {request: count for request, count in num_known.items() if request.request_id in able}

    def on_step(self, step: Step) -> None:
        """Call for each composed step. Its chunks continue from the right one of a request's two states, so afterwards
        only requests with new drafts are undecided."""
        if self._speculation.num_spares is not None:
            self._undecided.difference_update(step.requests)
            self._undecided.update(step.drafts)
        if (model := self._speculation.model) is not None:
            for chunk in step.chunks:
                if step.requests[chunk.request_id].sampling.speculate:
                    model.on_chunk(chunk)

    def waits(self) -> bool:
        """Whether the next step should not be composed before the result of a running one is known: if the running
        step carries drafts, if the next one could do so once its tokens are known, or if a draft model's pool is to be
        changed. Drafts can only follow known tokens, and a draft model runs between two steps."""
        if not self._table.submitted:
            return False
        newest = self._table.submitted[-1]
        if newest.waits_to_draft is None:
            must_wait = self._speculation.changes_pool or any(step.drafts for step in self._table.submitted)
            newest.waits_to_draft = must_wait or self._would_draft()
        return newest.waits_to_draft

    def _would_draft(self) -> bool:
        """Whether the next step would carry drafts if the tokens in flight were known. With many requests it nearly
        always would not, and `may_gain` says so without a look at each of them."""
        speculation, running = self._speculation, self._table.running
        if speculation.model is None and not speculation.may_gain(len(running), self._step_room(has_prompts=False)):
            speculation.skip()
            return False
        in_flight = [r for r in running if _drafts(r) and r.num_in_flight and needs_no_result(r)]
        free = {request: room - 1 for request, room in self._rooms(in_flight).items()}
        return bool(free) and speculation.would_draft(free, self._beside(dict.fromkeys(free, 1)))

    def _beside(self, num_known: Mapping[Request, int]) -> StepRoom:
        """The room for drafts, given `num_known`: how many known tokens the step computes of each request that may
        draft."""
        running = self._table.running
        may_start = (
            self._table.has_waiting and len(running) < self._table.limits.max_num_seqs and not self._policy.is_held
        )
        has_prompts = may_start or not all(request.output_token_ids for request in running)
        room = self._step_room(sum(num_known.values()) - len(num_known), has_prompts=has_prompts)
        if self._speculation.num_spares is None:
            return room
        return room._replace(num_known={request.request_id: count for request, count in num_known.items()})

    def _step_room(self, num_again: int = 0, *, has_prompts: bool) -> StepRoom:
        """The room for drafts in a step that computes `num_again` tokens beside one of each running request.

        If prompts can run, they keep half of the step's tokens, and drafts only use numbers of rows that were measured:
        a step with prompts does not show what its rows take. The sampler has room for as many rows as requests may run.
        """
        limits, num_running = self._table.limits, len(self._table.running)
        num_rows = limits.max_num_batched_tokens // (1 + has_prompts) - num_running - num_again
        most = max(0, min(num_rows, max(limits.max_num_seqs, MIN_SAMPLED_ROWS) - num_running))
        if has_prompts:
            most = max(0, min(most, self._speculation.costs.max_rows - num_running - num_again))
        min_gain, costs = MIN_GAIN_BESIDE_PROMPTS if has_prompts else MIN_GAIN, self._speculation.costs
        return StepRoom(num_running, costs, most, self._policy.target_s(), min_gain, self._speculation.wait_s)

    def _rooms(self, requests: Iterable[Request]) -> dict[Request, int]:
        """The most drafts of each request: they end before its last token, and take no block that others may need. With
        recurrent state, they also end in the block of the first token that the chunk computes. So a step ends at each
        block boundary of the request, where its state may be kept, and no more than a block is computed again."""
        blocks, most_tokens = self._table.blocks, self._table.limits.max_chunk_tokens or BLOCK_SIZE
        needed = 2 * len(self._table.running) * len(blocks.groups)  # for a token and drafts of each
        next_block = BLOCK_SIZE if blocks.num_free_blocks >= needed else 0
        is_recurrent = self._speculation.num_spares is not None
        rooms: dict[Request, int] = {}
        for request in requests:
            num_tokens, num_computed = request.num_tokens, request.num_computed_tokens
            if is_recurrent:
                in_blocks = (num_computed // BLOCK_SIZE + 1) * BLOCK_SIZE - num_tokens
            else:
                in_blocks = -num_tokens % BLOCK_SIZE + next_block
            num_left, most = request.max_total_tokens - num_tokens - 1, most_tokens - max(1, num_tokens - num_computed)
            rooms[request] = min(num_left, in_blocks, most)
        return rooms


def _drafts(request: Request) -> bool:
    """Whether a request decodes and may have drafts."""
    return bool(request.output_token_ids) and request.sampling.speculate
