"""Ollama's requests: common fields, `options`, model names, and `keep_alive`.

OpenAI's sampling fields work at the top level, beside Ollama's own; `options` take precedence. Null means "not given".

A name is first looked up as it is, then without `hf.co/` before it and the tag `:latest` after it, then without regard
to case. Models are listed with a tag, as Ollama's clients expect: `smollm2:latest`.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Request
from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, WithJsonSchema
from starlette.responses import Response

from mlx_server.api.answers.chat_plan import ChatCall, ToolUse
from mlx_server.api.auth.authentication import caller_of, require_admin
from mlx_server.api.context import ServerContext
from mlx_server.api.errors import error_responses
from mlx_server.api.http.request_bounds import check_name
from mlx_server.api.openai.document import STRING, either
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.api.openai.fields import Bool, Int, Number, OneAnswerOfText, Penalty, Refused, StopStrings
from mlx_server.engine.fair_slots import shielded
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.pool.catalog import LATEST_TAG
from mlx_server.pool.model_pool import ModelPool
from mlx_server.sampling_params import MAX_LOGPROBS, MAX_TOP_K, SamplingParams

NOT_ENFORCED_HEADER = "x-options-not-enforced"
"""Fields of the request that the answer does not keep to; see docs/ollama.md."""

_HUBS = ("hf.co/", "huggingface.co/")

THINK_LEVELS = ("low", "medium", "high", "max")

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_MAX_DURATION_CHARS = 64

_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""The penalties' neutral values."""


def duration_s(value: Any) -> float:
    """Ollama's durations in seconds: a number, or a text like `300`, `5m` or `1h30m`. Negative means forever:
    infinity. Raises `ValueError`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.inf if value < 0 or value > sys.float_info.max else float(value)
    if isinstance(value, str) and len(value) <= _MAX_DURATION_CHARS:
        text = value.removeprefix("-")
        is_negative = text != value
        if re.fullmatch(r"\d+(?:\.\d+)?", text):
            return math.inf if is_negative else float(text)
        if _DURATION.fullmatch(text):
            return math.inf if is_negative else sum(float(n) * _UNIT_S[unit] for n, unit in _PART.findall(text))
    raise ValueError("must be a number of seconds, or a duration like 5m, 1h30m, 0 or -1")


KeepAlive = Annotated[
    float,
    BeforeValidator(duration_s),
    WithJsonSchema(either({"type": "number"}, {**STRING, "pattern": r"^-?([0-9]+(\.[0-9]+)?(ms|s|m|h)){1,3}$"})),
]


def _think(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value in THINK_LEVELS:
        return value
    raise ValueError(f"must be a boolean, or one of {', '.join(THINK_LEVELS)}")


def default_true(value: Any) -> Any:
    return True if value is None else value


def _none_if_empty(value: Any) -> Any:
    return None if value == "" else value


def _integer(value: Any) -> Any:
    """Cuts fractions off, as Ollama does."""
    if isinstance(value, bool | str):
        raise ValueError("must be an integer")
    return int(value) if isinstance(value, float) and math.isfinite(value) else value


Integer = Annotated[int, BeforeValidator(_integer), WithJsonSchema({"type": "integer"})]


class Options(BaseModel):
    """`options`. Those that only say how a machine computes (`num_gpu`, `num_thread` ...) are ignored."""

    num_predict: Integer | None = None
    num_ctx: Integer | None = None
    temperature: Number | None = Field(None, ge=0, le=100)
    top_k: Integer | None = Field(None, le=MAX_TOP_K)
    top_p: Number | None = Field(None, ge=0)
    min_p: Number | None = Field(None, ge=0, le=1)
    seed: Integer | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopStrings | None = None
    repeat_penalty: Penalty | None = None
    repeat_last_n: Integer | None = Field(None, ge=-1)
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    typical_p: Annotated[Any, Refused((1,))] = None
    mirostat: Annotated[Any, Refused((0,))] = None

    def applied_to(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with the given options. Raises `InvalidRequestError` for values out of range."""
        given = {name: value for name, value in self._changes() if value is not None}
        if self.repeat_last_n == 0:
            given |= _PENALTIES
        return replace(sampling, **given)

    def _changes(self) -> Iterator[tuple[str, Any]]:
        for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty"):
            yield name, getattr(self, name)
        yield "repetition_penalty", self.repeat_penalty
        yield "top_k", None if self.top_k is None else max(self.top_k, 0)
        yield "top_p", None if self.top_p is None else min(self.top_p, 1.0)
        yield "seed", None if self.seed == -1 else self.seed
        yield "stop", None if self.stop is None else tuple(self.stop)
        yield "max_tokens", self.num_predict if (self.num_predict or 0) > 0 else None

    def not_enforced(self, sampling: SamplingParams, max_model_len: int) -> Iterator[str]:
        """The options that are not kept to: a context beyond the model's, and penalties over a part of the text."""
        if (self.num_ctx or 0) > max_model_len:
            yield "num_ctx"
        if (self.repeat_last_n or 0) > 0 and sampling.has_penalties:
            yield "repeat_last_n"


class OllamaFields(OneAnswerOfText):
    """The common fields of chats and completions."""

    stream: Annotated[Bool, BeforeValidator(default_true)] = True
    options: Options | None = None
    format: Annotated[Any, BeforeValidator(_none_if_empty)] = None
    keep_alive: KeepAlive | None = None
    think: Annotated[Any, BeforeValidator(_think), WithJsonSchema({"enum": [None, True, False, *THINK_LEVELS]})] = None
    logprobs: Bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        sampling = super().sampling(defaults)
        return sampling if self.options is None else self.options.applied_to(sampling)

    def chat(
        self, messages: Sequence[dict[str, Any]], images: ImageParts | None, tools: ToolUse, *, continues: bool
    ) -> ChatCall:
        """The chat of OpenAI's messages, without sampling parameters. If it `continues`, the last message is the
        beginning of the answer. Without `think`, the model's template decides whether it reasons. Raises
        `InvalidRequestError`."""
        is_switch = isinstance(self.think, bool)
        return ChatCall(
            messages=messages if images is None else images.mark_messages(messages),
            tool_use=tools,
            options=ChatOptions(
                continue_final_message=continues,
                template_kwargs={"enable_thinking": self.think} if is_switch else {},
                reasoning_effort=None if is_switch else self.think,
            ),
            structured=self.structured(),
            truncation=self.prompt_truncation,
            has_open_schemas=bool(self.open_schemas),
        )


class ModelBody(BaseModel):
    """The body of routes about one model; older clients call the field `name`."""

    model: str = Field(min_length=1, validation_alias=AliasChoices("model", "name"))


class OllamaError(BaseModel):
    error: str


ERROR_RESPONSES = error_responses(OllamaError)


def listed(name: str) -> str:
    """A model's name for Ollama's clients."""
    return name if ":" in name else f"{name}{LATEST_TAG}"


def plain(name: str) -> str:
    """A name without the parts that only Ollama's clients write."""
    for hub in _HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(LATEST_TAG)


async def find_name(pool: ModelPool, name: str | None) -> str | None:
    """The served name of the model that a client means, or its plain name if there is none; None is the default model.
    Raises `InvalidRequestError` for a name that is too long."""
    check_name(name)
    if not name:
        return None
    for form in dict.fromkeys((name, plain(name))):
        offer = pool.look_up(form)
        if offer is not None:
            return offer.name
    wanted = plain(name).lower()
    offers = await pool.offered()
    return next((offer.name for offer in offers for ours in offer.names if ours.lower() == wanted), plain(name))


@dataclass(frozen=True, slots=True)
class OllamaCall:
    """An open exchange. `name` is the model's as the client wrote it; the exchange was open after `load_s`, loading
    included."""

    exchange: Exchange
    name: str
    started_s: float
    load_s: float
    is_kept: bool
    """False if the request has a `keep_alive` that the caller may not set, or that the model does not take."""

    def finish(self, response: Response) -> Response:
        """The answer with the header for fields that it does not keep to."""
        body = self.exchange.body
        assert isinstance(body, OllamaFields)
        notes = [] if self.is_kept else ["keep_alive"]
        if body.options is not None:
            notes += body.options.not_enforced(self.exchange.sampling, self.exchange.engine.max_model_len)
        if notes:
            response.headers[NOT_ENFORCED_HEADER] = ", ".join(notes)
        return response


async def open_call(body: OllamaFields, request: Request, context: ServerContext) -> OllamaCall:
    """Raises what `open_exchange` raises."""
    started_s, asked = time.monotonic(), body.model
    body.model = await find_name(context.pool, asked)
    exchange = await open_exchange(body, request, context)
    is_kept = keep_model(context.pool, body.model, body.keep_alive, request)
    return OllamaCall(exchange, asked or exchange.model_name, started_s, time.monotonic() - started_s, is_kept)


def keep_model(pool: ModelPool, name: str | None, idle_s: float | None, request: Request) -> bool:
    """Sets how long a model may stay idle, for all callers, so only admins may. Returns whether the request is met;
    None requests nothing."""
    if idle_s is not None and caller_of(request).is_admin:
        return pool.keep_alive(name, idle_s)
    return idle_s is None


async def unload(body: OllamaFields, request: Request, context: ServerContext) -> str:
    """Unloads the model as soon as it is idle; returns its name. Raises `ServeError`, also for callers that are not
    admins."""
    await require_admin(request)
    name = await find_name(context.pool, body.model)
    context.pool.check_access(caller_of(request).tier, name)
    context.pool.keep_alive(name, 0.0)
    await shielded(context.pool.expire_idle())  # goes on if the client disconnects
    return body.model or plain(context.pool.find(name).name)
