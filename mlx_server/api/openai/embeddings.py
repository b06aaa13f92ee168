"""POST /v1/embeddings: OpenAI's shape, with vLLM's fields beside it."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, WithJsonSchema
from pydantic_core import to_json
from starlette.responses import Response

from mlx_server.api.answers.vectors import MAX_INPUTS, EmbeddingAsk, Embeddings, PoolingAnswer, embed
from mlx_server.api.context import Context
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.text_turns import turn_of
from mlx_server.api.openai.document import TEXT, TOKEN_IDS, either, list_of
from mlx_server.api.openai.fields import Bool, Int, Refused, RequestId, are_all
from mlx_server.engine.embeddings import FloatArray, InputTruncation


def _as_inputs(value: Any) -> Any:
    """One input or several, as text or token ids, becomes a list of inputs."""
    if isinstance(value, str) or (isinstance(value, list) and value and are_all(value, int)):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if len(value) > MAX_INPUTS:
        raise ValueError(f"has {len(value)} inputs; at most {MAX_INPUTS} are taken at a time, send several requests")
    if are_all(value, str) or (are_all(value, list) and all(are_all(item, int) for item in value)):
        return value
    raise ValueError("must have inputs of one kind: strings, or lists of token ids")


Inputs = Annotated[
    list[str] | list[list[int]],
    SkipValidation,
    BeforeValidator(_as_inputs),
    WithJsonSchema(
        either(
            TEXT,
            list_of(TEXT, minItems=1, maxItems=MAX_INPUTS),
            TOKEN_IDS,
            list_of(TOKEN_IDS, minItems=1, maxItems=MAX_INPUTS),
        )
    ),
]


class PoolingFields(BaseModel):
    """What the routes for vectors and scores have in common. Every field may be null."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    truncate_prompt_tokens: Int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    priority: Int | None = None
    request_id: RequestId | None = None
    rid: RequestId | None = None

    def asked(self) -> dict[str, Any]:
        """What all of these routes' requests ask, as `PoolingAsk` has it."""
        return {
            "model": self.model,
            "truncation": InputTruncation(self.truncate_prompt_tokens, self.truncation_side or "right"),
            "priority": self.priority,
            "request_id": self.rid if self.request_id is None else self.request_id,
        }


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


router = APIRouter(tags=["embeddings"], route_class=TurnRoute)


@router.post("/v1/embeddings", response_model=dict[str, Any])
async def create_embeddings(body: EmbeddingRequest, request: Request, context: Context) -> Response:
    """A vector for each input."""
    ask = EmbeddingAsk(
        inputs=body.input,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        input_type=body.input_type,
        add_special_tokens=body.add_special_tokens is not False,
        **body.asked(),
    )
    found = await embed(request, context, ask)
    is_base64 = body.encoding_format == "base64"
    content = await turn_of(request).in_thread(lambda: b"".join(_pieces(found, is_base64)))
    return Response(content, headers=found.answer.headers, media_type="application/json")


def _pieces(found: Embeddings, is_base64: bool) -> Iterator[bytes]:
    """The answer, a vector a piece: in between, the interpreter goes on with the streams of others."""
    yield to_json(list_head(found.answer))[:-1] + b',"data":['
    for index, vector in enumerate(found.vectors):
        yield b'%s{"object":"embedding","index":%d,"embedding":%s}' % (
            b"," if index else b"",
            index,
            _written(vector, is_base64),
        )
    yield b'],"usage":' + to_json(found.answer.usage) + b"}"


def list_head(answer: PoolingAnswer) -> dict[str, Any]:
    """What stands before the entries of a list."""
    return {"id": answer.response_id, "object": "list", "created": int(time.time()), "model": answer.model_name}


def _written(vector: FloatArray, is_base64: bool) -> bytes:
    if is_base64:
        return b'"' + base64.b64encode(vector.astype("<f4").tobytes()) + b'"'
    return to_json(vector.tolist(), inf_nan_mode="null")
