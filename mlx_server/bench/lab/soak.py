"""A soak of one engine: concurrent streams, aborts, prefix hits and preemptions in a small pool, for a while.

A request that runs alone gets the same answer before and after, whatever happened in between; afterwards no block is
held, no pool has moved, and memory is where it was.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import psutil

from mlx_server.config import BLOCK_SIZE, CacheConfig, Config, MemoryConfig, ModelConfig, SchedulerConfig
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.outputs import EngineStats
from mlx_server.sampling_params import SamplingParams

_NUM_STREAMS = 8
_NUM_BLOCKS = 40
_NUM_CASES = 10
_SHARED_TOKENS = 5 * BLOCK_SIZE
_ABORTED_SHARE = 0.25
_SAMPLE_S = 0.2
_AN_HOUR_MS = 3.6e6
"""Aim of a step: prompts are cut by their lengths alone, not by measured speed, so that who runs alone is computed
alike each time."""

_SETTLE_S = 10.0
_MOST_GROWTH = 0.05
_LEAST_GROWTH_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """A request that can be repeated: sampling is seeded."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes that MLX holds, and those of the whole process."""

    active_bytes: int
    resident_bytes: int


@dataclass(slots=True)
class SoakResult:
    """What happened. `num_equal` of the `num_whole` answers that were not aborted were those given alone; the others
    may differ by the rounding of other batches, so they are no problem by themselves. `problems` are."""

    backend: str
    num_whole: int = 0
    num_equal: int = 0
    num_aborted: int = 0
    num_pool_moves: int = 0
    elapsed_s: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)
    samples: list[MemorySample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def soak(model: str, seconds: float, *, wire_memory: bool = False) -> SoakResult:
    """Loads the model into an engine of its own, and soaks it for so long. Raises what loading raises."""
    async with _started(model, wire_memory) as engine:
        result = SoakResult(engine.info.backend)
        cases = _make_cases()
        alone = [await _answer_alone(engine, case) for case in cases]
        await engine.check_pool_moves()
        mx.reset_peak_memory()
        await _load(engine, cases, alone, seconds, result)
        result.problems += await _unsettled(engine)
        result.num_pool_moves = await engine.check_pool_moves()
        result.stats = engine.stats()
        again = [await _answer_alone(engine, case) for case in cases]
        num_changed = sum(before != after for before, after in zip(alone, again))
    result.problems += _problems(result, num_changed)
    return result


def _make_cases() -> list[Case]:
    """Prompts with a common beginning, half of them to be answered greedily."""
    rng = random.Random(0)
    shared = _random_ids(rng, _SHARED_TOKENS)
    return [
        Case(
            (*shared, *_random_ids(rng, rng.randrange(1, 200))),
            SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=rng.randrange(8, 49), ignore_eos=True),
        )
        for index in range(_NUM_CASES)
    ]


def _random_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    """Ids that every vocabulary has."""
    return tuple(rng.randrange(1, 256) for _ in range(count))


@asynccontextmanager
async def _started(model: str, wire_memory: bool) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        Config(
            model=ModelConfig(model=model, max_model_len=16 * BLOCK_SIZE),
            cache=CacheConfig(num_kv_blocks=_NUM_BLOCKS),
            memory=MemoryConfig(wire_memory=wire_memory),
            scheduler=SchedulerConfig(
                max_num_seqs=_NUM_STREAMS,
                max_num_batched_tokens=256,
                target_step_ms=_AN_HOUR_MS,
                max_step_ms=_AN_HOUR_MS,
            ),
        )
    )
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def _answer_alone(engine: AsyncEngine, case: Case) -> tuple[int, ...]:
    engine.reset_prefix_cache()
    answer = await _answer(engine, "alone", case, None)
    assert answer is not None
    return answer


async def _answer(engine: AsyncEngine, name: str, case: Case, abort_after: int | None) -> tuple[int, ...] | None:
    """The answer, or None if it was aborted, after so many tokens."""
    request = GenerationRequest(request_id=name, prompt_token_ids=case.prompt_token_ids, sampling=case.sampling)
    stream = engine.submit(request)
    token_ids: list[int] = []
    try:
        if abort_after == 0:
            await asyncio.sleep(0.01)
            return None
        async for delta in stream:
            token_ids += delta.token_ids
            if abort_after is not None and len(token_ids) >= abort_after:
                return None
    finally:
        stream.abort()
    return tuple(token_ids)


async def _load(
    engine: AsyncEngine, cases: Sequence[Case], alone: Sequence[tuple[int, ...]], seconds: float, result: SoakResult
) -> None:
    start_s = time.monotonic()

    async def client(number: int) -> None:
        rng, turn = random.Random(number), 0
        while time.monotonic() - start_s < seconds:
            index, turn = rng.randrange(len(cases)), turn + 1
            case = cases[index]
            is_aborted = rng.random() < _ABORTED_SHARE
            abort_after = rng.randrange(case.sampling.max_tokens or 1) if is_aborted else None
            answer = await _answer(engine, f"{number}-{turn}", case, abort_after)
            result.num_aborted += answer is None
            result.num_whole += answer is not None
            result.num_equal += answer == alone[index]

    async def watch() -> None:
        process = psutil.Process()
        while True:
            result.samples.append(MemorySample(int(mx.get_active_memory()), process.memory_info().rss))
            await asyncio.sleep(_SAMPLE_S)

    watching = asyncio.ensure_future(watch())
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(_NUM_STREAMS):
                group.create_task(client(number))
    finally:
        watching.cancel()
    result.elapsed_s = time.monotonic() - start_s


async def _unsettled(engine: AsyncEngine) -> list[str]:
    """What is still held when all requests have ended."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        stats = engine.stats()
        num_held = stats.num_blocks - stats.num_free_blocks
        if stats.num_running == stats.num_waiting == num_held == 0:
            break
        if time.monotonic() > deadline_s:
            return [f"{num_held} blocks are held, {stats.num_running} requests run and {stats.num_waiting} wait"]
        await asyncio.sleep(0.05)
    engine.scheduler.check_integrity()
    return []


def _problems(result: SoakResult, num_changed: int) -> list[str]:
    found = []
    if num_changed:
        found.append(f"{num_changed} of {_NUM_CASES} requests that ran alone were answered otherwise afterwards")
    if result.num_pool_moves:
        found.append(f"MLX has copied K/V pools {result.num_pool_moves} times")
    if not result.stats.num_prefix_hit_tokens:
        found.append("no prefix was found in the cache")
    before, after = memory_before_and_after(result.samples)
    if after - before > max(_LEAST_GROWTH_BYTES, _MOST_GROWTH * before):
        found.append(f"MLX's memory has grown by {(after - before) / 2**20:.0f} MiB")
    return found


def memory_before_and_after(samples: Sequence[MemorySample]) -> tuple[float, float]:
    """Medians of what MLX held in the second and in the last quarter of the time."""
    quarter = max(1, len(samples) // 4)
    parts = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    before, after = (statistics.median(sample.active_bytes for sample in part) for part in parts)
    return before, after
