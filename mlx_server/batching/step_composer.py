"""Composes a step: a token or drafts for each decoding request, and for prompts what policy.py decides."""

from __future__ import annotations

from mlx_server.batching.fair_order import by_holdings
from mlx_server.batching.policy import Policy
from mlx_server.batching.request_table import RequestTable, Step, needs_no_result
from mlx_server.batching.speculation.draft_burst import recent_tokens
from mlx_server.batching.speculation.draft_room import DraftRoom
from mlx_server.batching.speculation.drafting import NO_DRAFTS, Drafts
from mlx_server.batching.step_budget import PromptBudget
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds, ScheduledChunk
from mlx_server.request import Request, RequestStatus


class StepComposer:
    """Spends a step's token budget so that each request's `num_computed_tokens` catches up with its tokens.

    First, every decoding request gets its token. The rest of the budget goes to prompts, of running and waiting
    requests together, as `Policy` decides.
    """

    def __init__(self, table: RequestTable, budget: PromptBudget, policy: Policy, draft_room: DraftRoom | None) -> None:
        self._table = table
        self._limits = table.limits
        self._counters = table.counters
        self._budget = budget
        self._checkpoints = table.blocks.checkpoints
        self._policy = policy
        self._draft_room = draft_room
        self._last = Step()

    def compose(self, now: float) -> Step:
        """Composes the next step and books its effects on blocks and progress. The step is empty if nothing can run
        now."""
        table, step = self._table, Step()
        self._last, table.waiting.now, disk = step, now, table.disk
        if table.has_waiting:
            table.waiting.begin_step()
        if disk is not None:
            disk.advance(is_busy=bool(table.running))
        if table.has_waiting:
            self._policy.preempt_worse(step)
        prefilling = self._add_decodes(step)
        if prefilling and not table.has_waiting:
            table.waiting.begin_step()
        if prefilling or table.has_waiting:
            self._policy.share_out(step, prefilling)
            for request, num_tokens in step.given.items():
                step.prompt_cost += self._budget.cost(request.num_computed_tokens, num_tokens)
                self._put(step, request, num_tokens, step.block_ids[request.request_id])
        if step.requests:
            table.publish_filled(step)
            if self._draft_room is not None:
                self._draft_room.on_step(step)
        elif not table.running and not table.submitted:
            if disk is not None and (disk.is_loading or not table.has_waiting):
                disk.save_idle()
            elif table.has_waiting and not table.is_memory_coming():
                step.starving = self._policy.next_of_all()
        table.settle_starving(step)
        return step

    def explain(self, request: Request) -> str:
        """How many tokens the last composed step gives a request that has no output yet, and why not more."""
        given = {chunk.request_id: chunk.num_tokens for chunk in self._last.chunks}
        others = ", ".join(f"{name} {num_tokens}" for name, num_tokens in given.items() if name != request.request_id)
        if request.request_id in given:
            num_tokens, num_left = given[request.request_id], self._table.waiting.work(request)
            return f"gets {num_tokens} tokens and has {num_left} left; others: {others or '-'}"
        is_waiting = request.status is RequestStatus.WAITING
        reason = self._policy.why_not(request, self._last) if is_waiting else self._policy.images.why_held(request)
        return reason or f"no tokens are left: {others or 'none for prompts'}"

    # --- decodes ------------------------------------------------------------------------------------------

    def _add_decodes(self, step: Step) -> list[Request]:
        """Adds all decoding requests to the step. Returns the running requests with prompt left to compute.

        Up to a block of known tokens counts as a decode (tokens that a grammar forces, or the uncached end of a resumed
        request), if the step has room for them beside one token of each running request.
        """
        running = self._table.running
        drafts = {} if self._draft_room is None else self._draft_room.choose()
        num_taken = sum([own.num_known - 1 + len(own.token_ids) for own in drafts.values()])
        spare = self._limits.max_num_batched_tokens - len(running) - num_taken
        most = min(BLOCK_SIZE, self._limits.max_chunk_tokens or BLOCK_SIZE)
        prefilling: list[Request] = []
        for request in by_holdings(running):  # a preemption is of this one or a later one
            if request.status is RequestStatus.WAITING:
                continue
            start = request.num_computed_tokens
            if request.num_in_flight:
                if not needs_no_result(request):
                    continue
                num_tokens, own_drafts = 1, NO_DRAFTS
            else:
                num_tokens = request.num_tokens - start
                if self._table.is_prefilling(request):
                    prefilling.append(request)
                    continue
                own_drafts = drafts.get(request.request_id, NO_DRAFTS)
                if own_drafts is not NO_DRAFTS:
                    num_tokens += len(own_drafts.token_ids)
                elif num_tokens > 1:
                    num_tokens = min(num_tokens, most, 1 + spare)
                    spare -= num_tokens - 1
            filled = start % BLOCK_SIZE
            is_room = filled and filled + num_tokens <= BLOCK_SIZE
            block_ids = () if is_room else self._policy.grow(step, request, num_tokens)
            if block_ids is not None:
                step.num_decode_tokens += num_tokens
                self._put(step, request, num_tokens, block_ids, own_drafts)
        return prefilling

    # --- progress -----------------------------------------------------------------------------------------

    def _put(
        self, step: Step, request: Request, num_tokens: int, block_ids: BlockIds, drafts: Drafts = NO_DRAFTS
    ) -> None:
        """Adds the next `num_tokens` positions of a request to the step, the last of them `drafts`, and books them as
        computed. In most steps, most requests have one token, which is in flight."""
        request_id, start, num_in_flight = request.request_id, request.num_computed_tokens, request.num_in_flight
        end, num_output_tokens = start + num_tokens, len(request.output_token_ids) + num_in_flight
        num_prompt_tokens, num_drafts = len(request.prompt_token_ids), len(drafts.token_ids)
        is_sampling = end == num_prompt_tokens + num_output_tokens + num_drafts
        constraint = request.constraint
        chunk = ScheduledChunk(
            request_id,
            start,
            num_tokens,
            None if num_in_flight else (*request.token_ids(start, end), *drafts.token_ids),
            block_ids,
            is_sampling and request.pooling is None,
            num_output_tokens,
            None if constraint is None or not is_sampling else constraint.bitmask(),
            None if self._checkpoints is None else self._checkpoints.save(request, end),
            num_drafts,
            drafts.bitmasks,
            () if num_in_flight or self._draft_room is None else recent_tokens(request, start, end - num_drafts),
        )
        step.requests[request_id] = request
        (step.singles if num_tokens == 1 else step.longer).append(chunk)
        request.num_computed_tokens = end
        if is_sampling:
            request.num_in_flight = num_in_flight + 1 + num_drafts
        if num_drafts:
            step.drafts[request_id] = drafts
            return  # progress is counted once it is known which drafts are right
        num_ever_computed = request.num_ever_computed
        if start < num_ever_computed:
            self._counters.num_tokens_recomputed += min(end, num_ever_computed) - start
        if end > num_ever_computed:
            request.num_ever_computed = end
        if start < num_prompt_tokens:
            self._counters.num_prompt_tokens_computed += min(end, num_prompt_tokens) - start
        # A block that ends with a token in flight has no hash yet; the next step counts it as filled.
        if start % BLOCK_SIZE == 0 or (not num_in_flight and end // BLOCK_SIZE > start // BLOCK_SIZE):
            step.filled.append(request)
