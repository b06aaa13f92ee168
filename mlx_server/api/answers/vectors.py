"""Vectors and scores for any protocol: a request's inputs are read in its turn, computed, and given back.

    embed(request, context, EmbeddingAsk) -> PoolingAnswer       score(request, context, ScoreAsk) -> PoolingAnswer

Both are for routes that are a `TurnRoute`, and raise `ServeError`, or `ClientDisconnectedError` once the client has
gone; what was computed for it ends then.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fastapi import Request

from mlx_server.api.answers.generation import GenerationJob, Prompt
from mlx_server.api.answers.generation_service import lease_engine
from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.auth.quotas import Demand
from mlx_server.api.context import ServerContext
from mlx_server.api.http.middleware import REQUEST_ID_HEADER, until_disconnect
from mlx_server.api.http.text_turns import turn_of
from mlx_server.api.probes import load_headers
from mlx_server.engine.embeddings import FloatArray, InputTruncation, ScorePlan, embedder_of, scorer_of
from mlx_server.engine.engine import AsyncEngine
from mlx_server.errors import ServeError
from mlx_server.request import PoolingParams, Vector
from mlx_server.sampling_params import SamplingParams

T = TypeVar("T")

MAX_INPUTS = 2048
"""Of one request: OpenAI's bound for embeddings, and more documents than hosted rerankers take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingAsk:
    """What all requests of the kind may say. `model` None is the default one; `request_id` is the client's, if it gave
    one, and `prefix` what its answer's id begins with."""

    model: str | None = None
    truncation: InputTruncation = field(default_factory=InputTruncation)
    priority: int | None = None
    request_id: str | None = None
    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingAsk(PoolingAsk):
    """Vectors of texts, or of token ids. `name` is the inputs' field, for errors; `input_type` is what hosted services
    call a prompt."""

    inputs: Sequence[str | Sequence[int]]
    name: str = "input"
    dimensions: int | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    add_special_tokens: bool = True
    prefix: str = "embd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAsk(PoolingAsk):
    """Scores of pairs; `names` are the fields of both texts."""

    pairs: Sequence[tuple[str, str]]
    names: tuple[str, str]
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class PoolingAnswer(Generic[T]):
    """A vector (float32) or a score for each input. `headers` are the response's, and `load_s` is how long the model
    was waited for."""

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


async def embed(request: Request, context: ServerContext, ask: EmbeddingAsk) -> PoolingAnswer[FloatArray]:
    """The vectors of a request's inputs, in their order."""
    engine, load_s = await _engine(request, context, ask)
    embedder = embedder_of(engine.pooling, engine.model_name)
    embedder.check_dimensions(ask.dimensions)
    before = embedder.prompt(ask.prompt_name, ask.input_type)

    def read(index: int, item: str | Sequence[int]) -> list[int]:
        name = f"{ask.name}[{index}]" if len(ask.inputs) > 1 else ask.name
        return embedder.token_ids(item, before, ask.truncation, name, add_special_tokens=ask.add_special_tokens)

    prompts = await _in_turn(request, lambda: [Prompt(tuple(read(*numbered))) for numbered in enumerate(ask.inputs)])

    def vectors(results: list[Vector]) -> list[FloatArray]:
        return [embedder.vector(result, ask.dimensions) for result in results]

    return await _run(request, context, engine, load_s, ask, prompts, embedder.params, vectors)


async def score(request: Request, context: ServerContext, ask: ScoreAsk) -> PoolingAnswer[float]:
    """The scores of a request's pairs, in their order."""
    engine, load_s = await _engine(request, context, ask)
    scorer = scorer_of(engine.pooling, engine.model_name)

    def read() -> tuple[ScorePlan, list[Prompt]]:
        plan = scorer.plan(ask.pairs, ask.names, ask.truncation, ask.instruction)
        return plan, [Prompt(tuple(token_ids)) for token_ids in plan.inputs]

    plan, prompts = await _in_turn(request, read)
    answer = await _run(request, context, engine, load_s, ask, prompts, scorer.params, plan.scores)
    if not all(map(math.isfinite, answer.values)):
        raise ServeError(f"{engine.model_name} gives no number for some of the pairs; load it with --dtype float32.")
    return answer


async def _engine(request: Request, context: ServerContext, ask: PoolingAsk) -> tuple[AsyncEngine, float]:
    """The engine that answers, loaded if need be, and the seconds that took. Others may have used up the caller's quota
    meanwhile."""
    started_s = time.monotonic()
    if ask.request_id is not None:
        request.state.request_id = ask.request_id
    context.quotas.check(caller_of(request), Demand())
    return await lease_engine(request, context.pool, ask.model), time.monotonic() - started_s


async def _in_turn(request: Request, work: Callable[[], T]) -> T:
    return await until_disconnect(request, turn_of(request).in_thread(work))


async def _run(
    request: Request,
    context: ServerContext,
    engine: AsyncEngine,
    load_s: float,
    ask: PoolingAsk,
    prompts: Sequence[Prompt],
    params: PoolingParams,
    read: Callable[[list[Vector]], list[T]],
) -> PoolingAnswer[T]:
    """What `read` makes, in the request's turn, of what the engine makes of the inputs."""
    caller, request_id = caller_of(request), request.state.request_id
    job = GenerationJob(
        request_id=request_id,
        response_id=f"{ask.prefix}-{request_id}",
        prompts=prompts,
        sampling=SamplingParams(),
        caller=caller,
        priority=caller.priority_at(request.url.path, ask.priority),
        adapter=context.pool.offer(ask.model).adapter,
        pooling=params,
    )
    with contextlib.closing(await context.generations.start_pooling(engine, job)) as run:
        request.state.is_counted = True
        turn_of(request).end()
        results = await until_disconnect(request, run.results())
    headers = {REQUEST_ID_HEADER: request_id, **load_headers(request.headers, engine.stats())}
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    values = await _in_turn(request, lambda: read(results))
    return PoolingAnswer(values, job.response_id, run.model_name, num_tokens, headers, load_s)
