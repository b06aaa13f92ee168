"""POST /v1/rerank and /v1/score: which documents fit a query, in the shapes of Jina and Cohere as vLLM answers them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from mlx_server.api.answers.vectors import MAX_INPUTS, ScoreAsk, Scores, score
from mlx_server.api.context import Context
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import FIRST_ERROR, at_most
from mlx_server.api.http.text_turns import turn_of
from mlx_server.api.openai.embeddings import PoolingFields, list_head
from mlx_server.api.openai.fields import Bool, Int, Refused
from mlx_server.engine.embeddings import pair_up
from mlx_server.errors import InvalidRequestError


def _as_text(value: Any) -> Any:
    """A text, or an object with nothing but one, as Jina and Cohere's first version have documents."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
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
    """`text_1` with `text_2`, or the same as `queries` and `documents`."""

    text_1: OneOrMoreTexts | None = None
    text_2: OneOrMoreTexts | None = None
    queries: OneOrMoreTexts | None = None
    documents: OneOrMoreTexts | None = None
    instruction: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        """Of the fields that are used."""
        return ("queries", "documents") if self.text_1 is None and self.text_2 is None else ("text_1", "text_2")

    def pairs(self) -> list[tuple[str, str]]:
        """Raises `InvalidRequestError`."""
        firsts, seconds = (getattr(self, name) for name in self.names)
        for name, texts in zip(self.names, (firsts, seconds)):
            if texts is None:
                raise InvalidRequestError(f"{name} is missing: send text_1 and text_2, or queries and documents.", name)
        return pair_up(firsts, seconds, self.names)


router = APIRouter(tags=["rerank"], route_class=TurnRoute)


@router.post("/v1/rerank", response_model=dict[str, Any])
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def create_rerank(body: RerankRequest, request: Request, context: Context) -> Response:
    """The documents in the order of their relevance to a query, the best first."""
    pairs = [(body.query, document) for document in body.documents]
    names = ("query", "documents")
    ask = ScoreAsk(pairs=pairs, names=names, instruction=body.instruction, prefix="rerank", **body.asked())
    found = await score(request, context, ask)
    content = await turn_of(request).in_thread(lambda: b"".join(_pieces(body, found)))
    return Response(content, headers=found.answer.headers, media_type="application/json")


def _pieces(body: RerankRequest, found: Scores) -> Iterator[bytes]:
    """The answer, a document a piece: in between, the interpreter goes on with the streams of others."""
    order = sorted(range(len(found.scores)), key=lambda index: -found.scores[index])[: body.top_n or None]
    yield to_json({"id": found.answer.response_id, "model": found.answer.model_name})[:-1] + b',"results":['
    for place, index in enumerate(order):
        result: dict[str, Any] = {"index": index, "relevance_score": found.scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": body.documents[index]}
        yield (b"," if place else b"") + to_json(result)
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    yield b'],"usage":' + to_json(found.answer.usage) + b',"meta":' + to_json(meta) + b"}"


@router.post("/v1/score", response_model=dict[str, Any])
@router.post("/score", include_in_schema=False)
async def create_score(body: ScoreRequest, request: Request, context: Context) -> Response:
    """A score for each pair of texts, in their order."""
    ask = ScoreAsk(pairs=body.pairs(), names=body.names, instruction=body.instruction, prefix="score", **body.asked())
    found = await score(request, context, ask)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(found.scores)]
    answer = found.answer
    return JSONResponse({**list_head(answer), "data": data, "usage": answer.usage}, headers=answer.headers)
