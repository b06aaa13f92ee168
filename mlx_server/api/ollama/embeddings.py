"""POST /api/embed and /api/embeddings: Ollama's shapes of embeddings."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from mlx_server.api.answers import vectors
from mlx_server.api.answers.vectors import MAX_INPUTS, EmbeddingAsk, Embeddings
from mlx_server.api.context import Context, ServerContext
from mlx_server.api.http.body import AnyTypeTurnRoute
from mlx_server.api.http.request_bounds import Strings, at_most
from mlx_server.api.ollama.output import nanoseconds
from mlx_server.api.ollama.request import ERROR_RESPONSES, NOT_ENFORCED_HEADER, KeepAlive, find_name, keep_model
from mlx_server.api.openai.fields import Bool, Int
from mlx_server.engine.embeddings import InputTruncation


class _EmbedFields(BaseModel):
    model: str | None = None
    keep_alive: KeepAlive | None = None


class EmbedRequest(_EmbedFields):
    """The body of POST /api/embed."""

    input: str | Annotated[Strings, at_most(MAX_INPUTS, "texts")]
    truncate: Bool | None = None
    dimensions: Int | None = Field(None, ge=0)


class EmbeddingsRequest(_EmbedFields):
    """The body of POST /api/embeddings, the older one of the two."""

    prompt: str


router = APIRouter(tags=["ollama"], route_class=AnyTypeTurnRoute, responses=ERROR_RESPONSES)


@router.post("/api/embed")
async def embed(body: EmbedRequest, request: Request, response: Response, context: Context) -> dict[str, Any]:
    """Vectors of one text or several."""
    started_s = time.monotonic()
    texts = [body.input] if isinstance(body.input, str) else body.input
    cut = InputTruncation(None if body.truncate is False else -1)
    ask = EmbeddingAsk(inputs=texts, dimensions=body.dimensions or None, truncation=cut)
    found = await _embed(body, ask, request, response, context)
    return {
        "model": body.model or "",
        "embeddings": [vector.tolist() for vector in found.vectors],
        "total_duration": nanoseconds(time.monotonic() - started_s),
        "load_duration": nanoseconds(found.load_s),
        "prompt_eval_count": found.answer.num_prompt_tokens,
    }


@router.post("/api/embeddings")
async def embeddings(
    body: EmbeddingsRequest, request: Request, response: Response, context: Context
) -> dict[str, list[float]]:
    """The vector of one text."""
    ask = EmbeddingAsk(inputs=[body.prompt], name="prompt", truncation=InputTruncation(-1))
    found = await _embed(body, ask, request, response, context)
    return {"embedding": found.vectors[0].tolist()}


async def _embed(
    body: _EmbedFields, ask: EmbeddingAsk, request: Request, response: Response, context: ServerContext
) -> Embeddings:
    name = await find_name(context.pool, body.model)
    found = await vectors.embed(request, context, replace(ask, model=name))
    response.headers.update(found.answer.headers)
    if not keep_model(context.pool, name, body.keep_alive, request):
        response.headers[NOT_ENFORCED_HEADER] = "keep_alive"
    return found
