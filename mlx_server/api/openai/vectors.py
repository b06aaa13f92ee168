"""POST /v1/embeddings: OpenAI's shape, with vLLM's fields beside it.

POST /v1/rerank and /v1/score: which documents fit a query, in the shapes of Jina and Cohere as vLLM answers them.
"""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, BeforeValidator, Field
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from mlx_server.api.answers.vectors import MAX_INPUTS, PoolingAnswer, PoolingOptions, embed, score
from mlx_server.api.context import Context
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import FIRST_ERROR, at_most
from mlx_server.api.http.text_turns import encode_in_pieces, turn_of
from mlx_server.api.openai.fields import Bool, Int, Refused, RequestFields, TextsOrIds
from mlx_server.engine.embeddings import FloatArray, InputTruncation, pair_up

Inputs = Annotated[list[str | list[int]], TextsOrIds(MAX_INPUTS, "inputs")]


class PoolingFields(RequestFields):
    """The common fields of the routes for vectors and scores."""

    def options(self, prefix: str) -> PoolingOptions:
        truncation = InputTruncation(self.truncate_prompt_tokens, self.truncation_side or "right")
        return PoolingOptions(
            model=self.model, truncation=truncation, priority=self.priority, request_id=self.client_id, prefix=prefix
        )


class EmbeddingRequest(PoolingFields):
    """All fields of an embedding that mean something here."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = Field(None, ge=1)
    prompt_name: str | None = None
    input_type: str | None = None
    add_special_tokens: Bool | None = None

    messages: Annotated[Any, Refused(([],), "send input")] = None
    embed_dtype: Annotated[Any, Refused(("float32",))] = None
    endianness: Annotated[Any, Refused(("native", "little"))] = None
    normalize: Annotated[Any, Refused((), "the model's folder says whether its vectors have length 1")] = None
    embd_normalize: Annotated[Any, Refused((2,), "the model's folder says whether its vectors have length 1")] = None


router = APIRouter(route_class=TurnRoute)


@router.post("/v1/embeddings", tags=["embeddings"], response_model=dict[str, Any])
async def create_embeddings(body: EmbeddingRequest, request: Request, context: Context) -> Response:
    """A vector for each input."""
    found = await embed(
        request,
        context,
        body.options("embd"),
        body.input,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        input_type=body.input_type,
        add_special_tokens=body.add_special_tokens is not False,
    )
    is_base64 = body.encoding_format == "base64"
    entries = (
        {"object": "embedding", "index": index, "embedding": _base64(vector) if is_base64 else vector.tolist()}
        for index, vector in enumerate(found.values)
    )
    answer = {**_list_head(found), "data": entries, "usage": found.usage}
    content = await turn_of(request).in_thread(lambda: encode_in_pieces(answer, "data"))
    return Response(content, headers=found.headers, media_type="application/json")


def _list_head(answer: PoolingAnswer[Any]) -> dict[str, Any]:
    """An answer's members without its entries."""
    return {"id": answer.response_id, "object": "list", "created": int(time.time()), "model": answer.model_name}


def _base64(vector: FloatArray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _as_text(value: Any) -> Any:
    """A text, or an object with nothing but one (null members aside), as Jina and Cohere's first version have
    documents."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        unread = [name for name, content in value.items() if name != "text" and content is not None]
        if unread:
            raise ValueError(f"{unread[0][:100]!r} would not be read, only text is; move it there, or leave it out")
        return value["text"]
    if not isinstance(value, str):
        raise ValueError('must be a text, or an object like {"text": "..."}; only text is read')
    return value


def _as_texts(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Text = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any])]
Texts = Annotated[list[Text], FIRST_ERROR, Field(min_length=1), at_most(MAX_INPUTS, "texts")]
OneOrMoreTexts = Annotated[Texts, BeforeValidator(_as_texts, json_schema_input_type=Texts | str)]


class RerankRequest(PoolingFields):
    """All fields of a rerank request that mean something here."""

    query: Text
    documents: Texts
    top_n: Int | None = Field(None, ge=0)
    return_documents: Bool | None = None
    instruction: str | None = None

    rank_fields: Annotated[Any, Refused(([], ["text"]), "send each document's text")] = None
    max_chunks_per_doc: Annotated[Any, Refused((), "use truncate_prompt_tokens")] = None
    max_tokens_per_doc: Annotated[Any, Refused((), "use truncate_prompt_tokens")] = None


class ScoreRequest(PoolingFields):
    """Two lists of texts, one text of each for a pair."""

    text_1: OneOrMoreTexts = Field(validation_alias=AliasChoices("text_1", "queries"))
    text_2: OneOrMoreTexts = Field(validation_alias=AliasChoices("text_2", "documents"))
    instruction: str | None = None


@router.post("/v1/rerank", tags=["rerank"], response_model=dict[str, Any])
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def create_rerank(body: RerankRequest, request: Request, context: Context) -> Response:
    """The documents in the order of their relevance to a query, the best first."""
    pairs = [(body.query, document) for document in body.documents]
    found = await score(request, context, body.options("rerank"), pairs, ("query", "documents[{}]"), body.instruction)
    content = await turn_of(request).in_thread(lambda: to_json(_ranking(body, found)))
    return Response(content, headers=found.headers, media_type="application/json")


def _ranking(body: RerankRequest, found: PoolingAnswer[float]) -> dict[str, Any]:
    order = sorted(range(len(found.values)), key=lambda index: -found.values[index])[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": found.values[index]} for index in order]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]]}
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return {
        "id": found.response_id,
        "model": found.model_name,
        "results": results,
        "usage": found.usage,
        "meta": meta,
    }


@router.post("/v1/score", tags=["rerank"], response_model=dict[str, Any])
@router.post("/score", include_in_schema=False)
async def create_score(body: ScoreRequest, request: Request, context: Context) -> Response:
    """A score for each pair of texts, in their order."""
    pairs, paths = pair_up(body.text_1, body.text_2)
    found = await score(request, context, body.options("score"), pairs, paths, body.instruction)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(found.values)]
    return JSONResponse({**_list_head(found), "data": data, "usage": found.usage}, headers=found.headers)
