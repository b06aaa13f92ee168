"""Which prefixes are loaded from disk and for whom, which are saved and when; and that nothing leaks or is mixed up."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_server.batching.blocks.disk_saves import owner_tag
from mlx_server.batching.blocks.disk_tier import IDLE_S
from mlx_server.batching.blocks.prefix_cache import BlocksStored
from mlx_server.config import BLOCK_SIZE
from mlx_server.engine.prefixes.model_on_disk import flush
from mlx_server.errors import ContextLengthError
from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput
from mlx_server.request import FinishReason, Priority, PromptImage
from tests.batching.worlds import FakeStore, ScriptedSupply, World, make_request, make_world, prompt, step_seconds

LONG = prompt(10 * BLOCK_SIZE + 5)


def kept(prompt_token_ids: list[int] = LONG, **extra: object) -> FakeStore:
    """A store that has a prompt's blocks, out of another pool."""
    store = FakeStore()
    world = make_world(store=store)
    world.add(make_request("before", prompt_token_ids, 1, **extra))  # type: ignore[arg-type]
    world.finish()
    rest(world)
    return store


def rest(world: World) -> None:
    """Nobody comes for a while."""
    world.schedule()
    world.now += IDLE_S
    while world.schedule() is not None:
        world.deliver()


def num_computed(world: World) -> int:
    return world.scheduler.counters.num_prompt_tokens_computed


def test_what_a_request_leaves_is_saved_when_nobody_runs() -> None:
    store = FakeStore()
    world = make_world(store=store)
    world.add(make_request("a", LONG, 40, extra_keys=("key:ada",)))
    world.finish()
    assert store.blocks == {}, "it may go on at once"
    rest(world)
    hashes = world.requests["a"].block_hashes
    assert list(store.blocks) == hashes[:11], "prompt and output, as far as blocks are full"
    assert set(store.owners.values()) == {owner_tag(("key:ada",))}


def test_the_loop_does_not_wake_up_before_there_is_something_to_save() -> None:
    """Whatever the clock says: sums and differences of times are rounded differently."""
    for start_s in range(1, 20):
        world = make_world(store=FakeStore())
        world.now = 0.1 * start_s
        world.add(make_request("a", LONG, 2))
        world.finish()
        disk = world.scheduler.disk
        assert disk is not None
        while pause_s := disk.rest_s(world.now, is_idle=True):
            world.now += pause_s
        assert world.schedule() is not None


def test_what_is_evicted_is_saved_before_it_is_written_over() -> None:
    store = FakeStore()
    world = make_world(12, store=store)
    for name in "abcd":
        world.add(make_request(name, 5 * BLOCK_SIZE, 20))
        world.finish()
    assert (
        world.scheduler.blocks.counters.num_block_evictions
        == len(store.blocks)
        == world.scheduler.counters.num_blocks_saved
        > 5
    )
    again = make_request("again", world.requests["a"].prompt_token_ids, 20)
    world.add(again)
    world.finish()
    world.check_tokens()
    assert again.num_cached_tokens == 4 * BLOCK_SIZE


def test_blocks_are_saved_beside_who_runs_one_piece_at_a_time() -> None:
    """Those of who has left, but for blocks that somebody still holds; the next ones when these are written."""
    store = FakeStore()
    world = make_world(40, store=store)
    world.add(make_request("gone", LONG, 1))
    world.finish()
    world.add(make_request("runs", [*LONG[: 4 * BLOCK_SIZE], *prompt(8, first=500)], 60))
    world.step()
    assert store.blocks == {}, "the writer has something to do"
    store.is_quiet = True
    for num_saved in (1, 2, 3, 4, 5, 6, 6):
        world.now += 5.0  # what computes copies, too: it does so in a hundredth of the time
        for _ in range(3):
            world.step()
            assert len(store.blocks) == num_saved
    hashes = world.requests["gone"].block_hashes
    assert list(store.blocks) == hashes[4:10]
    world.finish()
    rest(world)
    assert set(store.blocks) == {*hashes[:10], *world.requests["runs"].block_hashes[:6]}
    world.check_tokens()


def test_saves_beside_who_runs_keep_a_pace_however_fast_copies_are() -> None:
    """32 MB a second: a block of 16 MiB every 0.52 s, once it is known that copies take no time."""
    store = FakeStore()
    store.is_quiet = True
    world = make_world(50, store=store)
    world.add(make_request("gone", prompt(30 * BLOCK_SIZE + 5), 1))
    world.finish()
    world.add(make_request("runs", prompt(8, first=500), 200))
    saved_s: list[float] = []
    while len(saved_s) < 25:
        num_before = len(store.blocks)
        world.now += 1.0 if num_before < 20 else 0.0
        world.step()
        saved_s += [world.now] * (len(store.blocks) - num_before)
    assert [after - before for before, after in pairwise(saved_s[20:])] == [pytest.approx(0.55)] * 4


@pytest.mark.parametrize(("copy_s", "most"), [(0.016, 1), (0.001, 4)])
def test_copies_beside_who_decodes_take_a_quarter_of_the_target(copy_s: float, most: int) -> None:
    """25 ms of 100. What a block takes is learnt; no more than a piece of four goes in any case."""
    long = prompt(40 * BLOCK_SIZE + 5)
    world = make_world(60, store=(store := kept(long)), target_step_s=0.1)
    num_loaded: list[int] = []

    def seconds(step: SchedulerOutput) -> float:
        num_loaded.append(0 if step.copies is None else len(step.copies.loaded))
        return step_seconds(step)

    world.runner.seconds, world.runner.copy_seconds = seconds, lambda count: copy_s * count
    world.add(make_request("runs", prompt(8, first=500), 80))
    for _ in range(4):
        world.step()
    world.add(make_request("loads", long, 1))
    while "loads" not in world.reasons:
        store.arrive()
        world.step()
    assert (max(num_loaded), sum(num_loaded)) == (most, 40)
    world.finish()
    world.check_tokens()


def beside_prompts(step_s: float, copy_seconds: Callable[[int], float]) -> list[int]:
    """How many blocks each step loads for a request beside a long prompt, whose steps take so long."""
    long = prompt(40 * BLOCK_SIZE + 5)
    world = make_world(200, store=(store := kept(long)), target_step_s=0.1, max_num_batched_tokens=64)
    num_loaded: list[int] = []

    def seconds(step: SchedulerOutput) -> float:
        num_loaded.append(0 if step.copies is None else len(step.copies.loaded))
        return step_s

    world.scheduler.learn(100, 0.1, 0.05)
    world.runner.seconds, world.runner.copy_seconds = seconds, copy_seconds
    world.add(make_request("prompt", prompt(150 * BLOCK_SIZE, first=500), 1))
    world.step()
    world.add(make_request("loads", long, 1))
    while "loads" not in world.reasons:
        store.arrive()
        world.step()
    assert sum(num_loaded) == 40
    return [count for count in num_loaded if count]


def test_slow_steps_are_not_taken_for_slow_copies() -> None:
    """Steps that take 9 s instead of the 0.1 s that was expected, with copies that take 1 ms a block."""
    assert beside_prompts(9.0, lambda count: 0.001 * count) == [4] * 10


def test_copies_may_take_a_quarter_of_a_long_step() -> None:
    """Once it is known that a block takes 0.1 s, two of them beside steps of a second, and one beside shorter ones."""
    assert beside_prompts(1.0, lambda count: 0.1 * count)[-8:-1] == [2] * 7
    assert beside_prompts(0.2, lambda count: 0.1 * count)[-8:-1] == [1] * 7


def test_one_interrupted_copy_does_not_make_the_others_small() -> None:
    """As when the machine sleeps: a minute for a piece, counted as four times what was expected."""
    times = iter([60.0, *[0.004] * 100])
    assert beside_prompts(1.0, lambda count: next(times) if count else 0.0) == [4] * 10


def test_what_is_taken_beside_who_decodes_is_copied_within_a_quarter_of_the_target() -> None:
    """A block of 16 MiB takes 17 ms as far as is known, and 25 ms may be spent: one block of the seven that go."""
    store = FakeStore()
    world = make_world(46, store=store, target_step_s=0.1)
    world.add(make_request("gone", prompt(40 * BLOCK_SIZE + 5), 1))
    world.finish()
    world.add(make_request("runs", prompt(8, first=500), 80))
    for _ in range(4):
        world.step()
    assert store.blocks == {}
    world.add(make_request("takes", prompt(12 * BLOCK_SIZE, first=600), 1))
    world.step()
    world.step()
    assert world.scheduler.blocks.counters.num_block_evictions == 7
    assert list(store.blocks) == world.requests["gone"].block_hashes[:1]


def test_what_is_cut_off_is_saved() -> None:
    store = FakeStore()
    world = make_world(20, store=store)
    for name in "abc":
        world.add(make_request(name, 5 * BLOCK_SIZE, 20))
        world.finish()
    for count in (9, 4, 4):  # five are unused, and four are a piece
        assert world.scheduler.shrink(count) == count
        world.schedule()
        world.deliver()
    assert len(store.blocks) == 12
    for name in "abc":
        again = make_request(f"{name} again", world.requests[name].prompt_token_ids[:80], 1)
        world.add(again)
        world.finish()
        assert again.num_cached_tokens == 2 * BLOCK_SIZE
    world.check_tokens()


def next_turn_cached(world: World, name: str) -> int:
    """How many blocks the next turn of a conversation hits."""
    tokens = [*world.requests[name].prompt_token_ids, *world.tokens[name], *prompt(8, first=700)]
    world.add(again := make_request(f"{name} goes on", tokens, 1))
    world.finish()
    world.check_tokens()
    return (again.num_cached_tokens or 0) // BLOCK_SIZE


@pytest.mark.parametrize("runs", [False, True], ids=["idle", "beside a stream"])
@pytest.mark.parametrize("kind", [{}, {"windows": (None, 40)}], ids=["plain", "w"])
def test_a_pool_that_is_cut_at_once_is_saved_first(kind: dict[str, object], runs: bool) -> None:
    """Ten pieces, one a step; the cut comes when the last has been copied."""
    store = FakeStore()
    world = make_world(120, store=store, **kind)
    if runs:
        world.add(make_request("stream", 8, 60))
    world.add(make_request("a", prompt(40 * BLOCK_SIZE + 5), 1))
    while "a" not in world.reasons:
        world.step()
    scheduler, num_saved = world.scheduler, [0]
    while not scheduler.shrink(116, saves_first=True):
        assert scheduler.blocks.num_cached_blocks >= 40
        world.step()
        num_saved.append(len(store.blocks))
        assert 0 < num_saved[-1] - num_saved[-2] <= 4, "a step saves a piece"
    world.step()
    assert scheduler.blocks.num_blocks <= 10
    assert scheduler.counters.num_blocks_not_saved == 0
    scheduler.blocks._supply = ScriptedSupply(110)
    assert next_turn_cached(world, "a") == 40


def test_saving_is_in_no_hurry_once_nobody_waits_for_it() -> None:
    """The pressure has gone, or the cut has been made without waiting."""
    world = make_world(120, store=FakeStore())
    world.add(make_request("a", prompt(40 * BLOCK_SIZE + 5), 1))
    while "a" not in world.reasons:
        world.step()
    saves = world.scheduler.disk.saves
    for num_blocks in (0, 5):
        assert world.scheduler.shrink(116, saves_first=True) == 0
        assert saves.is_urgent
        assert world.scheduler.shrink(num_blocks) == num_blocks
        assert not saves.is_urgent


def test_a_hurry_goes_on_however_many_blocks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are looked at in a step are not all."""
    monkeypatch.setattr("mlx_server.batching.blocks.disk_saves._MAX_PASSED", 2)
    world = make_world(120, store=(store := FakeStore()))
    world.add(make_request("a", prompt(40 * BLOCK_SIZE + 5), 1))
    while "a" not in world.reasons:
        world.step()
    assert world.scheduler.shrink(116, saves_first=True) == 0
    for _ in range(11):
        world.step()
    assert len(store.blocks) == 40
    assert not world.scheduler.disk.saves.is_urgent


def test_a_cut_that_does_not_wait_keeps_the_beginning_of_a_prompt() -> None:
    """A piece of it, from its first block on: what is behind a gap is worth nothing."""
    store = FakeStore()
    world = make_world(42, store=store)
    world.add(make_request("a", prompt(40 * BLOCK_SIZE + 5), 1))
    world.finish()
    assert world.scheduler.shrink(41) == 41
    world.schedule()
    world.deliver()
    hashes = world.requests["a"].block_hashes
    assert list(store.blocks) == hashes[:4]
    assert world.scheduler.counters.num_blocks_not_saved == 36
    world.scheduler.blocks._supply = ScriptedSupply(100)
    assert next_turn_cached(world, "a") == 4


def test_prompts_that_take_the_pool_leave_the_beginning_of_another() -> None:
    """Each takes twice as much as a step can save: from its end, while the beginning is saved, until they meet."""
    store = FakeStore()
    world = make_world(42, store=store)
    world.add(make_request("a", prompt(40 * BLOCK_SIZE + 5), 1))
    world.finish()
    for number in range(5):
        world.add(make_request(f"b{number}", prompt(7 * BLOCK_SIZE + 5, first=100 * number + 50), 1))
        world.finish()
    assert list(store.blocks) == world.requests["a"].block_hashes[:16], "then only these are left"
    assert next_turn_cached(world, "a") == 16


def test_a_reset_behind_a_cut_forgets_what_was_cut_off() -> None:
    store = FakeStore()
    world = make_world(20, store=store)
    world.add(make_request("a", LONG, 1))
    world.finish()
    assert world.scheduler.shrink(15) == 15
    assert world.scheduler.blocks.reset_prefix_cache()
    world.scheduler.disk.saves.forget()
    world.step()
    assert store.blocks == {}


@pytest.mark.parametrize("reason", ["nothing may be written", "saved already", "not worth it"])
def test_a_cut_waits_for_nothing_that_cannot_be_saved(reason: str) -> None:
    store = FakeStore()
    world = make_world(20, store=store)
    world.scheduler.disk.saves.min_prompt_tokens = 600 if reason == "not worth it" else 32
    world.add(make_request("a", LONG, 1))
    world.finish()
    if reason == "saved already":
        rest(world)
    elif reason == "nothing may be written":
        store.most_room, store.is_quiet = 0, True
    assert world.scheduler.shrink(19, saves_first=True) == 19


async def test_a_cut_that_no_step_has_taken_along_is_saved_as_it_was_at_the_end() -> None:
    """The blocks by their ids before the cut, and the cut, go to the runner together."""
    store = FakeStore()
    world = make_world(20, store=store, is_async=True)
    contents: dict[bytes, list[int]] = {}
    for name in "abc":
        world.add(make_request(name, 5 * BLOCK_SIZE, 20))
        world.finish()
    blocks = world.scheduler.blocks
    for request in world.requests.values():
        for block_hash in request.block_hashes:
            block = blocks.cached_block(block_hash)
            if block is not None:
                start = block.block_id * BLOCK_SIZE
                contents[block_hash] = world.runner._slots[start : start + BLOCK_SIZE]
    assert world.scheduler.shrink(9) == 9

    class AtOnce:
        async def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
            world.runner.submit(output)
            return world.runner.fetch()

    model = SimpleNamespace(disk=SimpleNamespace(is_on=True, drain=lambda left_s: True), records=store)
    await flush(model, world.scheduler, AtOnce())  # type: ignore[arg-type]
    assert len(store.blocks) > 9
    assert all(content.tolist() == contents[block_hash] for block_hash, content in store.blocks.items())


def test_a_prefix_is_loaded_and_counts_as_cached() -> None:
    world = make_world(store=(store := kept()))
    request = make_request("a", [*LONG, *prompt(40, first=500)], 8)
    world.add(request)
    assert world.schedule() is None, "nothing is computed that is on its way"
    assert len(store.reads) == 8, "no more than may be staged"
    world.finish()
    world.check_tokens()
    assert request.num_cached_tokens == 10 * BLOCK_SIZE
    assert num_computed(world) == request.num_prompt_tokens - 10 * BLOCK_SIZE
    assert world.scheduler.counters.num_prompt_tokens_from_disk == 10 * BLOCK_SIZE
    assert store.num_read == 10


def test_what_is_loaded_is_announced_with_its_images() -> None:
    """Routers find a prefix by its tokens and its images, which have the same tokens."""
    image = PromptImage(8, 64, b"7" * 32, {})
    world = make_world(store=(store := kept(images=(image,))))
    announced: list[object] = []
    world.scheduler.blocks.watch_prefixes(announced.append)
    world.add(make_request("a", LONG, 1, images=(image,)))
    world.schedule()
    while world.is_loading:
        store.arrive()
        world.schedule()
    stored = [change for change in announced if isinstance(change, BlocksStored)]
    assert len(stored) >= 10
    assert {change.images for change in stored} == {(image,)}


def test_blocks_of_8_bits_are_counted_wherever_they_are_hit() -> None:
    """Loaded, or in memory since; not those that are computed behind them, nor when they are computed anew."""
    world = make_world(14, store=(store := kept()))
    store.is_rounded = True
    longer = [*LONG, *prompt(40, first=500)]
    counts = []
    for name, tokens in (("loaded", LONG), ("in memory", longer), ("again", longer), ("other", prompt(446, first=300))):
        world.add(request := make_request(name, tokens, 1))
        world.finish()
        counts.append((request.num_cached_tokens // BLOCK_SIZE, request.num_rounded_tokens // BLOCK_SIZE))
    assert counts == [(10, 10), (10, 10), (11, 10), (0, 0)]
    store.blocks.clear()
    for name in ("computed", "hit"):
        world.add(request := make_request(name, LONG, 1))
        world.finish()
    assert (request.num_cached_tokens, request.num_rounded_tokens) == (10 * BLOCK_SIZE, 0)
    world.check_tokens()


def test_a_preempted_request_that_goes_on_from_8_bits_says_so() -> None:
    """Three of its five blocks were evicted, and come back rounded."""
    store = FakeStore()
    store.is_rounded = True
    world = make_world(12, store=store)
    world.add(request := make_request("low", 5 * BLOCK_SIZE, 30, priority=Priority.LOW))
    for _ in range(3):
        world.step()
    world.add(make_request("high", 9 * BLOCK_SIZE, 30, priority=Priority.HIGH))
    world.finish()
    world.check_tokens()
    assert request.num_preemptions > 0
    assert (request.num_cached_tokens, request.num_rounded_tokens) == (0, 3 * BLOCK_SIZE)


def counted_seeks(world: World) -> list[bytes]:
    """Gets the hash of each block that is looked for on disk."""
    assert world.scheduler.disk is not None
    sought: list[bytes] = []
    seek = world.scheduler.disk._is_stored

    def counted(block_hash: bytes, group: int) -> bool:
        sought.append(block_hash)
        return seek(block_hash, group)

    world.scheduler.disk._is_stored = counted  # type: ignore[method-assign]
    return sought


def test_a_prefix_is_sought_once_a_block_however_much_is_stored() -> None:
    store = kept()
    store.blocks.update({number.to_bytes(16, "little"): memoryview(b"") for number in range(20_000)})
    world = make_world(store=store)
    sought = counted_seeks(world)
    world.add(make_request("found", LONG, 1))
    world.finish()
    assert len(sought) == 10
    world.add(make_request("not found", prompt(10 * BLOCK_SIZE, first=500), 1))
    world.finish()
    assert len(sought) == 11


def test_memory_comes_before_disk() -> None:
    world = make_world(store=(store := kept()))
    world.add(make_request("short", LONG[: 4 * BLOCK_SIZE + 1], 1))
    world.finish()
    assert store.num_read == 4
    world.add(make_request("long", LONG, 1))
    world.finish()
    assert store.num_read == 10
    world.check_tokens()


def test_those_with_one_prefix_load_it_once() -> None:
    world = make_world(store=(store := kept()))
    for name in "abcd":
        world.add(make_request(name, [*LONG, *prompt(40, first=ord(name))], 8))
    world.schedule()
    assert world.scheduler.num_deferred == 4
    world.finish()
    world.check_tokens()
    assert store.num_read == 10
    assert world.scheduler.counters.num_disk_loads == 1


def kept_each(num_prompts: int, num_blocks: int = 10) -> tuple[FakeStore, list[list[int]]]:
    """A store that has the blocks of prompts that have nothing in common."""
    store = FakeStore()
    prompts = [prompt(num_blocks * BLOCK_SIZE + 5, first=7 * number) for number in range(num_prompts)]
    for tokens in prompts:
        store.blocks.update(kept(tokens).blocks)
    return store, prompts


def test_all_requests_that_come_at_once_hit_what_is_on_disk() -> None:
    """Not only the oldest and the shortest; two prefixes are read at a time, and each is looked up once."""
    store, prompts = kept_each(6)
    world = make_world(200, store=store)
    sought = counted_seeks(world)
    for number, tokens in enumerate(prompts):
        world.add(make_request(f"a{number}", [*tokens, *prompt(20 + number, first=500)], 4))
    assert world.schedule() is None
    assert world.scheduler.num_deferred == 6
    world.finish()
    world.check_tokens()
    assert [request.num_cached_tokens for request in world.requests.values()] == [10 * BLOCK_SIZE] * 6
    assert world.scheduler.counters.num_disk_loads == 6
    assert len(sought) == 6 * 10


def test_a_prefix_that_two_tiers_begin_with_is_loaded_once() -> None:
    """The next requests of a tier are the oldest and the shortest."""
    world = make_world(100, store=(store := kept()))
    world.add(make_request("longest", [*LONG, *prompt(90, first=500)], 1))
    world.add(make_request("shortest", [*LONG, *prompt(9, first=600)], 1))
    world.add(make_request("low", [*LONG, *prompt(50, first=700)], 1, priority=Priority.LOW))
    world.finish()
    world.check_tokens()
    assert (store.num_read, world.scheduler.counters.num_disk_loads) == (10, 1)


def test_who_has_nothing_on_disk_starts_beside_those_who_wait_for_loads() -> None:
    store, prompts = kept_each(5)
    world = make_world(200, store=store)
    for number, tokens in enumerate(prompts):
        world.add(make_request(f"a{number}", tokens, 4))
    world.add(make_request("other", prompt(11 * BLOCK_SIZE, first=800), 4))
    world.schedule()
    assert world.running_ids() == ["other"]
    world.finish()
    world.check_tokens()


def test_nobody_is_preempted_for_a_request_that_is_loaded_first() -> None:
    store, prompts = kept_each(3)
    world = make_world(200, store=store, max_num_seqs=1)
    world.add(make_request("low", 40, 30, priority=Priority.LOW))
    world.step()
    for number, tokens in enumerate(prompts):
        world.add(make_request(f"a{number}", tokens, 4, priority=Priority.HIGH))
    for _ in range(3):
        world.step()
    assert world.running_ids() == ["low"]
    world.finish()
    world.check_tokens()
    assert world.scheduler.counters.num_disk_loads == 3


def watch_loads(world: World) -> Callable[[], list[str]]:
    """Gets whose prefixes have been loaded so far, in order; of requests that share one, the last that was added."""
    store, digests = world.store, []
    assert store is not None
    read = store.read

    def noted(digest: bytes, *args: Any, **more: Any) -> None:
        digests.append(digest)
        read(digest, *args, **more)

    store.read = noted  # type: ignore[method-assign]

    def begun() -> list[str]:
        first_block = {request.block_hashes[0]: name for name, request in world.requests.items()}
        return [first_block[digest] for digest in digests if digest in first_block]

    return begun


def test_loads_begin_by_tier_and_then_by_age() -> None:
    store, prompts = kept_each(6)
    world = make_world(200, store=store)
    tiers = (Priority.LOW, Priority.LOW, Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.HIGH)
    begun = watch_loads(world)
    for number, (tokens, priority) in enumerate(zip(prompts, tiers, strict=True)):
        if number == 3:
            world.schedule()
        world.add(make_request(f"a{number}", tokens, 1, priority=priority, arrival_s=0.001 * number))
    world.finish()
    world.check_tokens()
    assert begun() == ["a0", "a1", "a4", "a5", "a3", "a2"]


def test_a_load_begins_when_it_is_the_turn_of_anyone_who_waits_for_it() -> None:
    """HIGH has the prefix of LOW, whose load comes after two of NORMAL."""
    store, prompts = kept_each(5)
    world = make_world(200, store=store)
    for number, tokens in enumerate(prompts[:4]):
        world.add(make_request(f"normal {number}", tokens, 1))
    begun = watch_loads(world)
    world.schedule()
    world.add(make_request("low", [*prompts[4], 1], 1, priority=Priority.LOW))
    world.schedule()
    world.add(make_request("high", [*prompts[4], 2], 1, priority=Priority.HIGH, arrival_s=world.now))
    world.finish()
    world.check_tokens()
    assert begun() == ["normal 0", "normal 1", "high", "normal 2", "normal 3"]


def test_a_disk_that_hangs_holds_up_all_requests_for_one_load_only() -> None:
    store, prompts = kept_each(6)
    world = make_world(200, store=store)
    for number, tokens in enumerate(prompts):
        world.add(make_request(f"a{number}", tokens, 4))
    assert world.schedule() is None
    world.now += world.scheduler.disk.rest_s(world.now, is_idle=False)
    assert world.schedule() is not None
    assert world.scheduler.num_deferred == 0
    assert len(world.running_ids()) == 6
    world.finish()
    world.check_tokens()


def test_so_many_loads_may_wait_and_better_tiers_pass_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step looks up so many prefixes and no more."""
    monkeypatch.setattr("mlx_server.batching.blocks.disk_tier._MAX_QUEUED", 4)
    store, prompts = kept_each(8)
    world = make_world(200, store=store)
    sought = counted_seeks(world)
    for number, tokens in enumerate(prompts[:7]):
        world.add(make_request(f"a{number}", tokens, 4, priority=Priority.LOW))
    for _ in range(3):
        assert world.schedule() is None
    assert (world.scheduler.num_deferred, len(sought)) == (4, 4 * 10)
    assert "loaded from disk" in world.scheduler.explain(world.requests["a4"])
    world.add(make_request("better", prompts[7], 4))
    world.schedule()
    assert (world.scheduler.num_deferred, len(sought)) == (5, 5 * 10)
    world.finish()
    world.check_tokens()
    assert all(request.num_cached_tokens == 10 * BLOCK_SIZE for request in world.requests.values())
    assert len(sought) == 8 * 10


def test_the_loads_of_one_key_are_not_before_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A has more to load than may wait, and a stream goes on; B comes last, and is loaded when the disk is free. What
    was loaded for B is B's, and not evicted with what A leaves."""
    monkeypatch.setattr("mlx_server.batching.blocks.disk_tier._MAX_QUEUED", 4)
    store, prompts = kept_each(8)
    world = make_world(400, store=store)
    world.add(make_request("stream", prompt(40, first=900), 300, client="A"))
    world.step()
    begun = watch_loads(world)
    for number, tokens in enumerate(prompts[:7]):
        world.add(make_request(f"a{number}", tokens, 1, client="A", arrival_s=0.001 * number))
    world.schedule()
    world.add(make_request("b", prompts[7], 1, client="B", arrival_s=0.1))
    for _ in range(20):
        world.step()
        store.arrive()
    world.finish()
    world.check_tokens()
    assert begun()[:3] == ["a0", "a1", "b"]
    loaded = map(world.scheduler.blocks.cached_block, world.requests["b"].block_hashes)
    assert {block.client for block in loaded if block is not None} == {"B"}


def test_loads_of_better_tiers_do_not_hold_up_who_has_aged_past_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """HIGH comes all the time with more prefixes than the disk can read; LOW has none there."""
    monkeypatch.setattr("mlx_server.batching.blocks.disk_tier._MAX_QUEUED", 4)
    store, prompts = kept_each(60, 3)
    world = make_world(300, store=store, aging_rate=0.1)
    world.step_s = 1.0
    for number, tokens in enumerate(prompts):
        world.add(make_request(f"a{number}", tokens, 1, priority=Priority.HIGH, arrival_s=world.now))
        if number == 5:
            world.add(make_request("low", prompt(3 * BLOCK_SIZE, first=5000), 4, priority=Priority.LOW))
        if number > 3:
            store.arrive(2)
            if world.schedule() is not None:
                world.deliver()
    assert "low" in world.reasons
    world.finish()
    world.check_tokens()


def test_a_load_that_waits_for_its_turn_is_not_made_for_a_request_that_has_left() -> None:
    store, prompts = kept_each(4)
    world = make_world(200, store=store)
    for number, tokens in enumerate(prompts):
        world.add(make_request(f"a{number}", tokens, 4))
    world.schedule()
    world.scheduler.finish_request("a3", FinishReason.ABORT)
    world.finish()
    assert (world.scheduler.counters.num_disk_loads, store.num_read) == (3, 30)
    world.check_tokens()
    world.add(make_request("again", prompts[3], 4))
    world.schedule()
    world.scheduler.fail_all()
    assert world.scheduler.blocks.num_free_blocks == 200


def test_a_load_that_waits_for_its_turn_is_not_made_of_what_was_computed_meanwhile() -> None:
    store, prompts = kept_each(3)
    stored = {digest: store.blocks.pop(digest) for digest in kept(prompts[2]).blocks}
    world = make_world(400, store=store, max_num_batched_tokens=64, deduplicate_prefixes=False)
    longer = [*prompts[2][: 10 * BLOCK_SIZE], *prompt(40 * BLOCK_SIZE, first=3000)]
    world.add(make_request("computes", longer, 1))
    world.step()
    store.blocks.update(stored)
    for number in range(2):
        world.add(make_request(f"a{number}", prompts[number], 1))
    world.step()
    world.add(request := make_request("waits", longer[: 30 * BLOCK_SIZE], 1))
    for _ in range(12):
        world.step()
    world.finish()
    world.check_tokens()
    assert request.num_cached_tokens == 29 * BLOCK_SIZE
    assert (world.scheduler.counters.num_disk_loads, store.num_read) == (2, 20)
    assert world.scheduler.counters.num_prompt_tokens_from_disk == 20 * BLOCK_SIZE


def test_a_prefix_whose_blocks_a_load_takes_as_a_request_starts_is_not_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(store=FakeStore())
    world.add(make_request("first", LONG, 1))
    world.finish()
    assert world.scheduler.disk is not None

    def defers(request: object) -> bool:
        """As if another load began with all blocks that nobody uses."""
        assert world.scheduler.blocks.reset_prefix_cache()
        return False

    monkeypatch.setattr(world.scheduler.disk, "defers", defers)
    before = num_computed(world)
    world.add(make_request("second", LONG, 1))
    world.finish()
    world.check_tokens()
    assert num_computed(world) - before == len(LONG)


def test_nothing_is_loaded_for_a_request_that_does_not_wait_for_it() -> None:
    """A worse tier computes the prefix, and better ones do not wait for that."""
    store, (tokens,) = kept_each(1, 40)
    stored = {**store.blocks}
    store.blocks.clear()
    world = make_world(400, store=store, max_num_batched_tokens=64)
    world.add(make_request("low", tokens, 1, priority=Priority.LOW))
    world.step()
    store.blocks.update(stored)
    world.add(make_request("high", tokens, 1, priority=Priority.HIGH))
    world.schedule()
    assert "high" in world.running_ids()
    assert (world.scheduler.counters.num_disk_loads, store.reads) == (0, [])
    world.deliver()
    world.finish()
    world.check_tokens()


def test_others_decode_while_a_prefix_is_loaded() -> None:
    world = make_world(store=(store := kept()), is_async=True)
    world.add(make_request("stream", 20, 60))
    for _ in range(4):
        world.step()
    world.add(make_request("a", LONG, 8))
    before = len(world.tokens["stream"])
    for _ in range(10):
        store.arrive(1)
        world.step()
    assert len(world.tokens["stream"]) >= before + 9
    world.finish()
    world.check_tokens()


@pytest.mark.parametrize("index", [0, 3, 9])
def test_what_cannot_be_read_is_computed_from_there(index: int) -> None:
    store = kept()
    store.lost.add(list(store.blocks)[index])
    world = make_world(store=store)
    request = make_request("a", LONG, 8)
    world.add(request)
    world.finish()
    world.check_tokens()
    assert request.num_cached_tokens == index * BLOCK_SIZE
    assert num_computed(world) == len(LONG) - index * BLOCK_SIZE


def test_a_disk_that_does_not_answer_is_not_waited_for() -> None:
    world = make_world(store=kept())
    request = make_request("a", LONG, 8)
    world.add(request)
    world.schedule()
    world.now += 11.0
    assert world.schedule() is not None
    world.deliver()
    assert request.num_cached_tokens == 0
    world.finish()
    world.check_tokens()


def test_the_loop_sleeps_while_a_prefix_is_loaded() -> None:
    """As long as a load may take: what is to be saved must not wake it again and again while somebody is there."""
    world = make_world(store=(store := kept()))
    disk = world.scheduler.disk
    world.add(make_request("before", 3 * BLOCK_SIZE, 1))
    world.finish()
    assert disk.rest_s(world.now, is_idle=True) is not None, "there is something to save"
    assert disk.rest_s(world.now, is_idle=False) is None
    world.add(make_request("a", LONG, 8))
    world.schedule()
    assert store.reads
    assert disk.rest_s(world.now, is_idle=False) == pytest.approx(10.01, abs=0.1)
    world.now += 10.01
    assert world.schedule() is not None, "a disk that hangs is not waited for"
    assert disk.rest_s(world.now, is_idle=False) is None


def test_a_prefix_of_which_nothing_must_be_read_is_not_waited_for() -> None:
    """Of a model that keeps only states: the state is in memory, and blocks have no content."""
    world = make_world(16, store=(store := FakeStore()), num_checkpoints=8)
    store.block_bytes, store.state_bytes = 0, 8
    world.runner._windows = ()
    for name, num_tokens in (("a", 300), ("b", 330)):
        world.add(make_request(name, prompt(num_tokens, first=ord(name)), 2))
        world.finish()
    world.add(again := make_request("a again", [*world.requests["a"].prompt_token_ids, 5], 2))
    assert world.schedule() is None
    assert (world.is_loading, store.reads) == (True, [])
    assert world.scheduler.disk.rest_s(world.now, is_idle=False) == 0.0, "nothing else would wake the loop"
    world.finish()
    assert again.num_cached_tokens == 9 * BLOCK_SIZE
    assert world.scheduler.counters.num_blocks_loaded == 0


def test_who_leaves_while_it_is_loaded_leaks_nothing() -> None:
    world = make_world(store=(store := kept()))
    world.add(make_request("a", LONG, 8))
    world.schedule()
    store.arrive(3)
    world.schedule()
    world.deliver()
    world.scheduler.finish_request("a", FinishReason.ABORT)
    world.finish()
    assert world.scheduler.blocks.num_cached_blocks == 10, "the next one may hit it"


def test_loads_give_way_to_those_who_run() -> None:
    world = make_world(16, store=(store := kept()))
    world.add(make_request("stream", 2 * BLOCK_SIZE - 4, 12 * BLOCK_SIZE))
    world.step()
    world.add(make_request("a", LONG, 8))
    world.schedule()
    world.deliver()
    assert store.reads, "it is being loaded"
    while world.is_loading:
        world.schedule()
        world.deliver()
    assert not world.scheduler.counters.num_preemptions, "nobody is preempted for a load"
    assert store.reads
    assert not any(is_wanted() for *_, is_wanted in store.reads), "what was given up is not read"
    assert world.running_ids() == ["stream"]
    world.finish()
    world.check_tokens()


def test_a_prefix_that_has_no_room_is_not_sought_again_before_there_is_some() -> None:
    """A look-up takes as long as the prefix, and the loop composes step after step meanwhile."""
    world = make_world(14, store=(store := kept()))
    world.scheduler.disk._pays = lambda first, end: end > first
    sought = counted_seeks(world)
    world.add(make_request("stream", 2 * BLOCK_SIZE, 4 * BLOCK_SIZE))
    world.step()
    world.add(make_request("other", prompt(3 * BLOCK_SIZE, first=900), 20))
    world.step()
    world.add(make_request("a", LONG, 8))
    world.step()
    num_sought = len(sought)
    assert num_sought >= 10
    for _ in range(12):
        world.step()
    assert "other" not in world.reasons
    assert (len(sought), store.reads) == (num_sought, [])
    world.finish()
    world.check_tokens()
    assert len(sought) == num_sought + 10, "once, when there is room"


def test_a_dead_engine_holds_no_blocks_for_loads() -> None:
    world = make_world(store=kept())
    world.add(make_request("a", LONG, 8))
    world.schedule()
    assert world.scheduler.blocks.num_free_blocks == 64 - 10
    world.scheduler.fail_all()
    assert world.scheduler.blocks.num_free_blocks == 64


def test_the_tier_is_closed_even_if_the_requests_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the failed step left may be in no order."""
    world = make_world(store=kept())
    closed: list[bool] = []
    monkeypatch.setattr(type(world.scheduler.disk), "close", lambda tier: closed.append(True))
    monkeypatch.setattr(world.scheduler._table, "end", lambda *_: 1 // 0)
    world.add(make_request("a", LONG, 8))
    with pytest.raises(ZeroDivisionError):
        world.scheduler.fail_all()
    assert closed == [True]


def test_nothing_is_loaded_that_is_computed_sooner() -> None:
    world = make_world(store=(store := kept()))
    world.scheduler.learn(100, 0.001, 0.001)  # 100,000 tokens a second, and a block takes 16 ms to read
    request = make_request("a", LONG, 8)
    world.add(request)
    world.finish()
    assert (store.num_read, request.num_cached_tokens) == (0, 0)


def is_loaded_from(world: World, number: int, read_s: float) -> bool:
    """Whether a prompt of eleven blocks is loaded, and tells that its reads took so long. Computing it takes 3.5 s."""
    assert world.store is not None
    num_before = world.store.num_read
    world.store.blocks.update(kept(tokens := prompt(11 * BLOCK_SIZE + 5, first=11 * number)).blocks)
    world.scheduler.learn(100, 1.0, 0.05)
    world.add(make_request(f"a{number}", tokens, 1))
    world.store.read_time_s += read_s
    world.finish()
    world.check_tokens()
    return world.store.num_read > num_before


def test_a_disk_that_was_slow_is_tried_again() -> None:
    """One load every five minutes, whose speed counts from then on."""
    world = make_world(300, store=FakeStore())
    world.runner.seconds = lambda step: 0.0
    assert is_loaded_from(world, 0, 0.1)
    assert [is_loaded_from(world, number, 300.0) for number in range(1, 12)].count(False) > 0
    tries = ((4, 99.0, False), (2, 99.0, True), (4, 0.1, False), (2, 0.1, True), (0, 0.1, True))
    for number, (minutes, read_s, expected) in enumerate(tries, start=20):
        world.now += 60.0 * minutes
        assert is_loaded_from(world, number, read_s) == expected


def test_reads_are_not_slow_because_steps_are() -> None:
    """Loads that wait 9 s for steps, of which reading takes 0.1 s."""
    world = make_world(300, store=FakeStore())
    world.runner.seconds = lambda step: 0.0
    world.step_s = 4.0
    assert [is_loaded_from(world, number, 0.1) for number in range(12)] == [True] * 12


def test_a_load_that_the_disk_does_not_finish_makes_it_slow() -> None:
    """Whoever comes next does not wait for it."""
    world = make_world(300, store=(store := kept()))
    world.runner.seconds = lambda step: 0.0
    world.scheduler.learn(100, 1.0, 0.05)
    world.add(make_request("a", LONG, 1))
    assert world.schedule() is None
    world.now += 11.0
    store.read_time_s = 11.0
    world.finish()
    assert not is_loaded_from(world, 20, 0.0)


def test_loads_that_find_nothing_do_not_make_the_disk_slow() -> None:
    """As when a full disk has dropped what it had: ten loads end at once, with nothing that was read."""
    store, prompts = kept_each(10)
    store.lost = set(store.blocks)
    world = make_world(300, store=store)
    world.runner.seconds = lambda step: 0.0
    world.scheduler.learn(100, 1.0, 0.05)
    for number, tokens in enumerate(prompts):
        world.add(make_request(f"a{number}", tokens, 1))
        store.read_time_s += 0.001
        world.finish()
    counters = world.scheduler.counters
    assert (counters.num_disk_loads, counters.disk_load_time_s) == (0, 0.0), "nor are they loads"
    assert is_loaded_from(world, 20, 0.1)
    assert counters.num_disk_loads == 1


def test_callers_who_are_kept_apart_are_so_on_disk() -> None:
    world = make_world(store=(store := kept(extra_keys=("key:ada",))))
    world.add(make_request("a", LONG, 8, extra_keys=("key:bob",)))
    world.add(make_request("b", LONG, 8, adapter="tuned", extra_keys=("key:ada",)))
    world.finish()
    assert store.num_read == 0


def test_prompt_logprobs_are_computed() -> None:
    world = make_world(store=(store := kept()))
    world.add(make_request("a", LONG, 8, prompt_logprobs=0))
    world.finish()
    assert store.num_read == 0


def test_a_full_writer_loses_blocks_and_nothing_else() -> None:
    store = FakeStore()
    store.most_room = 0
    world = make_world(12, store=store)
    for name in "abcd":
        world.add(make_request(name, 5 * BLOCK_SIZE, 20))
        world.finish()
    assert store.blocks == {}
    assert world.scheduler.counters.num_blocks_not_saved > 5


WINDOWS = {"windows": (None, 40)}
STATES_KEPT = {"num_checkpoints": 3}
BOTH = {**WINDOWS, **STATES_KEPT, "deduplicate_prefixes": False}


def kept_of(kind: dict[str, object]) -> tuple[FakeStore, World]:
    """A prompt of 10 blocks and an answer up to 12, saved out of a pool of such a model."""
    store = FakeStore()
    world = make_world(100, store=store, **kind)
    world.add(make_request("before", LONG, 2 * BLOCK_SIZE))
    world.finish()
    rest(world)
    return store, world


@pytest.mark.parametrize(
    ("kind", "num_records"), [(WINDOWS, 12 + 2 + 2), (STATES_KEPT, 12 + 2), (BOTH, 12 + 4 + 2)], ids=["w", "s", "ws"]
)
def test_of_windows_and_states_what_a_turn_goes_on_from_is_kept(kind: dict[str, object], num_records: int) -> None:
    """The prompt's end at block 10, and the answer's at 12; two blocks of each window are seen from there."""
    store, before = kept_of(kind)
    assert len(store.blocks) == num_records
    next_turn = [*LONG, *before.tokens["before"], *prompt(40, first=500)]
    for turn, num_blocks in ((next_turn, 12), ([*LONG, *prompt(40, first=700)], 10), (LONG[:200], 0)):
        world = make_world(100, store=store, **kind)
        request = make_request("a", turn, 8)
        world.add(request)
        world.finish()
        world.check_tokens()
        assert request.num_cached_tokens == num_blocks * BLOCK_SIZE
        assert world.scheduler.counters.num_prompt_tokens_from_disk == num_blocks * BLOCK_SIZE


@pytest.mark.parametrize("kind", [WINDOWS, BOTH], ids=["w", "ws"])
def test_a_prefix_that_is_not_whole_is_computed(kind: dict[str, object]) -> None:
    """Whichever record cannot be read: the request answers right, and nothing is lost."""
    store, before = kept_of(kind)
    next_turn = [*LONG, *before.tokens["before"], *prompt(40, first=500)]
    for digest in list(store.blocks):
        store.lost = {digest}
        world = make_world(100, store=store, **kind)
        world.add(make_request("a", next_turn, 8))
        world.finish()
        world.check_tokens()


def test_what_is_missing_of_a_prefix_is_loaded_and_the_rest_is_in_memory() -> None:
    """A model with windows and states: blocks in memory and a state on disk make one prefix."""
    store, before = kept_of(BOTH)
    before.scheduler.blocks.checkpoints.clear()
    request = make_request("a", [*LONG, *prompt(40, first=700)], 8)
    before.add(request)
    before.finish()
    before.check_tokens()
    assert (request.num_cached_tokens, store.num_read) == (10 * BLOCK_SIZE, 1)


SMALL = {"windows": (None, 1, 24)}


@pytest.mark.parametrize("kind", [{}, WINDOWS, STATES_KEPT, BOTH, SMALL], ids=["plain", "w", "s", "ws", "small"])
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(5, 12))])
def test_any_order_of_events(seed: int, kind: dict[str, object]) -> None:
    """Arrivals, steps, reads, rests, cuts, preemptions, ends and lost records: the fake runner asserts that every token
    sees its own K/V, and that no copy touches a block that a step in flight uses."""
    rng = random.Random(seed)
    store = FakeStore()
    store.is_quiet = seed % 2 == 0
    limits = {"max_num_batched_tokens": rng.choice([64, 512]), **kind}
    num_blocks = rng.choice([12, 20, 60]) * (2 if "windows" in kind else 1)
    world = make_world(num_blocks, is_async=rng.random() < 0.5, store=store, **limits)
    for number in range(150):
        action = rng.random()
        if action < 0.3:
            shared = prompt(rng.choice([0, 32, 64, 90, 160]), first=100 * rng.randrange(3))
            token_ids = shared + prompt(rng.randrange(1, 60), first=31 * number)
            priority = rng.choice(list(Priority))
            try:
                world.add(
                    make_request(f"r{number}", token_ids, rng.randrange(1, 30), arrival_s=world.now, priority=priority)
                )
            except ContextLengthError:
                continue
        elif action < 0.75:
            world.step()
        elif action < 0.85:
            store.arrive(3, rng)
        elif action < 0.9:
            world.now += 2.0
        elif action < 0.93:
            store.lost.update(block_hash for block_hash in store.blocks if rng.random() < 0.2)
        elif action < 0.95:
            world.scheduler.shrink(rng.randrange(1, 6), saves_first=rng.random() < 0.5)
        elif action < 0.97:
            world.scheduler.preempt_lowest()
        elif world.requests and (name := rng.choice(list(world.requests))) not in world.reasons:
            world.scheduler.finish_request(name, FinishReason.ABORT)
    world.finish()
    world.check_tokens()
