"""However many sockets are ready, the event loop serves few of them in one turn, and all in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from mlx_server.api import server
from mlx_server.api.http.connections import EVENTS_AT_ONCE, FairSelector
from mlx_server.config import Config

NUM = 10 * EVENTS_AT_ONCE


@pytest.fixture
def ready() -> Iterator[list[socket.socket]]:
    """Sockets with a byte to read."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(NUM):
            ours, theirs = map(stack.enter_context, socket.socketpair())
            theirs.send(b"x")
            found.append(ours)
        yield found


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FairSelector())) as runner:
        runner.run(work)


def test_few_sockets_are_served_in_a_turn_and_none_twice_before_all_others(ready: list[socket.socket]):
    async def work() -> None:
        loop, served, turns = asyncio.get_running_loop(), list[int](), list[int]()
        for index, one in enumerate(ready):  # nobody reads the byte, so all stay ready
            loop.add_reader(one.fileno(), served.append, index)
        while len(served) < 3 * NUM:
            before = len(served)
            await asyncio.sleep(0)
            turns.append(len(served) - before)
        for one in ready:
            loop.remove_reader(one.fileno())
        assert max(turns) <= EVENTS_AT_ONCE
        assert all(set(served[first : first + NUM]) == set(range(NUM)) for first in (0, NUM, 2 * NUM))

    run(work())


def test_what_begins_and_ends_to_write_again_and_again_is_read_all_the_same(ready: list[socket.socket]):
    async def work() -> None:
        loop, served = asyncio.get_running_loop(), list[int]()
        last = ready[-1].fileno()

        def write() -> None:
            loop.add_writer(last, served.clear)
            loop.remove_writer(last)

        for one in ready[:-1]:
            loop.add_reader(one.fileno(), write)
        loop.add_reader(last, served.append, last)
        for _ in range(3 * NUM):
            await asyncio.sleep(0)
        for one in ready:
            loop.remove_reader(one.fileno())
        assert served

    run(work())


def test_what_is_closed_before_its_turn_is_not_served_nor_a_new_socket_with_its_number(ready: list[socket.socket]):
    async def work() -> None:
        loop, served = asyncio.get_running_loop(), list[str]()
        quiet, peer = socket.socketpair()
        number = ready[-1].fileno()

        def close_all() -> None:
            served.append("first")
            for one in ready:
                loop.remove_reader(one.fileno())
            os.dup2(quiet.fileno(), number)
            loop.add_reader(number, served.append, "new")

        for one in ready:
            loop.add_reader(one.fileno(), close_all)
        for _ in range(2 * NUM):
            await asyncio.sleep(0)
        assert served == ["first"]
        with quiet, peer:
            peer.send(b"x")
            for _ in range(NUM):
                await asyncio.sleep(0)
        loop.remove_reader(number)
        assert served[:2] == ["first", "new"]

    run(work())


def test_the_server_runs_on_it(monkeypatch: pytest.MonkeyPatch):
    found = list[object]()

    async def run(own: object, make_pool: object) -> int:
        found.append(asyncio.get_running_loop()._selector)  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(server._Server, "run", run)
    for name in ("_set_up_logging", "_dump_stacks_on_request", "_end_children"):  # of the process, which is pytest's
        monkeypatch.setattr(server, name, lambda *_: None)
    assert server.serve(Config(), (), lambda _: pytest.fail("no pool is asked for")) == 0
    assert [type(one) for one in found] == [FairSelector]
