"""A chat put together from pieces, for protocols whose messages hold less or more than a chat template's do.

Anthropic's messages are lists of blocks, and the Responses API has an item for each of what one message of a
template says: reasoning, text and calls of one turn. Templates want whole turns, one system message, and no two
turns of one role in a row.
"""

from __future__ import annotations

from typing import Any

_TEXTS = ("content", "reasoning")


class Turns:
    """Joins pieces of one role that follow each other into one message, texts by line breaks."""

    def __init__(self) -> None:
        # Texts are lists of pieces here: thousands of them would be copied as often if each were joined as it comes.
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def messages(self) -> list[dict[str, Any]]:
        """OpenAI's messages, as `ChatCall` takes them."""
        return [
            {**message, **{field: "\n".join(message[field]) for field in _TEXTS if field in message}}
            for message in self._messages
        ]

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last turn is the assistant's, so that the model goes on with it."""
        return bool(self._messages) and self._messages[-1]["role"] == "assistant"

    @property
    def has_open_calls(self) -> bool:
        """Whether the last turn is one of calls without results."""
        return self.ends_with_answer and "tool_calls" in self._messages[-1]

    def instruct(self, text: str) -> None:
        """Instructions. Many templates refuse them anywhere but at the beginning, so later ones become a part of
        the user's turn."""
        is_beginning = all(message["role"] == "system" for message in self._messages)
        self._append_text("system" if is_beginning else "user", text)

    def say(self, text: str) -> None:
        """What the user wrote."""
        self._append_text("user", text)

    def answer(self, text: str) -> None:
        """What the assistant wrote; an empty text opens its turn."""
        self._append_text("assistant", text)

    def think(self, text: str) -> None:
        """What the assistant thought; whether the model is shown it is for the template to say."""
        _append(self._turn("assistant").setdefault("reasoning", []), text)

    def call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """A call of a tool."""
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """What a tool returned. Some templates need the tool's name, too."""
        message = {"role": "tool", "tool_call_id": call_id, "content": [text]}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self._messages.append(message)

    def _append_text(self, role: str, text: str) -> None:
        _append(self._turn(role)["content"], text)

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]


def _append(pieces: list[str], text: str) -> None:
    if text:
        pieces.append(text)
