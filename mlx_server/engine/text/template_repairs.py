"""How chats are rewritten for templates that cannot take them: the repairs that `template_fit` chooses from.

A repair rewrites each turn the same way, whatever turns follow. So a prompt keeps its beginning from turn to turn, and
its prefix stays cached.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlx_server.engine.tools.formats import JSON_TAGS, Tool, ToolParser
from mlx_server.engine.tools.written import written_calls

Message = dict[str, Any]
Tools = Sequence[Tool] | None

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


def system_for_tools(chat: list[Message], tools: Tools, parser: ToolParser) -> tuple[list[Message], Tools]:
    """Begins with a system message, for templates that show the tools in that (DeepSeek V3.2's in Python)."""
    is_missing = tools and chat[0]["role"] != "system"
    return [{"role": "system", "content": ""}, *chat] if is_missing else chat, tools


_EXPLANATION = """You can call functions. To call one, write this and nothing else:
{call}
The result will be given to you. These are the functions, one JSON object a line:
"""
_EXAMPLE = {"name": "the function's name", "arguments": {"argument": "value"}}


def bare_tools(chat: list[Message], tools: Tools, parser: ToolParser) -> tuple[list[Message], Tools]:
    """Gives the functions without what is around them, for templates that look for their names there (Apertus)."""
    return chat, [tool.get("function", tool) for tool in tools] if tools else tools


def tools_in_message(chat: list[Message], tools: Tools, parser: ToolParser) -> tuple[list[Message], Tools]:
    """Puts the tools into the system message, as JSON, for templates that look for them there (Phi-4-mini)."""
    if not tools:
        return chat, tools
    if chat[0]["role"] != "system":
        chat = [{"role": "system", "content": "You are a helpful assistant with some tools."}, *chat]
    return [{**chat[0], "tools": _as_json([tool.get("function", tool) for tool in tools])}, *chat[1:]], None


def described_tools(chat: list[Message], tools: Tools, parser: ToolParser) -> tuple[list[Message], Tools]:
    """Explains the tools in the system message."""
    if not tools:
        return chat, tools
    functions = [_as_json(tool.get("function", tool)) for tool in tools]
    explanation = _EXPLANATION.format(call=written_calls(parser, [_EXAMPLE])) + "\n".join(functions)
    if chat[0]["role"] == "system":
        explanation, chat = f"{chat[0]['content']}\n\n{explanation}", chat[1:]
    return [{"role": "system", "content": explanation}, *chat], None


def tools_as_text(chat: list[Message], tools: Tools, parser: ToolParser) -> tuple[list[Message], Tools]:
    """Explains the tools in the system message, and writes calls and results as text."""
    return described_tools([_as_text(message, parser) for message in chat] if tools else chat, tools, parser)


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


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


arguments_as_text = _of_arguments(_as_json)


@_of_arguments
def escaped_texts(arguments: Any) -> Any:
    """Escapes the texts in arguments, for templates that only put quotes around them (LFM2.5)."""

    def escaped(value: Any) -> Any:
        return _as_json(value)[1:-1].replace("'", r"\'") if isinstance(value, str) else value

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


@_of_messages
def named_ids(chat: list[Message]) -> Iterable[Message]:
    """Makes ids of the functions' names and the calls' numbers, for templates that write no other name (Kimi's)."""
    numbers = itertools.count()
    known: dict[Any, str] = {}

    def named(call: Message) -> Message:
        beginning, number, own = f"functions.{call['function']['name']}:", next(numbers), str(call.get("id"))
        known[call.get("id")] = own if own.startswith(beginning) else f"{beginning}{number}"
        return {**call, "id": known[call.get("id")]}

    for message in chat:
        if "tool_calls" in message:
            yield _with_calls(message, named)
        elif message["role"] == "tool" and message.get("tool_call_id") in known:
            yield {**message, "tool_call_id": known[message.get("tool_call_id")]}
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
def thoughts_once(chat: list[Message]) -> Iterable[Message]:
    """Leaves reasoning out beside calls if the message before them, which has their text, has it, too."""
    for before, message in itertools.pairwise([{}, *chat]):
        is_split = "tool_calls" in message and "tool_calls" not in before
        thoughts = before.get("reasoning_content") if is_split else None
        is_again = thoughts is not None and thoughts == message.get("reasoning_content")
        yield {key: value for key, value in message.items() if key != "reasoning_content"} if is_again else message


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
def reasoning_in_text(chat: list[Message]) -> Iterable[Message]:
    """Joins reasoning and text beside calls, for templates that take one of the two (gpt-oss)."""
    for message in chat:
        if "tool_calls" in message and message["content"] and message.get("reasoning_content"):
            both = f"{message['reasoning_content']}\n\n{message['content']}"
            yield {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": both}
        else:
            yield message


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
    system_for_tools,
    tools_as_text,
    described_tools,
    tools_in_message,
    bare_tools,
    calls_as_text,
    history_as_text,
    empty_tools,
    arguments_as_text,
    escaped_texts,
    short_ids,
    named_ids,
    one_call_a_turn,
    text_before_calls,
    thoughts_once,
    no_empty_answers,
    answers_without_reasoning,
    reasoning_in_text,
    one_system_message,
    late_system_as_user,
    system_in_user,
    answered_results,
    merge_neighbours,
)
