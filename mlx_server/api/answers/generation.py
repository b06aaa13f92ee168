"""Runs a job (prompts and parameters) and turns its output into one stream of events that any protocol can use.

    route -> GenerationJob -> GenerationService.start() -> Generation -> OutputEvent ... -> the protocol's format

The model's text is split into reasoning, content and tool calls. This module knows nothing of HTTP. Everything runs on
the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlx_server.api.answers.output_parser import OutputParser, Part, Parts, Thought
from mlx_server.api.auth.keys import Caller
from mlx_server.api.auth.quotas import Grant
from mlx_server.engine.request_stream import RequestStream
from mlx_server.engine.text.reasoning import ReasoningSpan
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.parser import ToolCallDelta, calls_of
from mlx_server.errors import ContextLengthError, ServeError
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.outputs import CompletionDelta, PositionLogprobs, RequestTimings
from mlx_server.request import FinishReason, PoolingParams, Priority, PromptImage, TokenConstraint
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is the text of `token_ids`, for echoes; None if it was not asked for. `images` have their positions in
    `token_ids`."""

    token_ids: tuple[int, ...]
    text: str | None = None
    images: tuple[PromptImage, ...] = ()


MAX_COUNTED_TOKENS = 128 * 1024
"""Of a prompt that is only counted, if the model's context is shorter: agents keep conversations for the contexts of
hosted models. Texts of up to eight characters for each are counted whatever they have: at worst a million tokens, which
take about a second and 0.3 GB."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a client wants a long prompt cut: to `num_tokens` (-1: the context length less one token for the output),
    which are its last (`side` "left") or first ones ("right"). With `num_tokens` None the prompt is not cut."""

    num_tokens: int | None = None
    side: Literal["left", "right"] = "left"

    def part(self, text: str, tokenizer: Tokenizer, max_model_len: int, *, is_counted: bool = False) -> str:
        """Returns the part of `text` that must be tokenized before `apply`. Raises `ContextLengthError` for a text that
        must not be cut and is far too long: for the context, or if it `is_counted` only, for `MAX_COUNTED_TOKENS`."""
        keep = self.num_kept(max_model_len)
        limit = max(max_model_len, MAX_COUNTED_TOKENS) if is_counted else max_model_len
        most = limit if keep is None else min(keep, limit)
        part = tokenizer.part_of(text, most, is_end=keep is not None and self.side == "left")
        if keep is None and len(part) < len(text):
            if is_counted:
                raise ContextLengthError(
                    f"The prompt is too long to be counted: at least {limit + 1} tokens > {limit} maximum. Already "
                    f"{len(part)} of its {len(text)} characters are so many. Send it in parts.",
                    "input_tokens",
                )
            raise ContextLengthError.of_prompt(
                f"at least {max_model_len + 1}",
                max_model_len,
                f"Already {len(part)} of its {len(text)} characters are so many. Shorten the prompt.",
                is_answered=False,
            )
        return part

    def apply(self, token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        keep = self.num_kept(max_model_len)
        if keep is None or keep >= len(token_ids):
            return token_ids
        return token_ids[len(token_ids) - keep :] if self.side == "left" else token_ids[:keep]

    def num_kept(self, max_model_len: int) -> int | None:
        """The most prompt tokens to keep; None for all. -1 leaves one token of the context for the output."""
        return max_model_len - 1 if self.num_tokens == -1 else self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Prompts that are ready to generate, and what follows the outputs. `new_parser` and `new_constraint` are called
    once for each choice, since both follow that choice's output. `end_token_ids` end the output as the model's own end
    tokens do. `notes` are keywords of schemas that are not enforced. `kept_token_ids`, `continues_text`, `reasoning`
    (None: the model does not reason) and `prediction_token_ids` are passed on to `GenerationRequest`."""

    prompts: Sequence[Prompt]
    new_parser: Callable[[], OutputParser] = OutputParser
    new_constraint: Callable[[], TokenConstraint] | None = None
    end_token_ids: tuple[int, ...] = ()
    kept_token_ids: frozenset[int] = frozenset()
    continues_text: bool = False
    prediction_token_ids: tuple[int, ...] = ()
    reasoning: ReasoningSpan | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """Generates `n` choices for each prompt of the plan, with one of the model's adapters or without. `request_id` is
    the client's id of the request, `response_id` the id of the answer; neither needs to be unique. With `pooling`,
    vectors or scores are computed instead."""

    request_id: str
    response_id: str
    plan: Plan
    sampling: SamplingParams
    n: int = 1
    caller: Caller = field(default_factory=Caller)
    priority: Priority = Priority.NORMAL
    extra_keys: tuple[str, ...] = ()
    adapter: str | None = None
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a choice ended. `reason` is the engine's finish reason, or `tool_calls`; it is `stop` if a stop string or
    stop token `cuts_call`: ends the output inside the arguments of a call."""

    reason: str
    stop_reason: int | str | None
    timings: RequestTimings | None
    cuts_call: bool = False


@dataclass(slots=True)  # not frozen, which would take three times as long: each token makes one
class OutputEvent:
    """New output of one choice: the text of `delta`, split as in `Parts`. Counts are totals so far; `finish` is set on
    the choice's last event."""

    index: int
    content: str = ""
    reasoning: str = ""
    mixed: tuple[Part, ...] = ()
    finish: Finish | None = None
    num_reasoning_tokens: int = 0
    delta: CompletionDelta = field(default_factory=lambda: CompletionDelta("", ()))

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        return calls_of(self.mixed)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.delta.token_ids

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        return self.delta.logprobs


def in_order(output: Parts | OutputEvent) -> tuple[Part, ...]:
    """The parts in the order in which they were written."""
    if output.mixed or not output.reasoning:
        return output.mixed or ((output.content,) if output.content else ())
    thought = Thought(output.reasoning)
    return (thought, output.content) if output.content else (thought,)


Emit = Callable[[list[OutputEvent]], bool]
"""Takes events. Returns False if no more may be passed until the client is ready for them."""


async def _never_full() -> None:
    """For a client that is always ready."""


class Generation:
    """A job in progress. Call `feed` for one reader; call `close` on every path."""

    def __init__(
        self,
        job: GenerationJob,
        model_name: str,
        streams: Sequence[RequestStream],
        grant: Grant,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.job = job
        self.model_name = model_name
        self.ids = frozenset((job.request_id, job.response_id))
        self._choices = [_Choice(index, stream, job.plan.new_parser()) for index, stream in enumerate(streams)]
        self._unread = self._choices  # choices whose end has not been read
        self._is_taking = False
        self._emit: Emit | None = None  # set while `feed` waits for output
        self._waiter: asyncio.Future[None] | None = None  # ends `_wait`
        for stream in streams:
            stream.on_output = self._on_output
        self._grant = grant
        self._on_close = on_close

    @property
    def has_output(self) -> bool:
        """Whether an event can be read without waiting."""
        return any(choice.stream.has_output for choice in self._choices)

    async def wait_for_output(self, timeout_s: float | None) -> None:
        """Waits for the first output of any choice, at most `timeout_s`. Raises the `ServeError` of a choice that fails
        first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not any(choice.stream.is_over() for choice in self._choices) and not self.has_output:
                    await self._wait()

    async def feed(self, emit: Emit, drain: Callable[[], Awaitable[None]] = _never_full) -> None:
        """Passes the events of all choices to `emit` until all have ended; the events of a step are passed together.

        `emit` is called in the engine's callback, since switching to a task for each step would take longer than
        everything else. After it has returned False, further events wait for `drain`, and are then passed together.
        Raises what `emit` raises, and the `ServeError` of a choice that fails.
        """
        while True:
            while not self._emit_output(emit):
                await drain()
            if not self._unread:
                return
            await self._wait(emit)
            await drain()

    async def _wait(self, emit: Emit | None = None) -> None:
        """Waits for output. With `emit`, `_on_output` emits the output, and the wait ends when the client is not ready,
        when all choices have ended, or on an error."""
        self._emit, self._waiter = emit, asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._emit = self._waiter = None

    def _on_output(self) -> None:
        """The callback of the streams. It is also called when `take` aborts a choice; that output is read by the `take`
        that is running."""
        waiter = self._waiter
        if waiter is None or waiter.done() or self._is_taking:
            return
        try:
            is_done = self._emit is None or not self._emit_output(self._emit) or not self._unread
        except Exception as error:
            waiter.set_exception(error)
        else:
            if is_done:
                waiter.set_result(None)

    def _emit_output(self, emit: Emit) -> bool:
        """Emits the events that can be read without waiting: those of one step, or of several if the client was slow.
        Returns what `emit` returns."""
        events: list[OutputEvent] = []
        num_tokens = 0
        is_any_complete = False
        self._is_taking = True
        try:
            for choice in self._unread:
                num_tokens += choice.take(events)
                is_any_complete = is_any_complete or choice.stream.is_complete
        finally:
            self._is_taking = False
        is_ready = True
        if events:
            self._grant.add_output(0 if self.job.sampling.is_scoring else num_tokens)
            is_ready = emit(events)
        if is_any_complete:
            self._unread = [choice for choice in self._unread if not choice.stream.is_over()]
        return is_ready

    def summaries(self) -> list[RequestSummary]:
        """The summaries of the choices that have ended: of all choices once the generation is closed."""
        summaries = (choice.stream.summary for choice in self._choices)
        return [summary for summary in summaries if summary is not None]

    def abort(self, new_error: Callable[[], ServeError] | None = None) -> None:
        """Ends every choice with the finish reason `abort`, or with an error. Events up to there can still be read."""
        for choice in self._choices:
            choice.stream.abort(None if new_error is None else new_error())

    def close(self) -> None:
        """Aborts unfinished choices, gives the caller's seats back, and removes the job from the service.
        Idempotent."""
        self.abort()
        self._grant.close()
        self._on_close(self)


class _Choice:
    """One choice of a job: turns the engine's deltas into events."""

    __slots__ = ("_index", "_is_plain", "_num_reasoning_tokens", "_parser", "_was_reasoning", "stream")

    def __init__(self, index: int, stream: RequestStream, parser: OutputParser) -> None:
        self.stream = stream
        self._index = index
        self._parser = parser
        self._is_plain = parser.is_plain
        self._was_reasoning = parser.is_reasoning
        self._num_reasoning_tokens = 0

    def take(self, events: list[OutputEvent]) -> int:
        """Adds the events that can be read without waiting to `events`. Returns the number of their tokens."""
        num_tokens = 0
        for delta in self.stream.take():
            num_tokens += len(delta.token_ids)
            if self._is_plain and delta.finish_reason is None:
                events.append(OutputEvent(self._index, delta.text, "", (), None, 0, delta))
            else:
                events.append(self._event(delta))
        if self._parser.is_over and not self.stream.is_complete:
            self.stream.abort()
            events += map(self._event, self.stream.take())
        return num_tokens

    def _event(self, delta: CompletionDelta) -> OutputEvent:
        parts = self._read(delta)
        finish = None
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason is not FinishReason.STOP or delta.stop_reason is not None
            parts = _joined(parts, self._parser.finish(is_cut=is_cut))
            cuts_call = delta.stop_reason is not None and self._parser.has_cut_call
            finish = Finish(
                reason=self._finish_reason(delta.finish_reason, cuts_call),
                stop_reason=delta.stop_reason,
                cuts_call=cuts_call,
                timings=delta.timings,
            )
        return OutputEvent(self._index, *parts, finish, self._num_reasoning_tokens, delta)

    def _read(self, delta: CompletionDelta) -> Parts:
        """Splits the text of a delta. Its tokens are read one by one if the reasoning may end among them, since those
        after its end do not count as reasoning."""
        if not (self._parser.splits_reasoning and delta.pieces):
            parts = self._parser.append(delta.text)
            self._count(len(delta.token_ids))
            return parts
        parts = Parts()
        for piece in delta.pieces:
            parts = _joined(parts, self._parser.append(piece))
            self._count(1)
        return parts

    def _count(self, num_tokens: int) -> None:
        is_reasoning = self._parser.is_reasoning
        if self._was_reasoning or is_reasoning:
            self._num_reasoning_tokens += num_tokens
        self._was_reasoning = is_reasoning

    def _finish_reason(self, reason: FinishReason, cuts_call: bool) -> str:
        if reason is FinishReason.ABORT and self._parser.is_over:
            return FinishReason.LENGTH.value
        if reason is FinishReason.STOP and self._parser.has_tool_calls and not cuts_call:
            return "tool_calls"
        return reason.value


def _joined(first: Parts, second: Parts) -> Parts:
    is_mixed = first.mixed or second.mixed or (first.content and second.reasoning)
    mixed = (*in_order(first), *in_order(second)) if is_mixed else ()
    return Parts(first.content + second.content, first.reasoning + second.reasoning, mixed)
