"""Every claim of the run loop on all kinds of device: those that compute in `launch`, and one that runs by itself.

The scheduler, the executor, the MLX thread and the device queue are the real ones; the device is made up, so what it
really did is known and can be held against what was booked.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from mlx_server.request import FinishReason, Priority
from tests.batching.worlds import expected_tokens, make_request
from tests.device_worlds import ALL_KINDS, FAST_GPU, GPU, DeviceStep, DeviceWorld, Kind, Model

_HAND_OVER_S = 0.0001
"""What may lie between a step's end and the delivery of its tokens; a made-up host takes no time for it."""


def steady(_: int) -> float:
    return 1.0


def early(number: int) -> float:
    """Every fourth step is a quarter shorter than those before made one expect."""
    return 0.75 if number % 4 == 3 else 1.0


def late(number: int) -> float:
    return 1.25 if number % 4 == 3 else 1.0


def hiccups(number: int) -> float:
    """Another program has the device for half of the time of one step in ten."""
    return 2.0 if random.Random(number).random() < 0.1 else 1.0


def crowded(number: int) -> float:
    """The same of one step in four: what is predicted lies between the two kinds, so most steps end early."""
    return 2.0 if random.Random(number).random() < 0.25 else 1.0


PACES = pytest.mark.parametrize("pace", [steady, early, late, hiccups, crowded])


def on_device(world: DeviceWorld, step: DeviceStep) -> float:
    """What is to be booked for a step: from the end of the one before it, or from the beginning of its launch."""
    steps = world.device.steps
    index = steps.index(step)
    before_s = steps[index - 1].end_s if index else 0.0
    return step.end_s - max(step.launched_s, before_s)


def check_books(world: DeviceWorld) -> None:
    for model in world.models:
        true = [on_device(world, step) for step in model.true_steps()]
        assert [booked.result.step_time_s for booked in model.booked] == pytest.approx(true, abs=_HAND_OVER_S)


def check_deliveries(model: Model) -> None:
    """Each step's result is there when it is over, or when the MLX thread has launched the next; its tokens with it."""
    steps = model.true_steps()
    assert [booked.result.step_id for booked in model.booked] == [step.step.step_id for step in steps]
    waits = [booked.time_s - step.end_s for booked, step in zip(model.booked, steps, strict=True)]
    assert 0.0 <= min(waits) <= max(waits) <= model.world.device.profile.launch_s + _HAND_OVER_S
    ends = {booked.time_s for booked in model.booked if booked.result.sampled}
    assert {delivery.time_s for delivery in model.deliveries} <= ends


async def keep_busy(model: Model, tier: Priority, num_tokens: int) -> None:
    """Long prompts without end."""
    number = 0
    while True:
        while model.scheduler.num_waiting < 2:
            number += 1
            model.add(make_request(f"long-{number}", num_tokens, max_tokens=2, priority=tier))
        await asyncio.sleep(0.05)


async def under_load(world: DeviceWorld, tier: Priority, seconds: float) -> None:
    """Streams, if the prompts are of their tier, and long prompts, on one model."""
    async with world.model() as model:
        for index in range(8 if tier is Priority.NORMAL else 0):
            model.add(make_request(f"stream-{index}", 64, max_tokens=4000))
        feeding = asyncio.create_task(keep_busy(model, tier, 4000))
        await asyncio.sleep(seconds)
        feeding.cancel()


LOADS = pytest.mark.parametrize("tier", [Priority.NORMAL, Priority.LOW], ids=["streams", "batch"])


@ALL_KINDS
@PACES
@LOADS
def test_the_device_does_not_wait_and_its_times_are_booked(
    kind: Kind,
    pace: Callable[[int], float],
    tier: Priority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Composed late or not, ended earlier or later than predicted: idle for at most half a percent, and every end is
    one that was seen."""
    world = DeviceWorld(kind, monkeypatch, GPU if tier is Priority.NORMAL else FAST_GPU, pace)
    world.run(under_load(world, tier, 12.0))
    (model,) = world.models
    assert world.device.idle_s(4.0, 12.0) <= 0.005 * 8.0
    check_books(world)
    check_deliveries(model)
    assert model.scheduler.counters.idle_time_s <= world.device.idle_s(0.0, 12.0) + _HAND_OVER_S


@ALL_KINDS
@PACES
def test_the_prompts_share_of_a_step_follows_the_devices_speed(
    kind: Kind, pace: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that end early, late or in a hiccup teach what they took, and none is made of more than that allows: a
    second's worth, a quarter more if that ends a prompt, and no more at a time than the fastest step was worth."""
    world = DeviceWorld(kind, monkeypatch, GPU, pace)
    world.run(under_load(world, Priority.LOW, 25.0))
    steps = [step.step for step in world.device.steps if step.launched_s > 8.0]
    max_s = 1.25 / (0.75 if pace is early else 1.0)
    assert 0.6 <= max(map(GPU.seconds, steps)) <= 1.05 * max_s


@ALL_KINDS
@LOADS
def test_who_is_high_and_arrives_in_a_long_step_waits_for_that_one_only(
    kind: Kind, tier: Priority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes before the next step is composed: 10 ms, a tenth of the step and a launch before it ends, 18 ms of 50.
    Nobody waits for a third one. While HIGH ones come, steps are of 50 ms, and arrivals are at any moment of them."""
    world = DeviceWorld(kind, monkeypatch)
    num_waited: dict[bool, list[int]] = {False: [], True: []}

    async def main() -> None:
        async with world.model() as model:
            for index in range(8 if tier is Priority.NORMAL else 0):
                model.add(make_request(f"stream-{index}", 64, max_tokens=4000))
            feeding = asyncio.create_task(keep_busy(model, tier, 4000))
            await asyncio.sleep(8.0)
            for index in range(20):
                name = f"high-{index}"
                arrived_s = world.threads.now_s
                model.add(make_request(name, 40, max_tokens=1, priority=Priority.HIGH))
                await model.until_done(name)
                steps = model.true_steps()
                began = [step.began_s for step in steps if step.began_s > arrived_s]
                mine = next(s.began_s for s in steps if any(c.request_id == name for c in s.step.chunks))
                current = next(step for step in steps if step.end_s > arrived_s)
                is_late = current.end_s - arrived_s < 0.4 * (current.end_s - current.began_s)
                num_waited[is_late].append(began.index(mine))
                await asyncio.sleep(0.6 + 0.007 * index)
            feeding.cancel()

    world.run(main())
    assert min(map(len, num_waited.values())) >= 4
    assert set(num_waited[False]) == {0}, "it was there in time"
    assert max(num_waited[True]) <= 1


@ALL_KINDS
@PACES
def test_tokens_are_right_and_complete(
    kind: Kind, pace: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = DeviceWorld(kind, monkeypatch, GPU, pace)
    requests = [make_request(f"r{index}", 10 + 400 * index, max_tokens=5 + index) for index in range(6)]

    async def main() -> None:
        async with world.model() as model:
            for request in requests:
                model.add(request)
                await asyncio.sleep(0.03)
            await model.until_done(*(request.request_id for request in requests))

    world.run(main())
    for index, request in enumerate(requests):
        outputs = [d.output for d in world.models[0].deliveries if d.output.request_id == request.request_id]
        tokens = [token for output in outputs for token in output.new_token_ids]
        assert tokens == expected_tokens(request.prompt_token_ids, 5 + index)
        assert outputs[-1].finish_reason is FinishReason.LENGTH


@ALL_KINDS
def test_two_models_share_a_device_and_each_pays_for_its_own_steps(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with long prompts, one with a stream: the stream goes on, and the times of both are those of the device."""
    world = DeviceWorld(kind, monkeypatch, GPU, hiccups)

    async def main() -> None:
        async with world.model("prompts") as prompts, world.model("stream") as stream:
            feeding = asyncio.create_task(keep_busy(prompts, Priority.NORMAL, 4000))
            stream.add(make_request("s", 64, max_tokens=150))
            await stream.until_done("s")
            feeding.cancel()

    world.run(main())
    check_books(world)
    prompts, stream = world.models
    check_deliveries(prompts)
    check_deliveries(stream)
    gaps = [b - a for a, b in zip(stream.times("s"), stream.times("s")[1:])]
    longest_s = max(step.seconds for step in world.device.steps[4:])
    assert max(gaps[4:]) <= 4 * longest_s, "a step of its own, and at most those of the other that were there before"
