"""Answers of engines with a random drafter, and what it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.batching.speculation.draft_model import DraftModel
from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.parts import GivenModels
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.outputs import EngineStats, ModelRunnerOutput
from tests.vision_worlds import picture, prompt_of

LIKELY = {5: 30.0, 6: 30.0}
"""Of two tokens a random drafter is right about half the time."""

DRAFTED_SAMPLING = (
    SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logit_bias=LIKELY),
    SamplingParams(max_tokens=40, temperature=0.7, seed=1, ignore_eos=True, logit_bias=LIKELY, repetition_penalty=1.2),
    SamplingParams(max_tokens=40, temperature=0.7, seed=4, ignore_eos=True, speculate=False),
    SamplingParams(max_tokens=40, temperature=0.7, seed=3, top_p=0.9, ignore_eos=True, logit_bias=LIKELY),
)


Answers = list[tuple[int, ...]]
_PLAIN: dict[tuple[object, ...], Answers] = {}


def answers_in_small_pool(
    target: str, prompts: Sequence[Sequence[int]], **settings: Any
) -> tuple[Answers, EngineStats]:
    """Of two rounds, of which the second finds the first one's prefixes."""
    with LLM(target, max_model_len=128, num_kv_blocks=8, max_num_batched_tokens=64, **settings) as llm:
        done = [one.token_ids for _ in range(2) for one in llm.generate(prompts, DRAFTED_SAMPLING, use_tqdm=False)]
        llm.engine.scheduler.check_integrity()
        stats, speculation = llm.stats(), llm.engine.scheduler.speculation
        assert stats.num_free_blocks == stats.num_blocks
        if speculation is not None and speculation.model is not None:
            blocks = speculation.model.blocks
            assert blocks.num_free_blocks == blocks.num_blocks
        return done, stats


def check_random_drafts(target: str, prompts: Sequence[Sequence[int]], **settings: Any) -> EngineStats:
    """The answers are those without drafts, which are computed once for all tests with the same model."""
    key = (*(Path(target, name).read_bytes() for name in ("config.json", "model.safetensors")), repr(prompts))
    if key not in _PLAIN:
        _PLAIN[key], _ = answers_in_small_pool(target, prompts, speculate="off")
    drafted, stats = answers_in_small_pool(target, prompts, max_draft_tokens=4, **settings)
    assert drafted == _PLAIN[key]
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    return stats


Drafts = list[tuple[list[int], tuple[int, ...]]]
"""Known tokens, and what was drafted after them."""


def record_drafts(monkeypatch: pytest.MonkeyPatch, kind: type[DraftModel]) -> Drafts:
    """A list that gets all further drafts of this kind."""
    drafts: Drafts = []
    take = kind.take

    def watched(self: DraftModel, output: ModelRunnerOutput) -> None:
        take(self, output)
        for name in output.drafts:
            shadow = self._followers[name].shadow
            drafts.append(([*shadow.prompt_token_ids, *shadow.output_token_ids], self._drafts[name][1]))

    monkeypatch.setattr(kind, "take", watched)
    return drafts


async def check_behind_images(model_type: str, given: GivenModels, *, seed: int) -> None:
    """The drafter changes no answer to prompts with images; with this seed some drafts are right."""
    prompts = [
        prompt_of([range(5, 15), picture(model_type, 1), range(40, 60)]),
        prompt_of([range(5, 9), picture(model_type, 2), range(30, 40), picture(model_type, 1), range(40, 60)]),
        prompt_of([range(1, 50)]),
    ]
    likely = SamplingParams(max_tokens=25, temperature=0.7, seed=seed, ignore_eos=True, logit_bias=LIKELY)
    answers = []
    for speculate in ("off", "model"):
        settings = Config(
            model=ModelConfig(model="tiny", max_model_len=512, draft_model="drafter"),
            cache=CacheConfig(num_kv_blocks=64),
            scheduler=SchedulerConfig(
                max_num_seqs=12, max_num_batched_tokens=64, speculate=speculate, max_draft_tokens=4
            ),
        )
        engine = AsyncEngine(settings, given=given)
        await engine.start()
        try:
            asked = [
                GenerationRequest(request_id=f"r{n}", prompt_token_ids=ids, images=images, sampling=likely)
                for n, (ids, images) in enumerate(prompts)
            ]
            streams = [engine.submit(one) for one in asked]
            answers.append([[token async for delta in stream for token in delta.token_ids] for stream in streams])
            stats = engine.stats()
        finally:
            await engine.stop()
    assert answers[0] == answers[1]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
