"""Vectors and scores for scripts: inputs in, one continuous batch, results in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_server.engine.embeddings.embedding import FloatArray, InputTruncation
from mlx_server.engine.embeddings.pooling import embedder_of, scorer_of
from mlx_server.engine.embeddings.scoring import pair_up
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.library.completions import run_all
from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.pooling_params import PoolingParams, Vector
from mlx_server.sampling_params import SamplingParams, plain_ints

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Embedding:
    """One input's vector, float32."""

    prompt_token_ids: tuple[int, ...]
    embedding: FloatArray


async def embed(
    engine: AsyncEngine,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    dimensions: int | None,
    prompt_name: str | None,
    truncate_prompt_tokens: int | None,
    use_tqdm: bool,
) -> list[Embedding]:
    """Every prompt's vector. Raises `InvalidRequestError` before anything runs."""
    truncation = InputTruncation(truncate_prompt_tokens)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    embedder = embedder_of(engine.pooling, engine.model_name)
    embedder.check_dimensions(dimensions)
    before = embedder.prompt(prompt_name)
    items = [prompt if isinstance(prompt, str) else plain_ints(prompt, "prompts") for prompt in prompts]
    inputs = [embedder.token_ids(item, before, truncation, f"prompts[{index}]") for index, item in enumerate(items)]
    results = await _pool(engine, inputs, embedder.params, use_tqdm)
    vectors = (embedder.vector(result, dimensions) for result in results)
    return [Embedding(tuple(ids), vector) for ids, vector in zip(inputs, vectors, strict=True)]


async def score(
    engine: AsyncEngine,
    text_1: str | Sequence[str],
    text_2: str | Sequence[str],
    *,
    truncate_prompt_tokens: int | None,
    use_tqdm: bool,
) -> list[float]:
    """The score of each pair. Raises `InvalidRequestError` before anything runs."""
    names = ("text_1", "text_2")
    firsts, seconds = ([texts] if isinstance(texts, str) else list(texts) for texts in (text_1, text_2))
    scorer = scorer_of(engine.pooling, engine.model_name)
    plan = scorer.plan(pair_up(firsts, seconds, names), names, InputTruncation(truncate_prompt_tokens))
    return plan.scores(await _pool(engine, plan.inputs, scorer.params, use_tqdm))


async def _pool(
    engine: AsyncEngine, inputs: Sequence[Sequence[int]], params: PoolingParams, use_tqdm: bool
) -> list[Vector]:
    requests = [
        GenerationRequest(
            request_id=f"llm-input-{next(_ids)}", prompt_token_ids=token_ids, sampling=SamplingParams(), pooling=params
        )
        for token_ids in inputs
    ]
    results = []
    for (delta,) in await run_all(engine, requests, "Inputs", use_tqdm):
        assert delta.pooled is not None
        results.append(delta.pooled)
    return results
