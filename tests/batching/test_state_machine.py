"""Any sequence of arrivals, with images or without, steps, deliveries, aborts, stops and memory pressure, in both
modes, on pools of any size that grow and are cut, of models with and without recurrent state, with and without sliding
windows.

After each move the books must agree; at the end nothing may have leaked, and every request must have the
tokens that it would have had alone.
"""

from __future__ import annotations

from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_server.errors import ContextLengthError
from mlx_server.request import FinishReason, Priority, PromptImage
from tests.batching.worlds import FakeConstraint, ScriptedSupply, World, make_request, make_world, prompt


class SchedulerMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        is_async=st.booleans(),
        num_blocks=st.sampled_from([5, 8, 12, 20, 60]),
        max_num_seqs=st.sampled_from([1, 2, 4, 16]),
        max_num_batched_tokens=st.sampled_from([16, 40, 64, 100, 512]),
        max_chunk_tokens=st.sampled_from([None, None, 1, 7]),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        aging_rate=st.sampled_from([0.0, 0.1, 1.0]),
        num_first_blocks=st.sampled_from([None, 1, 4]),
        num_checkpoints=st.sampled_from([None, None, 1, 3, 16]),
        windows=st.sampled_from([(None,), (None,), (None, 24), (24,), (None, None, 1, 70), (40, 200)]),
    )
    def start(
        self,
        is_async: bool,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_chunk_tokens: int | None,
        flags: tuple[bool, bool, bool],
        aging_rate: float,
        num_first_blocks: int | None,
        num_checkpoints: int | None,
        windows: tuple[int | None, ...],
    ) -> None:
        num_blocks *= len(windows)
        bound_stalls, deduplicate_prefixes, enable_prefix_caching = flags
        num_first = num_first_blocks or num_blocks
        self.supply = ScriptedSupply(num_blocks - num_first)
        self.num_blocks = num_blocks
        self.world = make_world(
            num_first,
            max_blocks=num_blocks,
            supply=self.supply,
            num_checkpoints=num_checkpoints,
            windows=windows,
            is_async=is_async,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk_tokens=max_chunk_tokens,
            bound_stalls=bound_stalls,
            deduplicate_prefixes=deduplicate_prefixes,
            aging_rate=aging_rate,
            target_step_s=0.08,
            memory_wait_s=0.3,
        )
        self.world.scheduler.blocks.enable_prefix_caching = enable_prefix_caching
        self.num_added = 0

    @rule(
        num_shared_tokens=st.sampled_from([0, 0, 20, 32, 64, 90]),
        num_own_tokens=st.integers(1, 80),
        max_tokens=st.integers(1, 40),
        priority=st.sampled_from(list(Priority)),
        kind=st.sampled_from(["plain", "plain", "plain", "stop", "prompt_logprobs"]),
        client=st.sampled_from(["", "", "a", "b"]),
        images=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 5)), max_size=3),
    )
    def add(
        self,
        num_shared_tokens: int,
        num_own_tokens: int,
        max_tokens: int,
        priority: Priority,
        kind: str,
        client: str,
        images: list[tuple[int, int, int]],
    ) -> None:
        """`images` are distances, lengths and seeds."""
        name = f"r{self.num_added}"
        self.num_added += 1
        token_ids = prompt(num_shared_tokens) + prompt(num_own_tokens, first=31 * self.num_added)
        extra = {"stop": {"stop_token_ids": tuple(range(0, 997, 9))}, "prompt_logprobs": {"prompt_logprobs": 0}}
        placed: list[PromptImage] = []
        for distance, length, seed in images:
            start = distance + (placed[-1].end if placed else 0)
            if start + length <= len(token_ids):
                is_whole = length <= 16 and not seed % 5 and self.world.scheduler.limits.max_chunk_tokens is None
                placed.append(PromptImage(start, length, seed.to_bytes(32, "little"), {}, is_whole))
        more = {"priority": priority, "client": client, "images": tuple(placed), **extra.get(kind, {})}
        request = make_request(name, token_ids, max_tokens, arrival_s=self.world.now, **more)
        try:
            self.world.add(request)
        except ContextLengthError:
            blocks = self.world.scheduler.blocks
            assert request.max_total_tokens > blocks.groups.max_tokens(blocks.max_blocks)

    @rule(num_tokens=st.integers(1, 60), num_forced=st.integers(0, 40), priority=st.sampled_from(list(Priority)))
    def add_with_grammar(self, num_tokens: int, num_forced: int, priority: Priority) -> None:
        """Its tokens are not those of the fake model alone; that they are computed in order, the runner sees."""
        self.num_added += 1
        forced = {2: tuple(prompt(num_forced, first=77))}
        request = make_request(
            f"g{self.num_added}",
            num_tokens,
            max_tokens=40,
            priority=priority,
            arrival_s=self.world.now,
            constraint=FakeConstraint(num_forced + 6, forced=forced),
        )
        with suppress(ContextLengthError):
            self.world.add_unchecked(request)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule()
    @precondition(lambda self: self.world.runner.num_submitted < self.world.depth)
    def schedule(self) -> None:
        self.world.schedule()

    @rule()
    @precondition(lambda self: self.world.runner.num_submitted > 0)
    def deliver(self) -> None:
        self.world.deliver()

    @rule(error=st.sampled_from([None, None, "no room"]))
    @precondition(lambda self: self.world.image is not None)
    def encode(self, error: str | None) -> None:
        self.world.encode(error)

    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    @precondition(lambda self: self.world.has_requests)
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        scheduler = self.world.scheduler
        alive = sorted(request.request_id for request in scheduler.in_order())
        assert scheduler.finish_request(data.draw(st.sampled_from(alive)), reason)

    @rule(num_blocks=st.integers(1, 30))
    def shrink(self, num_blocks: int) -> None:
        scheduler = self.world.scheduler
        before, num_free = scheduler.blocks.num_blocks, scheduler.blocks.num_free_blocks
        num_cut = scheduler.shrink(num_blocks)
        assert num_cut in (0, min(num_blocks, num_free, before - 1))
        assert scheduler.blocks.num_blocks == before - num_cut

    @rule(is_open=st.booleans())
    def open_supply(self, is_open: bool) -> None:
        self.supply.is_open = is_open

    @rule(is_held=st.booleans())
    def hold_admission(self, is_held: bool) -> None:
        self.world.scheduler.hold_admission(is_held)

    @rule()
    def preempt_lowest(self) -> None:
        is_crowded = self.world.scheduler.num_running > 1
        assert self.world.scheduler.preempt_lowest() == is_crowded

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
            self.world.check_tokens()
            if self.world.schedule() is not None:  # a cut at the very end
                self.world.deliver()
            images = self.world.scheduler.images
            assert not images._held, "who has left is kept"
            assert images._last is None, "who has left is kept"
            assert self.supply.num_left + self.world.scheduler.blocks.num_blocks == self.num_blocks


@pytest.mark.slow
class TestScheduler(SchedulerMachine.TestCase):
    settings = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
    )


@pytest.mark.full
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(TestScheduler.settings, max_examples=300)
