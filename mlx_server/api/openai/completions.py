"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_server.api.context import Context
from mlx_server.api.disconnect import until_disconnect
from mlx_server.api.generation import GenerationJob
from mlx_server.api.openai.completion_output import TextShape, text_chunks, text_completion
from mlx_server.api.openai.completion_request import CompletionRequest
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.api.prompts import Prompt
from mlx_server.api.sse import whole_or_streamed
from mlx_server.api.text_turns import TextTurn
from mlx_server.api.turn_route import TurnRoute
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.structured_spec import StructuredSpec
from mlx_server.request import TokenConstraint

router = APIRouter(tags=["completions"], route_class=TurnRoute)


@router.post("/v1/completions", responses=whole_or_streamed("id", "object", "created", "model", "choices", "usage"))
async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Completions of one or several prompts, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    sampling = body.sampling(exchange.engine.default_sampling)
    plan = await until_disconnect(request, plan_text(exchange.engine, body, exchange.turn))
    shape = _shape(body, exchange, plan.prompts)
    job = GenerationJob(
        request_id=exchange.request_id,
        response_id=shape.response_id,
        prompts=plan.prompts,
        sampling=sampling,
        n=body.num_samples,
        caller=exchange.caller,
        priority=exchange.priority(body),
        extra_keys=exchange.extra_keys(body),
        adapter=exchange.adapter,
        new_constraint=plan.new_constraint,
        continues_text=True,
    )
    if body.stream:
        return await exchange.stream(job, partial(text_chunks, shape))
    return await exchange.whole(job, partial(text_completion, shape))


@dataclass(frozen=True, slots=True)
class TextPlan:
    """Prompts and grammar, ready to generate."""

    prompts: tuple[Prompt, ...]
    new_constraint: Callable[[], TokenConstraint] | None


async def plan_text(engine: AsyncEngine, body: CompletionRequest, turn: TextTurn) -> TextPlan:
    """Tokenizes and compiles in a worker thread. Raises `InvalidRequestError`."""

    def read() -> tuple[StructuredSpec | None, tuple[Prompt, ...]]:
        return body.structured(), tuple(_prompt(engine, body, prompt) for prompt in body.prompt)

    spec, prompts = await turn.in_thread(read)
    if spec is None:
        return TextPlan(prompts, None)
    grammars = engine.grammars
    grammar = await grammars.beside(lambda: grammars.compile(spec), spec.param, turn.asker)
    return TextPlan(prompts, grammar.start)


def _prompt(engine: AsyncEngine, body: CompletionRequest, prompt: str | Sequence[int]) -> Prompt:
    token_ids: Sequence[int]
    if isinstance(prompt, str):
        part = body.truncation.part(prompt, engine.tokenizer, engine.max_model_len)
        token_ids = engine.tokenizer.encode(part, add_special_tokens=body.add_special_tokens is not False)
    else:
        token_ids = prompt
    kept = tuple(body.truncation.apply(token_ids, engine.max_model_len))
    if not body.echo:
        return Prompt(kept)
    if isinstance(prompt, str) and len(kept) == len(token_ids):
        return Prompt(kept, prompt)
    return Prompt(kept, engine.tokenizer.decode(kept, skip_special_tokens=False))


def _shape(body: CompletionRequest, exchange: Exchange, prompts: tuple[Prompt, ...]) -> TextShape:
    return TextShape(
        response_id=f"cmpl-{exchange.request_id}",
        model=exchange.model_name,
        created_s=int(time.time()),
        names=exchange.names(bool(body.return_tokens_as_token_ids)),
        prompts=prompts,
        n=body.num_samples,
        has_echo=bool(body.echo),
        is_scoring=body.is_scoring,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        has_token_ids=bool(body.return_token_ids),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
