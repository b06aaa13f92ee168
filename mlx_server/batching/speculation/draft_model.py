"""A smaller model that drafts: for which requests, how far, and what it keeps of them in a KV pool of its own.

Between two steps of the target model it runs a burst: one step over all tokens that it has not computed of its
requests, then single tokens, all requests in one batch. Drafts that it was fed and that were accepted are not computed
again.

    tokens 0..40 are known; 41 42 43 were sampled, of which 41 and 42 were fed; the target accepts 41 and draws
    another token for 42: the next burst computes from 42 on, and overwrites what the wrong draft has left there
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.prefix_cache import CachedPrefix
from mlx_server.batching.speculation import draft_burst
from mlx_server.batching.speculation.draft_burst import NO_BURST, Burst, BurstSteps, Follower
from mlx_server.batching.speculation.draft_costs import Acceptances, RowCosts, StepRoom
from mlx_server.batching.step_budget import PromptBudget, StepShape
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import ModelRunnerOutput, NewRequestData, ScheduledChunk, SchedulerOutput
from mlx_server.request import Request


class DraftModel:
    """The policy of one draft model, whose runner gets `SchedulerOutput.draft_steps`. Event-loop thread only.

    Its pool is full when its share of the memory is used; then there are fewer drafts. To `MemoryGuard` it is a
    scheduler without requests. One burst runs at a time, and none beside a step of the target model.
    """

    def __init__(self, blocks: PagedBlockManager, *, vocab_size: int, max_tokens: int, doubling_tokens: float) -> None:
        """`max_tokens` is the context limit of the draft model."""
        self.blocks = blocks
        self.costs = RowCosts()
        self.wake: Callable[[], None] = lambda: None
        self._budget = PromptBudget(doubling_tokens)
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._followers: dict[str, Follower] = {}
        self._dropped: list[str] = []
        self._drafts: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._burst = BurstSteps()  # the last one
        self.acceptances = Acceptances()
        self._is_held = False
        self._has_failed = False

    def learn(self, num_prompt_tokens: int, prompt_s: float, decode_s: float) -> None:
        """Seeds the costs with what a prompt's chunk from position 0 and one token took."""
        self._budget.observe(self._budget.alone(0, num_prompt_tokens), prompt_s)
        for _ in range(2):  # the first of a kind does not count
            self.costs.observe(1, decode_s)

    def discard_drafts(self) -> None:
        """Forgets the drafts of the last burst."""
        self._drafts.clear()

    def drafts(self, request: Request) -> tuple[int, ...]:
        """The drafts of the last burst for the request, if it has not got a token since."""
        if request.request_id not in self._drafts:
            return ()
        num_output_tokens, token_ids = self._drafts[request.request_id]
        return token_ids if num_output_tokens == request.num_output_tokens else ()

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.release(request)
        self.acceptances.forget(request.request_id)

    def release(self, request: Request) -> None:
        """The request waits again or has ended: its blocks are free. A burst that still computes it writes them before
        any later burst does."""
        follower = self._followers.pop(request.request_id, None)
        if follower is not None:
            self._release(follower)

    def on_chunk(self, chunk: ScheduledChunk) -> None:
        """A step of the target model computes the chunk, of a request that may draft."""

    # --- a burst --------------------------------------------------------------------------------------------

    def choose(self, free: Mapping[Request, int], most: int, room: StepRoom) -> Burst:
        """The best burst for requests with room for drafts, even if the draft model has not computed their tokens
        yet."""
        able = [request for request, num_free in free.items() if num_free > 0 and self._can_follow(request)]
        rates = {request.request_id: self.acceptances.rate(request.request_id) for request in able}
        return NO_BURST if self._is_held or self._has_failed else self._best(rates, most, room)

    def _best(self, rates: Mapping[str, float], most: int, room: StepRoom) -> Burst:
        return draft_burst.choose_burst(rates, most, room, self.costs)

    def _skip(self, free: Mapping[Request, int], burst: Burst) -> None:
        """A step has no drafts for requests outside `burst`. They are tried again after a while, and so is a draft
        model that seems too slow."""
        for request in free:
            if request.request_id not in burst.request_ids:
                self.acceptances.decay(request.request_id)
        if free and not burst.depth:
            self.costs.skip()

    def would_draft(self, free: Mapping[Request, int], most: int, room: StepRoom) -> bool:
        """Whether the best burst, once each request has one more token, would compute anything: the draft model has
        computed the prompt of one of them, or it is worth computing now, and there are blocks for it."""
        wanted = self.choose(free, most, room)
        chosen = {self._followers[request_id] for request_id in wanted.request_ids}
        if any(self._would_compute(follower, chosen, wanted.saved_s) for follower in chosen):
            return True  # `compose` follows for the same step, and passes over
        self._skip(free, wanted)
        return False

    def _would_compute(self, follower: Follower, wanted: set[Follower], saved_s: float) -> bool:
        shadow, num_behind = follower.shadow, self._num_behind(follower)
        is_near = num_behind <= BLOCK_SIZE
        if not is_near and not self._is_paid(follower, num_behind, saved_s):
            return False
        prefix = self._find_prefix(follower)
        num_blocks = self.blocks.num_new_blocks(shadow, shadow.num_tokens + 1, prefix)
        others = self._others(wanted if not is_near else {follower})
        *_, num_freed = self.blocks.num_freed_in_turn((other.shadow.request_id for other in others), prefix or ())
        return self.blocks.make_room(num_blocks - num_freed)

    def compose(self, free: Mapping[Request, int], most: int, room: StepRoom) -> tuple[SchedulerOutput, ...]:
        """The steps of the best burst. A request of which the draft model lacks more than a block is brought up to date
        first, once drafts would have saved as much time as that takes, and for no longer at a time than a step should
        take."""
        wanted = self.choose(free, most, room)
        self._skip(free, wanted)
        chosen = {r: self._followers[r.request_id] for r in free if r.request_id in wanted.request_ids}
        near = {r: f for r, f in chosen.items() if self._num_behind(f) <= BLOCK_SIZE}
        burst = wanted
        if len(near) < len(chosen):
            rates = {request.request_id: self.acceptances.rate(request.request_id) for request in near}
            burst = self._best(rates, most, room)
        steps = self._burst = BurstSteps(chosen.values())
        for request, follower in near.items():
            if request.request_id in burst.request_ids:
                self._draft(steps, request, follower, min(burst.depth, free[request]))
        self._bring_up(steps, [f for r, f in chosen.items() if r not in near], wanted.saved_s, room.limit_s)
        for follower in steps.computed:
            self.blocks.cache_full_blocks(follower.shadow, follower.shadow.num_computed_tokens)
        steps.change = self.blocks.take_change()
        if not steps.computed and steps.change is None:
            return ()
        dropped, self._dropped = tuple(self._dropped), []
        return steps.outputs(dropped)

    def _draft(self, steps: BurstSteps, request: Request, follower: Follower, depth: int) -> None:
        num_known = follower.shadow.num_tokens
        for most in dict.fromkeys((depth, 1)):
            if self._admit(steps, follower, num_known + self._num_fed(most), self._others(steps.wanted)):
                break
        else:  # of two requests that both need the last block, the first gets it
            others = self._others({follower, *steps.computed})
            if not self._admit(steps, follower, num_known + self._num_fed(most), others):
                return
        bitmask = None if request.constraint is None else request.constraint.bitmask()
        self._add(steps, follower, num_known, most, bitmask)
        steps.drafting[request.request_id] = follower

    def _num_fed(self, depth: int) -> int:
        """How many positions after the known tokens are computed to draft `depth` tokens."""
        return depth - 1

    def _add(self, steps: BurstSteps, follower: Follower, num_known: int, depth: int, bitmask: bytes | None) -> None:
        """Adds the computation of `depth` drafts after the first `num_known` tokens, whose first obeys `bitmask`."""
        steps.add(follower, num_known, is_sampling=True, bitmask=bitmask)
        steps.follow(follower.shadow, num_known, depth - 1)

    def _bring_up(self, steps: BurstSteps, behind: Iterable[Follower], saved_s: float, limit_s: float) -> None:
        """Computes pieces of prompts, the shortest first, as many tokens in all as fit `limit_s`."""
        num_decodes = len(steps.computed)
        for follower in sorted(behind, key=self._num_behind):
            shadow, num_behind = follower.shadow, self._num_behind(follower)
            start = shadow.num_tokens - num_behind
            if not self._is_paid(follower, num_behind, saved_s):
                continue
            most = min(self._budget.num_tokens(start, num_decodes, limit_s), self.blocks.groups.max_chunk_tokens)
            count = min(num_behind, most - steps.num_prompt_tokens)
            if count <= 0 or not self._admit(steps, follower, shadow.num_tokens, self._others(steps.wanted)):
                break
            steps.add(follower, start + count, is_sampling=False)
            steps.num_prompt_tokens += count
            steps.prompt_cost += self._budget.cost(start, count)

    def _is_paid(self, follower: Follower, num_behind: int, saved_s: float) -> bool:
        """Whether drafts would by now have saved the time that computing the missing tokens takes."""
        shadow = follower.shadow
        missing = self._budget.alone(shadow.num_tokens - num_behind, num_behind)
        return shadow.num_output_tokens * saved_s >= self._budget.expected_s(missing)

    def _others(self, kept: Container[Follower]) -> list[Follower]:
        """Requests that may lose their blocks, the latest first."""
        return [other for other in reversed(self._followers.values()) if other not in kept]

    def _find_prefix(self, follower: Follower) -> CachedPrefix | None:
        """Its cached prefix, if it holds no blocks yet."""
        return None if self.blocks.holds(follower.shadow, 1) else self.blocks.find_prefix(follower.shadow)

    def _admit(self, steps: BurstSteps, follower: Follower, num_tokens: int, others: Iterable[Follower]) -> bool:
        """Whether it gets blocks for `num_tokens` tokens, if necessary those of `others`."""
        shadow, prefix = follower.shadow, self._find_prefix(follower)
        for other in others:
            if self.blocks.make_room(self.blocks.num_new_blocks(shadow, num_tokens, prefix)):
                break
            self._release(other)
            prefix = self._find_prefix(follower)  # the other may have been the only one to hold its blocks
        block_ids = self.blocks.allocate(shadow, num_tokens, prefix)
        if block_ids is None:
            return False
        steps.block_ids[shadow.request_id] = block_ids
        if prefix is not None:
            shadow.num_computed_tokens = len(prefix) * BLOCK_SIZE
            steps.new_requests.append(NewRequestData.of(shadow, None))
        return True

    def take(self, output: ModelRunnerOutput) -> None:
        """Takes the result of the burst that was composed last."""
        if output.draft_error is not None:
            self._fail()
            return
        burst, seconds = self._burst, output.step_time_s + min(output.idle_time_s, output.step_time_s)
        for request_id, token_ids in output.drafts.items():
            follower = burst.drafting[request_id]
            if self._followers.get(request_id) is follower and self.blocks.holds(follower.shadow, 1):
                self._drafts[request_id] = follower.shadow.num_output_tokens, token_ids
                follower.fed = token_ids[:-1]
        num_requests = len(burst.drafting)
        if burst.change is not None:  # its time includes the change
            self.blocks.on_changed(burst.change)
        elif burst.num_prompt_tokens:
            shape = StepShape(num_requests, burst.num_prompt_tokens, burst.prompt_cost)
            self._budget.observe(shape, seconds - (burst.num_steps - 1) * self.costs.seconds(num_requests))
        elif num_requests:
            self.costs.observe(num_requests, seconds / burst.num_steps)

    def _fail(self) -> None:
        """Stops using the draft model; its runner has freed the pool."""
        self._has_failed = True
        for follower in self._followers.values():
            self._release(follower)
        changes = [self._burst.change, self.blocks.take_change()]
        self.blocks.shrink(self.blocks.num_blocks)
        for change in (*changes, self.blocks.take_change()):
            if change is not None:
                self.blocks.on_changed(change)

    def _can_follow(self, request: Request) -> bool:
        follower = self._followers.get(request.request_id)
        if follower is None:
            follower = self._followers[request.request_id] = Follower(Follower.shadow_of(request))
        return self._is_within(request) and follower.knows(self._vocab_size)

    def _is_within(self, request: Request) -> bool:
        return request.num_tokens + BLOCK_SIZE <= self._max_tokens

    def _num_behind(self, follower: Follower) -> int:
        """Known tokens that the draft model has neither computed nor cached."""
        shadow = follower.shadow
        if self.blocks.holds(shadow, 1):
            return follower.num_behind()
        return shadow.num_tokens - BLOCK_SIZE * self.blocks.num_cached(shadow)

    def _release(self, follower: Follower) -> None:
        shadow = follower.shadow
        if self.blocks.holds(shadow, 1):
            self.blocks.free(shadow.request_id)
            self._dropped.append(shadow.request_id)
            shadow.num_computed_tokens, follower.fed = 0, ()
        self._drafts.pop(shadow.request_id, None)

    # --- as a memory guard sees it --------------------------------------------------------------------------

    def shrink(self, num_blocks: int, *, saves_first: bool = False) -> int:
        """Gives up to `num_blocks` unreferenced blocks back with the next burst; returns how many. Nothing needs
        saving."""
        num_cut = self.blocks.shrink(num_blocks)
        self.wake()
        return num_cut

    def give_way(self) -> None:
        """The target model lacks memory for its next blocks: gives half of the unreferenced blocks back with the next
        burst, or half of all blocks if all are referenced."""
        if self.blocks.is_changed:
            return
        if not self.blocks.num_free_blocks:
            for follower in self._followers.values():
                self._release(follower)
        self.shrink(-(-self.blocks.num_free_blocks // 2))

    def hold_admission(self, is_held: bool) -> None:
        """While admission is held, nothing is drafted, and no block is referenced."""
        self._is_held = is_held
        for follower in self._followers.values() if is_held else ():
            self._release(follower)

    def lowest_rank(self) -> None:
        """No request waits for a draft model's memory."""

    def preempt_lowest(self) -> bool:
        return False

    def check_integrity(self) -> None:
        """Asserts the invariants of blocks and requests."""
        self.blocks.check_integrity()
        for follower in self._followers.values():
            num_computed = follower.shadow.num_computed_tokens
            assert num_computed <= follower.shadow.num_tokens, "more was computed than is known"
            assert not num_computed or self.blocks.holds(follower.shadow, num_computed), "K/V without blocks"
