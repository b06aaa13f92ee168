"""What a chat template cannot take of a chat that clients send, and how the chat is written for it instead.

Templates differ: some refuse a system message, two users in a row, two calls at once, ids of more than nine letters;
others drop such things without a word. What one does is found by trying small chats on it, once; where a text is
missing in the prompt, or the template raises, the first repair is kept that mends it:

    [user "a", user "b"]    raises "roles must alternate"
    MERGE_NEIGHBOURS        [user "a\\n\\nb"]    shows both: from now on, chats for this template are merged so

A repair changes messages where they stand, whatever follows them, so that a prompt goes on as it began from turn to
turn, and its prefix stays cached.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mlx_server.engine.text.messages import calls_as_text, write_tools_into_messages
from mlx_server.engine.tools.formats import Tool

Message = dict[str, Any]
Tools = Sequence[Tool] | None
Shows = Callable[[Sequence[Message], Tools], str | None]
"""Renders a chat that is in a template's form; None where the template raises."""


class Repair(enum.Enum):
    """In the order in which they are applied."""

    NAMED_RESULTS = enum.auto()
    """A tool's result with the name of its call, which clients need not send."""
    DEVELOPER_AS_SYSTEM = enum.auto()
    TOOLS_AS_TEXT = enum.auto()
    CALLS_AS_TEXT = enum.auto()
    HISTORY_AS_TEXT = enum.auto()
    """Calls and results as text where no tools are offered."""
    EMPTY_TOOLS = enum.auto()
    """An empty list instead of no tools."""
    ARGUMENTS_AS_TEXT = enum.auto()
    SHORT_IDS = enum.auto()
    ONE_CALL_A_TURN = enum.auto()
    TEXT_BEFORE_CALLS = enum.auto()
    """An assistant's text in a message of its own before that of its calls."""
    NO_EMPTY_ANSWERS = enum.auto()
    ANSWERS_WITHOUT_REASONING = enum.auto()
    ONE_SYSTEM_MESSAGE = enum.auto()
    LATE_SYSTEM_AS_USER = enum.auto()
    SYSTEM_IN_USER = enum.auto()
    """A system message at the head of the first user's."""
    ANSWERED_RESULTS = enum.auto()
    """A short answer between a tool's result and a user's message."""
    MERGE_NEIGHBOURS = enum.auto()


Repairs = frozenset[Repair]


def adapt(messages: Sequence[Message], tools: Tools, repairs: Repairs) -> tuple[list[Message], Tools]:
    """Normalised messages as the template can take them, and the tools that it is to be given."""
    chat = list(messages)
    for repair in Repair:
        if repair in repairs:
            chat, tools = _APPLY[repair](chat, tools)
    return chat, tools


def find_repairs(shows: Shows, repairs: Repairs = frozenset()) -> Repairs:
    """What a template needs besides `repairs`. Some thirty renderings of a few lines each."""

    def is_whole(trial: _Trial, repairs: Repairs) -> bool:
        text = shows(*adapt(trial.messages, trial.tools, repairs))
        return text is not None and all(word in text for word in trial.words)

    for trial in _TRIALS:
        if not is_whole(trial, repairs):
            candidates = (repairs | set(more) for more in trial.repairs)
            repairs = next((more for more in candidates if is_whole(trial, more)), repairs)
    return repairs


# --- repairs --------------------------------------------------------------------------------------------------------

_Change = Callable[[list[Message], Tools], tuple[list[Message], Tools]]


def _of_messages(change: Callable[[list[Message]], Iterable[Message]]) -> _Change:
    return lambda chat, tools: (list(change(chat)), tools)


def _named_results(chat: list[Message]) -> Iterable[Message]:
    names: dict[Any, str] = {}
    for message in chat:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id"))
        yield {**message, "name": name} if message["role"] == "tool" and name and not message.get("name") else message


def _developer_as_system(chat: list[Message]) -> Iterable[Message]:
    return ({**message, "role": "system"} if message["role"] == "developer" else message for message in chat)


def _tools_as_text(chat: list[Message], tools: Tools) -> tuple[list[Message], Tools]:
    return (write_tools_into_messages(chat, tools), None) if tools else (chat, tools)


def _history_as_text(chat: list[Message], tools: Tools) -> tuple[list[Message], Tools]:
    return (chat, tools) if tools else (list(map(calls_as_text, chat)), tools)


def _calls_as_text(chat: list[Message]) -> Iterable[Message]:
    return (message if message["role"] == "tool" else calls_as_text(message) for message in chat)


def _with_calls(message: Message, change: Callable[[Message], Message]) -> Message:
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def _arguments_as_text(chat: list[Message]) -> Iterable[Message]:
    def written(call: Message) -> Message:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return (_with_calls(message, written) if "tool_calls" in message else message for message in chat)


def _short_ids(chat: list[Message]) -> Iterable[Message]:
    """Nine letters and digits, which depend on the id alone."""
    for message in chat:
        if "tool_calls" in message:
            yield _with_calls(message, lambda call: {**call, "id": _short_id(call.get("id"))})
        elif message["role"] == "tool":
            yield {**message, "tool_call_id": _short_id(message.get("tool_call_id"))}
        else:
            yield message


def _short_id(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()[:9]


def _one_call_a_turn(chat: list[Message]) -> Iterable[Message]:
    """Each call is followed by its result; results without a call of that id stay where they are."""
    taken: set[int] = set()
    for index, message in enumerate(chat):
        calls = message.get("tool_calls", ())
        if index in taken:
            continue
        if len(calls) < 2:
            yield message
            continue
        behind = range(index + 1, len(chat))
        end = next((i for i in behind if chat[i]["role"] != "tool"), len(chat))
        results = {chat[i].get("tool_call_id"): i for i in range(index + 1, end)}
        for number, call in enumerate(calls):
            yield {**message, "content": message["content"] if number == 0 else "", "tool_calls": [call]}
            result = results.get(call.get("id"))
            if result is not None:
                taken.add(result)
                yield chat[result]


def _text_before_calls(chat: list[Message]) -> Iterable[Message]:
    for message in chat:
        if "tool_calls" in message and message["content"]:
            yield {key: value for key, value in message.items() if key != "tool_calls"}
            yield {**message, "content": ""}
        else:
            yield message


def _no_empty_answers(chat: list[Message]) -> Iterable[Message]:
    """But for the last message, which may be the one to go on with."""
    for index, message in enumerate(chat):
        is_empty = message["role"] == "assistant" and not message["content"] and "tool_calls" not in message
        if not is_empty or index == len(chat) - 1:
            yield message


def _answers_without_reasoning(chat: list[Message]) -> Iterable[Message]:
    for message in chat:
        is_answer = message["role"] == "assistant" and message["content"] and "tool_calls" not in message
        yield {key: value for key, value in message.items() if key != "reasoning_content"} if is_answer else message


def _one_system_message(chat: list[Message]) -> Iterable[Message]:
    """Those at the beginning as one."""
    num_first = next((i for i, message in enumerate(chat) if message["role"] != "system"), len(chat))
    if num_first:
        yield {**chat[0], "content": "\n\n".join(message["content"] for message in chat[:num_first])}
    yield from chat[num_first:]


def _late_system_as_user(chat: list[Message]) -> Iterable[Message]:
    num_first = next((i for i, message in enumerate(chat) if message["role"] != "system"), len(chat))
    yield from chat[:num_first]
    for message in chat[num_first:]:
        yield {**message, "role": "user"} if message["role"] == "system" else message


def _system_in_user(chat: list[Message]) -> Iterable[Message]:
    if len(chat) > 1 and chat[0]["role"] == "system" and chat[1]["role"] == "user":
        yield {**chat[1], "content": f"{chat[0]['content']}\n\n{chat[1]['content']}"}
        yield from chat[2:]
    else:
        yield from ({**message, "role": "user"} if message["role"] == "system" else message for message in chat)


def _answered_results(chat: list[Message]) -> Iterable[Message]:
    for index, message in enumerate(chat):
        if index and message["role"] == "user" and chat[index - 1]["role"] == "tool":
            yield {"role": "assistant", "content": "OK."}
        yield message


def _merge_neighbours(chat: list[Message]) -> Iterable[Message]:
    for _, run in itertools.groupby(enumerate(chat), _run):
        messages = [message for _, message in run]
        if len(messages) > 1:
            texts = [message["content"] for message in messages if message["content"]]
            yield {
                **{name: value for message in messages for name, value in message.items()},
                "content": "\n\n".join(texts),
            }
        else:
            yield messages[0]


def _run(numbered: tuple[int, Message]) -> tuple[str, int]:
    """The same for neighbours that can be one message."""
    index, message = numbered
    is_text = message["role"] != "tool" and "tool_calls" not in message
    return message["role"], -1 if is_text else index


_APPLY: dict[Repair, _Change] = {
    Repair.NAMED_RESULTS: _of_messages(_named_results),
    Repair.DEVELOPER_AS_SYSTEM: _of_messages(_developer_as_system),
    Repair.TOOLS_AS_TEXT: _tools_as_text,
    Repair.CALLS_AS_TEXT: _of_messages(_calls_as_text),
    Repair.HISTORY_AS_TEXT: _history_as_text,
    Repair.EMPTY_TOOLS: lambda chat, tools: (chat, tools or []),
    Repair.ARGUMENTS_AS_TEXT: _of_messages(_arguments_as_text),
    Repair.SHORT_IDS: _of_messages(_short_ids),
    Repair.ONE_CALL_A_TURN: _of_messages(_one_call_a_turn),
    Repair.TEXT_BEFORE_CALLS: _of_messages(_text_before_calls),
    Repair.NO_EMPTY_ANSWERS: _of_messages(_no_empty_answers),
    Repair.ANSWERS_WITHOUT_REASONING: _of_messages(_answers_without_reasoning),
    Repair.ONE_SYSTEM_MESSAGE: _of_messages(_one_system_message),
    Repair.LATE_SYSTEM_AS_USER: _of_messages(_late_system_as_user),
    Repair.SYSTEM_IN_USER: _of_messages(_system_in_user),
    Repair.ANSWERED_RESULTS: _of_messages(_answered_results),
    Repair.MERGE_NEIGHBOURS: _of_messages(_merge_neighbours),
}


# --- trials ---------------------------------------------------------------------------------------------------------


class _Trial:
    """A chat, the words of it that a prompt must show, and what may mend it, the mildest first."""

    def __init__(self, messages: Sequence[Message], *repairs: Repair | tuple[Repair, ...], tools: Tools = None) -> None:
        self.messages = messages
        self.tools = tools
        self.repairs = [repair if isinstance(repair, tuple) else (repair,) for repair in repairs]
        texts = [message["content"] for message in messages]
        texts += [call["function"]["arguments"]["at"] for message in messages for call in message.get("tool_calls", ())]
        self.words = [*filter(None, texts), *(tool["function"]["name"] for tool in tools or ())]


def _says(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _calls(text: str, *places: str) -> Message:
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": "probe_it", "arguments": {"at": place}}}
        for place in places
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _gives(place: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{place}", "content": text}


_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
_TOOLS = [{"type": "function", "function": {"name": "probe_it", "description": "Probes.", "parameters": _PARAMETERS}}]
_ASKS, _MORE, _ANSWER = _says("user", "ask-1"), _says("user", "ask-2"), _says("assistant", "answer-1")
_SYSTEM = _says("system", "system-1")
_CALLED = [_ASKS, _calls("", "place-1"), _gives("place-1", "result-1")]
_R = Repair

_TRIALS = (
    _Trial([_ASKS], _R.EMPTY_TOOLS),
    _Trial([_ASKS, _MORE], _R.MERGE_NEIGHBOURS),
    _Trial([_ASKS, _ANSWER, _says("assistant", "answer-2"), _MORE], _R.MERGE_NEIGHBOURS),
    _Trial([_ASKS, _says("assistant", ""), _MORE], _R.NO_EMPTY_ANSWERS, (_R.NO_EMPTY_ANSWERS, _R.MERGE_NEIGHBOURS)),
    _Trial([_ASKS, {**_ANSWER, "reasoning_content": "thought-1"}, _MORE], _R.ANSWERS_WITHOUT_REASONING),
    _Trial([_SYSTEM, _ASKS], _R.SYSTEM_IN_USER),
    _Trial([_says("developer", "developer-1"), _ASKS], _R.DEVELOPER_AS_SYSTEM),
    _Trial([_SYSTEM, _says("system", "system-2"), _ASKS], _R.ONE_SYSTEM_MESSAGE),
    _Trial([_ASKS, _ANSWER, _SYSTEM, _MORE], _R.LATE_SYSTEM_AS_USER, (_R.LATE_SYSTEM_AS_USER, _R.MERGE_NEIGHBOURS)),
    _Trial([_SYSTEM, _ASKS], _R.TOOLS_AS_TEXT, tools=_TOOLS),
    _Trial(
        [*_CALLED, _ANSWER, _MORE],
        *(_R.NAMED_RESULTS, _R.ARGUMENTS_AS_TEXT, _R.SHORT_IDS, (_R.ARGUMENTS_AS_TEXT, _R.SHORT_IDS)),
        *(_R.CALLS_AS_TEXT, _R.TOOLS_AS_TEXT),
        tools=_TOOLS,
    ),
    _Trial(_CALLED, _R.TOOLS_AS_TEXT, tools=_TOOLS),
    _Trial(
        [_ASKS, _calls("", "place-1", "place-2"), _gives("place-1", "result-1"), _gives("place-2", "result-2")],
        _R.ONE_CALL_A_TURN,
        tools=_TOOLS,
    ),
    _Trial([_ASKS, _calls("answer-1", "place-1"), _gives("place-1", "result-1")], _R.TEXT_BEFORE_CALLS, tools=_TOOLS),
    _Trial([*_CALLED, _MORE], _R.ANSWERED_RESULTS, _R.TOOLS_AS_TEXT, tools=_TOOLS),
    _Trial([*_CALLED, _ANSWER, _MORE], _R.HISTORY_AS_TEXT),
    _Trial([*_CALLED, _MORE], _R.HISTORY_AS_TEXT),
)
