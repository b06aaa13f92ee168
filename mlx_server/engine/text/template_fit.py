"""What a chat template cannot take of the chats that clients send, and which repairs it needs.

Templates differ: some refuse a system message, two user messages in a row, two calls at once, or ids of more than nine
letters; others silently drop such things. So each template renders a few small chats once. Where a text is missing in
the prompt, or the template raises, the first repair that helps is kept:

    [user "a", user "b"]    raises "roles must alternate"
    merge_neighbours        [user "a\\n\\nb"]    shows both: from now on, chats for this template are merged so

The trials also check that the model's own parser reads a call as the template writes it: the model will write its calls
as it sees them in the history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlx_server.engine.text.reasoning import Dialect
from mlx_server.engine.text.splitters import new_splitter
from mlx_server.engine.text.template_repairs import (
    Change,
    Message,
    Repairs,
    Tools,
    adapt,
    answered_results,
    answers_without_reasoning,
    arguments_as_text,
    bare_tools,
    calls_as_text,
    described_tools,
    developer_as_system,
    empty_tools,
    escaped_texts,
    history_as_text,
    late_system_as_user,
    merge_neighbours,
    named_ids,
    named_results,
    no_empty_answers,
    one_call_a_turn,
    one_system_message,
    reasoning_in_text,
    short_ids,
    system_for_tools,
    system_in_user,
    text_before_calls,
    thoughts_once,
    tools_as_text,
    tools_in_message,
)
from mlx_server.engine.tools.parser import ToolCallExtractor

Shows = Callable[[Sequence[Message], Tools], str | None]
"""Renders a chat that is in a template's form; None if the template raises."""


def find_repairs(shows: Shows, dialect: Dialect, end: str | None, repairs: Repairs) -> Repairs:
    """Returns `repairs` and what else a template needs. `end` is the text of the token that ends the model's turns.
    Takes some thirty renderings of a few lines each."""

    def shown(messages: Sequence[Message], tools: Tools, repairs: Repairs) -> str | None:
        return shows(*adapt(messages, tools, repairs, dialect.tool_parser))

    def is_whole(trial: _Trial, repairs: Repairs) -> bool:
        text = shown(trial.messages, trial.tools, repairs)
        if text is None or any(word not in text for word in trial.words) or text.count(_THOUGHT) > 1:
            return False
        if any(text.rindex(said) > text.rindex(place) for said, place in trial.said_before):
            return False
        return not trial.is_read or reads(text, trial.arguments, repairs)

    def reads(text: str, arguments: Any, repairs: Repairs) -> bool:
        """Whether the call between question and result would be found, with these arguments, if the model wrote it,
        after the beginning of its turn."""
        beginning = (shown([_QUESTION], _TOOLS, repairs) or "").rpartition(_QUESTION["content"])[2]
        turn = text.rpartition(_QUESTION["content"])[2].partition("result-1")[0].removeprefix(beginning)
        return any(_has_call(piece, arguments, dialect) for piece in (turn.split(end) if end else [turn]))

    for trial in _TRIALS:
        if not is_whole(trial, repairs):
            candidates = (repairs | set(more) for more in trial.repairs)
            repairs = next((more for more in candidates if is_whole(trial, more)), repairs)
    if tools_as_text in repairs:  # a template that has no place for tools may still write calls
        others = repairs - {tools_as_text, history_as_text} | {described_tools}
        milder = (others, others | {arguments_as_text})
        repairs = next((each for each in milder if all(is_whole(trial, each) for trial in _TRIALS)), repairs)
    return repairs


@dataclass(frozen=True, slots=True)
class Joints:
    """The white space that a template writes between what a model says and its calls, and before the end of its
    reasoning. The model writes it, too, so it is at the end of the text that clients send back."""

    before_calls: str
    after_reasoning: str

    def without(self, message: Message) -> Message:
        """The message without what the template adds, so that a turn is written as the model wrote it."""
        ends = {"reasoning_content": self.after_reasoning} | (
            {"content": self.before_calls} if "tool_calls" in message else {}
        )
        texts = {key: message[key].removesuffix(end) for key, end in ends.items() if isinstance(message.get(key), str)}
        return {**message, **texts}


def find_joints(shows: Shows, dialect: Dialect, repairs: Repairs) -> Joints:
    """The joints of a template that needs `repairs`, found in one rendering; empty where it writes something else."""
    called = {**_calls("answer-1", "place-1"), "reasoning_content": _THOUGHT}
    chat = [_QUESTION, called, _tool_result("1", "result-1")]
    text = shows(*adapt(chat, _TOOLS, repairs, dialect.tool_parser)) or ""

    def between(said: str, marker: str) -> str:
        joint, found, _ = text.rpartition(said)[2].partition(marker)
        return joint if found and joint.isspace() else ""

    end = "" if dialect.reasoning is None else between(_THOUGHT, dialect.reasoning.end)
    return Joints(between("answer-1", dialect.tool_parser.start), end)


def _has_call(text: str, arguments: Any, dialect: Dialect) -> bool:
    """Whether the output `text` is read as a call of the trials' tool with these arguments."""
    splitter = new_splitter(dialect, _TOOLS)
    if splitter is not None:
        text = splitter.append(text).content + splitter.finish().content
    extractor = ToolCallExtractor(dialect.tool_parser, _TOOLS)
    found = (*extractor.append(text).calls, *extractor.finish().calls)
    if [call.name for call in found if call.name] != ["probe_it"]:
        return False
    with suppress(ValueError):  # what was cut off is no JSON
        return bool(json.loads("".join(call.arguments_fragment for call in found)) == arguments)
    return False


class _Trial:
    """A chat, the words of it that a prompt must show (text beside calls before them), and the repairs to try, the
    mildest first. With `is_read`, the model's parser must find the first call."""

    def __init__(
        self,
        messages: Sequence[Message],
        *repairs: Change | tuple[Change, ...],
        tools: Tools = None,
        is_read: bool = False,
    ) -> None:
        self.messages = messages
        self.tools = tools
        self.is_read = is_read
        self.repairs = [repair if isinstance(repair, tuple) else (repair,) for repair in repairs]
        texts = [message["content"] for message in messages]
        given = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
        self.arguments = next(iter(given), None)
        beside = [message for message in messages if message["content"] and "tool_calls" in message]
        self.said_before = [(message["content"], given[0]["at"]) for message in beside]
        if not is_read:  # else they may be escaped
            texts += [arguments["at"] for arguments in given]
        self.words = [*filter(None, texts), *(tool["function"]["name"] for tool in tools or ())]


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _calls(text: str, *places: str) -> Message:
    calls = [
        {"id": _id(place), "type": "function", "function": {"name": "probe_it", "arguments": {"at": place}}}
        for place in places
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _tool_result(place: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": _id(place), "content": text}


def _id(place: str) -> str:
    return f"call-{place[-1]}"


_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
_TOOLS = [{"type": "function", "function": {"name": "probe_it", "description": "Probes.", "parameters": _PARAMETERS}}]
_QUESTION, _FOLLOW_UP, _ANSWER = _message("user", "ask-1"), _message("user", "ask-2"), _message("assistant", "answer-1")
_THOUGHT = "thought-1"
_SYSTEM = _message("system", "system-1")


def _called(place: str) -> list[Message]:
    return [_QUESTION, _calls("", place), _tool_result("1", "result-1")]


_CALLED = _called("place-1")

_TRIALS = (
    _Trial([_QUESTION], empty_tools),
    _Trial([_QUESTION, _FOLLOW_UP], merge_neighbours),
    _Trial([_QUESTION, _ANSWER, _message("assistant", "answer-2"), _FOLLOW_UP], merge_neighbours),
    _Trial([_QUESTION, _message("assistant", ""), _FOLLOW_UP], no_empty_answers, (no_empty_answers, merge_neighbours)),
    _Trial([_QUESTION, {**_ANSWER, "reasoning_content": _THOUGHT}, _FOLLOW_UP], answers_without_reasoning),
    _Trial([_SYSTEM, _QUESTION], system_in_user),
    _Trial([_message("developer", "developer-1"), _QUESTION], developer_as_system),
    _Trial([_SYSTEM, _message("system", "system-2"), _QUESTION], one_system_message),
    _Trial([_QUESTION, _ANSWER, _SYSTEM, _FOLLOW_UP], late_system_as_user, (late_system_as_user, merge_neighbours)),
    _Trial([_QUESTION], system_for_tools, tools_in_message, bare_tools, tools_as_text, tools=_TOOLS),
    _Trial([_SYSTEM, _QUESTION], tools_as_text, tools=_TOOLS),
    _Trial(
        [*_CALLED, _ANSWER, _FOLLOW_UP],
        *(named_results, arguments_as_text, short_ids, (arguments_as_text, short_ids)),
        *(calls_as_text, tools_as_text),
        tools=_TOOLS,
    ),
    _Trial(_CALLED, tools_as_text, tools=_TOOLS),
    _Trial(_CALLED, arguments_as_text, named_ids, tools_as_text, tools=_TOOLS, is_read=True),
    _Trial(_called('it\'s "a" \\ 1'), escaped_texts, tools=_TOOLS, is_read=True),
    _Trial(
        [
            _QUESTION,
            _calls("", "place-1", "place-2"),
            _tool_result("place-1", "result-1"),
            _tool_result("place-2", "result-2"),
        ],
        one_call_a_turn,
        tools=_TOOLS,
    ),
    _Trial(
        [_QUESTION, _calls("answer-1", "place-1"), _tool_result("place-1", "result-1")], text_before_calls, tools=_TOOLS
    ),
    _Trial(
        [_QUESTION, {**_calls("answer-1", "place-1"), "reasoning_content": _THOUGHT}, _tool_result("1", "result-1")],
        *(reasoning_in_text, thoughts_once),
        tools=_TOOLS,
    ),
    _Trial([*_CALLED, _FOLLOW_UP], answered_results, tools_as_text, tools=_TOOLS),
    _Trial([*_CALLED, _ANSWER, _FOLLOW_UP], history_as_text),
    _Trial([*_CALLED, _FOLLOW_UP], history_as_text),
)
