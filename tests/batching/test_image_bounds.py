"""One image a step, in turns; and images that must be computed whole."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_server.batching.image_bounds import with_whole_images
from mlx_server.request import PromptImage, Request
from tests.batching.worlds import World, chunks, make_request, make_scheduler, make_world


def _image(start: int, seed: int, *, is_bidirectional: bool = False) -> PromptImage:
    return PromptImage(start, 64, seed.to_bytes(32, "little"), {}, is_bidirectional)


def _first_token_step(world: World, name: str, num_short: int) -> int:
    """The step in which the request `name` has its first token, while each step a short prompt with an image comes."""
    request = world.requests[name]
    for step in range(num_short):
        if world.schedule() is not None:
            world.deliver()
        if request.output_token_ids:
            return step
        world.add(make_request(f"short-{step}", 120, 1, arrival_s=1.0 + step, images=(_image(10, 2 + step),)))
    raise AssertionError(f"no first token after {num_short} steps: {request}")


def test_a_long_prompt_with_an_image_is_not_held_up_by_short_ones() -> None:
    world = make_world(4000, max_num_batched_tokens=256, max_num_seqs=16)
    world.add(make_request("long", 3000, 4, arrival_s=0.0, images=(_image(2900, 1),)))
    # Half of each step is its own, and at its image it waits for one other: 3,000 / 128 steps and a few.
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


def test_a_step_computes_placeholders_of_one_image() -> None:
    world = make_world(4000, max_num_batched_tokens=512, max_num_seqs=16)
    images = {}
    for index in range(6):
        images[f"r{index}"] = _image(10 + 16 * index, index)
        world.add(make_request(f"r{index}", 300, 2, arrival_s=float(index), images=(images[f"r{index}"],)))
    num_encoding = 0
    while (step := world.schedule()) is not None:
        seen = [
            chunk.request_id
            for chunk in step.chunks
            if (image := images[chunk.request_id]).start < chunk.start + chunk.num_tokens and chunk.start < image.end
        ]
        assert len(seen) <= 1
        num_encoding += len(seen)
        world.deliver()
    assert num_encoding >= len(images)
    assert all(len(world.requests[name].output_token_ids) == 2 for name in images)


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
    while (step := world.schedule()) is not None:
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
    """Who was held up at its image has ended since, or cannot start: the other goes on at its own in the same step."""
    world = make_world(300, max_num_batched_tokens=256, max_num_seqs=8)
    world.add(
        make_request("a", 400, 2, images=(_image(0, 1), _image(100, 2)), arrival_s=0.0),
        make_request("b", 400, 2, images=(_image(0, 3),), arrival_s=1.0),
    )
    assert list(chunks(world.schedule())) == ["a"]
    world.deliver()
    if how == "ended":
        world.scheduler.finish_request("b")
    else:
        world.scheduler.hold_admission(True)
    assert list(chunks(world.schedule())) == ["a"]


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
