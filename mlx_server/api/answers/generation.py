"""From a job (prompts, parameters) to one stream of neutral events, for any protocol.

    route -> GenerationJob -> GenerationService.start() -> Generation -> OutputEvent ... -> the protocol's shape

What the model writes is taken apart on the way: reasoning, content and tool calls. Nothing here knows HTTP. Everything
runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mlx_server.api.auth.keys import Caller
from mlx_server.api.auth.quotas import Grant
from mlx_server.engine.request_stream import RequestStream
from mlx_server.engine.text.reasoning import ReasoningSplit, ReasoningSplitter
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.parser import ToolCallDelta, ToolCallExtractor, ToolOutput
from mlx_server.errors import ContextLengthError, ServeError
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.outputs import CompletionDelta, PositionLogprobs, RequestTimings
from mlx_server.request import FinishReason, PoolingParams, Priority, PromptImage, TokenConstraint
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what `token_ids` say, for echoes; None where it was not asked for. `images` are at their places in
    `token_ids`."""

    token_ids: tuple[int, ...]
    text: str | None = None
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a client wants a long prompt cut: to `num_tokens` (-1 is the whole context), losing one side."""

    num_tokens: int | None = None
    side: Literal["left", "right"] = "left"

    def part(self, text: str, tokenizer: Tokenizer, max_model_len: int) -> str:
        """What of `text` is to be tokenized before `apply`. Raises `ContextLengthError` for a text that is far too
        long and not to be cut."""
        keep = self.num_kept(max_model_len)
        most = max_model_len if keep is None else min(keep, max_model_len)
        part = tokenizer.part_of(text, most, is_end=keep is not None and self.side == "left")
        if keep is None and len(part) < len(text):
            raise ContextLengthError(
                f"The prompt has {len(text)} characters, and already {len(part)} of them are more tokens than the "
                f"context holds, which is {max_model_len}. Shorten the prompt.",
                "input_tokens",
            )
        return part

    def apply(self, token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        keep = self.num_kept(max_model_len)
        if keep is None or keep >= len(token_ids):
            return token_ids
        return token_ids[len(token_ids) - keep :] if self.side == "left" else token_ids[:keep]

    def num_kept(self, max_model_len: int) -> int | None:
        """One token of the context is for the output."""
        return max_model_len - 1 if self.num_tokens == -1 else self.num_tokens


class Parts(NamedTuple):
    """What a piece of text turned out to be. Reasoning comes before content where both are set."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser:
    """Follows one choice's text: splits off reasoning, then finds calls in what is left. Text that may be the start of
    a marker is held back until it is known. With neither splitter nor extractor, all text is content."""

    is_over = False
    """Whether the output ends here, whatever the model goes on to write. For subclasses to set."""

    is_plain = False
    """Whether all text is content as it comes, so that it need not be given to `append`."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None = None,
        extractor: ToolCallExtractor | None = None,
        is_parallel: bool = True,
    ) -> None:
        """Without `is_parallel`, calls after the first are dropped. `is_reasoning` tells whether the text so far ends
        inside the reasoning, which there is none of without `splits_reasoning`."""
        self.is_plain = type(self) is OutputParser and splitter is None and extractor is None
        self.splits_reasoning = splitter is not None
        self.is_reasoning = splitter is not None and splitter.is_reasoning
        self._splitter = splitter
        self._extractor = extractor
        self._is_parallel = is_parallel

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call has begun, which decides the finish reason."""
        return self._extractor is not None and self._extractor.has_calls

    def append(self, text: str) -> Parts:
        """What is certain once `text` has come."""
        reasoning = ""
        if self._splitter is not None:
            split = self._splitter.append(text)
            text, reasoning = split.content, split.reasoning
            self.is_reasoning = self._splitter.is_reasoning
        if self._extractor is None:
            return Parts(text, reasoning)
        return self._parts(reasoning, self._extractor.append(text))

    def finish(self) -> Parts:
        """What was held back; called once, at the end."""
        split = ReasoningSplit() if self._splitter is None else self._splitter.finish()
        if self._extractor is None:
            return Parts(split.content, split.reasoning)
        found, last = self._extractor.append(split.content), self._extractor.finish()
        return self._parts(split.reasoning, ToolOutput(found.content + last.content, found.calls + last.calls))

    def _parts(self, reasoning: str, found: ToolOutput) -> Parts:
        calls = found.calls if self._is_parallel else tuple(call for call in found.calls if call.index == 0)
        return Parts(found.content, reasoning, calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """Every prompt, `n` times, with one of the model's adapters or none. `request_id` is what the client calls it, and
    `response_id` what its answer is called; neither need be unique.

    `new_parser` and `new_constraint` make one object a choice: both follow that choice's own output. The last three
    are `GenerationRequest`'s.
    """

    request_id: str
    response_id: str
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    n: int = 1
    caller: Caller = field(default_factory=Caller)
    priority: Priority = Priority.NORMAL
    extra_keys: tuple[str, ...] = ()
    adapter: str | None = None
    new_parser: Callable[[], OutputParser] = OutputParser
    new_constraint: Callable[[], TokenConstraint] | None = None
    kept_token_ids: frozenset[int] = frozenset()
    continues_text: bool = False
    prediction_token_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a choice ended. `reason` is the engine's, or `tool_calls`; counts are final."""

    reason: str
    stop_reason: int | str | None
    timings: RequestTimings | None


@dataclass(slots=True)  # not frozen: there is one a token, and it takes three times as long
class OutputEvent:
    """News of one choice: what the text of a `delta` is. Counts are totals so far; `finish` is set on the choice's last
    event."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish: Finish | None = None
    num_reasoning_tokens: int = 0
    delta: CompletionDelta = field(default_factory=lambda: CompletionDelta("", ()))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.delta.token_ids

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        return self.delta.logprobs


Show = Callable[[list[OutputEvent]], bool]
"""Takes events; False if no more may come until its owner is ready for them."""


async def _at_once() -> None:
    """For an owner who is always ready."""


class Generation:
    """One job in progress. `feed` it to one reader; `close` it on every path."""

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
        self._choices = [_Choice(index, stream, job.new_parser()) for index, stream in enumerate(streams)]
        self._unread = self._choices  # of these the end has not been read
        self._is_taking = False
        self._show: Show | None = None  # while nothing but news is waited for
        self._news: asyncio.Future[None] | None = None  # for a task that waits for them, or for the end of showing
        for stream in streams:
            stream.on_news = self._on_news
        self._grant = grant
        self._on_close = on_close

    @property
    def has_output(self) -> bool:
        """Whether an event can be read without waiting."""
        return any(choice.stream.has_output for choice in self._choices)

    async def wait_for_output(self, timeout_s: float | None) -> None:
        """Waits for the first output of any choice, at most `timeout_s`. Raises the `ServeError` of a choice that ends
        without any until then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not any(choice.stream.is_over() for choice in self._choices) and not self.has_output:
                    await self._wait()

    async def feed(self, show: Show, is_ready: Callable[[], Awaitable[None]] = _at_once) -> None:
        """Shows the events of all choices to the end, those of a step together. They are shown right where the engine
        tells of them, since a task's turn for each would take longer than all else. When `show` says False, the next
        ones wait for `is_ready`, and are shown together. Raises what `show` raises, and the `ServeError` of a choice
        that ends with one."""
        while True:
            while not self._show_news(show):
                await is_ready()
            if not self._unread:
                return
            await self._wait(show)
            await is_ready()

    async def _wait(self, show: Show | None = None) -> None:
        """For news, or with `show` until showing them is to be looked after."""
        self._show, self._news = show, asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._show = self._news = None

    def _on_news(self) -> None:
        """Some choices have news, or their end. What ends while others' news are taken is taken with them."""
        news = self._news
        if news is None or news.done() or self._is_taking:
            return
        try:
            is_done = self._show is None or not self._show_news(self._show) or not self._unread
        except Exception as error:
            news.set_exception(error)
        else:
            if is_done:
                news.set_result(None)

    def _show_news(self, show: Show) -> bool:
        """What can be read without waiting: the news of a step, or of all steps that a slow reader has let pass. What
        `show` says."""
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
            self._grant.add_output(num_tokens)
            is_ready = show(events)
        if is_any_complete:
            self._unread = [choice for choice in self._unread if not choice.stream.is_over()]
        return is_ready

    def summaries(self) -> list[RequestSummary]:
        """Of the choices that have ended: all of them, once the generation is closed."""
        summaries = (choice.stream.summary for choice in self._choices)
        return [summary for summary in summaries if summary is not None]

    def abort(self, new_error: Callable[[], ServeError] | None = None) -> None:
        """Ends every choice with the reason `abort`, or with an error; the client still gets its last events."""
        for choice in self._choices:
            choice.stream.abort(None if new_error is None else new_error())

    def close(self) -> None:
        """Aborts what is unfinished, gives the caller's seats back, and forgets the job. Idempotent."""
        self.abort()
        self._grant.close()
        self._on_close(self)


class _Choice:
    """One request of a job: turns the engine's deltas into events."""

    __slots__ = ("_index", "_is_plain", "_num_reasoning_tokens", "_parser", "_was_reasoning", "stream")

    def __init__(self, index: int, stream: RequestStream, parser: OutputParser) -> None:
        self.stream = stream
        self._index = index
        self._parser = parser
        self._is_plain = parser.is_plain
        self._was_reasoning = parser.is_reasoning
        self._num_reasoning_tokens = 0

    def take(self, events: list[OutputEvent]) -> int:
        """Adds all that can be read without waiting to `events`; how many tokens that is."""
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
            parts = _joined(parts, self._parser.finish())
            finish = Finish(
                reason=self._finish_reason(delta.finish_reason),
                stop_reason=delta.stop_reason,
                timings=delta.timings,
            )
        return OutputEvent(self._index, *parts, finish, self._num_reasoning_tokens, delta)

    def _read(self, delta: CompletionDelta) -> Parts:
        """What the text is. Reasoning may end among several tokens, of which those behind its end are not counted."""
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

    def _finish_reason(self, reason: FinishReason) -> str:
        if reason is FinishReason.ABORT and self._parser.is_over:
            return FinishReason.LENGTH.value
        if reason is FinishReason.STOP and self._parser.has_tool_calls:
            return "tool_calls"
        return reason.value


def _joined(first: Parts, second: Parts) -> Parts:
    return Parts(
        first.content + second.content, first.reasoning + second.reasoning, first.tool_calls + second.tool_calls
    )
