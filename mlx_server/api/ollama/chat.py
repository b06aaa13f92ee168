"""POST /api/chat."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import JSONResponse, Response

from mlx_server.api.answers.chat_plan import ChatCall, ChatPlan
from mlx_server.api.context import Context
from mlx_server.api.http.body import AnyTypeTurnRoute
from mlx_server.api.http.request_bounds import BOUNDED_MESSAGES, BOUNDED_TOOLS, FIRST_ERROR
from mlx_server.api.http.sse import whole_or_streamed
from mlx_server.api.ollama.fields import ERROR_RESPONSES, OllamaFields
from mlx_server.api.ollama.messages import openai_messages
from mlx_server.api.ollama.opening import OllamaCall, open_call, unload
from mlx_server.api.ollama.output import NDJSON, ChatWriter, message_body, timestamp
from mlx_server.api.openai.chat import tool_use
from mlx_server.api.openai.document import NULL, STRING, either, list_of, members
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.errors import InvalidRequestError

_CALL = members("function", function=members("name", name=STRING, arguments={"type": ["object", "null"]}))
_Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        members(
            "role",
            role=STRING,
            content=either(STRING, NULL),
            thinking=either(STRING, NULL),
            images=either(list_of(STRING), NULL),
            tool_calls=either(list_of(_CALL), NULL),
            tool_name=either(STRING, NULL),
        )
    ),
]
_Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        members("function", function=members("name", name={**STRING, "minLength": 1}, parameters={"type": "object"}))
    ),
]


class ChatRequest(OllamaFields):
    """The body of POST /api/chat. Without messages, the model is loaded, or unloaded with `keep_alive` 0."""

    messages: Annotated[list[_Message], FIRST_ERROR, BOUNDED_MESSAGES] | None = Field(None)
    tools: Annotated[list[_Tool], FIRST_ERROR, BOUNDED_TOOLS] | None = None

    def call(self, images: ImageParts | None) -> ChatCall:
        """The chat without what concerns sampling; an answer that is the last message is gone on with. Raises
        `InvalidRequestError`."""
        messages = openai_messages(self.messages or ())
        last = messages[-1]
        continues = last.get("role") == "assistant" and not last.get("tool_calls")
        return ChatCall(
            messages=messages if images is None else images.mark_messages(messages),
            tool_use=tool_use(self.tools or None, None, is_parallel=True),
            options=self.chat_options(continues=continues),
            structured=self.structured(),
            truncation=self.prompt_truncation,
            has_open_schemas=bool(self.open_schemas),
        )


router = APIRouter(tags=["ollama"], route_class=AnyTypeTurnRoute, responses=ERROR_RESPONSES)


@router.post("/api/chat", responses=whole_or_streamed("model", "created_at", "message", "done", media_type=NDJSON))
async def chat(body: ChatRequest, request: Request, context: Context) -> Response:
    """A chat, streamed unless `stream` is false."""
    if not body.messages and body.keep_alive == 0:
        return nothing_said(await unload(body, request, context), "unload", {"message": message_body()})
    call = await open_call(body, request, context)
    if not body.messages:
        return call.finish(nothing_said(call.name, "load", {"message": message_body()}))
    plan = await call.exchange.plan(body.call)
    check_thinks(body, call, plan)
    writer = ChatWriter(call)
    sampling = body.sampling(call.exchange.engine.default_sampling)
    job = call.exchange.chat_job(plan, sampling, writer.response_id)
    return call.finish(await call.exchange.answer(job, writer, writer.keep_alive, NDJSON))


def nothing_said(name: str, reason: str, shown: dict[str, Any]) -> Response:
    """The answer to a request that only loads or unloads the model."""
    return JSONResponse({"model": name, "created_at": timestamp(), **shown, "done": True, "done_reason": reason})


def check_thinks(body: OllamaFields, call: OllamaCall, plan: ChatPlan) -> None:
    """Raises `InvalidRequestError` for a model that is to think and cannot."""
    if body.think and not plan.can_reason:
        raise InvalidRequestError(
            f'"{call.name}" does not support thinking. Leave think out, or set it to false.', "think"
        )
