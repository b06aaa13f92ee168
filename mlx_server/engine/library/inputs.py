"""What scripts give to `LLM` and `AsyncLLM`, checked and brought into one form."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mlx_server.engine.vision.decoding import UnreadableImageError, as_file
from mlx_server.errors import InvalidRequestError

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or one of them under vLLM's name: `{"prompt": …}`, `{"prompt_token_ids": …}`."""

Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""OpenAI's messages."""

_PROMPT_NAMES = ("prompt", "prompt_token_ids")


def as_prompts(prompts: Any) -> list[Prompt]:
    """Makes a list of prompts. A single prompt becomes a list of one; a sequence of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    each = _listed(prompts, "prompts", "a text, token ids, or a list of such prompts")
    return [each] if each and not any(hasattr(one, "__len__") for one in each) else each


def bare_prompt(prompt: Prompt) -> str | Sequence[int]:
    """The text or token ids of a prompt. Raises `InvalidRequestError`."""
    if not isinstance(prompt, Mapping):
        return prompt
    given = [name for name, value in prompt.items() if value is not None]
    if len(given) != 1 or given[0] not in _PROMPT_NAMES:
        found = ", ".join(map(str, given)) or "neither"
        raise InvalidRequestError(
            f"A prompt that is a mapping has prompt or prompt_token_ids alone, got {found}. Images are given in the "
            "messages of `chat`.",
            "prompt",
        )
    return bare_prompt(prompt[given[0]])


def as_chats(messages: Any) -> list[Chat]:
    """Makes a list of chats; the messages of one chat become a list of one. Raises `InvalidRequestError`."""
    each = _listed(messages, "messages", "a chat, which is a list of messages, or several chats")
    if each and isinstance(each[0], Mapping):
        return [each]
    return [_listed(chat, f"messages[{index}]", "a chat") for index, chat in enumerate(each)]


def _listed(given: Any, name: str, wanted: str) -> list[Any]:
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{name} must be {wanted}, got {type(given).__name__}.", name)
    return list(given)


def as_tools(tools: Any) -> list[dict[str, Any]] | None:
    """OpenAI's tools, or None. Raises `InvalidRequestError`."""
    if tools is None:
        return None
    each = _listed(tools, "tools", "a list of OpenAI's tools")
    for index, tool in enumerate(each):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            where = f"tools[{index}]"
            raise InvalidRequestError(f"{where} must have a function with a name, as OpenAI's tools have.", where)
    return each


def for_each(given: Any, count: int, of_what: str, name: str, kind: type[Any]) -> list[Any]:
    """Returns `given` for all `count` items, or checks that it has one for each."""
    if given is None or isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence):
        raise InvalidRequestError(f"{name} must be {kind.__name__}, or one for each, got {type(given).__name__}.", name)
    if len(given) != count:
        raise InvalidRequestError(f"There are {count} {of_what} and {len(given)} {name}.", name)
    each = list(given)
    wrong = next((one for one in each if not isinstance(one, kind | None)), None)
    if wrong is not None:
        raise InvalidRequestError(f"{name} must be {kind.__name__} each, got {type(wrong).__name__}.", name)
    return each


def with_sources(messages: Chat, max_pixels: int) -> list[Any]:
    """Converts images that are bytes, files or Pillow images to base64. Raises `InvalidRequestError`."""

    def read(part: Any, where: str) -> Any:
        given = part.get("image") if isinstance(part, Mapping) else None
        if given is None or isinstance(given, str | Mapping):
            return part
        try:
            data = _bytes_of(given, max_pixels)
        except OSError as error:
            raise InvalidRequestError(f"{where}: {given} cannot be read: {error.strerror}.", where) from error
        except UnreadableImageError as error:
            raise InvalidRequestError(f"{where} is an image that {error}.", where) from error
        return {**part, "image": base64.b64encode(data).decode()}

    def sourced(message: Any, where: str) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": [read(part, f"{where}.content[{i}]") for i, part in enumerate(content)]}

    return [sourced(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _bytes_of(image: Any, max_pixels: int) -> bytes:
    """The file of an image. Raises `OSError` and `UnreadableImageError`."""
    if hasattr(image, "save"):
        return as_file(image, max_pixels)
    data = image.read_bytes() if isinstance(image, Path) else image
    if not isinstance(data, bytes | bytearray | memoryview):
        raise UnreadableImageError(
            f"is of type {type(data).__name__}. Give the bytes of a file, a pathlib.Path, a Pillow image or a data URL"
        )
    if not len(data):
        raise UnreadableImageError(f"has 0 bytes{f' ({image})' if isinstance(image, Path) else ''}")
    return bytes(data)
