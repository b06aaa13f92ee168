"""Ollama's answers: one JSON object, or one a line, the last with counts and times."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from mlx_server.api.answers.collect import Answer, Choice, ToolCall, UsageMeter, arguments_object
from mlx_server.api.answers.generation import Finish, OutputEvent, Prompt
from mlx_server.api.errors import ErrorInfo
from mlx_server.api.http import sse
from mlx_server.api.ollama.request import OllamaCall
from mlx_server.api.openai.exchange import Writer
from mlx_server.api.openai.output import TokenNames, finite
from mlx_server.engine.tools.parser import ToolCallDelta
from mlx_server.outputs import PositionLogprobs, RequestTimings, TokenLogprob

NDJSON = "application/x-ndjson"

# An abort cuts an answer off as the token limit does; calls end an answer as any other end does.
_DONE_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "length"}


def line(body: dict[str, Any]) -> bytes:
    return sse.encode(body) + b"\n"


def timestamp(seconds: float | None = None) -> str:
    """Of a time since the epoch, or of now, as Ollama's clients read it."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat().replace("+00:00", "Z")


class AnswerWriter(Writer):
    """What both kinds of answer have in common. Subclasses say where text, thoughts and calls stand."""

    def __init__(self, call: OllamaCall) -> None:
        exchange = call.exchange
        self.response_id = f"ollama-{exchange.request_id}"
        self._call = call
        self._meter = UsageMeter(1)
        self._finish: Finish | None = None
        self._pieces: dict[str, sse.Template] = {}
        self._tool_call: list[ToolCallDelta] = []
        """What has come of the call that is being written."""
        self._names = TokenNames(exchange.engine.tokenizer if exchange.engine.has_tokenizer else None)
        self._num_top = exchange.body.num_logprobs

    @abstractmethod
    def shown(self, content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The members of an answer, or of a part of one, that hold what the model wrote."""

    def ending(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """What the last line has beside counts and times."""
        return {}

    @property
    def keep_alive(self) -> bytes:
        """A line without news, for a silent stream: clients read each line as a part of the answer."""
        return line(self._body({**self.shown(), "done": False}))

    def whole(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        calls = [_call_body(index, call) for index, call in enumerate(choice.tool_calls)]
        counts = self._counts(answer.usage.num_prompt_tokens, answer.usage.num_output_tokens, answer.timings)
        shown = self.shown(choice.content, choice.reasoning, calls)
        ending = {**_done(choice.finish), **self.ending(choice.token_ids), **counts}
        return self._body({**shown, **self._logprobs(choice), **ending})

    def write(self, event: OutputEvent) -> bytes:
        self._meter.update(event)
        self._note(event)
        lines = list(self._lines(event))
        if event.finish is not None:
            self._finish = event.finish
            lines += self._end_call()
        return b"".join(lines)

    def closing(self) -> bytes:
        assert self._finish is not None, "the stream ended without a finish reason"
        usage = self._meter.total()
        counts = self._counts(usage.num_prompt_tokens, usage.num_output_tokens, self._meter.timings())
        return line(self._body({**self.shown(), **_done(self._finish), **self.ending(self._token_ids()), **counts}))

    def failure(self, error: ErrorInfo) -> bytes:
        return line(error.ollama_body())

    def _note(self, event: OutputEvent) -> None:
        """Looks at an event before it is written."""

    def _token_ids(self) -> Sequence[int]:
        """Of a streamed answer, for `ending`."""
        return ()

    def _lines(self, event: OutputEvent) -> Iterator[bytes]:
        if self._num_top is not None and (event.logprobs or event.content or event.reasoning):
            yield self._part({**self.shown(event.content, event.reasoning), **self._logprobs(event)})
        else:
            if event.reasoning:
                yield self._piece("thinking", event.reasoning)
            if event.content:
                yield self._piece("content", event.content)
        for piece in event.tool_calls:
            if self._tool_call and self._tool_call[0].index != piece.index:
                yield from self._end_call()
            self._tool_call.append(piece)

    def _end_call(self) -> Iterator[bytes]:
        """A call is sent once it is complete: its arguments are an object."""
        pieces, self._tool_call = self._tool_call, []
        if pieces:
            arguments = "".join(piece.arguments_fragment for piece in pieces)
            first = next((piece for piece in pieces if piece.name), pieces[0])
            call = ToolCall(first.id or "", first.name or "", arguments)
            yield self._part(self.shown(calls=[_call_body(first.index, call)]))

    def _piece(self, name: str, text: str) -> bytes:
        """A line of text or thought: they differ in that and in their time only."""
        template = self._pieces.get(name)
        if template is None:
            template = self._pieces[name] = sse.Template(
                lambda blank: self._tail(self.shown(blank) if name == "content" else self.shown(thinking=blank))
            )
        return self._head(timestamp()) + template.fill(text)

    def _part(self, members: dict[str, Any]) -> bytes:
        return self._head(timestamp()) + self._tail(members)

    def _head(self, created_at: str) -> bytes:
        return sse.encode({"model": self._call.name, "created_at": created_at})[:-1] + b","

    def _tail(self, members: dict[str, Any]) -> bytes:
        return line({**members, "done": False})[1:]

    def _body(self, members: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._call.name, "created_at": timestamp(), **members}

    def _logprobs(self, source: OutputEvent | Choice) -> dict[str, Any]:
        if self._num_top is None or not source.logprobs:
            return {}
        return {"logprobs": [self._position(position, self._num_top) for position in source.logprobs]}

    def _position(self, position: PositionLogprobs, num_top: int) -> dict[str, Any]:
        body = self._token(position.token)
        return body | ({"top_logprobs": [self._token(token) for token in position.top[:num_top]]} if num_top else {})

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        names, token_id = self._names, token.token_id
        return {"token": names.name(token_id), "logprob": finite(token.logprob), "bytes": names.bytes(token_id)}

    def _counts(self, num_prompt: int, num_output: int, timings: RequestTimings | None) -> dict[str, int]:
        """Times in nanoseconds; that of the prompt is from its first step to the first token."""
        call = self._call
        prompt_s = output_s = 0.0
        if timings is not None and timings.first_token_s is not None:
            prompt_s = timings.first_token_s - (timings.first_scheduled_s or timings.arrival_s)
            output_s = (timings.finished_s or timings.first_token_s) - timings.first_token_s
        return {
            "total_duration": nanoseconds(time.monotonic() - call.started_s),
            "load_duration": nanoseconds(call.load_s),
            "prompt_eval_count": num_prompt,
            "prompt_eval_duration": nanoseconds(prompt_s),
            "eval_count": num_output,
            "eval_duration": nanoseconds(output_s),
        }


class ChatWriter(AnswerWriter):
    """`/api/chat`."""

    def shown(self, content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"message": message_body(content, thinking, calls)}


class TextWriter(AnswerWriter):
    """`/api/generate`. The last line has `context`: `prompt` and answer as token ids, unless `prompt` is None, for raw
    text."""

    def __init__(self, call: OllamaCall, prompt: Prompt | None) -> None:
        super().__init__(call)
        self._prompt = prompt
        self._answer_ids: list[int] = []

    def shown(self, content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"response": content, **({"thinking": thinking} if thinking else {})}

    def ending(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {} if self._prompt is None else {"context": [*self._prompt.token_ids, *token_ids]}

    def _note(self, event: OutputEvent) -> None:
        if self._prompt is not None:
            self._answer_ids.extend(event.token_ids)

    def _token_ids(self) -> Sequence[int]:
        return self._answer_ids


def message_body(content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    body: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        body["thinking"] = thinking
    if calls:
        body["tool_calls"] = list(calls)
    return body


def _call_body(index: int, call: ToolCall) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": arguments_object(call.arguments)}
    return {"id": call.call_id, "function": function}


def _done(finish: Finish) -> dict[str, Any]:
    return {"done": True, "done_reason": _DONE_REASONS[finish.reason]}


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
