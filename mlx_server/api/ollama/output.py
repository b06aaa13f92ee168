"""Ollama's answers: one JSON object, or one a line, the last with counts and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from mlx_server.api.answers.collect import Answer, Usage, arguments_object, is_cut_off, usage_of, whole_call
from mlx_server.api.answers.generation import Finish, OutputEvent, Prompt
from mlx_server.api.errors import ErrorInfo
from mlx_server.api.http import sse
from mlx_server.api.ollama.request import OllamaCall
from mlx_server.api.openai.chat import token_body
from mlx_server.api.openai.exchange import Writer
from mlx_server.api.openai.output import TokenNames
from mlx_server.engine.tools.parser import ToolCallDelta
from mlx_server.engine.tools.untagged import JsonObjectCursor
from mlx_server.outputs import PositionLogprobs

NDJSON = "application/x-ndjson"

# The protocol has no reasons of its own for an abort, which cuts an answer off as a limit does, or for tool calls.
_DONE_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "length"}


def line(body: dict[str, Any]) -> bytes:
    return sse.encode(body) + b"\n"


def timestamp(seconds: float | None = None) -> str:
    """A time since the epoch (default: now) as Ollama's clients read it."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat().replace("+00:00", "Z")


Shown = Callable[..., dict[str, Any]]
"""Makes the members of an answer, or of one line of it, that hold what the model wrote, like the next function."""


def chat_members(content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Of `/api/chat`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return {"message": message}


def text_members(content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Of `/api/generate`, which has no tools."""
    return {"response": content, **({"thinking": thinking} if thinking else {})}


class AnswerWriter(Writer):
    """The answer to `/api/chat` or `/api/generate`. Tool calls are sent once they are complete, since their arguments
    are an object; one that is cut off is not sent."""

    media_type = NDJSON

    def __init__(self, call: OllamaCall, shown: Shown, prompt: Prompt | None = None) -> None:
        """`shown` makes the members that hold what the model wrote. With a `prompt`, the last line has `context`:
        prompt and answer as token ids."""
        exchange = call.exchange
        self.response_id = f"ollama-{exchange.request_id}"
        self._call = call
        self._shown = shown
        self._prompt = prompt
        self._answer_ids: list[int] = []
        self._templates: dict[str, sse.Template] = {}
        self._tool_call: list[ToolCallDelta] = []  # the pieces of the call that is being written
        self._arguments = JsonObjectCursor()  # its arguments
        self._names = TokenNames(exchange.engine.tokenizer if exchange.engine.has_tokenizer else None)
        self._num_top = exchange.body.num_logprobs
        self.keep_alive = self._line(**shown(), done=False)  # clients read each line as a part of the answer

    def full_body(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        calls = list(_call_bodies(choice.tool_calls, answer.finish))
        shown = {**self._shown(choice.content, choice.reasoning, calls), **self._logprobs(choice)}
        return self._last(shown, answer.finish, choice.token_ids, answer.usage)

    def write(self, event: OutputEvent) -> bytes:
        if self._prompt is not None:
            self._answer_ids.extend(event.token_ids)
        lines = list(self._lines(event))
        if event.finish is not None:
            lines += self._end_call(event.finish)
            lines.append(line(self._last(self._shown(), event.finish, self._answer_ids, usage_of([event]))))
        return b"".join(lines)

    def failure(self, error: ErrorInfo) -> bytes:
        return line(error.ollama_body())

    def _lines(self, event: OutputEvent) -> Iterator[bytes]:
        if self._num_top is not None and (event.logprobs or event.content or event.reasoning):
            yield self._line(**self._shown(event.content, event.reasoning), **self._logprobs(event), done=False)
        else:
            if event.reasoning:
                yield self._text("thinking", event.reasoning)
            if event.content:
                yield self._text("content", event.content)
        for piece in event.tool_calls:
            if self._tool_call and self._tool_call[0].index != piece.index:
                yield from self._end_call()
            self._tool_call.append(piece)
            if piece.arguments_fragment and self._arguments.feed(piece.arguments_fragment)[1] is not None:
                yield from self._end_call()

    def _end_call(self, finish: Finish | None = None) -> Iterator[bytes]:
        pieces, self._tool_call, self._arguments = self._tool_call, [], JsonObjectCursor()
        for call in _call_bodies([whole_call(pieces)] if pieces else (), finish):
            yield self._line(**self._shown(calls=[call]), done=False)

    def _text(self, name: str, text: str) -> bytes:
        """A line of `content` or `thinking`; lines of one kind differ in text and time only."""
        template = self._templates.get(name)
        if template is None:
            shown = self._shown if name == "content" else partial(self._shown, "")
            template = self._templates[name] = sse.Template(lambda blank: line({**shown(blank), "done": False})[1:])
        head = {"model": self._call.name, "created_at": timestamp()}
        return sse.encode(head)[:-1] + b"," + template.fill(text)

    def _line(self, **members: Any) -> bytes:
        return line(self._body(members))

    def _body(self, members: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._call.name, "created_at": timestamp(), **members}

    def _logprobs(self, source: OutputEvent) -> dict[str, Any]:
        if self._num_top is None or not source.logprobs:
            return {}
        return {"logprobs": [self._position(position, self._num_top) for position in source.logprobs]}

    def _position(self, position: PositionLogprobs, num_top: int) -> dict[str, Any]:
        body = token_body(self._names, position.token)
        if num_top:
            body["top_logprobs"] = [token_body(self._names, token) for token in position.top[:num_top]]
        return body

    def _last(self, shown: dict[str, Any], finish: Finish, token_ids: Sequence[int], usage: Usage) -> dict[str, Any]:
        """The last line, or a complete answer. Times are in nanoseconds; that of the prompt runs from its first step to
        the first output token."""
        call, timings = self._call, finish.timings
        prompt_s = output_s = 0.0
        if timings is not None and timings.first_token_s is not None:
            prompt_s = timings.first_token_s - (timings.first_scheduled_s or timings.arrival_s)
            output_s = (timings.finished_s or timings.first_token_s) - timings.first_token_s
        context = {} if self._prompt is None else {"context": [*self._prompt.token_ids, *token_ids]}
        return self._body(
            {
                **shown,
                "done": True,
                "done_reason": _DONE_REASONS[finish.reason],
                **context,
                "total_duration": nanoseconds(time.monotonic() - call.started_s),
                "load_duration": nanoseconds(call.load_s),
                "prompt_eval_count": usage.num_prompt_tokens,
                "prompt_eval_duration": nanoseconds(prompt_s),
                "eval_count": usage.num_output_tokens,
                "eval_duration": nanoseconds(output_s),
            }
        )


def _call_bodies(calls: Iterable[ToolCallDelta], finish: Finish | None) -> Iterator[dict[str, Any]]:
    """Clients run every call that they see."""
    for call in calls:
        written = call.arguments_fragment
        if not is_cut_off(written, finish):
            function = {"index": call.index, "name": call.name, "arguments": arguments_object(written)}
            yield {"id": call.id, "function": function}


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
