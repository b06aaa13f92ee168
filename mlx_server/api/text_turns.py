"""Whose text is worked on when: reading bodies, writing prompts, tokenizing, by tier and by key in turn.

    body received -> TextTurn.begin() -> parsed, tokenized in a thread, submitted -> TextTurn.end()

Requests that wait here cost the event loop nothing: a thousand that come at once are not a thousand steps between
each two of everyone else's.

A chat put together from pieces, for protocols whose messages hold less or more than a chat template's do.

Anthropic's messages are lists of blocks, and the Responses API has an item for each of what one message of a
template says: reasoning, text and calls of one turn. Templates want whole turns, one system message, and no two
turns of one role in a row.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request

from mlx_server.engine.fair_slots import Asker, FairSlots, Slot

T = TypeVar("T")

_IDLE_S = 0.25
"""A turn ends by itself when its request waits for so long for something else, like a model that is being loaded."""


class TextWorkers:
    """The threads of one server, and the order in which requests get them."""

    def __init__(self, max_num_waiting: int) -> None:
        """`max_num_waiting` bounds the requests of one key that wait for their first turn."""
        num_threads = max(3, (os.cpu_count() or 1) // 2 + 1)
        self.slots = FairSlots(num_threads, max_num_waiting)
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")


class TextTurn:
    """One request's turn, which may be taken several times. Event-loop thread only."""

    def __init__(self, workers: TextWorkers, asker: Asker) -> None:
        self.asker = asker
        self._workers = workers
        self._slot: Slot | None = None
        self._had_slot = False
        self._is_working = False
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    def try_begin(self) -> bool:
        """Takes a slot if that needs no waiting; whether the turn has begun."""
        self._is_over = False
        if self._slot is None:
            self._take(self._workers.slots.try_acquire(self.asker))
        return self._slot is not None

    async def begin(self) -> None:
        """Waits for the turn. Raises `QuotaExceededError` if it is the first and too many requests of the key wait."""
        if not self.try_begin():
            self._take(await self._workers.slots.acquire(self.asker, is_later=self._had_slot))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. It goes on when the caller is cancelled, and holds its slot until it is done:
        who leaves early does not get more threads."""
        await self.begin()
        self._is_working = True
        context = contextvars.copy_context()
        working = asyncio.get_running_loop().run_in_executor(self._workers.threads, context.run, work)
        working.add_done_callback(self._on_done)
        return await asyncio.shield(working)

    def end(self) -> None:
        """Gives the slot back, once no work runs in it. Idempotent."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._slot is not None and not self._is_working:
            self._slot.release()
            self._slot = None

    def _take(self, slot: Slot | None) -> None:
        self._slot = slot
        self._had_slot = self._had_slot or slot is not None
        self._watch()

    def _on_done(self, working: asyncio.Future[Any]) -> None:
        self._is_working = False
        if not working.cancelled():
            working.exception()  # nobody may be there to take it
        if self._is_over:
            self.end()
        else:
            self._watch()

    def _watch(self) -> None:
        if self._slot is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_IDLE_S, self._on_idle)

    def _on_idle(self) -> None:
        self._timer = None
        if not self._is_working:
            self.end()


def turn_of(request: Request) -> TextTurn:
    """The turn of a request that came by a `TurnRoute`."""
    turn = request.state.turn
    assert isinstance(turn, TextTurn)
    return turn


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
