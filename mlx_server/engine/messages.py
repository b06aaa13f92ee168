"""OpenAI's messages, in all the forms that clients send, made into the one form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server.engine.content import text_of
from mlx_server.errors import InvalidRequestError


def normalise_messages(
    messages: Sequence[Any], *, knows_developer: bool = True, parses_arguments: bool = True
) -> list[dict[str, Any]]:
    """Copies with: `content` a string (text parts joined by line breaks, null made empty); `tool_calls` present
    only if there are any, their arguments objects instead of JSON text (`parses_arguments`); `reasoning` under
    the name `reasoning_content`; role `developer` as `system` for templates that do not know it.

    Other keys are kept for the template. Raises `InvalidRequestError`, for parts that are no text, too.
    """
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one message.", "messages")
    normalised = [_normalise(message, f"messages[{i}]", parses_arguments) for i, message in enumerate(messages)]
    if not knows_developer:
        for message in normalised:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    return normalised


def _normalise(message: Any, where: str, parses_arguments: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a role.", where)
    copy = {key: value for key, value in message.items() if value is not None}
    if "function_call" in copy or copy["role"] == "function":
        where = f"{where}.function_call" if "function_call" in copy else f"{where}.role"
        raise InvalidRequestError(
            f"{where}: the former function calls are not read; send tool_calls, and their results as role tool.", where
        )
    copy["content"] = _text_of(copy.get("content", ""), f"{where}.content")
    reasoning = copy.pop("reasoning", None)
    if isinstance(reasoning, str):
        copy.setdefault("reasoning_content", reasoning)
    calls = copy.pop("tool_calls", None)
    if calls:
        where = f"{where}.tool_calls"
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise InvalidRequestError(f"{where} must be a list.", where)
        copy["tool_calls"] = [_tool_call(call, f"{where}[{i}]", parses_arguments) for i, call in enumerate(calls)]
    return copy


def _text_of(content: Any, where: str) -> str:
    """Like `content.text_of`; some clients mix strings with parts."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return text_of(content, where)


def _tool_call(call: Any, where: str, parses_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must have a function with a name.", where)
    arguments = function.get("arguments")
    if parses_arguments:
        arguments = parse_arguments(arguments, f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Templates iterate over arguments, but clients send them as JSON text. Text that is no JSON is shown to the model
    under the key `invalid_json`: it wrote it, when its answer was cut off, and a client that sends its conversation
    back must be able to go on. Raises `InvalidRequestError` for other JSON than an object."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            return {"invalid_json": arguments}
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{where} must be a JSON object.", where)
    return parsed
