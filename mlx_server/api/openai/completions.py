"""POST /v1/completions: the request's body, its prompts, and the answer."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from mlx_server.api.answers.collect import Usage
from mlx_server.api.answers.generation import OutputEvent, Plan, Prompt
from mlx_server.api.context import Context
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import MAX_BODY_BYTES
from mlx_server.api.http.sse import openapi_responses
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.api.openai.fields import Bool, GenerationFields, Int, TextsOrIds
from mlx_server.api.openai.output import CompletionWriter, finite
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.text.detokenizer import IncrementalDetokenizer
from mlx_server.engine.text.fill_in import FillWriter, Gap, find_fill_format
from mlx_server.errors import InvalidRequestError
from mlx_server.outputs import PositionLogprobs
from mlx_server.sampling_params import MAX_LOGPROBS

MAX_SEQUENCES = 1024
"""Most completions of one request: prompts times samples."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for text completions only."""


class CompletionRequest(GenerationFields):
    """The fields of a text completion that mean something here."""

    prompt: Annotated[list[str | list[int]], TextsOrIds(MAX_SEQUENCES, "prompts")]
    max_tokens: Int | None = Field(None, json_schema_extra={"minimum": -1})
    logprobs: Int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
    echo: Bool | None = None
    best_of: Int | None = Field(None, ge=1)
    suffix: str | None = None

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
        if len(self.suffix or "") * len(self.prompt) > MAX_BODY_BYTES:
            raise InvalidRequestError(
                f"suffix has {len(self.suffix or '')} characters for each of {len(self.prompt)} prompts; together they "
                f"may have {MAX_BODY_BYTES}. Send several requests.",
                "suffix",
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1, got 0 (0 needs echo: true).", "max_tokens")

    @property
    def is_scoring(self) -> bool:
        """Whether the request scores its prompt only: `echo` with `max_tokens` 0, as evaluation harnesses send."""
        return self.max_tokens == 0

    @property
    def output_limit(self) -> int | None:
        """To score a prompt, one token is generated and dropped."""
        if self.is_scoring:
            return 1
        if self.max_tokens == -1:
            return None
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The larger of the number that the request names and the number that an echo shows."""
        echoed = self.logprobs if self.echo else None
        return max((k for k in (echoed, self.prompt_logprobs) if k is not None), default=None)


class TextWriter(CompletionWriter):
    """Text completions. In a stream a choice's echo comes with its first output, when its logprobs are known, which
    may follow in several chunks."""

    def __init__(self, exchange: Exchange, body: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        super().__init__(exchange, "cmpl", "text_completion")
        self._body = body
        self._prompts = prompts
        tokenizer = self._names.tokenizer
        # A model without a tokenizer has no text, so its stream has an empty chunk for each token.
        self._has_details = body.logprobs is not None or self._has_token_ids or tokenizer is None
        self._num_echoed: dict[int, int] = {}  # tokens of the prompt, by choices that have begun
        self._offsets: dict[int, int] = {}
        self._texts: defaultdict[int, IncrementalDetokenizer | None] = defaultdict(
            lambda: None if tokenizer is None else IncrementalDetokenizer(tokenizer, False, continues_text=True)
        )

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Without the one token that is generated and dropped to score a prompt."""
        only_prompt = Usage(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_rounded_tokens)
        return super().usage(only_prompt if self._body.is_scoring else usage)

    def full_choice(self, choice: OutputEvent) -> dict[str, Any]:
        return {**self._choice(choice), "prompt_logprobs": self.prompt_logprobs(choice)}

    def write_choice(self, event: OutputEvent) -> bytes:
        has_details = self._has_details and bool(event.token_ids or event.delta.prompt_logprobs)
        if not (event.content or event.finish is not None or has_details):
            return b""
        if event.index in self._num_echoed and event.finish is None and not self._has_details:
            return self.piece(event.index, event.content, self._text)
        return self.chunk(self._choice(event))

    def _text(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(OutputEvent(index, text))

    def _choice(self, source: OutputEvent) -> dict[str, Any]:
        prompt = self._prompts[source.index // self._body.num_samples]
        is_scoring = self._body.is_scoring
        text, token_ids = ("", ()) if is_scoring else (source.content, source.token_ids)
        shown_ids: tuple[int, ...] = token_ids
        logprobs: list[PositionLogprobs | None] = [] if is_scoring else [*source.logprobs]
        begins, num_echoed = source.index not in self._num_echoed, self._num_echoed.setdefault(source.index, 0)
        if self._body.echo:
            text = (prompt.text or "") + text if begins else text
            # Nothing predicts the first token.
            echoed = [*([None] if begins else ()), *source.delta.prompt_logprobs]
            end = self._num_echoed[source.index] = num_echoed + len(echoed)
            shown_ids = prompt.token_ids[num_echoed:end] + token_ids
            logprobs = [*echoed, *logprobs]
        choice: dict[str, Any] = {
            "index": source.index,
            "text": text,
            "logprobs": None,
            "finish_reason": source.finish and source.finish.reason,
            "stop_reason": source.finish and source.finish.stop_reason,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(source.index, shown_ids, logprobs, self._body.logprobs)
        if self._has_token_ids:
            choice["token_ids"] = list(token_ids)
            if begins:
                choice["prompt_token_ids"] = list(prompt.token_ids)
        return choice

    def _logprobs(
        self, index: int, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], num_top: int
    ) -> dict[str, Any]:
        """`positions` belong to `token_ids`. Offsets count from the beginning of the choice's text; tokens of one
        character have the same."""
        text = self._texts[index]
        widths = (0 if text is None else len(text.append((token_id,))) for token_id in token_ids)
        *offsets, end = itertools.accumulate(widths, initial=self._offsets.get(index, 0))
        self._offsets[index] = end
        return {
            "tokens": [self._names.name(token_id) for token_id in token_ids],
            "token_logprobs": [position and finite(position.token.logprob) for position in positions],
            "top_logprobs": [position and self._top(position, num_top) for position in positions],
            "text_offset": offsets,
        }

    def _top(self, position: PositionLogprobs, num_top: int) -> dict[str, float]:
        tokens = (*position.top[:num_top], position.token)
        return {self._names.name(token.token_id): finite(token.logprob) for token in tokens}


router = APIRouter(tags=["completions"], route_class=TurnRoute)


@router.post("/v1/completions", responses=openapi_responses("id", "object", "created", "model", "choices", "usage"))
async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Completions of one or several prompts, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    plan = await plan_text(exchange, body)
    return await exchange.answer(plan, TextWriter(exchange, body, plan.prompts))


async def plan_text(exchange: Exchange, body: CompletionRequest, *, is_counted: bool = False) -> Plan:
    """Tokenizes and compiles in a worker thread. Prompts that are only counted may be longer than the context. Raises
    `InvalidRequestError`."""
    engine, suffix = exchange.engine, body.suffix
    if not suffix:
        return await plan_prompts(
            exchange, lambda: tuple(_prompt(engine, body, prompt, is_counted) for prompt in body.prompt)
        )
    filler = fill_writer(engine, "suffix")
    gaps = (Gap(prompt, suffix) for prompt in body.prompt)
    return await plan_prompts(
        exchange,
        lambda: tuple(_fill_prompt(engine, body, filler, gap, is_counted) for gap in gaps),
        filler.end_token_ids,
    )


async def plan_prompts(
    exchange: Exchange, write: Callable[[], tuple[Prompt, ...]], end_token_ids: tuple[int, ...] = ()
) -> Plan:
    """The plan for the prompts that `write` makes in a worker thread. Raises `InvalidRequestError`."""
    turn = exchange.turn
    spec, prompts = await turn.in_thread(lambda: (exchange.body.structured(), write()))
    plan = Plan(prompts=prompts, end_token_ids=end_token_ids, continues_text=True)
    if spec is None:
        return plan
    grammars = exchange.engine.grammars
    grammar = await grammars.threads.run(lambda: grammars.compile(spec), spec.param, turn.requester)
    return replace(plan, new_constraint=grammar.start, notes=grammar.notes, kept_token_ids=grammar.kept_token_ids)


def fill_writer(engine: AsyncEngine, param: str) -> FillWriter:
    """For prompts with a gap. Raises `InvalidRequestError`, naming the field `param`, if the model cannot fill one."""
    form = find_fill_format(engine.tokenizer)
    if form is None:
        raise InvalidRequestError(
            f"{param} asks to fill in the middle, and the tokenizer of {engine.model_name} has no tokens for that. "
            "Leave it out, or use a model that was trained for it, like Qwen2.5-Coder.",
            param,
        )
    return FillWriter(engine.tokenizer, form)


def _fill_prompt(
    engine: AsyncEngine, body: CompletionRequest, writer: FillWriter, gap: Gap, is_counted: bool
) -> Prompt:
    truncation, max_model_len = body.prompt_truncation, engine.max_model_len
    most = truncation.num_kept(max_model_len)
    for text in (gap.prefix, gap.suffix) if most is None else ():
        if isinstance(text, str):
            truncation.part(
                text, engine.tokenizer, max_model_len, is_counted=is_counted
            )  # raises if it is far too long
    token_ids = tuple(writer.write(gap, most, add_special_tokens=body.add_special_tokens is not False))
    return Prompt(token_ids, engine.tokenizer.decode(token_ids, skip_special_tokens=False) if body.echo else None)


def _prompt(engine: AsyncEngine, body: CompletionRequest, prompt: str | Sequence[int], is_counted: bool) -> Prompt:
    token_ids: Sequence[int]
    if isinstance(prompt, str):
        truncation, max_model_len = body.prompt_truncation, engine.max_model_len
        part = truncation.part(prompt, engine.tokenizer, max_model_len, is_counted=is_counted)
        token_ids = engine.tokenizer.encode(part, add_special_tokens=body.add_special_tokens is not False)
    else:
        token_ids = prompt
    kept = tuple(body.prompt_truncation.apply(token_ids, engine.max_model_len))
    if not body.echo:
        return Prompt(kept)
    if isinstance(prompt, str) and len(kept) == len(token_ids):
        return Prompt(kept, prompt)
    return Prompt(kept, engine.tokenizer.decode(kept, skip_special_tokens=False))
