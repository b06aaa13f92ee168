"""Requests of one call enter the queue together or not at all, and never fill it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from pathlib import Path

import pytest

from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.intake import Intake
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.errors import ContextLengthError, QueueFullError
from mlx_server.outputs import CompletionDelta, RequestOutput
from mlx_server.request import FinishReason, Priority, Request
from mlx_server.tiers import Tier
from tests.engine.test_engine import MAX_MODEL_LEN, ask, engine_of, is_empty, read, until
from tests.engine_worlds import greedy, make_folder, random_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


def call(client: str, num_parts: int, num_tokens: int = 8, **more: object) -> list[GenerationRequest]:
    prompts = random_prompts([4 + index % 9 for index in range(num_parts)])
    return [
        ask(f"{client}{index}", prompt, greedy(num_tokens), client=client, **more)
        for index, prompt in enumerate(prompts)
    ]


def token_ids(deltas: list[CompletionDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def occupied(engine: AsyncEngine) -> RequestStream:
    """A stream that has the only seat."""
    stream = engine.submit(ask("running", sampling=greedy(250), client="runs"))
    await anext(stream)
    return stream


async def test_on_an_idle_server_a_call_takes_all_seats_at_once(folder):
    async with engine_of(folder, max_num_seqs=4) as engine:
        streams = engine.submit_all(call("n", 4))
        assert engine.scheduler.num_waiting == 4
        for stream in streams:
            assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH


async def test_a_call_takes_one_place_in_a_full_queue_and_is_answered_whole(folder):
    async with engine_of(folder, max_num_seqs=1, max_num_waiting=4) as engine:
        running = await occupied(engine)
        others = [engine.submit(request) for request in call("other", 4)]
        streams = engine.submit_all(call("n", 3))
        with pytest.raises(QueueFullError, match="one of a key that has fewer waiting has taken this one's place"):
            await read(others.pop())
        assert engine.scheduler.num_waiting == 4
        running.abort()
        answers = [await read(stream) for stream in [*streams, *others]]
        assert {deltas[-1].finish_reason for deltas in answers} == {FinishReason.LENGTH}
        await until(lambda: is_empty(engine))


async def test_a_call_that_is_refused_displaces_nobody(folder):
    async with engine_of(folder, max_num_seqs=1, max_num_waiting=4) as engine:
        running = await occupied(engine)
        others = [engine.submit(request) for request in call("other", 4)]
        too_long = ask("long", [1] * MAX_MODEL_LEN, client="n")
        with pytest.raises(ContextLengthError):
            engine.submit_all([*call("n", 2), too_long])
        with pytest.raises(QueueFullError, match="Waiting requests: 4"):
            engine.submit_all(call("n", 2, priority=Priority.LOW))
        assert engine.num_streams == 5
        assert engine.metrics.rejected == {("normal", "context_length"): 1, ("low", "max_num_queued_reqs"): 1}
        running.abort()
        for stream in others:
            assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH


async def test_a_call_never_fills_the_queue(folder):
    """A sixteenth of it at most; its answers are those that its requests have alone, and nobody is refused."""
    async with engine_of(folder, max_num_seqs=4, max_num_waiting=32) as engine:
        alone = [await read(engine.submit(request)) for request in call("alone", 40)]
        streams, most = engine.submit_all(call("n", 40)), 0
        late = None
        while not all(stream.is_complete for stream in streams):
            most = max(most, engine.scheduler.num_waiting)
            if late is None and any(stream.is_complete for stream in streams):
                late = engine.submit(ask("late", sampling=greedy(1)))
            await asyncio.sleep(0)
        assert most <= 32 // 16 + 1
        assert late is not None
        assert (await read(late))[-1].finish_reason is FinishReason.LENGTH
        for stream, expected in zip(streams, alone, strict=True):
            assert token_ids(await read(stream)) == token_ids(expected)
        await until(lambda: is_empty(engine))


async def test_a_call_waits_for_the_limits_of_its_tier(folder):
    tier = Tier(name="free", max_num_waiting=1, max_queued_tokens=20)
    first, last = call("refused", 2, tier="free")
    async with engine_of(folder, tier) as engine:
        with pytest.raises(ContextLengthError, match=r"The prompt has 21 tokens, .* of tier free together may have 20"):
            engine.submit_all([first, ask("long", [1] * 21, tier="free"), last])
        streams = engine.submit_all(call("n", 12, tier="free"))
        assert engine.scheduler.num_waiting == 1
        for stream in streams:
            assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH


async def test_a_part_that_loses_its_place_enters_again_while_others_of_its_call_are_in(folder):
    async with engine_of(folder, max_num_seqs=1, max_num_waiting=16, aging_rate=1e-6) as engine:
        streams = engine.submit_all(call("n", 3, 30, priority=Priority.LOW))
        await anext(streams[0])
        better = [engine.submit(ask(f"high{index}", priority=Priority.HIGH)) for index in range(16)]
        assert not streams[1].is_complete, "it was displaced, and enters again"
        for stream in [*better, *streams]:
            assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH
        running = await occupied(engine)
        (only, _) = engine.submit_all(call("n", 2, priority=Priority.LOW))
        better = [engine.submit(ask(f"high{index}", priority=Priority.HIGH)) for index in range(16)]
        with pytest.raises(QueueFullError):
            await read(only)
        running.abort()


async def test_a_call_that_is_given_up_leaves_nothing(folder):
    async with engine_of(folder, max_num_seqs=2, max_num_waiting=16) as engine:
        streams = engine.submit_all(call("n", 20, 100))
        await anext(streams[0])
        num_started = engine.stats().num_prompt_tokens
        for stream in streams:
            stream.abort()
        assert engine.num_streams == 0
        for stream in streams[2:]:
            assert [delta.finish_reason for delta in await read(stream)] == [FinishReason.ABORT]
        await until(lambda: is_empty(engine))
        assert engine.stats().num_prompt_tokens == num_started, "none has entered when others were aborted"


async def test_what_ends_a_call_is_the_error_of_all_its_parts(folder):
    """Clients would take parts that were aborted for whole answers."""
    async with engine_of(folder, max_num_seqs=1, max_num_waiting=16) as engine:
        running = await occupied(engine)
        streams = engine.submit_all(call("n", 3, priority=Priority.LOW))
        for index in range(16):
            engine.submit(ask(f"high{index}", priority=Priority.HIGH))
        for stream in streams:
            with pytest.raises(QueueFullError, match="a request of a better tier has taken this one's place"):
                await read(stream)
        assert engine.metrics.rejected == {("low", "displaced"): 1}
        running.abort()


async def test_a_part_that_is_aborted_before_it_has_entered_never_enters(folder):
    async with engine_of(folder, max_num_seqs=4, max_num_waiting=64) as engine:
        streams = engine.submit_all(call("n", 20))
        given_up = streams[4:20:3]
        for stream in given_up:
            stream.abort()
        for stream in streams:
            await read(stream)
        await until(lambda: is_empty(engine))
        num_tokens = sum(stream.request.num_prompt_tokens for stream in streams if stream not in given_up)
        assert engine.stats().num_prompt_tokens == num_tokens


async def test_a_part_that_enters_again_is_counted_once(folder):
    async with engine_of(folder, max_num_seqs=1, max_num_waiting=16, aging_rate=1e-6) as engine:
        streams = engine.submit_all(call("n", 3, 30, priority=Priority.LOW))
        await anext(streams[0])
        better = [engine.submit(ask(f"high{index}", priority=Priority.HIGH)) for index in range(16)]
        for stream in [*better, *streams]:
            await read(stream)
        num_tokens = sum(stream.request.num_prompt_tokens for stream in [*better, *streams])
        assert engine.stats().num_prompt_tokens == num_tokens


async def test_an_engine_that_has_stopped_keeps_no_blocks(folder):
    """The pool keeps engines of earlier loads for their counts."""
    async with engine_of(folder) as engine:
        await read(engine.submit(ask("one")))
        blocks = weakref.ref(engine.scheduler.blocks)
        await engine.stop()
        gc.collect()
        assert blocks() is None


async def test_few_calls_have_a_turn_after_a_step_and_each_has_one(folder, monkeypatch):
    """Streams would wait for all of them otherwise."""
    async with engine_of(folder, max_num_seqs=1, max_num_waiting=120) as engine:
        running = await occupied(engine)
        calls = [engine.submit_all(call(f"{number}-", 2, 1)) for number in range(110)]
        add_request, num_tries = engine.scheduler.add_request, Counter[int]()

        def count(request: Request, **more: bool) -> list[RequestOutput]:
            num_tries[running.request.num_output_tokens] += 1
            return add_request(request, **more)

        monkeypatch.setattr(engine.scheduler, "add_request", count)
        for _ in range(4):
            await anext(running)
        assert 0 < max(num_tries.values()) <= 64
        running.abort()
        for streams in calls:
            for stream in streams:
                assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH


async def test_the_end_of_a_long_call_gives_others_one_turn(folder, monkeypatch):
    """And not one for each of its parts, which would hold up streams."""
    num_turns, fill = 0, Intake.fill

    def count(intake: Intake) -> list[RequestOutput]:
        nonlocal num_turns
        num_turns += 1
        return fill(intake)

    async with engine_of(folder, max_num_seqs=1, max_num_waiting=128) as engine:
        running = await occupied(engine)
        first, second = engine.submit_all(call("n", 100)), engine.submit_all(call("m", 3, 1))
        monkeypatch.setattr(Intake, "fill", count)
        for stream in first:
            stream.abort()
        await asyncio.sleep(0)
        assert 0 < num_turns <= 2
        running.abort()
        for stream in second:
            assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH
