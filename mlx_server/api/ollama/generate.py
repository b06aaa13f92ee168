"""POST /api/generate: one prompt, as a chat of one message, or raw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_server.api.answers.chat_plan import ChatCall
from mlx_server.api.answers.generation import GenerationJob, Prompt
from mlx_server.api.context import Context
from mlx_server.api.http.body import AnyTypeTurnRoute
from mlx_server.api.http.request_bounds import Strings
from mlx_server.api.http.sse import whole_or_streamed
from mlx_server.api.ollama.chat import check_thinks, nothing_said
from mlx_server.api.ollama.fields import ERROR_RESPONSES, OllamaFields
from mlx_server.api.ollama.messages import content_of
from mlx_server.api.ollama.opening import OllamaCall, open_call, unload
from mlx_server.api.ollama.output import NDJSON, TextWriter
from mlx_server.api.openai.completions import CompletionRequest, plan_text
from mlx_server.api.openai.fields import Bool, Ints, Refused
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.errors import InvalidRequestError


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
            raise InvalidRequestError("raw takes no think: nothing is looked for in the text.", "think")

    @property
    def is_text(self) -> bool:
        """Whether the prompt is not put into the model's chat template."""
        return bool(self.raw or self.suffix)

    def call(self, images: ImageParts | None) -> ChatCall:
        """The chat without what concerns sampling. Raises `InvalidRequestError`."""
        messages: list[Any] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": content_of(self.prompt, self.images)})
        return ChatCall(
            messages=messages if images is None else images.mark_messages(messages),
            options=self.chat_options(continues=False),
            structured=self.structured(),
            truncation=self.prompt_truncation,
            has_open_schemas=bool(self.open_schemas),
        )

    def text_request(self) -> CompletionRequest:
        """The same as a text completion, which is what a raw prompt is. Raises `InvalidRequestError`."""
        bounds = {name: getattr(self, name) for name in ("truncate_prompt_tokens", "truncation_side")}
        return CompletionRequest.model_validate({"prompt": self.prompt or "", "suffix": self.suffix, **bounds})


router = APIRouter(tags=["ollama"], route_class=AnyTypeTurnRoute, responses=ERROR_RESPONSES)


@router.post("/api/generate", responses=whole_or_streamed("model", "created_at", "response", "done", media_type=NDJSON))
async def generate(body: GenerateRequest, request: Request, context: Context) -> Response:
    """The answer to a prompt, streamed unless `stream` is false."""
    if not body.prompt and not body.suffix and body.keep_alive == 0:
        return nothing_said(await unload(body, request, context), "unload", {"response": ""})
    call = await open_call(body, request, context)
    if not body.prompt and not body.suffix:
        return call.finish(nothing_said(call.name, "load", {"response": ""}))
    writer, job = await (_text_job if body.is_text else _chat_job)(body, call)
    return call.finish(await call.exchange.answer(job, writer, writer.keep_alive, NDJSON))


async def _chat_job(body: GenerateRequest, call: OllamaCall) -> tuple[TextWriter, GenerationJob]:
    plan = await call.exchange.plan(body.call)
    check_thinks(body, call, plan)
    prompt = _behind(body.context or (), plan.prompt)
    writer = TextWriter(call, prompt)
    sampling = body.sampling(call.exchange.engine.default_sampling)
    return writer, replace(call.exchange.chat_job(plan, sampling, writer.response_id), prompts=[prompt])


def _behind(context: Sequence[int], prompt: Prompt) -> Prompt:
    """A prompt behind the ids of an earlier exchange."""
    images = tuple(replace(image, start=image.start + len(context)) for image in prompt.images)
    return Prompt((*context, *prompt.token_ids), images=images)


async def _text_job(body: GenerateRequest, call: OllamaCall) -> tuple[TextWriter, GenerationJob]:
    plan = await plan_text(call.exchange, body.text_request())
    writer = TextWriter(call, None)
    sampling = body.sampling(call.exchange.engine.default_sampling)
    return writer, plan.job(call.exchange, sampling, writer.response_id)
