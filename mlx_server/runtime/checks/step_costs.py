"""What a model's steps cost, for the scheduler: measures the first steps, and computes how much a context adds."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import NewRequestData, ScheduledChunk, SchedulerOutput
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.sampling_params import SamplingParams

_PROMPT_BLOCKS = 4
"""Length of the measured prompt. 128 tokens fill the tiles of a matrix product, and take half a second at 300 tokens a
second."""

_REQUEST_ID = "first steps"


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """Seconds that two steps took: a prompt chunk from position 0, and one token after it."""

    num_prompt_tokens: int
    prompt_s: float
    decode_s: float


def measure_first_steps(
    runner: ModelRunner, num_blocks: int, max_num_tokens: int
) -> Generator[float, None, FirstSteps | None]:
    """Runs a prompt and one token after it on empty blocks, and forgets them. Each runs once before it is timed,
    because a first call compiles. None if the pool is too small. MLX thread; yields between steps."""
    num_groups = len(runner.cache.windows)
    num_each = min(_PROMPT_BLOCKS, num_blocks // num_groups, max_num_tokens // BLOCK_SIZE)
    num_tokens = num_each * BLOCK_SIZE - 2  # leaves room for the two decodes
    if num_tokens <= 0:
        return None
    block_ids = tuple(tuple(range(group * num_each, (group + 1) * num_each)) for group in range(num_groups))
    data = NewRequestData(_REQUEST_ID, (0,) * num_tokens, (), SamplingParams(), frozenset())
    try:
        for dropped in ((), (_REQUEST_ID,)):
            prompt_s = _step_seconds(runner, 0, num_tokens, block_ids, (data,), dropped)
            yield 1.0
        for position in (num_tokens, num_tokens + 1):
            decode_s = _step_seconds(runner, position, 1, ((),) * num_groups)
            yield 1.0
    finally:
        runner.fetch(runner.launch(SchedulerOutput(-1, (), dropped_request_ids=(_REQUEST_ID,))))
    return FirstSteps(num_tokens, prompt_s, decode_s)


def _step_seconds(
    runner: ModelRunner,
    start: int,
    num_tokens: int,
    block_ids: tuple[tuple[int, ...], ...],
    new_requests: tuple[NewRequestData, ...] = (),
    dropped: tuple[str, ...] = (),
) -> float:
    chunk = ScheduledChunk(_REQUEST_ID, start, num_tokens, (0,) * num_tokens, block_ids, True, 0)
    started = time.perf_counter()
    runner.fetch(runner.launch(SchedulerOutput(-1, (chunk,), new_requests, dropped)))
    return time.perf_counter() - started


def context_doubling(model: Any, vocab_size: int, setting: Callable[..., int | None]) -> float:
    """The context length at which attention needs as many operations for a token as the weights do. `setting` returns a
    number of the model's configuration by any of its names, or None."""
    num_parameters = sum(_num_elements(array) for _, array in tree_flatten(model.parameters()))
    num_heads = setting("num_attention_heads", "n_heads") or 1
    hidden_size = setting("hidden_size", "dim") or 1
    head_dim = setting("head_dim") or hidden_size // num_heads
    num_layers = setting("num_hidden_layers", "n_layers") or 1
    embedding = vocab_size * hidden_size
    return max(1.0, (num_parameters - embedding) / (2.0 * num_layers * num_heads * head_dim))


def _num_elements(array: mx.array) -> int:
    # Packed quantised weights hold several values a word; four bits a value is close enough for a cost.
    return int(array.size) * (8 if array.dtype == mx.uint32 else 1)
