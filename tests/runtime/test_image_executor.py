"""The vision encoder on the MLX thread: how much is queued, what a piece has, and what ends an image."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.errors import EngineDeadError
from mlx_server.outputs import ImageJob, ImageResult, ModelRunnerOutput, SchedulerOutput
from mlx_server.request import FinishReason, PromptImage, Request
from mlx_server.runtime import image_executor
from mlx_server.runtime.executor import MLXExecutor, MLXThread
from mlx_server.runtime.image_executor import ImageExecutor
from mlx_server.sampling_params import SamplingParams

NUM_OUTPUTS = 1000
STEP = SchedulerOutput(0, ())


class Pieces:
    """Of an image with NUM_OUTPUTS outputs of modules. `before(n)` is called before the n-th piece."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self.num_left, self.encoded, self.sizes = NUM_OUTPUTS, "image", list[int]()
        self._before = before

    def submit(self, num_outputs: int) -> mx.array:
        self._before(len(self.sizes))
        self.sizes.append(min(num_outputs, self.num_left))
        self.num_left -= self.sizes[-1]
        return mx.array(0)


class Encoder:
    def __init__(self, before: Callable[[int], None] = lambda count: None) -> None:
        self.pieces, self.kept = Pieces(before), list[Any]()

    def begin(self, job: ImageJob) -> Pieces:
        return self.pieces

    def keep(self, job: ImageJob, encoded: Any) -> None:
        self.kept.append(encoded)


class Timed(ImageExecutor):
    """Pieces take `each_s` for each output of a module. `most_queued` is how many were on the device at a time."""

    each_s, most_queued = 0.0, 0

    def settle(self, step_time_s: float, idle_time_s: float) -> None:
        self.most_queued = max(self.most_queued, len(self._launched))
        super().settle(self.each_s * self._launched[0].num_outputs, 0.0)


class Steps:
    """Steps that take `step_s` on the device."""

    launch_is_host_only = True

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s, self.count = step_s, 0

    def launch(self, step: SchedulerOutput) -> Any:
        self.count += 1

    def wait(self, launched: Any) -> None:
        time.sleep(self.step_s)

    def fetch(self, launched: Any) -> ModelRunnerOutput:
        return ModelRunnerOutput(0, {})


def made(thread: MLXThread, encoder: Any, each_s: float = 0.0) -> Timed:
    executor = Timed(thread, encoder, MLXExecutor(thread, Steps()))  # type: ignore[arg-type]
    executor.each_s = each_s
    return executor


def job() -> ImageJob:
    image = PromptImage(1, 2, bytes(32), {})
    return ImageJob(
        Request("r", [1, 2, 2], SamplingParams(), arrival_s=0.0, max_total_tokens=9, images=(image,)), image
    )


@pytest.fixture(params=[True, False], ids=["at launch", "by itself"])
def thread(request: pytest.FixtureRequest) -> Iterator[MLXThread]:
    made = MLXThread(computes_at_launch=request.param)
    yield made
    made.stop()


async def encode(thread: MLXThread, encoder: Any, job: ImageJob, each_s: float = 0.0) -> tuple[Timed, ImageResult]:
    executor = made(thread, encoder, each_s)
    return executor, await asyncio.wait_for(executor.encode(job), 30)


@pytest.mark.parametrize(("each_s", "largest"), [(1.0, 1), (0.001, 10), (0.0001, 100)])
async def test_a_piece_takes_ten_milliseconds_or_is_one_module(thread, each_s, largest):
    encoder = Encoder()
    executor, result = await encode(thread, encoder, job(), each_s)
    assert result == ImageResult(is_encoded=True, was_run=True)
    assert encoder.kept == ["image"]
    sizes = encoder.pieces.sizes
    assert (sum(sizes), sizes[0], max(sizes)) == (NUM_OUTPUTS, 1, largest)
    assert executor.most_queued <= (1 if thread.computes_at_launch else 2)


async def test_an_image_whose_request_has_ended_stops_at_the_next_piece(thread):
    wanted = job()

    def leave(count: int) -> None:
        if count == 3:
            wanted.request.finish_reason = FinishReason.ABORT

    encoder = Encoder(leave)
    _, result = await encode(thread, encoder, wanted, 1.0)
    assert result == ImageResult(is_encoded=False, was_run=True)
    assert (encoder.pieces.sizes, encoder.kept) == ([1] * 4, [])


async def test_an_error_in_a_piece_fails_the_image_and_not_the_next(thread):
    def fail(count: int) -> None:
        if count == 3:
            raise RuntimeError("no room")

    executor, result = await encode(thread, Encoder(fail), job(), 1.0)
    assert result == ImageResult(is_encoded=False, was_run=True, error="RuntimeError: no room")
    executor._encoder = Encoder()
    assert (await asyncio.wait_for(executor.encode(job()), 30)).is_encoded


async def test_an_error_of_the_device_fails_the_image(thread):
    executor, encoder = made(thread, Encoder()), Encoder()
    executor._encoder = encoder
    encoder.pieces._before = lambda count: thread.judge(RuntimeError("[METAL] lost")) if count == 3 else None
    result = await asyncio.wait_for(executor.encode(job()), 30)
    if thread.computes_at_launch:
        assert result.is_encoded, "nothing was on the device"
    else:
        assert (result.is_encoded, encoder.kept) == (False, [])
        assert result.error == "RuntimeError: [METAL] lost"


async def test_nobody_waits_for_a_thread_that_has_stopped():
    thread = MLXThread()
    thread.stop()
    _, result = await encode(thread, Encoder(), job())
    error = "EngineDeadError: the MLX thread has stopped"
    assert result == ImageResult(is_encoded=False, was_run=False, error=error)


async def test_an_image_is_begun_behind_the_steps_that_were_submitted_before_it(thread):
    """They may use the images before it, which it may displace. Although it is the encoder's turn."""
    happened, may_go = list[str](), threading.Event()
    steps, encoder = MLXExecutor(thread, Steps()), Encoder(lambda count: happened.append("piece"))
    executor = ImageExecutor(thread, encoder, steps)  # type: ignore[arg-type]
    steps._runner.launch = lambda step: happened.append("step")  # type: ignore[assignment, return-value]
    thread.charge(steps, 1e9)
    thread.call(may_go.wait)
    futures = [steps.submit(STEP), steps.submit(STEP), executor.encode(job())]
    may_go.set()
    await asyncio.wait_for(asyncio.gather(*futures), 30)
    assert happened[:3] == ["step", "step", "piece"]


async def test_an_image_is_begun_when_no_piece_of_another_is_on_the_device(monkeypatch, thread):
    """The memory of one encoder is booked."""
    first, may_end, num_launched = job(), threading.Semaphore(0), list[int]()
    monkeypatch.setattr(image_executor, "_wait", lambda end: may_end.acquire())

    class Counting(Encoder):
        def begin(self, job: ImageJob) -> Pieces:
            num_launched.append(len(executor._launched))
            return Pieces(lambda count: None)

    executor = made(thread, Counting(), 1.0)
    futures = [executor.encode(first), executor.encode(job())]
    await asyncio.sleep(0.05)  # as many pieces are launched as may be
    first.request.finish_reason = FinishReason.ABORT
    may_end.release()
    await asyncio.sleep(0.05)
    may_end.release(2 * NUM_OUTPUTS)
    results = await asyncio.wait_for(asyncio.gather(*futures), 30)
    assert [result.is_encoded for result in results] == [False, True]
    assert num_launched == [0, 0]


@pytest.mark.parametrize("is_cached", [True, False])
async def test_a_thread_may_be_given_up_while_it_encodes(is_cached, caplog):
    """By any thread, as when another rank of a model is lost."""
    thread, error = MLXThread(), EngineDeadError("a rank is lost")

    class Losing(Encoder):
        def begin(self, job: ImageJob) -> Pieces | None:
            other = threading.Thread(target=thread.give_up, args=(error,))
            other.start()
            other.join()
            return None if is_cached else self.pieces

    executor = made(thread, Losing())
    result = await asyncio.wait_for(executor.encode(job()), 30)
    assert result.error == "EngineDeadError: a rank is lost"
    await asyncio.to_thread(thread._thread.join, 30)
    assert caplog.text == "", "the thread ends, and not by an error"


async def test_pieces_pause_while_others_use_the_device(thread):
    """Not before the first one is over, which does not know yet."""
    encoder = Encoder(lambda count: thread.charge(others, 0.001) if count < 5 else None)
    others, paused = made(thread, Encoder()), []
    executor = made(thread, encoder, 0.01)
    go_on = executor._go_on
    executor._go_on = lambda: (paused.append(len(encoder.pieces.sizes)), go_on())[1]  # type: ignore[method-assign]
    assert (await asyncio.wait_for(executor.encode(job()), 30)).is_encoded
    assert 3 <= len(paused) <= 6
    assert max(paused) <= 6


@pytest.mark.parametrize("step_s", [0.005, 0.05])
async def test_an_image_and_steps_share_the_device_however_long_the_steps_are(monkeypatch, step_s):
    thread, each_s = MLXThread(computes_at_launch=False), 0.0005
    encoder, runner = Encoder(), Steps(step_s)
    waits = iter(encoder.pieces.sizes)  # which grows
    monkeypatch.setattr(image_executor, "_wait", lambda end: time.sleep(each_s * next(waits)))
    steps = MLXExecutor(thread, runner)
    executor, is_over = ImageExecutor(thread, encoder, steps), False  # type: ignore[arg-type]

    async def others() -> None:
        while not is_over:
            await asyncio.gather(steps.submit(STEP), steps.submit(STEP))

    task = asyncio.create_task(others())
    await asyncio.wait_for(executor.encode(job()), 30)
    is_over = True
    await task
    thread.stop()
    assert 0.1 < runner.count * step_s / (NUM_OUTPUTS * each_s) < 2.0


async def test_a_closed_executor_keeps_nothing_of_its_model(monkeypatch, thread):
    """Even if a piece is on the device: unloading frees the model at once."""
    is_begun, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(image_executor, "_wait", lambda end: (is_begun.set(), may_end.wait(30)))
    encoder, runner = Encoder(), Steps()
    model = [weakref.ref(encoder), weakref.ref(encoder.pieces), weakref.ref(runner)]
    steps = MLXExecutor(thread, runner)
    executor = ImageExecutor(thread, encoder, steps)  # type: ignore[arg-type]
    future = executor.encode(job())
    await asyncio.to_thread(is_begun.wait, 30)
    steps.close()
    executor.close()
    del encoder, runner, steps
    try:
        await asyncio.wrap_future(thread.call(gc.collect))
        assert [one() for one in model] == [None, None, None]
    finally:
        may_end.set()
    await asyncio.sleep(0.05)
    assert not future.done()
