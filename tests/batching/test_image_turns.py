"""Images are encoded in turns while others go on; and images that must be computed whole."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest

from mlx_server.batching.image_turns import with_whole_images
from mlx_server.request import FinishReason, PromptImage, Request
from tests.batching.worlds import World, chunks, make_request, make_scheduler, make_world


def _image(start: int, seed: int, *, is_bidirectional: bool = False) -> PromptImage:
    return PromptImage(start, 64, seed.to_bytes(32, "little"), {}, is_bidirectional)


def _first_token_step(world: World, name: str, num_short: int) -> int:
    """The step in which the request `name` has its first token, while each step a short prompt with an image comes."""
    request = world.requests[name]
    for step in range(num_short):
        world.step()
        if request.output_token_ids:
            return step
        world.add(make_request(f"short-{step}", 120, 1, arrival_s=1.0 + step, images=(_image(10, 2 + step),)))
    raise AssertionError(f"no first token after {num_short} steps: {request}")


def test_a_long_prompt_with_an_image_is_not_held_up_by_short_ones() -> None:
    world = make_world(4000, max_num_batched_tokens=256, max_num_seqs=16)
    world.add(make_request("long", 3000, 4, arrival_s=0.0, images=(_image(2900, 1),)))
    # Half of each step is its own: 3,000 / 128 steps and a few.
    assert _first_token_step(world, "long", 60) < 40


def test_clients_share_the_images_of_steps() -> None:
    """A keeps ten requests open, each with twenty images. B has one, for one of the next steps."""
    world = make_world(4000, max_num_batched_tokens=512, max_num_seqs=8)
    for index in range(10):
        images = tuple(_image(10 + 80 * place, 100 * index + place) for place in range(20))
        world.add(make_request(f"a{index}", 1700, 2, images=images, client="A", arrival_s=float(index)))
    for _ in range(5):
        world.step()
    world.add(make_request("b", 100, 2, images=(_image(10, 5000),), client="B", arrival_s=20.0))
    for _ in range(5):
        world.step()
    assert world.requests["b"].output_token_ids


def test_streams_go_on_while_an_image_is_encoded() -> None:
    """The request with the image has no seat and no blocks before its image is ready."""
    world = make_world(100, max_num_batched_tokens=256, max_num_seqs=2)
    world.add(make_request("stream", 40, 30, arrival_s=0.0))
    world.step()
    world.add(make_request("seeing", 200, 2, images=(_image(10, 1),), arrival_s=1.0))
    for count in range(5):
        assert list(chunks(world.schedule())) == ["stream"]
        world.deliver()
        assert world.image is not None
        assert len(world.tokens["stream"]) == 2 + count
        assert (world.running_ids(), world.waiting_ids()) == (["stream"], ["seeing"])
    assert "image is not encoded" in world.scheduler.explain(world.requests["seeing"])
    world.add(make_request("text", 40, 1, arrival_s=2.0))
    assert list(chunks(world.schedule())) == ["stream", "text"], "it goes before, and does not wait for the image"
    world.deliver()
    world.encode()
    start, num_tokens = chunks(world.schedule())["seeing"]
    assert (start, num_tokens >= 74) == (0, True)
    world.deliver()
    world.finish()


def test_a_running_prompt_is_computed_up_to_its_next_image() -> None:
    world = make_world(100, max_num_batched_tokens=256, max_num_seqs=4)
    world.add(make_request("a", 300, 2, images=(_image(10, 1), _image(100, 2)), arrival_s=0.0))
    assert world.schedule() is None
    world.encode()
    assert chunks(world.schedule()) == {"a": (0, 100)}
    world.deliver()
    world.add(make_request("text", 40, 1, arrival_s=1.0))
    step = world.schedule()
    assert list(chunks(step)) == ["text"]
    assert world.scheduler.explain(world.requests["a"]) == "its next image is not encoded yet"
    world.deliver()
    assert world.schedule() is None
    world.encode()
    assert chunks(world.schedule()) == {"a": (100, 200)}
    world.deliver()
    world.finish()


def test_an_image_that_fails_ends_its_request_alone() -> None:
    world = make_world(100, max_num_batched_tokens=256, max_num_seqs=4)
    for number, name in enumerate("abc"):
        world.add(make_request(name, 200, 2, images=(_image(10, 1),), arrival_s=float(number)))
    world.schedule()
    assert world.image is not None
    assert world.image.request.request_id == "a"
    world.encode(error="no room")
    world.finish()
    assert [world.reasons[name] for name in "abc"] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    assert "no room" in str(world.outputs[0].error)
    assert world.scheduler.counters.num_images_encoded == 2


def test_an_image_that_nobody_waits_for_is_given_up() -> None:
    world = make_world(100, max_num_batched_tokens=256, max_num_seqs=4)
    world.add(*[make_request(name, 200, 2, images=(_image(10, ord(name)),), arrival_s=ord(name)) for name in "ab"])
    world.schedule()
    job = world.image
    assert job is not None
    assert job.is_wanted
    world.scheduler.finish_request("a")
    assert not job.is_wanted
    world.encode()
    world.schedule()
    assert world.image is not None
    assert world.image.request.request_id == "b"
    world.finish()


@pytest.mark.parametrize("priority", [0, 2])
def test_a_better_tier_s_image_goes_before_one_that_waits_for_its_seat(priority: int) -> None:
    world = make_world(100, max_num_batched_tokens=256, max_num_seqs=2)
    world.add(make_request("first", 200, 2, images=(_image(10, 1),), arrival_s=0.0, priority=1))
    world.schedule()
    world.add(*[make_request(name, 20, 60, arrival_s=1.0) for name in "xy"])
    world.step()
    assert world.waiting_ids() == ["first"], "the seats were taken meanwhile"
    world.add(make_request("second", 200, 2, images=(_image(10, 2),), arrival_s=2.0, priority=priority))
    world.step()
    if priority:
        assert world.image is None
    else:
        assert world.image is not None
        assert world.image.request.request_id == "second"
    world.finish()


@pytest.mark.parametrize(
    ("priority", "seed", "arrival_s", "is_given_up"),
    [(0, 2, 1.0, True), (1, 2, 1.0, True), (2, 2, 1.0, False), (0, 1, 1.0, False), (0, 2, 30.0, False)],
    ids=["high", "normal", "the same tier", "the same image", "the begun one has aged past it"],
)
def test_an_image_that_is_begun_gives_way_to_one_of_a_better_tier(
    priority: int, seed: int, arrival_s: float, is_given_up: bool
) -> None:
    world = make_world(100, max_num_batched_tokens=256, max_num_seqs=4, aging_rate=0.1)
    world.add(make_request("low", 200, 2, images=(_image(10, 1),), arrival_s=0.0, priority=2))
    world.schedule()
    begun = world.image
    world.add(make_request("other", 200, 2, images=(_image(10, seed),), arrival_s=arrival_s, priority=priority))
    for _ in range(2):
        world.schedule()
    assert begun is not None
    assert (begun.is_wanted, world.image) == (not is_given_up, begun), "only one is on its way"
    world.step()
    if is_given_up:
        assert world.image is not None
        assert world.image.request.request_id == "other"
    world.finish()
    world.check_tokens()
    assert set(world.reasons.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("is_promoted", [False, True])
def test_an_image_of_a_request_that_runs_by_its_age_does_not_give_way(is_promoted: bool) -> None:
    world = make_world(100, max_num_batched_tokens=256, max_num_seqs=4, aging_rate=0.1)
    low = make_request("low", 300, 2, images=(_image(10, 1), _image(100, 2)), arrival_s=0.0, priority=2)
    world.add(low)
    world.schedule()
    world.step()
    world.schedule()
    low.is_promoted = is_promoted  # as `RequestTable.admit` has it where age gave it its seat
    begun = world.image
    assert begun is not None
    assert begun.image.digest == low.images[1].digest
    world.add(make_request("high", 200, 2, images=(_image(10, 3),), arrival_s=1.0, priority=0))
    for _ in range(2):
        world.schedule()
    assert begun.is_wanted is is_promoted
    world.finish()


@pytest.mark.parametrize("max_tokens", [256, 60], ids=["a step for an image", "two steps"])
def test_one_image_in_eight_is_of_a_request_that_has_aged_past_better_tiers(max_tokens: int) -> None:
    world = make_world(400, max_num_batched_tokens=max_tokens, max_num_seqs=16, aging_rate=0.1)
    world.add(make_request("low", 100, 2, images=(_image(10, 1),), arrival_s=0.0, priority=2))
    world.now, before = 40.0, set[str]()
    for number in range(40):
        world.add(*[
            make_request(f"h{number}-{each}", 75, 1, images=(_image(10, 10 + 2 * number + each),), arrival_s=world.now,
                         priority=0)
            for each in range(2)
        ])  # fmt: skip
        world.step()
        before |= set() if world.image is None else {world.image.request.request_id}
        if "low" in before:
            break
    assert "low" in before
    assert len(before) <= 8
    world.finish()


def test_a_running_prompt_that_has_aged_past_better_tiers_has_its_image_until_it_is_given_tokens_for_it() -> None:
    """Its share of a step is too small at first. Images of better tiers went before it each time it was ready."""
    world, rng = make_world(400, max_num_batched_tokens=256, max_num_seqs=8, aging_rate=0.1), random.Random(1)
    low = make_request("low", 100, 2, images=(_image(10, 1),), arrival_s=0.0, priority=2)
    world.add(low)
    world.now, num_high, num_begun = 40.0, 0, 0
    for _ in range(100):
        while world.scheduler.num_running + world.scheduler.num_waiting < 13:
            num_high += 1
            images = (_image(10, 10 + num_high),) if rng.random() < 0.3 else ()
            high = make_request(f"h{num_high}", 75, 1, images=images, arrival_s=world.now, priority=0)
            world.add(high)
        world.step()
        num_begun += world.image is not None and world.image.request is low
        if low.output_token_ids:
            break
    assert low.output_token_ids
    assert num_begun <= 2
    world.finish()


def _whole(name: str, start: int, num_tokens: int = 300, **more: Any) -> Request:
    return make_request(name, num_tokens, 2, images=(_image(start, hash(name) % 97, is_bidirectional=True),), **more)


@pytest.mark.parametrize(
    ("num_computed", "num_tokens", "given"),
    [
        *((0, 9, 9), (0, 10, 10), (0, 11, 10), (0, 73, 10), (0, 74, 74), (0, 90, 90)),
        *((10, 1, 64), (10, 70, 70), (32, 1, 42), (32, 50, 50), (32, 0, 0), (74, 5, 5)),
    ],
)
def test_no_chunk_ends_within_an_image_that_must_be_whole(num_computed: int, num_tokens: int, given: int) -> None:
    request = _whole("a", 10)
    request.num_computed_tokens = num_computed
    assert with_whole_images(request, num_tokens) == given


def test_such_images_are_computed_in_one_step_beside_others() -> None:
    """Although a step has no more tokens than one image, and others have half of these."""
    world = make_world(4000, max_num_batched_tokens=64, max_num_seqs=16)
    requests = [_whole(f"r{index}", 7 + 29 * index, arrival_s=float(index)) for index in range(5)]
    text = make_request("text", 400, 8, arrival_s=0.5)
    world.add(*requests, text)
    num_whole = 0
    while world.has_requests:
        if world.image is not None:
            world.encode()
        if (step := world.schedule()) is None:
            continue
        for request in requests:
            (image,), chunk = request.images, chunks(step).get(request.request_id)
            if chunk is not None and chunk[0] < image.end and image.start < sum(chunk):
                assert chunk[0] <= image.start
                assert sum(chunk) >= image.end
                num_whole += 1
        world.deliver()
    assert num_whole == len(requests)
    world.check_tokens()


def test_blocks_behind_a_window_can_be_hit_once_the_image_before_them_is_certain() -> None:
    """The step behind the image's is composed before that one's result: what it no longer sees is not given up before
    it is cached."""
    scheduler = make_scheduler(200, is_async=True, windows=(None, 24), max_num_batched_tokens=128, max_num_seqs=4)
    world, hits = World(scheduler, depth=2), []
    for name in ("first", "second"):
        request = make_request(name, list(range(156)), 2, images=(_image(10, 1, is_bidirectional=True),))
        world.add(request)
        world.finish()
        hits.append(request.num_cached_tokens)
    assert hits == [0, 128]


@pytest.mark.parametrize("how", ["ended", "cannot start"])
def test_a_turn_that_nobody_takes_is_another_s(how: str) -> None:
    """The image of the request whose turn it is is ready, but the request has ended since, or cannot start: the other
    goes on at its own, and may hold what the first one waits for."""
    world = make_world(300, max_num_batched_tokens=256, max_num_seqs=8)
    world.add(make_request("b", 400, 2, images=(_image(0, 3), _image(100, 2)), arrival_s=1.0))
    world.step()
    world.add(make_request("a", 400, 2, images=(_image(0, 1),), arrival_s=0.0))
    world.step()
    assert world.image is not None
    assert (world.image.request.request_id, world.running_ids()) == ("a", ["b"])
    if how == "ended":
        world.scheduler.finish_request("a")
    else:
        world.scheduler.hold_admission(True)
    world.step()
    assert world.image is not None
    assert world.image.request.request_id == "b"
    world.scheduler.hold_admission(False)
    world.finish()


@pytest.mark.parametrize("seed", [2, 1], ids=["another", "the same"])
def test_a_prompt_that_is_preempted_at_its_second_image_sees_the_first_again(seed: int) -> None:
    """Also if the second one is the same: when the first is computed, the encoder may forget it."""
    world = make_world(100, max_num_batched_tokens=64, max_num_seqs=4)
    world.scheduler.blocks.enable_prefix_caching = False
    world.add(make_request("other", 40, 60, arrival_s=0.0))
    world.step()
    world.add(make_request("a", 300, 2, images=(_image(10, 1), _image(100, seed)), arrival_s=1.0))
    for _ in range(20):
        if world.image is not None and world.image.image.start == 100:
            break
        world.step()
    world.encode()
    assert world.scheduler.preempt_lowest()
    assert world.waiting_ids() == ["a"]
    begun = list[int]()
    for _ in range(100):
        world.step()
        begun += [] if world.image is None else [world.image.image.start]
    assert begun == [10, 100]
    world.finish()
    assert world.reasons["a"] is FinishReason.LENGTH


def test_a_short_image_that_comes_again_is_no_decode() -> None:
    """After a preemption, with less than a block to compute."""
    world = make_world(300, max_num_batched_tokens=256, max_num_seqs=4)
    request = make_request("a", 40, 20, images=(PromptImage(20, 16, bytes(32), {}, True),))
    world.add(request)
    for _ in range(3):
        world.step()
    table, num_computed = world.scheduler._table, request.num_computed_tokens
    assert not table.is_prefilling(request)
    request.num_computed_tokens = 19
    assert table.is_prefilling(request)
    request.num_computed_tokens = num_computed


class _Arrays(dict[str, Any]):
    """Of an image; may be referred to weakly."""


def test_nothing_is_kept_of_an_image_whose_request_has_ended() -> None:
    """Its arrays may have hundreds of megabytes."""
    world = make_world(100, max_num_batched_tokens=256, max_num_seqs=4)
    for is_ended in (False, True):
        arrays = _Arrays()
        world.add(make_request("a", 200, 2, images=(PromptImage(10, 64, bytes([is_ended] * 32), arrays),)))
        world.step()
        if is_ended:
            world.encode()
            world.scheduler.finish_request("a")
        world.finish()
        for _ in range(2):
            world.schedule()
        world.requests.clear()
        world.reasons.clear()
        kept = weakref.ref(arrays)
        del arrays
        assert kept() is None


def test_an_image_is_not_held_up_by_one_whose_request_waits_for_a_prefix() -> None:
    """`a` is parked behind `text`, which has begun with the same prompt while a's image was encoded."""
    world = make_world(400, max_num_batched_tokens=64, max_num_seqs=4)
    prompt = list(range(3000))
    world.add(make_request("a", prompt, 2, images=(_image(2900, 1),), arrival_s=0.0))
    world.schedule()
    assert world.image is not None
    world.add(make_request("text", prompt[:2800], 2, arrival_s=1.0))
    assert chunks(world.schedule()) == {"text": (0, 64)}
    world.deliver()
    world.add(make_request("b", 100, 2, images=(_image(10, 2),), arrival_s=2.0))
    for _ in range(10):
        world.step()
    assert world.requests["b"].output_token_ids
    world.finish()
    world.check_tokens()


def test_an_image_behind_a_gap_in_its_cached_prompt_is_encoded_first() -> None:
    """One block before cached ones is gone, which the queue's quick look does not see."""
    world = make_world(100, max_num_batched_tokens=256, max_num_seqs=4)
    for _ in range(2):
        request = make_request("a", 200, 2, images=(_image(32, 1),))
        world.add(request)
        world.finish()
        world.reasons.clear()
        cached = world.scheduler.blocks._cache
        cached.remove(cached.get(request.block_hashes[1], 0))
        world.scheduler.blocks._found.clear()
    assert world.scheduler.counters.num_images_encoded == 2


def test_a_prompt_that_waits_for_its_image_is_no_stream_to_keep_steps_short_for() -> None:
    world = make_world(400, target_step_s=0.1, max_step_s=1.0, context_doubling_tokens=1e12)
    world.add(make_request("other", 64, 1))
    world.step()
    images = (_image(0, 1), _image(100, 2))
    world.add(make_request("seeing", 200, 2, images=images))
    while world.image is None or world.image.image is not images[1]:
        world.step()
    world.add(make_request("text", 2000, 1, arrival_s=1.0))
    assert world.running_ids() == ["seeing"]
    assert chunks(world.schedule())["text"][1] > 500
    world.deliver()
    world.finish()
