"""How a generation's events reach their reader: a step's together, in order, and never past one who is not ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from mlx_server.api.answers.generation import Generation, GenerationJob, OutputEvent, Plan, Prompt
from mlx_server.api.answers.output_parser import OutputParser, Parts
from mlx_server.api.auth.keys import Caller
from mlx_server.api.auth.quotas import Demand, Quotas
from mlx_server.engine.request_stream import RequestStream
from mlx_server.errors import EngineDeadError, ServeError
from mlx_server.outputs import RequestOutput
from mlx_server.request import FinishReason, Request
from mlx_server.sampling_params import SamplingParams


class Reader:
    """Records the tokens that it gets, in one list a call; full from token `full_at` on until `ready` is set."""

    def __init__(self, full_at: int | None = None) -> None:
        self.shown: list[list[int]] = []
        self.events: list[OutputEvent] = []
        self.full_at = full_at
        self.ready = asyncio.Event()
        self.fault: Exception | None = None

    def emit(self, events: list[OutputEvent]) -> bool:
        self.events += events
        self.shown.append([token_id for event in events for token_id in event.token_ids])
        if self.fault is not None:
            raise self.fault
        return not self._is_full

    async def drain(self) -> None:
        if self._is_full:
            await self.ready.wait()

    @property
    def _is_full(self) -> bool:
        return self.full_at is not None and self.shown[-1][-1] >= self.full_at and not self.ready.is_set()


class World:
    """A generation of `n` choices that is being read, and the engine's side of it."""

    def __init__(self, reader: Reader, n: int = 1, new_parser: Callable[[], OutputParser] = OutputParser) -> None:
        sampling = SamplingParams(max_tokens=50)
        requests = [Request(f"r{i}", [1], sampling, arrival_s=0.0, max_total_tokens=100) for i in range(n)]
        self.streams = [RequestStream(request, None, lambda request_id, reason, num_void: True) for request in requests]
        plan = Plan(prompts=[Prompt((1,))], new_parser=new_parser)
        job = GenerationJob(request_id="r", response_id="a", plan=plan, sampling=sampling, n=n)
        grant = Quotas().open(Caller(), Demand(n, 1))
        self.generation = Generation(job, "model", self.streams, grant, lambda generation: None)
        self.feeding = asyncio.ensure_future(self.generation.feed(reader.emit, reader.drain))

    def step(self, *token_ids: int, reason: FinishReason | None = None) -> None:
        """Puts one token on each of the first choices, and notifies the reader once, as the engine does."""
        for stream, token_id in zip(self.streams, token_ids):
            stream.put(RequestOutput(stream.request_id, (token_id,), reason), time.monotonic())
        (on_output,) = {stream.on_output for stream in self.streams}
        on_output()


async def turns(num: int = 3) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


class EndsAt(OutputParser):
    """An output that is over with token 2, as far as the client is concerned."""

    num_read = 0

    def append(self, text: str) -> Parts:
        self.num_read += 1
        self.is_over = self.num_read >= 2
        return super().append(text)


@pytest.mark.parametrize("is_read_before", [True, False])
async def test_an_output_that_is_cut_ends_once_and_behind_its_last_text(is_read_before: bool):
    """Also when the output is there before it is read."""
    reader = Reader()
    world = World(reader, new_parser=EndsAt)
    if is_read_before:
        await turns()
        world.step(1)
        world.step(2)
    else:
        for token_id in (1, 2):
            world.streams[0].put(RequestOutput("r0", (token_id,)), time.monotonic())
    await asyncio.wait_for(world.feeding, 1)
    assert [event.token_ids for event in reader.events] == [(1,), (2,), ()]
    assert [event.finish is not None for event in reader.events] == [False, False, True]


async def test_a_steps_tokens_are_shown_together_and_at_once():
    reader = Reader()
    world = World(reader, n=3)
    await turns()
    world.step(1, 2, 3)
    assert reader.shown == [[1, 2, 3]]
    world.step(4)
    assert reader.shown == [[1, 2, 3], [4]]
    world.step(5, 6, 7, reason=FinishReason.LENGTH)
    await world.feeding
    assert reader.shown[-1] == [5, 6, 7]


async def test_what_was_there_before_the_reader_comes_first():
    reader = Reader()
    world = World(reader)
    world.step(1)
    world.step(2)
    assert reader.shown == []
    await turns()
    world.step(3)
    assert reader.shown == [[1, 2], [3]]
    world.feeding.cancel()


async def test_a_reader_who_is_not_ready_is_left_alone_until_it_is():
    reader = Reader(full_at=2)
    world = World(reader)
    await turns()
    for token_id in (1, 2, 3, 4):
        world.step(token_id)
        await turns()
    assert reader.shown == [[1], [2]]
    reader.ready.set()
    await turns()
    assert reader.shown == [[1], [2], [3, 4]]
    world.step(5)
    world.step(6, reason=FinishReason.STOP)
    await world.feeding
    assert reader.shown[3:] == [[5], [6]]


async def test_an_end_that_comes_meanwhile_is_shown_too():
    reader = Reader(full_at=1)
    world = World(reader)
    await turns()
    world.step(1)
    world.step(2, reason=FinishReason.LENGTH)
    reader.ready.set()
    await asyncio.wait_for(world.feeding, 1)
    assert reader.shown == [[1], [2]]


async def test_a_readers_fault_is_its_own():
    reader = Reader()
    reader.fault = ValueError("cannot be shown")
    world = World(reader)
    await turns()
    world.step(1)  # nothing is raised in the engine
    world.step(2)
    with pytest.raises(ValueError, match="cannot be shown"):
        await world.feeding
    assert reader.shown == [[1]]


@pytest.mark.parametrize("n", [1, 2])
async def test_an_error_comes_behind_what_was_shown(n: int):
    reader = Reader()
    world = World(reader, n)
    await turns()
    world.streams[0].put(RequestOutput("r0", (1,)), 1.0)
    world.streams[0].fail(EngineDeadError("The engine has died."))
    with pytest.raises(ServeError, match="has died"):
        await world.feeding
    assert reader.shown == [[1]]


async def test_a_reader_who_has_left_is_shown_nothing_more():
    reader = Reader()
    world = World(reader)
    await turns()
    world.feeding.cancel()
    world.step(1)  # before the task notices
    await turns()
    world.step(2)
    world.generation.close()
    assert world.feeding.cancelled()
    assert reader.shown == []


async def test_an_aborted_choice_keeps_its_counts():
    reader = Reader()
    world = World(reader)
    await turns()
    world.step(1)
    world.step(2)
    world.generation.abort()
    await world.feeding
    last = reader.events[-1]
    assert (last.token_ids, last.delta.num_output_tokens, last.delta.num_prompt_tokens) == ((), 2, 1)
    assert last.finish is not None
    assert last.finish.reason == "abort"
