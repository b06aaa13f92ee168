"""The check for every architecture: answers in a batch equal those of plain mlx-lm for one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_server import LLM, SamplingParams
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.config import BLOCK_SIZE
from mlx_server.engine.library.llm import Completion
from mlx_server.outputs import SchedulerOutput
from mlx_server.runtime.cache.row_pool import RowPool
from mlx_server.runtime.models.loader import LoadedModel
from mlx_server.runtime.models.random_models import build_random
from tests.architectures import SEEDS, config_of
from tests.engine_worlds import random_prompts
from tests.tiny_models import Reference, reference_generate

LENGTHS = (60, 61, 70, 63, 1, 5)
MAX_TOKENS = (8, 6, 3, 6, 4, 12)
NUM_BLOCKS = 8
NUM_LOGPROBS = 5

CROWDED = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "num_kv_blocks": NUM_BLOCKS, "max_model_len": 256}
"""Prompts are computed in chunks together with decodes, requests join and leave, and blocks run out."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of an engine, and the counts of steps and model calls."""

    completions: list[Completion]
    num_preemptions: int
    num_steps: int
    num_model_calls: int


@dataclass(frozen=True, slots=True)
class Row:
    """One architecture's row of the table."""

    architecture: str
    level: str
    calls_per_step: float
    is_recurrent: bool
    worst_error: float
    pool_bytes: int
    """Bytes of blocks and recurrent states."""

    def __str__(self) -> str:
        cached = "blocks and state" if self.is_recurrent else "blocks"
        calls = f"{self.calls_per_step:10.2f}"
        return f"{self.architecture:22} {self.level:35} {calls}  {cached:16}  {self.worst_error:.1e}"


HEADER = f"{'architecture':22} {'what runs group by group':35} calls/step  {'a cached prefix':16}  worst error"
"""The error is `worst_error`'s."""


class Subject:
    """A tiny model of one architecture, and plain mlx-lm's answers."""

    def __init__(self, architecture: str, config: dict[str, Any] | None = None) -> None:
        self.architecture = architecture
        self.config = config or config_of(architecture)
        self.model: nn.Module = build_random(self.config, SEEDS.get(architecture, 0))
        first = [1] * max([1, *self.config.get("compress_ratios", ())])
        mx.eval(self.model(mx.array([first])))  # lazy constants can only be evaluated by the thread that makes them

    def make_llm(self, **settings: Any) -> LLM:
        loaded = LoadedModel(self.architecture, self.model, self.config, None)
        return LLM(loaded, **{"max_model_len": 256, "num_kv_blocks": 32, **settings})

    @property
    def is_windowed(self) -> bool:
        """Whether some layer has a sliding window."""
        caches = make_prompt_cache(self.model)
        parts = [part for cache in caches for part in getattr(cache, "caches", (cache,))]
        return any(isinstance(part, RotatingKVCache) for part in parts)

    def wanted(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[Reference]:
        return [reference_generate(self.model, p, n) for p, n in zip(prompts, max_tokens, strict=True)]


def answer(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> Answers:
    """Greedy answers of the engine to all prompts in one batch, with counts."""
    before = llm.stats()
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, logprobs=NUM_LOGPROBS) for n in max_tokens]
    completions = llm.generate(prompts, params, use_tqdm=False)
    after = llm.stats()
    return Answers(
        completions,
        after.num_preemptions - before.num_preemptions,
        after.num_steps - before.num_steps,
        after.num_model_calls - before.num_model_calls,
    )


def worst_error(answers: Answers, wanted: Sequence[Reference]) -> float:
    """The largest difference of a likely token's log-probability, relative to the largest logit. Asserts that all
    tokens equal plain mlx-lm's."""
    worst = 0.0
    for completion, reference in zip(answers.completions, wanted, strict=True):
        assert list(completion.token_ids) == reference.token_ids
        logprobs = reference.logits - mx.logsumexp(reference.logits, axis=-1, keepdims=True)
        largest = max(1.0, float(mx.abs(reference.logits).max()))
        for position, row in zip(completion.logprobs, logprobs.tolist(), strict=True):
            worst = max(worst, *(abs(entry.logprob - row[entry.token_id]) / largest for entry in position.top))
    return worst


def pool_bytes(llm: LLM) -> int:
    """The bytes of the arrays in an engine's pools. Arrays of one number only order operations and do not count."""
    cache = llm.engine._parts.runner.cache
    pools = {id(layer.pool): layer.pool.contents[0] for layer in cache.paged}.values()
    arrays = [
        array for pool in pools for array in (pool.arrays() if isinstance(pool, RowPool) else (pool.keys, pool.values))
    ]
    arrays += [state for states in cache.recurrent for state in states.state()]
    return sum(array.nbytes for array in arrays if array.size > 1)


def preempt_every(num_steps: int, scheduler: ContinuousBatchingScheduler) -> None:
    """Preempts the lowest of several running requests every `num_steps` steps."""
    schedule, steps = scheduler.schedule, count(1)

    def preempting(now: float) -> SchedulerOutput | None:
        if next(steps) % num_steps == 0:
            scheduler.preempt_lowest()
        return schedule(now)

    scheduler.schedule = preempting  # type: ignore[method-assign]


def check_crowd(subject: Subject) -> Row:
    """Chunks, joins, leaves and preemptions in one batch; then one prompt again, whose full blocks are cached."""
    prompts = random_prompts(LENGTHS)
    wanted = subject.wanted(prompts, MAX_TOKENS)
    with subject.make_llm(**CROWDED) as llm:
        if subject.is_windowed:  # blocks do not run out there
            preempt_every(7, llm.engine.scheduler)
        first = answer(llm, prompts, MAX_TOKENS)
        if subject.is_windowed:  # blocks that the others freed outside their windows have evicted this prompt's
            answer(llm, prompts[2:3], MAX_TOKENS[2:3])
        again = answer(llm, prompts[2:3], MAX_TOKENS[2:3])
        stats, info, num_bytes = llm.stats(), llm.info, pool_bytes(llm)
    assert first.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks == NUM_BLOCKS * len(info.windows)
    assert again.completions[0].num_cached_tokens == LENGTHS[2] // BLOCK_SIZE * BLOCK_SIZE
    error = max(worst_error(first, wanted), worst_error(again, wanted[2:3]))
    return Row(
        subject.architecture,
        info.level,
        first.num_model_calls / first.num_steps,
        info.is_recurrent,
        error,
        num_bytes,
    )
