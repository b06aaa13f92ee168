"""How long a model's first steps take, measured before it serves, so that the scheduler need not guess."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import NewRequestData, ScheduledChunk, SchedulerOutput
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.sampling_params import SamplingParams

_NUM_BLOCKS = 4
"""128 tokens: enough to fill a matrix product's tiles, and half a second on a machine of 300 tokens a second."""

_NAME = "first steps"


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """A prompt's chunk from position 0, and one token behind it."""

    num_prompt_tokens: int
    prompt_s: float
    decode_s: float


def measure(runner: ModelRunner, num_blocks: int, most_tokens: int) -> Generator[float, None, FirstSteps | None]:
    """Runs a prompt and one token behind it on blocks that hold nothing yet, and forgets them; each once before it is
    timed, for what is compiled at the first call. None if the pool is too small. MLX thread; yields between steps."""
    num_groups = len(runner.cache.windows)
    num_each = min(_NUM_BLOCKS, num_blocks // num_groups, most_tokens // BLOCK_SIZE)
    num_tokens = num_each * BLOCK_SIZE - 2  # the last two are for the tokens behind it
    if num_tokens <= 0:
        return None
    block_ids = tuple(tuple(range(group * num_each, (group + 1) * num_each)) for group in range(num_groups))
    data = NewRequestData(_NAME, (0,) * num_tokens, (), SamplingParams(), frozenset())
    try:
        for dropped in ((), (_NAME,)):
            prompt_s = _seconds(runner, 0, num_tokens, block_ids, (data,), dropped)
            yield 1.0
        for position in (num_tokens, num_tokens + 1):
            decode_s = _seconds(runner, position, 1, ((),) * num_groups)
            yield 1.0
    finally:
        runner.fetch(runner.launch(SchedulerOutput(-1, (), dropped_request_ids=(_NAME,))))
    return FirstSteps(num_tokens, prompt_s, decode_s)


def _seconds(
    runner: ModelRunner,
    start: int,
    num_tokens: int,
    block_ids: tuple[tuple[int, ...], ...],
    new_requests: tuple[NewRequestData, ...] = (),
    dropped: tuple[str, ...] = (),
) -> float:
    chunk = ScheduledChunk(_NAME, start, num_tokens, (0,) * num_tokens, block_ids, True, 0)
    started = time.perf_counter()
    runner.fetch(runner.launch(SchedulerOutput(-1, (chunk,), new_requests, dropped)))
    return time.perf_counter() - started
