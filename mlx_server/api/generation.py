"""From a job (prompts, parameters) to one stream of neutral events, for any protocol.

    route -> GenerationJob -> GenerationService.start() -> Generation -> OutputEvent ... -> the protocol's shape

What the model writes is taken apart on the way: reasoning, content and tool calls. Nothing here knows HTTP. Everything
runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlx_server.api.auth.keys import Caller
from mlx_server.api.auth.quotas import Grant
from mlx_server.engine.request_stream import RequestStream
from mlx_server.engine.text.reasoning import ReasoningSplit, ReasoningSplitter
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.parser import ToolCallDelta, ToolCallExtractor, ToolOutput
from mlx_server.errors import ContextLengthError, ServeError
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.outputs import CompletionDelta, PositionLogprobs, RequestTimings
from mlx_server.request import FinishReason, Priority, TokenConstraint
from mlx_server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what `token_ids` say, for echoes; None where it was not asked for."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a client wants a long prompt cut: to `num_tokens` (-1 is the whole context), losing one side."""

    num_tokens: int | None = None
    side: Literal["left", "right"] = "left"

    def part(self, text: str, tokenizer: Tokenizer, max_model_len: int) -> str:
        """What of `text` is to be tokenized before `apply`. Raises `ContextLengthError` for a text that is far too
        long and not to be cut."""
        keep = self._num_kept(max_model_len)
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
        keep = self._num_kept(max_model_len)
        if keep is None or keep >= len(token_ids):
            return token_ids
        return token_ids[len(token_ids) - keep :] if self.side == "left" else token_ids[:keep]

    def _num_kept(self, max_model_len: int) -> int | None:
        """One token of the context is for the output."""
        return max_model_len - 1 if self.num_tokens == -1 else self.num_tokens


@dataclass(frozen=True, slots=True)
class Parts:
    """What a piece of text turned out to be. Reasoning comes before content where both are set."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser:
    """Follows one choice's text: splits off reasoning, then finds calls in what is left. Text that may be the start of
    a marker is held back until it is known. With neither splitter nor extractor, all text is content."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None = None,
        extractor: ToolCallExtractor | None = None,
        is_parallel: bool = True,
    ) -> None:
        """Without `is_parallel`, calls after the first are dropped. `is_reasoning` tells whether the text so far ends
        inside the reasoning."""
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

    `new_parser` and `new_constraint` make one object a choice: both follow that choice's own output. The last two
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a choice ended. `reason` is the engine's, or `tool_calls`; counts are final."""

    reason: str
    stop_reason: int | str | None
    timings: RequestTimings | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEvent:
    """News of one choice. Counts are totals so far; `finish` is set on the choice's last event."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    finish: Finish | None = None


class Generation:
    """One job in progress. Iterate over it once; `close` it on every path."""

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
        self._grant = grant
        self._on_close = on_close

    @property
    def has_output(self) -> bool:
        """Whether an event can be read without waiting."""
        return any(choice.stream.has_output for choice in self._choices)

    async def wait_for_output(self, timeout_s: float | None) -> None:
        """Waits for the first output of any choice, at most `timeout_s`. Raises the `ServeError` of a choice that ends
        without any until then."""
        waits = [asyncio.ensure_future(choice.stream.wait_for_output()) for choice in self._choices]
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            await _cancel(waits)

    async def events(self) -> AsyncGenerator[OutputEvent, None]:
        """The events of all choices as they come. Raises `ServeError` when a choice ends with an error."""
        sources = [choice.events() for choice in self._choices]
        async with contextlib.aclosing(sources[0] if len(sources) == 1 else _merged(sources)) as events:
            async for event in events:
                if event.token_ids:
                    self._grant.add_output(len(event.token_ids))
                yield event

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

    def __init__(self, index: int, stream: RequestStream, parser: OutputParser) -> None:
        self.stream = stream
        self._index = index
        self._parser = parser
        self._was_reasoning = parser.is_reasoning
        self._num_reasoning_tokens = 0
        self._counted = CompletionDelta("", ())

    async def events(self) -> AsyncGenerator[OutputEvent, None]:
        async for delta in self.stream:
            yield self._event(delta)

    def _event(self, delta: CompletionDelta) -> OutputEvent:
        # An aborted request's last delta has no counts; those before it stand.
        counted = self._counted = delta if delta.finish_reason is not FinishReason.ABORT else self._counted
        parts = self._parser.append(delta.text)
        finish = None
        if delta.finish_reason is not None:
            parts = _joined(parts, self._parser.finish())
            finish = Finish(
                reason=self._finish_reason(delta.finish_reason),
                stop_reason=delta.stop_reason,
                timings=delta.timings,
            )
        is_reasoning = self._parser.is_reasoning
        if self._was_reasoning or is_reasoning:
            self._num_reasoning_tokens += len(delta.token_ids)
        self._was_reasoning = is_reasoning
        return OutputEvent(
            index=self._index,
            content=parts.content,
            reasoning=parts.reasoning,
            tool_calls=parts.tool_calls,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            num_prompt_tokens=counted.num_prompt_tokens,
            num_cached_tokens=counted.num_cached_tokens,
            num_output_tokens=counted.num_output_tokens,
            num_reasoning_tokens=self._num_reasoning_tokens,
            finish=finish,
        )

    def _finish_reason(self, reason: FinishReason) -> str:
        if reason is FinishReason.STOP and self._parser.has_tool_calls:
            return "tool_calls"
        return reason.value


def _joined(first: Parts, second: Parts) -> Parts:
    return Parts(
        first.content + second.content, first.reasoning + second.reasoning, first.tool_calls + second.tool_calls
    )


async def _merged(sources: Sequence[AsyncIterator[OutputEvent]]) -> AsyncGenerator[OutputEvent, None]:
    queue: asyncio.Queue[OutputEvent | Exception | None] = asyncio.Queue()  # None is a source's end

    async def pump(source: AsyncIterator[OutputEvent]) -> None:
        try:
            async for event in source:
                queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
