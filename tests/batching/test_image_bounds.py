"""One image a step, in turns."""

from __future__ import annotations

from mlx_server.request import PromptImage
from tests.batching.worlds import World, make_request, make_world


def _image(start: int, seed: int) -> PromptImage:
    return PromptImage(start, 64, seed.to_bytes(32, "little"), {})


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
