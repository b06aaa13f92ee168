"""POST /infill: llama.cpp's protocol for completion in editors (llama.vim, llama.vscode ...).

The text before and after the cursor and snippets of other files become a prompt with a gap (`engine/text/fill_in.py`).
What does not fit the context is left out, farthest from the cursor first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from mlx_server.api.answers.collect import Answer, Usage, usage_of
from mlx_server.api.answers.generation import Finish, OutputEvent, Prompt
from mlx_server.api.answers.output_parser import OutputParser, Parts
from mlx_server.api.context import Context
from mlx_server.api.errors import ErrorInfo
from mlx_server.api.http import sse
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import BOUNDED_ITEMS, FIRST_ERROR, Strings
from mlx_server.api.http.sse import openapi_responses
from mlx_server.api.openai.completions import fill_writer, plan_prompts
from mlx_server.api.openai.exchange import Exchange, Writer, open_exchange
from mlx_server.api.openai.fields import Bool, Int, OneAnswerOfText, no_limit
from mlx_server.engine.text.fill_in import Gap
from mlx_server.sampling_params import SamplingParams

_OUTPUT_SHARE = 4
"""The prompt leaves a fourth of the context free for an answer without a limit of its own."""

_Limit = Annotated[Int | None, Field(ge=0), BeforeValidator(no_limit)]


class ExtraFile(BaseModel):
    """A snippet of another file."""

    text: str
    filename: str | None = Field(None, max_length=4096)


class InfillRequest(OneAnswerOfText):
    """All fields of an infill that mean something here."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], FIRST_ERROR, BOUNDED_ITEMS] | None = None
    prompt: str | None = None
    n_predict: _Limit = None
    max_tokens: _Limit = None
    n_indent: Int | None = Field(None, ge=0)
    t_max_predict_ms: Annotated[Int | None, Field(ge=0, le=2**31), BeforeValidator(no_limit)] = None
    samplers: Strings | None = None
    seed: Annotated[Int | None, BeforeValidator(no_limit)] = None
    return_tokens: Bool | None = None
    response_fields: Strings | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.n_predict is None else self.n_predict

    @property
    def is_warming(self) -> bool:
        """Whether the request only fills the prefix cache, as editors do while nobody types."""
        return self.limit == 0

    @property
    def output_limit(self) -> int | None:
        return 1 if self.is_warming else self.limit

    def gap(self) -> Gap:
        files = [(extra.filename, extra.text) for extra in self.input_extra or ()]
        return Gap(self.input_prefix + (self.prompt or ""), self.input_suffix, files)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """llama.cpp's sampler `infill` takes the token that stands out. Here it means the likeliest token, unless the
        request names a temperature."""
        sampling = super().sampling(defaults)
        is_greedy = self.temperature is None and "infill" in (self.samplers or ())
        return replace(sampling, temperature=0.0) if is_greedy else sampling


_MAX_HELD_CHARS = 1024
"""More white space than this ends the output: all of what is held back is searched again with each token."""

_LINE_START = re.compile(r"\n[ \t]*(?=([^ \t])?)")
"""A line break, the line's indentation, and the character after that, if it is there."""


class LinesParser(OutputParser):
    r"""Ends an output before the first line that is indented by less than `min_indent` characters, or with the line in
    which `max_s` seconds since the first text have passed (0: no bound), as llama.cpp does. Empty lines do not count.
    Text that may begin such a line is held back.

    For a `min_indent` of 4, `a = 1\n    b = 2\n\nc` is cut to `a = 1\n    b = 2`.
    """

    def __init__(self, min_indent: int, max_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._min_indent = min_indent
        self._max_s = max_s
        self._clock = clock
        self._begun_s: float | None = None
        self._held = ""

    def append(self, text: str) -> Parts:
        if self.is_over:
            return Parts()
        if text and self._begun_s is None:
            self._begun_s = self._clock()
        line, line_break, _ = text.partition("\n")
        is_last = bool(line_break) and self._is_late()
        shown, self._held = self._split(self._held + (line if is_last else text))
        self.is_over |= is_last or len(self._held) > _MAX_HELD_CHARS
        return Parts(shown)

    def finish(self, *, is_cut: bool = False) -> Parts:
        return Parts("" if self.is_over else self._held)

    def _is_late(self) -> bool:
        return bool(self._max_s and self._begun_s is not None and self._clock() - self._begun_s > self._max_s)

    def _split(self, text: str) -> tuple[str, str]:
        """The text to show, and the text to hold back. Empty lines are held back with the line break before them."""
        blank = None
        for line in _LINE_START.finditer(text) if self._min_indent else ():
            start = line.start() if blank is None else blank
            if line[1] is None:
                return text[:start], text[start:]
            if line[1] == "\n":
                blank = start
                continue
            if len(line[0]) - 1 < self._min_indent:
                self.is_over = True
                return text[:start], ""
            blank = None
        return text, ""


class InfillWriter(Writer):
    """llama.cpp's answer: `content`, and counts, times and settings with the last piece."""

    def __init__(self, exchange: Exchange, body: InfillRequest, prompt: Prompt) -> None:
        self.response_id = f"infill-{exchange.request_id}"
        self._body = body
        self._head = {"model": exchange.model_name, "prompt": prompt.text or "", "id_slot": -1}
        sampling = exchange.sampling
        self._settings = {
            "n_ctx": exchange.engine.max_model_len,
            "n_predict": -1 if body.limit is None else body.limit,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stream": bool(body.stream),
        }
        self._has_new_line = False

    def full_body(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        self._has_new_line = "\n" in choice.content
        token_ids = choice.token_ids if self._body.return_tokens else ()
        return self._selected(self._last(choice.content, token_ids, answer.finish, answer.usage))

    def write(self, event: OutputEvent) -> bytes:
        self._has_new_line |= "\n" in event.content
        if event.finish is not None:
            last = self._last(event.content, event.token_ids, event.finish, usage_of([event]))
            return sse.data(self._selected(last))
        if not event.content or self._body.is_warming:
            return b""
        counts = {"tokens_predicted": event.delta.num_output_tokens, "tokens_evaluated": event.delta.num_prompt_tokens}
        piece = {"index": 0, "content": event.content, "tokens": list(event.token_ids), "stop": False, "id_slot": -1}
        return sse.data({**piece, **counts})

    def failure(self, error: ErrorInfo) -> bytes:
        return sse.data(error.openai_body())

    def _last(self, content: str, token_ids: Sequence[int], finish: Finish, usage: Usage) -> dict[str, Any]:
        is_warming = self._body.is_warming
        num_predicted = 0 if is_warming else usage.num_output_tokens
        stop_type, word = ("limit", "") if is_warming else _stop_type(finish)
        return {
            "index": 0,
            "content": "" if is_warming else content,
            "tokens": [] if is_warming else list(token_ids),
            **self._head,
            "stop": True,
            "tokens_predicted": num_predicted,
            "tokens_evaluated": usage.num_prompt_tokens,
            "generation_settings": self._settings,
            "has_new_line": self._has_new_line,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": usage.num_cached_tokens,
            "timings": _timings(finish, usage, num_predicted),
        }

    def _selected(self, body: dict[str, Any]) -> dict[str, Any]:
        """The members that `response_fields` names: `timings/prompt_n` is the member `prompt_n` of `timings`."""
        if not self._body.response_fields:
            return body
        found = {}
        for path in self._body.response_fields:
            value: Any = body
            for name in (names := path.split("/")):
                value = value.get(name) if isinstance(value, Mapping) else None
            if value is not None:
                found[names[-1]] = value
        return found


def _stop_type(finish: Finish) -> tuple[str, str]:
    if finish.reason == "stop" and isinstance(finish.stop_reason, str):
        return "word", finish.stop_reason
    return {"stop": "eos", "length": "limit"}.get(finish.reason, "none"), ""


def _timings(finish: Finish, usage: Usage, num_predicted: int) -> dict[str, float]:
    """Under llama.cpp's names. An output that was cut at a line has counts only, since its last piece has no times."""
    num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
    found: dict[str, float] = {
        "cache_n": usage.num_cached_tokens,
        "prompt_n": num_computed,
        "predicted_n": num_predicted,
    }
    times = finish.timings
    if times is None or times.first_scheduled_s is None or times.first_token_s is None or times.finished_s is None:
        return found
    stages = (
        ("prompt", num_computed, times.first_token_s - times.first_scheduled_s),
        ("predicted", num_predicted, times.finished_s - times.first_token_s),
    )
    for name, num_tokens, seconds in stages:
        found[f"{name}_ms"] = round(seconds * 1000, 3)
        found[f"{name}_per_token_ms"] = round(seconds * 1000 / max(num_tokens, 1), 3)
        found[f"{name}_per_second"] = round(num_tokens / seconds, 3) if seconds > 0 else 0.0
    return found


router = APIRouter(tags=["completions"], route_class=TurnRoute)


@router.post("/infill", responses=openapi_responses("content", "stop"))
async def infill(body: InfillRequest, request: Request, context: Context) -> Response:
    """The text between `input_prefix` and `input_suffix`, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    engine = exchange.engine
    filler = fill_writer(engine, "input_suffix")
    room = engine.max_model_len // _OUTPUT_SHARE
    most = engine.max_model_len - min(room if body.output_limit is None else body.output_limit, room) - 1

    def write() -> tuple[Prompt, ...]:
        token_ids = tuple(filler.write(body.gap(), most))
        return (Prompt(token_ids, engine.tokenizer.decode(token_ids, skip_special_tokens=False)),)

    plan = await plan_prompts(exchange, write, filler.end_token_ids)
    indent, max_ms = body.n_indent or 0, body.t_max_predict_ms or 0
    if indent or max_ms:
        plan = replace(plan, new_parser=lambda: LinesParser(indent, max_ms / 1000))
    return await exchange.answer(plan, InfillWriter(exchange, body, plan.prompts[0]))
