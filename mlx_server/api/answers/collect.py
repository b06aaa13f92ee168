"""Collects a complete answer and its usage from events, for every protocol."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mlx_server.api.answers.generation import Finish, Generation, OutputEvent, in_order
from mlx_server.api.answers.output_parser import Part, Thought
from mlx_server.engine.tools.parser import ToolCallDelta, calls_of
from mlx_server.engine.tools.untagged import JsonObjectCursor
from mlx_server.engine.tools.values import read_arguments
from mlx_server.outputs import PositionLogprobs


def whole_call(pieces: Sequence[ToolCallDelta]) -> ToolCallDelta:
    """The call that has come in these pieces, as one piece."""
    first = next((piece for piece in pieces if piece.name), pieces[0])
    return replace(first, arguments_fragment="".join(piece.arguments_fragment for piece in pieces))


def is_cut_off(arguments: str, finish: Finish | None) -> bool:
    """Whether a call's arguments are not complete because something else than the model has ended the output (None:
    nothing has yet)."""
    is_whole = bool(arguments) and JsonObjectCursor().feed(arguments)[1] is not None
    return not is_whole and finish is not None and finish.reason != "tool_calls"


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object (`read_arguments`); an empty one if they are something else."""
    parsed = read_arguments(arguments)
    return parsed if isinstance(parsed, dict) else {}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole job. A prompt counts once, even with several answers. Rounded tokens are those whose K/V
    were loaded from disk in 8 bits, at the start or after a preemption."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_rounded_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0


def usage_of(events: Collection[OutputEvent], n: int = 1) -> Usage:
    """The counts of a job after these events, the last ones of its choices so far. Choices `k * n` to `k * n + n - 1`
    share prompt `k`."""
    prompts = {event.index // n: event for event in sorted(events, key=lambda e: -e.index)}
    return Usage(
        num_prompt_tokens=sum(event.delta.num_prompt_tokens for event in prompts.values()),
        num_cached_tokens=sum(event.delta.num_cached_tokens for event in prompts.values()),
        num_rounded_tokens=sum(event.delta.num_rounded_tokens for event in prompts.values()),
        num_output_tokens=sum(event.delta.num_output_tokens for event in events),
        num_reasoning_tokens=sum(event.num_reasoning_tokens for event in events),
        num_accepted_drafts=sum(event.delta.num_accepted_drafts for event in events),
        num_rejected_drafts=sum(event.delta.num_rejected_drafts for event in events),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of a job, in order of their index: an event each, with all of the choice's output in `content`,
    `reasoning` and `mixed` (a piece for each call, and for each text between them). Its `delta` is that of the last
    step."""

    choices: tuple[OutputEvent, ...]
    usage: Usage

    @property
    def finish(self) -> Finish:
        """How the first choice ended."""
        finish = self.choices[0].finish
        assert finish is not None, "the stream ended without a finish reason"
        return finish


async def collect(generation: Generation, n: int) -> Answer:
    """Waits for the end of every choice. Raises `ServeError` if one fails."""
    builders: defaultdict[int, _Builder] = defaultdict(_Builder)

    def add(events: list[OutputEvent]) -> bool:
        for event in events:
            builders[event.index].add(event)
        return True

    await generation.feed(add)
    choices = tuple(builders[index].choice() for index in sorted(builders))
    return Answer(choices, usage_of(choices, n))


class _Builder:
    """Joins one choice's events."""

    _last: OutputEvent

    def __init__(self) -> None:
        self._mixed: list[Part] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: list[PositionLogprobs] = []

    def add(self, event: OutputEvent) -> None:
        self._mixed += in_order(event)
        self._token_ids.extend(event.token_ids)
        self._logprobs.extend(event.logprobs)
        self._prompt_logprobs.extend(event.delta.prompt_logprobs)
        self._last = event

    def choice(self) -> OutputEvent:
        mixed = tuple(joined(self._mixed))
        return replace(
            self._last,
            content="".join(part for part in mixed if type(part) is str),
            reasoning="".join(part for part in mixed if isinstance(part, Thought)),
            mixed=mixed,
            delta=replace(
                self._last.delta,
                token_ids=tuple(self._token_ids),
                logprobs=tuple(self._logprobs),
                prompt_logprobs=tuple(self._prompt_logprobs),
            ),
        )


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Joins neighbours of one kind: pieces of reasoning, of content, or of one call."""
    for key, group in groupby(parts, lambda part: type(part) if isinstance(part, str) else part.index):
        pieces = list(group)
        if isinstance(key, type):
            yield key("".join(map(str, pieces)))
        else:
            yield whole_call(calls_of(pieces))
