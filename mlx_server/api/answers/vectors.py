"""Vectors and scores for any protocol: `embed` and `score`.

Both are for routes that are a `TurnRoute`. They tokenize in the request's turn, and raise `ServeError`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fastapi import Request

from mlx_server.api.answers.generation import GenerationJob, Plan, Prompt
from mlx_server.api.answers.generation_service import lease_engine
from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.auth.quotas import Demand
from mlx_server.api.context import ServerContext
from mlx_server.api.http.middleware import REQUEST_ID_HEADER
from mlx_server.api.http.text_turns import turn_of
from mlx_server.api.probes import load_headers
from mlx_server.engine.embeddings import FloatArray, InputTruncation, embedder_of, scorer_of
from mlx_server.engine.engine import AsyncEngine
from mlx_server.errors import ServeError
from mlx_server.request import PoolingParams, Vector
from mlx_server.sampling_params import SamplingParams

T = TypeVar("T")

MAX_INPUTS = 2048
"""Of one request: OpenAI's bound for embeddings, and more documents than hosted rerankers take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """What a request says beside its inputs. `model` None is the default model; `request_id` is the client's, if it
    gave one; the answer's id begins with `prefix`."""

    model: str | None = None
    truncation: InputTruncation = field(default_factory=InputTruncation)
    priority: int | None = None
    request_id: str | None = None
    prefix: str = "embd"


@dataclass(frozen=True, slots=True)
class PoolingAnswer(Generic[T]):
    """A vector (float32) or a score for each input. `headers` are the response's; loading the model took `load_s`."""

    values: list[T]
    response_id: str
    model_name: str
    num_prompt_tokens: int
    headers: dict[str, str]
    load_s: float

    @property
    def usage(self) -> dict[str, int]:
        """As OpenAI has it."""
        return {"prompt_tokens": self.num_prompt_tokens, "total_tokens": self.num_prompt_tokens}


async def embed(
    request: Request,
    context: ServerContext,
    options: PoolingOptions,
    inputs: Sequence[str | Sequence[int]],
    *,
    name: str = "input",
    dimensions: int | None = None,
    prompt_name: str | None = None,
    input_type: str | None = None,
    add_special_tokens: bool = True,
) -> PoolingAnswer[FloatArray]:
    """The vectors of texts or token ids, in their order. `name` is the inputs' field, for errors; `input_type` is what
    hosted services call a prompt."""
    engine, load_s = await _engine(request, context, options)
    embedder = embedder_of(engine.pooling, engine.model_name)
    embedder.check_dimensions(dimensions)
    before = embedder.prompt(prompt_name, input_type)

    def read(index: int, item: str | Sequence[int]) -> Prompt:
        where = f"{name}[{index}]" if len(inputs) > 1 else name
        token_ids = embedder.token_ids(item, before, options.truncation, where, add_special_tokens=add_special_tokens)
        return Prompt(tuple(token_ids))

    prompts = await turn_of(request).in_thread(lambda: list(itertools.starmap(read, enumerate(inputs))))

    def vectors(results: list[Vector]) -> list[FloatArray]:
        return [embedder.vector(result, dimensions) for result in results]

    return await _run(request, context, engine, load_s, options, prompts, embedder.params, vectors)


async def score(
    request: Request,
    context: ServerContext,
    options: PoolingOptions,
    pairs: Sequence[tuple[str, str]],
    paths: tuple[str, str],
    instruction: str | None,
) -> PoolingAnswer[float]:
    """The scores of pairs of texts, in their order; `paths` are as for `Scorer.plan`."""
    engine, load_s = await _engine(request, context, options)
    scorer = scorer_of(engine.pooling, engine.model_name)
    plan = await turn_of(request).in_thread(lambda: scorer.plan(pairs, paths, options.truncation, instruction))
    prompts = [Prompt(tuple(token_ids)) for token_ids in plan.inputs]
    answer = await _run(request, context, engine, load_s, options, prompts, scorer.params, plan.scores)
    if not all(map(math.isfinite, answer.values)):
        raise ServeError(f"{engine.model_name} gives no number for some of the pairs; load it with --dtype float32.")
    return answer


async def _engine(request: Request, context: ServerContext, options: PoolingOptions) -> tuple[AsyncEngine, float]:
    """The engine that answers, loaded if need be, and the seconds that this took."""
    started_s = time.monotonic()
    if options.request_id is not None:
        request.state.request_id = options.request_id
    context.quotas.check(caller_of(request), Demand())
    return await lease_engine(request, context.pool, options.model), time.monotonic() - started_s


async def _run(
    request: Request,
    context: ServerContext,
    engine: AsyncEngine,
    load_s: float,
    options: PoolingOptions,
    prompts: Sequence[Prompt],
    params: PoolingParams,
    read: Callable[[list[Vector]], list[T]],
) -> PoolingAnswer[T]:
    """Computes the prompts, then `read`s the results in the request's turn."""
    caller, request_id = caller_of(request), request.state.request_id
    job = GenerationJob(
        request_id=request_id,
        response_id=f"{options.prefix}-{request_id}",
        plan=Plan(prompts=prompts),
        sampling=SamplingParams(),
        caller=caller,
        priority=caller.priority_at(request.url.path, options.priority),
        adapter=context.pool.offer(options.model).adapter,
        pooling=params,
    )
    with contextlib.closing(await context.generations.start_pooling(engine, job)) as run:
        request.state.is_counted = True
        turn_of(request).end()
        results = await run.results()
    headers = {REQUEST_ID_HEADER: request_id, **load_headers(request.headers, engine.stats())}
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    values = await turn_of(request).in_thread(lambda: read(results))
    return PoolingAnswer(values, job.response_id, run.model_name, num_tokens, headers, load_s)
