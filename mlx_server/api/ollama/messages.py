"""Ollama's messages as OpenAI's: images and thoughts in other places, and calls without ids."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any


def openai_messages(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies. What else a message has is left as it is, and looked at where OpenAI's are.

    Calls may come without ids, and results then name the tool, or nothing. Each result is that of the first call of
    its tool that has none yet. Ids made here depend on the chat alone, so that prompts that begin alike stay alike: the
    third call of a chat is `call00003`, nine characters, since some templates take no others."""
    ids = _CallIds()
    return [_openai_message(message, ids) for message in messages]


class _CallIds:
    """The calls so far, and which still wait for their results."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._waiting: defaultdict[str, deque[str]] = defaultdict(deque)

    def add(self, call_id: Any, name: str) -> str:
        self._num_calls += 1
        known = call_id if isinstance(call_id, str) and call_id else f"call{self._num_calls:05}"
        self._waiting[name].append(known)
        return known

    def drop(self, call_id: object) -> None:
        """A result says itself which call it belongs to."""
        for name, waiting in list(self._waiting.items()):
            if call_id in waiting:
                waiting.remove(str(call_id))
                if not waiting:
                    del self._waiting[name]

    def clear(self) -> None:
        """Calls that no result has followed get none."""
        self._waiting.clear()

    def take(self, name: Any) -> tuple[str, str] | None:
        """Id and name of the call that a result without an id belongs to; None if no call waits for one."""
        called = name if isinstance(name, str) and name in self._waiting else next(iter(self._waiting), None)
        if called is None:
            return None
        waiting = self._waiting[called]
        call_id = waiting.popleft()
        if not waiting:
            del self._waiting[called]
        return call_id, called


def _openai_message(message: dict[str, Any], ids: _CallIds) -> dict[str, Any]:
    copy = {key: value for key, value in message.items() if value is not None}
    if isinstance(copy.get("role"), str):
        copy["role"] = copy["role"].lower()
    if "thinking" in copy:
        copy["reasoning"] = copy.pop("thinking")
    if images := copy.pop("images", None):
        copy["content"] = content_of(copy.get("content") or "", images)
    if isinstance(copy.get("tool_calls"), list):
        copy["tool_calls"] = [_openai_call(call, ids) for call in copy["tool_calls"]]
    if copy.get("role") == "tool":
        _name_result(copy, ids)
    elif not copy.get("tool_calls"):
        ids.clear()
    return copy


def content_of(text: Any, images: Any) -> Any:
    """Images and a text as parts, which are read or refused as in any other protocol. Images are first, as Ollama has
    them."""
    if not images:
        return text
    listed = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    pictures = [{"type": "image_url", "image_url": {"url": f"data:image;base64,{image}"}} for image in listed]
    return [*pictures, *([{"type": "text", "text": text}] if text else [])]


def _openai_call(call: Any, ids: _CallIds) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return call
    return {**call, "id": ids.add(call.get("id"), function["name"]), "type": "function"}


def _name_result(message: dict[str, Any], ids: _CallIds) -> None:
    """Gives a result the id of its call, and the tool's name, which some templates need."""
    name = message.pop("tool_name", None) or message.get("name")
    own_id = message.get("tool_call_id")
    if own_id:
        ids.drop(own_id)
    found = None if own_id else ids.take(name)
    if found is not None:
        message["tool_call_id"] = found[0]
        name = name or found[1]
    if name:
        message["name"] = name
