"""POST /v1/completions.

The body of POST /v1/completions.

Bodies of text completions: the whole answer, and the chunks of a stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field, SkipValidation, WithJsonSchema
from starlette.responses import Response

from mlx_server.api import sse
from mlx_server.api.body import TurnRoute
from mlx_server.api.collect import Answer, Choice, Usage, UsageMeter
from mlx_server.api.context import Context
from mlx_server.api.generation import Finish, Generation, GenerationJob, OutputEvent, Prompt
from mlx_server.api.middleware import until_disconnect
from mlx_server.api.openai.exchange import Exchange, metrics_fields, open_exchange, usage_body
from mlx_server.api.openai.fields import Bool, GenerationFields, Int
from mlx_server.api.openai.logprobs import TextPosition, TokenNames, prompt_logprobs, text_logprobs
from mlx_server.api.sse import whole_or_streamed
from mlx_server.api.text_turns import TextTurn
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.grammar.spec import StructuredSpec
from mlx_server.errors import InvalidRequestError
from mlx_server.outputs import PositionLogprobs
from mlx_server.request import TokenConstraint
from mlx_server.sampling_params import MAX_LOGPROBS

MAX_SEQUENCES = 1024
"""Most completions of one request: prompts times samples."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for text completions only."""


def _as_prompts(value: Any) -> Any:
    """One prompt or several, as text or token ids, becomes a list of prompts."""
    if isinstance(value, list) and len(value) > MAX_SEQUENCES and type(value[0]) is not int:
        raise ValueError(f"has {len(value)} prompts; at most {MAX_SEQUENCES} are taken at a time, send several")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and _are_ids(value):
        return [value]
    if isinstance(value, list) and value and all(_is_prompt(item) for item in value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and _are_ids(value))


def _are_ids(values: list[Any]) -> bool:
    """In C: there may be millions."""
    return set(map(type, values)) <= {int}


_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[str | list[int]],
    SkipValidation,  # of what `_as_prompts` has looked at: once for each of millions of ids is enough
    BeforeValidator(_as_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]


class CompletionRequest(GenerationFields):
    """All fields of a text completion that mean something here."""

    prompt: Prompts
    max_tokens: Int | None = Field(None, json_schema_extra={"minimum": 0})
    logprobs: Int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
    echo: Bool | None = None
    best_of: Int | None = Field(None, ge=1)
    suffix: str | None = None

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationFields.refused, "suffix": ("",)}

    def check(self) -> None:
        super().check()
        if len(self.prompt) * self.num_samples > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"{len(self.prompt)} prompts with n={self.num_samples} are more than {MAX_SEQUENCES} completions; "
                "send several requests.",
                "prompt",
            )
        if self.best_of is not None and self.best_of != self.num_samples:
            raise InvalidRequestError("best_of is only supported when it equals n.", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1, got 0 (0 needs echo: true).", "max_tokens")

    @property
    def is_scoring(self) -> bool:
        """Whether only the prompt is wanted: `echo` with `max_tokens` 0, as evaluation harnesses ask."""
        return self.max_tokens == 0

    @property
    def output_limit(self) -> int:
        """To score a prompt, one token is generated and dropped."""
        if self.is_scoring:
            return 1
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Those asked for, and those that an echo shows."""
        echoed = self.logprobs if self.echo else None
        return max((k for k in (echoed, self.prompt_logprobs) if k is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShape:
    """What a client asked to see, and what every body of one request repeats."""

    response_id: str
    model: str
    created_s: int
    names: TokenNames
    prompts: tuple[Prompt, ...]
    n: int
    has_echo: bool = False
    is_scoring: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    has_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    def head(self) -> dict[str, Any]:
        return {"id": self.response_id, "object": "text_completion", "created": self.created_s, "model": self.model}

    def prompt(self, index: int) -> Prompt:
        """The prompt of choice `index`."""
        return self.prompts[index // self.n]

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Of a scored prompt, the one token that was generated and dropped does not count."""
        return usage_body(Usage(usage.num_prompt_tokens, usage.num_cached_tokens) if self.is_scoring else usage)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of one choice's text and the tokens behind it."""

    text: str = ""
    positions: tuple[TextPosition, ...] = ()

    def __add__(self, other: _Piece) -> _Piece:
        return _Piece(self.text + other.text, self.positions + other.positions)


def _echo(prompt: Prompt, logprobs: Sequence[PositionLogprobs]) -> _Piece:
    known = [None, *logprobs] if logprobs else [None] * len(prompt.token_ids)
    return _Piece(prompt.text or "", tuple(map(TextPosition, prompt.token_ids, known)))


def _output(shape: TextShape, source: Choice | OutputEvent) -> _Piece:
    if shape.is_scoring:
        return _Piece()
    known = source.logprobs or [None] * len(source.token_ids)
    return _Piece(source.content, tuple(map(TextPosition, source.token_ids, known)))


def _choice(shape: TextShape, index: int, piece: _Piece, finish: Finish | None, offset: int = 0) -> dict[str, Any]:
    logprobs = None
    if shape.num_logprobs is not None:
        logprobs = text_logprobs(shape.names, piece.positions, shape.num_logprobs, offset)
    return {
        "index": index,
        "text": piece.text,
        "logprobs": logprobs,
        "finish_reason": None if finish is None else finish.reason,
        "stop_reason": None if finish is None else finish.stop_reason,
    }


def text_completion(shape: TextShape, answer: Answer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    body = shape.head()
    body["choices"] = [_whole_choice(shape, choice) for choice in answer.choices]
    body["usage"] = shape.usage(answer.usage)
    body.update(metrics_fields(answer.timings, answer.usage.num_output_tokens))
    return body


def _whole_choice(shape: TextShape, choice: Choice) -> dict[str, Any]:
    prompt = shape.prompt(choice.index)
    output = _output(shape, choice)
    piece = _echo(prompt, choice.prompt_logprobs) + output if shape.has_echo else output
    body = _choice(shape, choice.index, piece, choice.finish)
    if shape.num_prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(shape.names, choice.prompt_logprobs, shape.num_prompt_logprobs)
    if shape.has_token_ids:
        body["prompt_token_ids"] = list(prompt.token_ids)
        body["token_ids"] = [position.token_id for position in output.positions]
    return body


async def text_chunks(shape: TextShape, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The events of a stream, without `[DONE]`."""
    stream = _ChunkStream(shape)
    async with contextlib.aclosing(generation.events()) as events:
        async for event in events:
            chunk = stream.chunk(event)
            if chunk is not None:
                yield chunk
    if shape.include_usage:
        yield stream.closing()


class _ChunkStream:
    """Makes chunks of events. A choice's echo comes with its first output, when its logprobs are known, too."""

    def __init__(self, shape: TextShape) -> None:
        self._shape = shape
        self._meter = UsageMeter(shape.n)
        # A model without a tokenizer has no text to show, so its tokens are shown by empty chunks.
        self._has_details = shape.num_logprobs is not None or shape.has_token_ids or shape.names.tokenizer is None
        self._prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        self._offsets: dict[int, int] = {}

    def chunk(self, event: OutputEvent) -> bytes | None:
        """None for an event that has nothing to show."""
        self._meter.update(event)
        is_first = event.index not in self._offsets
        if is_first:
            self._prompt_logprobs.setdefault(event.index, []).extend(event.prompt_logprobs)
        has_news = event.content or event.finish is not None or (self._has_details and event.token_ids)
        if not has_news:
            return None
        output = piece = _output(self._shape, event)
        if is_first and self._shape.has_echo:
            piece = _echo(self._shape.prompt(event.index), self._prompt_logprobs.pop(event.index)) + output
        offset = self._offsets.get(event.index, 0)
        self._offsets[event.index] = offset + sum(self._width(position) for position in piece.positions)
        choice = _choice(self._shape, event.index, piece, event.finish, offset)
        if self._shape.has_token_ids:
            choice["token_ids"] = [position.token_id for position in output.positions]
            if is_first:
                choice["prompt_token_ids"] = list(self._shape.prompt(event.index).token_ids)
        return sse.data(self._body([choice]))

    def closing(self) -> bytes:
        """The chunk with the usage of all choices and none of their text."""
        usage = self._meter.total()
        body = self._shape.head()
        body["choices"] = []
        body["usage"] = self._shape.usage(usage)
        body.update(metrics_fields(self._meter.timings(), usage.num_output_tokens))
        return sse.data(body)

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._shape.head()
        body["choices"] = choices
        if self._shape.continuous_usage:
            body["usage"] = self._shape.usage(self._meter.total())
        elif self._shape.include_usage:
            body["usage"] = None
        return body

    def _width(self, position: TextPosition) -> int:
        return 0 if self._shape.num_logprobs is None else len(self._shape.names.text(position.token_id))


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
