"""What a chat template cannot take of the chats that clients send, and how a chat is rewritten for it.

Templates differ: some refuse a system message, two user messages in a row, two calls at once, or ids of more than nine
letters; others silently drop such things. So each template renders a few small chats once. Where a text is missing in
the prompt, or the template raises, the first repair that helps is kept:

    [user "a", user "b"]    raises "roles must alternate"
    merge_neighbours        [user "a\\n\\nb"]    shows both: from now on, chats for this template are merged so

A repair rewrites each turn the same way, whatever turns follow. So a prompt keeps its beginning from turn to turn, and
its prefix stays cached.

The trials also check that the model's own parser reads a call as the template writes it: the model will write its calls
as it sees them in the history.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlx_server.engine.text.reasoning import Dialect
from mlx_server.engine.text.splitters import new_splitter
from mlx_server.engine.tools.formats import JSON_TAGS, Tool, ToolParser
from mlx_server.engine.tools.parser import ToolCallExtractor
from mlx_server.engine.tools.written import written_calls

Message = dict[str, Any]
Tools = Sequence[Tool] | None
Shows = Callable[[Sequence[Message], Tools], str | None]
"""Renders a chat that is in a template's form; None if the template raises."""

Change = Callable[[list[Message], Tools, ToolParser], tuple[list[Message], Tools]]
"""A repair: it changes a chat and its tools. Calls that it writes as text are in the parser's format."""

Repairs = frozenset[Change]


def adapt(
    messages: Sequence[Message], tools: Tools, repairs: Repairs, parser: ToolParser = JSON_TAGS
) -> tuple[list[Message], Tools]:
    """Returns normalised messages as the template can take them, and the tools to give it."""
    chat = list(messages)
    for repair in _IN_ORDER:
        if repair in repairs:
            chat, tools = repair(chat, tools, parser)
    return chat, tools


def find_repairs(shows: Shows, dialect: Dialect, end: str | None, repairs: Repairs) -> Repairs:
    """Returns `repairs` and what else a template needs. `end` is the text of the token that ends the model's turns.
    Takes some thirty renderings of a few lines each."""

    def shown(messages: Sequence[Message], tools: Tools, repairs: Repairs) -> str | None:
        return shows(*adapt(messages, tools, repairs, dialect.tool_parser))

    def is_whole(trial: _Trial, repairs: Repairs) -> bool:
        text = shown(trial.messages, trial.tools, repairs)
        if text is None or any(word not in text for word in trial.words):
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
    return repairs


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


# --- repairs --------------------------------------------------------------------------------------------------------


def _of_messages(change: Callable[[list[Message]], Iterable[Message]]) -> Change:
    """A repair that leaves the tools alone."""
    return lambda chat, tools, _: (list(change(chat)), tools)


@_of_messages
def named_results(chat: list[Message]) -> Iterable[Message]:
    """Adds the name of its call to a tool's result, which clients need not send."""
    names: dict[Any, str] = {}
    for message in chat:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id"))
        yield {**message, "name": name} if message["role"] == "tool" and name and not message.get("name") else message


@_of_messages
def developer_as_system(chat: list[Message]) -> Iterable[Message]:
    return ({**message, "role": "system"} if message["role"] == "developer" else message for message in chat)


_EXPLANATION = """You can call functions. To call one, write this and nothing else:
{call}
The result will be given to you. These are the functions, one JSON object a line:
"""
_EXAMPLE = {"name": "the function's name", "arguments": {"argument": "value"}}


def tools_as_text(chat: list[Message], tools: Tools, parser: ToolParser) -> tuple[list[Message], Tools]:
    """Explains the tools in the system message, and writes calls and results as text."""
    if not tools:
        return chat, tools
    functions = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    explanation = _EXPLANATION.format(call=written_calls(parser, [_EXAMPLE])) + "\n".join(functions)
    chat = [_as_text(message, parser) for message in chat]
    if chat[0]["role"] == "system":
        explanation = f"{chat.pop(0)['content']}\n\n{explanation}"
    return [{"role": "system", "content": explanation}, *chat], None


def history_as_text(chat: list[Message], tools: Tools, parser: ToolParser) -> tuple[list[Message], Tools]:
    """Writes calls and results as text where the request offers no tools."""
    return (chat, tools) if tools else ([_as_text(message, parser) for message in chat], tools)


def empty_tools(chat: list[Message], tools: Tools, parser: ToolParser) -> tuple[list[Message], Tools]:
    """Gives an empty list instead of no tools."""
    return chat, tools or []


def calls_as_text(chat: list[Message], tools: Tools, parser: ToolParser) -> tuple[list[Message], Tools]:
    """Writes calls as text, but no results."""
    return [m if m["role"] == "tool" else _as_text(m, parser) for m in chat], tools


def _as_text(message: Message, parser: ToolParser) -> Message:
    """Writes a message's calls, as `parser` reads them, or a tool's result as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    written = written_calls(parser, [call["function"] for call in message["tool_calls"]])
    content = "\n".join(filter(None, [message["content"], written]))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _with_calls(message: Message, change: Callable[[Message], Message]) -> Message:
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def _of_arguments(change: Callable[[Any], Any]) -> Change:
    """A repair of the calls' arguments."""

    def changed(call: Message) -> Message:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return _of_messages(lambda chat: (_with_calls(m, changed) if "tool_calls" in m else m for m in chat))


@_of_arguments
def arguments_as_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@_of_arguments
def escaped_texts(arguments: Any) -> Any:
    """Escapes the texts in arguments, for templates that only put quotes around them (LFM2.5)."""

    def escaped(value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False)[1:-1].replace("'", r"\'") if isinstance(value, str) else value

    return {key: escaped(value) for key, value in arguments.items()} if isinstance(arguments, Mapping) else arguments


@_of_messages
def short_ids(chat: list[Message]) -> Iterable[Message]:
    """Makes ids of nine letters and digits, which depend on the client's id alone."""
    for message in chat:
        if "tool_calls" in message:
            yield _with_calls(message, lambda call: {**call, "id": _short_id(call.get("id"))})
        elif message["role"] == "tool":
            yield {**message, "tool_call_id": _short_id(message.get("tool_call_id"))}
        else:
            yield message


def _short_id(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()[:9]


@_of_messages
def one_call_a_turn(chat: list[Message]) -> Iterable[Message]:
    """Puts each call's result right after it; results without a call of that id stay where they are."""
    taken: set[int] = set()
    for index, message in enumerate(chat):
        calls = message.get("tool_calls", ())
        if index in taken:
            continue
        if len(calls) < 2:
            yield message
            continue
        following = range(index + 1, len(chat))
        end = next((i for i in following if chat[i]["role"] != "tool"), len(chat))
        results = {chat[i].get("tool_call_id"): i for i in range(index + 1, end)}
        for number, call in enumerate(calls):
            yield {**message, "content": message["content"] if number == 0 else "", "tool_calls": [call]}
            result = results.get(call.get("id"))
            if result is not None:
                taken.add(result)
                yield chat[result]


@_of_messages
def text_before_calls(chat: list[Message]) -> Iterable[Message]:
    """Puts an assistant's text into a message of its own before that of its calls."""
    for message in chat:
        if "tool_calls" in message and message["content"]:
            yield {key: value for key, value in message.items() if key != "tool_calls"}
            yield {**message, "content": ""}
        else:
            yield message


@_of_messages
def no_empty_answers(chat: list[Message]) -> Iterable[Message]:
    """Keeps the last message, which may be the one to continue."""
    for index, message in enumerate(chat):
        is_empty = message["role"] == "assistant" and not message["content"] and "tool_calls" not in message
        if not is_empty or index == len(chat) - 1:
            yield message


@_of_messages
def answers_without_reasoning(chat: list[Message]) -> Iterable[Message]:
    for message in chat:
        is_answer = message["role"] == "assistant" and message["content"] and "tool_calls" not in message
        yield {key: value for key, value in message.items() if key != "reasoning_content"} if is_answer else message


@_of_messages
def one_system_message(chat: list[Message]) -> Iterable[Message]:
    """Joins the system messages at the beginning."""
    num_first = next((i for i, message in enumerate(chat) if message["role"] != "system"), len(chat))
    if num_first:
        yield {**chat[0], "content": "\n\n".join(message["content"] for message in chat[:num_first])}
    yield from chat[num_first:]


@_of_messages
def late_system_as_user(chat: list[Message]) -> Iterable[Message]:
    num_first = next((i for i, message in enumerate(chat) if message["role"] != "system"), len(chat))
    yield from chat[:num_first]
    for message in chat[num_first:]:
        yield {**message, "role": "user"} if message["role"] == "system" else message


@_of_messages
def system_in_user(chat: list[Message]) -> Iterable[Message]:
    """Puts a system message at the head of the first user's message."""
    if len(chat) > 1 and chat[0]["role"] == "system" and chat[1]["role"] == "user":
        yield {**chat[1], "content": f"{chat[0]['content']}\n\n{chat[1]['content']}"}
        yield from chat[2:]
    else:
        yield from ({**message, "role": "user"} if message["role"] == "system" else message for message in chat)


@_of_messages
def answered_results(chat: list[Message]) -> Iterable[Message]:
    """Puts a short answer between a tool's result and a user's message."""
    for index, message in enumerate(chat):
        if index and message["role"] == "user" and chat[index - 1]["role"] == "tool":
            yield {"role": "assistant", "content": "OK."}
        yield message


@_of_messages
def merge_neighbours(chat: list[Message]) -> Iterable[Message]:
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
    """A key that is equal for neighbours that can become one message."""
    index, message = numbered
    is_text = message["role"] != "tool" and "tool_calls" not in message
    return message["role"], -1 if is_text else index


_IN_ORDER = (
    named_results,
    developer_as_system,
    tools_as_text,
    calls_as_text,
    history_as_text,
    empty_tools,
    arguments_as_text,
    escaped_texts,
    short_ids,
    one_call_a_turn,
    text_before_calls,
    no_empty_answers,
    answers_without_reasoning,
    one_system_message,
    late_system_as_user,
    system_in_user,
    answered_results,
    merge_neighbours,
)


# --- trials ---------------------------------------------------------------------------------------------------------


class _Trial:
    """A chat, the words of it that a prompt must show, and the repairs to try, the mildest first. With `is_read`, the
    model's parser must find the first call."""

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
    """As Kimi's, whose template writes the name only as a part of the id."""
    return f"functions.probe_it:{place[-1]}"


_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
_TOOLS = [{"type": "function", "function": {"name": "probe_it", "description": "Probes.", "parameters": _PARAMETERS}}]
_QUESTION, _FOLLOW_UP, _ANSWER = _message("user", "ask-1"), _message("user", "ask-2"), _message("assistant", "answer-1")
_SYSTEM = _message("system", "system-1")


def _called(place: str) -> list[Message]:
    return [_QUESTION, _calls("", place), _tool_result("1", "result-1")]


_CALLED = _called("place-1")

_TRIALS = (
    _Trial([_QUESTION], empty_tools),
    _Trial([_QUESTION, _FOLLOW_UP], merge_neighbours),
    _Trial([_QUESTION, _ANSWER, _message("assistant", "answer-2"), _FOLLOW_UP], merge_neighbours),
    _Trial([_QUESTION, _message("assistant", ""), _FOLLOW_UP], no_empty_answers, (no_empty_answers, merge_neighbours)),
    _Trial([_QUESTION, {**_ANSWER, "reasoning_content": "thought-1"}, _FOLLOW_UP], answers_without_reasoning),
    _Trial([_SYSTEM, _QUESTION], system_in_user),
    _Trial([_message("developer", "developer-1"), _QUESTION], developer_as_system),
    _Trial([_SYSTEM, _message("system", "system-2"), _QUESTION], one_system_message),
    _Trial([_QUESTION, _ANSWER, _SYSTEM, _FOLLOW_UP], late_system_as_user, (late_system_as_user, merge_neighbours)),
    _Trial([_SYSTEM, _QUESTION], tools_as_text, tools=_TOOLS),
    _Trial(
        [*_CALLED, _ANSWER, _FOLLOW_UP],
        *(named_results, arguments_as_text, short_ids, (arguments_as_text, short_ids)),
        *(calls_as_text, tools_as_text),
        tools=_TOOLS,
    ),
    _Trial(_CALLED, tools_as_text, tools=_TOOLS),
    _Trial(_CALLED, arguments_as_text, tools_as_text, tools=_TOOLS, is_read=True),
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
    _Trial([*_CALLED, _FOLLOW_UP], answered_results, tools_as_text, tools=_TOOLS),
    _Trial([*_CALLED, _ANSWER, _FOLLOW_UP], history_as_text),
    _Trial([*_CALLED, _FOLLOW_UP], history_as_text),
)
