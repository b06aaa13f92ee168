"""A soak test of one engine: concurrent streams, aborts, prefix hits and preemptions in a small KV pool.

It passes if a request alone gets the same answer before and after, and if afterwards no block is held, no pool was
copied, and memory has not grown.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import mlx.core as mx

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
"""Target time of a step: so long that prompts are cut by their lengths and not by measured speed, and a request alone
is computed in the same way each time."""

_SETTLE_S = 10.0
_MAX_GROWTH = 0.05
_MAX_GROWTH_BYTES = 16 * 2**20


@dataclass(slots=True)
class SoakResult:
    """What happened. `num_whole` answers were not aborted, and `num_equal` of them equal the answers given alone. The
    others may differ by rounding in other batches, which is not a problem. `samples` are the bytes that MLX held, taken
    at regular times."""

    backend: str
    num_whole: int = 0
    num_equal: int = 0
    num_aborted: int = 0
    num_pool_moves: int = 0
    elapsed_s: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)
    samples: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def soak(model: str, seconds: float, *, wire_memory: bool = False) -> SoakResult:
    """Loads the model into a new engine and soaks it. Raises what loading raises."""
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


def _make_cases() -> list[GenerationRequest]:
    """Seeded requests with a common prefix, half of them greedy."""
    rng = random.Random(0)
    shared = _random_ids(rng, _SHARED_TOKENS)
    return [
        GenerationRequest(
            request_id="",
            prompt_token_ids=(*shared, *_random_ids(rng, rng.randrange(1, 200))),
            sampling=SamplingParams(
                temperature=0.8 * (index % 2), seed=index, max_tokens=rng.randrange(8, 49), ignore_eos=True
            ),
        )
        for index in range(_NUM_CASES)
    ]


def _random_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    """Token ids that every vocabulary has."""
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


async def _answer_alone(engine: AsyncEngine, case: GenerationRequest) -> tuple[int, ...]:
    engine.reset_prefix_cache()
    answer = await _answer(engine, "alone", case, None)
    assert answer is not None
    return answer


async def _answer(
    engine: AsyncEngine, name: str, case: GenerationRequest, abort_after: int | None
) -> tuple[int, ...] | None:
    """The answer, or None if it was aborted after `abort_after` tokens."""
    stream = engine.submit(replace(case, request_id=name))
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
    engine: AsyncEngine,
    cases: Sequence[GenerationRequest],
    alone: Sequence[tuple[int, ...]],
    seconds: float,
    result: SoakResult,
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
        while True:
            result.samples.append(int(mx.get_active_memory()))
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
    """A problem if blocks or requests are left when all streams have ended."""
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
        found.append(f"{num_changed} of {_NUM_CASES} requests that ran alone had another answer afterwards")
    if result.num_pool_moves:
        found.append(f"MLX has copied KV pools {result.num_pool_moves} times")
    if not result.stats.num_prefix_hit_tokens:
        found.append("there was no prefix cache hit")
    before, after = memory_before_and_after(result.samples)
    if after - before > max(_MAX_GROWTH_BYTES, _MAX_GROWTH * before):
        found.append(f"MLX's memory has grown by {(after - before) / 2**20:.0f} MiB")
    return found


def memory_before_and_after(samples: Sequence[int]) -> tuple[float, float]:
    """Medians of the second and of the last quarter of the samples."""
    quarter = max(1, len(samples) // 4)
    parts = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    before, after = (statistics.median(part) for part in parts)
    return before, after
