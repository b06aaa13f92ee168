"""POST /api/chat; POST /api/generate: one prompt, as a chat of one message, or raw; POST /api/embed, and its older form
/api/embeddings.

Ollama's messages become OpenAI's, which have other places for images and thoughts, and ids for calls.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from mlx_server.api.answers import vectors
from mlx_server.api.answers.chat_plan import ChatCall, ToolUse
from mlx_server.api.answers.generation import Plan, Prompt
from mlx_server.api.answers.vectors import MAX_INPUTS, PoolingAnswer, PoolingOptions
from mlx_server.api.context import Context, ServerContext
from mlx_server.api.http.body import AnyTypeTurnRoute
from mlx_server.api.http.request_bounds import BOUNDED_TOOLS, FIRST_ERROR, Strings, at_most
from mlx_server.api.http.sse import openapi_responses
from mlx_server.api.http.text_turns import encode_in_pieces, turn_of
from mlx_server.api.ollama.output import NDJSON, AnswerWriter, chat_members, nanoseconds, text_members, timestamp
from mlx_server.api.ollama.request import (
    ERROR_RESPONSES,
    NOT_ENFORCED_HEADER,
    KeepAlive,
    OllamaCall,
    OllamaFields,
    find_name,
    keep_model,
    open_call,
    unload,
)
from mlx_server.api.openai.chat import Messages, Tool, tool_use
from mlx_server.api.openai.completions import CompletionRequest, plan_text
from mlx_server.api.openai.fields import Bool, Int, Ints, Refused
from mlx_server.engine.embeddings import FloatArray, InputTruncation
from mlx_server.engine.text.tokenizer import check_ids
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.engine.vision.seeing import SeeingModel
from mlx_server.errors import InvalidRequestError


class ChatRequest(OllamaFields):
    """The body of POST /api/chat. Without messages, the model is loaded, or unloaded with `keep_alive` 0."""

    messages: Messages | None = None
    tools: Annotated[list[Tool], FIRST_ERROR, BOUNDED_TOOLS] | None = None

    def call(self, images: ImageParts | None) -> ChatCall:
        """If the last message is an answer, the model continues it. Raises `InvalidRequestError`."""
        messages = _openai_messages(self.messages or ())
        last = messages[-1]
        continues = last.get("role") == "assistant" and not last.get("tool_calls")
        return self.chat(messages, images, tool_use(self.tools, None), continues=continues)

    def sent_at(self, message: int, part: int) -> str:
        """Where the client sent a part of the messages that `call` makes."""
        where, images = f"messages[{message}]", (self.messages or ())[message].get("images")
        if not images:
            return f"{where}.content[{part}]"
        return f"{where}.content" if part == len(images) else f"{where}.images[{part}]"


class GenerateRequest(OllamaFields):
    """The body of POST /api/generate. Without a prompt, the model is loaded, or unloaded with `keep_alive` 0."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: Bool | None = None
    context: Ints | None = None
    images: Strings | None = None
    template: Annotated[Any, Refused(("",), "the model's own is used; send the whole prompt with raw: true")] = None

    def check(self) -> None:
        super().check()
        if self.is_text and (self.system or self.context or self.images):
            what = "raw" if self.raw else "suffix"
            raise InvalidRequestError(f"{what} takes no system, context or images: the prompt is sent as it is.", what)
        if self.raw and self.think:
            raise InvalidRequestError("raw takes no think: reasoning is not split from raw text.", "think")

    @property
    def is_text(self) -> bool:
        """Whether the prompt is not put into the model's chat template."""
        return bool(self.raw or self.suffix)

    def call(self, images: ImageParts | None) -> ChatCall:
        """A chat of one message, after the system's if there is one. Raises `InvalidRequestError`."""
        messages: list[Any] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": _content_of(self.prompt, self.images)})
        return self.chat(messages, images, ToolUse(), continues=False)

    def sent_at(self, message: int, part: int) -> str:
        """Where the client sent a part of the messages that `call` makes: they are all images."""
        return f"images[{part}]"

    def text_request(self) -> CompletionRequest:
        """The same as a text completion. Raises `InvalidRequestError`."""
        bounds = {name: getattr(self, name) for name in ("truncate_prompt_tokens", "truncation_side")}
        return CompletionRequest.model_validate({"prompt": self.prompt or "", "suffix": self.suffix, **bounds})


router = APIRouter(tags=["ollama"], route_class=AnyTypeTurnRoute, responses=ERROR_RESPONSES)


@router.post("/api/chat", responses=openapi_responses("model", "created_at", "message", "done", media_type=NDJSON))
async def chat(body: ChatRequest, request: Request, context: Context) -> Response:
    """A chat, streamed unless `stream` is false."""
    if not body.messages:
        return await _load_or_unload(body, request, context, chat_members())
    call = await open_call(body, request, context)
    plan = await _plan(body, call)
    return call.finish(await call.exchange.answer(plan, AnswerWriter(call, chat_members)))


async def _load_or_unload(
    body: OllamaFields, request: Request, context: ServerContext, shown: dict[str, Any]
) -> Response:
    """The answer to a request without messages or prompt: it loads the model, or unloads it with `keep_alive` 0."""

    def answer(name: str, reason: str) -> Response:
        return JSONResponse({"model": name, "created_at": timestamp(), **shown, "done": True, "done_reason": reason})

    if body.keep_alive == 0:
        return answer(await unload(body, request, context), "unload")
    call = await open_call(body, request, context)
    return call.finish(answer(call.name, "load"))


_PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")


async def _plan(body: ChatRequest | GenerateRequest, call: OllamaCall) -> Plan:
    """Plans a chat. Raises `ServeError`, also if a model is asked to think and cannot; errors name images where the
    client sent them."""
    try:
        plan = await call.exchange.plan(body.call)
    except InvalidRequestError as error:
        place = _PART.match(error.param or "")
        if place is None:
            raise
        sent_at = body.sent_at(int(place[1]), int(place[2]))
        raise InvalidRequestError(error.message.replace(place[0], sent_at)) from error
    if body.think and plan.reasoning is None:
        raise InvalidRequestError(
            f'"{call.name}" does not support thinking. Leave think out, or set it to false.', "think"
        )
    return plan


@router.post("/api/generate", responses=openapi_responses("model", "created_at", "response", "done", media_type=NDJSON))
async def generate(body: GenerateRequest, request: Request, context: Context) -> Response:
    """The answer to a prompt, streamed unless `stream` is false."""
    if not body.prompt and not body.suffix:
        return await _load_or_unload(body, request, context, text_members())
    call = await open_call(body, request, context)
    exchange = call.exchange
    if body.is_text:
        plan = await plan_text(exchange, body.text_request())
        writer = AnswerWriter(call, text_members)
    else:
        _check_context(body.context or (), exchange.engine.vision)
        plan = await _plan(body, call)
        check_ids("context", body.context or (), exchange.engine.grammars.vocab_size)
        prompt = _after(body.context or (), plan.prompts[0])
        plan = replace(plan, prompts=(prompt,))
        writer = AnswerWriter(call, text_members, prompt)
    return call.finish(await exchange.answer(plan, writer))


def _check_context(context: Sequence[int], model: SeeingModel | None) -> None:
    """Raises `InvalidRequestError` for a context with places of images: it does not have the images themselves."""
    if model is not None and model.image_token_id in context:
        place = f"context[{context.index(model.image_token_id)}]"
        raise InvalidRequestError(
            f"{place} is the token of an image, and a context does not keep images. Leave context out, or send the "
            "conversation with its images to /api/chat.",
            place,
        )


def _after(context: Sequence[int], prompt: Prompt) -> Prompt:
    """A prompt after the token ids of an earlier exchange."""
    images = tuple(replace(image, start=image.start + len(context)) for image in prompt.images)
    return Prompt((*context, *prompt.token_ids), images=images)


def _openai_messages(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies in OpenAI's form. Other members stay as they are; they are checked where OpenAI's messages are.

    Calls may come without ids; results then name the tool, or nothing, and belong to the first call of that tool that
    has no result. Ids made here depend on the chat alone, so that prompts that begin alike stay alike: the third call
    of a chat is `call00003`. Some templates take only ids of nine characters."""
    ids = _CallIds()
    return [_openai_message(message, ids, f"messages[{index}]") for index, message in enumerate(messages)]


class _CallIds:
    """Ids of calls. `waiting` has the tool of each call without a result yet, by the call's id."""

    def __init__(self) -> None:
        self.waiting: dict[str, str] = {}
        self._num_calls = 0

    def add(self, call_id: Any, name: str) -> str:
        self._num_calls += 1
        known = call_id if isinstance(call_id, str) and call_id else f"call{self._num_calls:05}"
        self.waiting[known] = name
        return known

    def take(self, name: Any) -> tuple[str, str] | None:
        """Id and tool of the call that a result without an id belongs to: the first of the tool `name`, else the first
        of any; None if no call waits for a result."""
        calls = self.waiting.items()
        found = next((call for call in calls if call[1] == name), None) or next(iter(calls), None)
        if found is not None:
            del self.waiting[found[0]]
        return found


def _openai_message(message: dict[str, Any], ids: _CallIds, where: str) -> dict[str, Any]:
    copy = {key: value for key, value in message.items() if value is not None}
    if isinstance(copy.get("role"), str):
        copy["role"] = copy["role"].lower()
    if "thinking" in copy:
        copy["reasoning"] = copy.pop("thinking")
    if images := copy.pop("images", None):
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise InvalidRequestError(f"{where}.images must be a list of base64 strings or URLs.", f"{where}.images")
        copy["content"] = _content_of(copy.get("content") or "", images)
    if isinstance(copy.get("tool_calls"), list):
        copy["tool_calls"] = [_openai_call(call, ids) for call in copy["tool_calls"]]
    if copy.get("role") == "tool":
        _name_result(copy, ids)
    elif not copy.get("tool_calls"):
        ids.waiting.clear()  # calls that no result has followed get none
    return copy


def _content_of(text: Any, images: Sequence[str] | None) -> Any:
    """Images and then a text, as OpenAI's parts."""
    if not images:
        return text
    pictures = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [*pictures, *([{"type": "text", "text": text}] if text else [])]


def _openai_call(call: Any, ids: _CallIds) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return call
    return {**call, "id": ids.add(call.get("id"), function["name"]), "type": "function"}


def _name_result(message: dict[str, Any], ids: _CallIds) -> None:
    """Gives a result the id of its call, and the tool's name, which some templates need."""
    name = message.pop("tool_name", None) or message.get("name")
    if own_id := message.get("tool_call_id"):
        ids.waiting.pop(str(own_id), None)
    elif found := ids.take(name):
        message["tool_call_id"] = found[0]
        name = name or found[1]
    if name:
        message["name"] = name


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


@router.post("/api/embed", response_model=dict[str, Any])
async def embed(body: EmbedRequest, request: Request, context: Context) -> Response:
    """Vectors of one text or several."""
    started_s = time.monotonic()
    texts = [body.input] if isinstance(body.input, str) else body.input
    truncation = InputTruncation(None if body.truncate is False else -1, asked_by="truncate: true")
    found = await _embed(body, request, context, texts, truncation, dimensions=body.dimensions or None)
    answer = {
        "model": body.model or "",
        "embeddings": (vector.tolist() for vector in found.values),
        "total_duration": nanoseconds(time.monotonic() - started_s),
        "load_duration": nanoseconds(found.load_s),
        "prompt_eval_count": found.num_prompt_tokens,
    }
    content = await turn_of(request).in_thread(lambda: encode_in_pieces(answer, "embeddings"))
    return Response(content, headers=found.headers, media_type="application/json")


@router.post("/api/embeddings", response_model=dict[str, list[float]])
async def embeddings(body: EmbeddingsRequest, request: Request, context: Context) -> Response:
    """The vector of one text."""
    found = await _embed(body, request, context, [body.prompt], InputTruncation(-1), name="prompt")
    content = encode_in_pieces({"embedding": found.values[0].tolist()})
    return Response(content, headers=found.headers, media_type="application/json")


async def _embed(
    body: _EmbedFields,
    request: Request,
    context: ServerContext,
    texts: list[str],
    truncation: InputTruncation,
    **more: Any,
) -> PoolingAnswer[FloatArray]:
    model = await find_name(context.pool, body.model)
    found = await vectors.embed(request, context, PoolingOptions(model=model, truncation=truncation), texts, **more)
    is_kept = keep_model(context.pool, model, body.keep_alive, request)
    return found if is_kept else replace(found, headers={**found.headers, NOT_ENFORCED_HEADER: "keep_alive"})
