"""What the bodies of Ollama's routes have in common; `Options` are its parameters of sampling.

Beside Ollama's own fields, those of sampling that OpenAI's routes take are honoured at the top level; `options` go
before them. Null counts as absent.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from mlx_server.api.openai.document import STRING, either
from mlx_server.api.openai.fields import Bool, Int, Number, OneAnswerOfText, Refused, StringOrList
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import MAX_LOGPROBS, MAX_TOP_K, SamplingParams

THINK_LEVELS = ("low", "medium", "high", "max")

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_MAX_DURATION_CHARS = 64

_LEAST_TOP_P = 1e-6
"""The best token alone, which 0 asks for."""

_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Each at the value that changes nothing."""


def duration_s(value: Any) -> float:
    """Ollama's durations in seconds: a number of them, or text like `300`, `5m` or `1h30m`. Below 0 is for ever:
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


def _whole(value: Any) -> Any:
    """Ollama cuts fractions off."""
    if isinstance(value, bool | str):
        raise ValueError("must be an integer")
    return int(value) if isinstance(value, float) and math.isfinite(value) else value


Whole = Annotated[int, BeforeValidator(_whole), WithJsonSchema({"type": "integer"})]


class Options(BaseModel):
    """What an answer depends on. Options that only say how a machine computes (`num_gpu`, `num_thread` ...) are not
    declared: they change nothing."""

    model_config = ConfigDict(extra="ignore")

    num_predict: Whole | None = None
    num_ctx: Whole | None = None
    temperature: Number | None = Field(None, ge=0, le=100)
    top_k: Whole | None = Field(None, le=MAX_TOP_K)
    top_p: Number | None = Field(None, ge=0)
    min_p: Number | None = Field(None, ge=0, le=1)
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StringOrList | None = None
    repeat_penalty: Number | None = None
    repeat_last_n: Whole | None = Field(None, ge=-1)
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    typical_p: Annotated[Any, Refused((1,))] = None
    mirostat: Annotated[Any, Refused((0,))] = None

    def applied_to(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with what is given here. Raises `InvalidRequestError` for values out of range."""
        given = {name: value for name, value in self._changes() if value is not None}
        if self.repeat_last_n == 0:
            given |= _PENALTIES
        return replace(sampling, **given)

    def _changes(self) -> Iterator[tuple[str, Any]]:
        for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty"):
            yield name, getattr(self, name)
        yield "repetition_penalty", self.repeat_penalty
        yield "top_k", None if self.top_k is None else max(self.top_k, 0)
        yield "top_p", None if self.top_p is None else min(max(self.top_p, _LEAST_TOP_P), 1.0)
        yield "seed", None if self.seed == -1 else self.seed
        yield "stop", None if self.stop is None else tuple(self.stop)
        yield "max_tokens", self.num_predict if (self.num_predict or 0) > 0 else None

    def not_enforced(self, sampling: SamplingParams, max_model_len: int) -> Iterator[str]:
        """What an answer by `sampling` does not keep to: a context beyond the model's, and penalties that look at a
        part of the text only."""
        if (self.num_ctx or 0) > max_model_len:
            yield "num_ctx"
        if (self.repeat_last_n or 0) > 0 and sampling.has_penalties:
            yield "repeat_last_n"


class OllamaFields(OneAnswerOfText):
    """What a chat and a completion share."""

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

    def chat_options(self, *, continues: bool) -> ChatOptions:
        """How to write the prompt. Without `think`, a model that reasons does as its template has it."""
        is_switch = isinstance(self.think, bool)
        return ChatOptions(
            continue_final_message=continues,
            template_kwargs={"enable_thinking": self.think} if is_switch else {},
            reasoning_effort=None if is_switch else self.think,
        )


class ModelBody(BaseModel):
    """The body of routes about one model; `name` is the older way to say it."""

    model: str | None = None
    name: str | None = None

    def asked(self) -> str:
        """Raises `InvalidRequestError` where neither is there."""
        name = self.model or self.name
        if not name:
            raise InvalidRequestError("model is required.", "model")
        return name


class OllamaError(BaseModel):
    error: str


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaError, "description": "The request is wrong, or refused"},
    "5XX": {"model": OllamaError, "description": "The server cannot do it, or not now"},
}
