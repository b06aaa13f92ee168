"""A Mac stays awake while there is work; a script stands in for its `caffeinate`."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from pathlib import Path

import httpx
import psutil
import pytest

from mlx_server.api import awake
from tests.api.test_server_life import complete, in_progress, server


@pytest.fixture
def started(monkeypatch, tmp_path) -> Path:
    """A folder with a file for each start of the stand-in: named by its process, with its arguments."""
    program, folder = tmp_path / "caffeinate", tmp_path / "started"
    folder.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/.new && mv {folder}/.new {folder}/$$\nexec sleep 600\n')
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(awake, "is_mac", lambda: True)
    monkeypatch.setattr(awake, "_PROGRAM", str(program))
    monkeypatch.setattr(awake, "_LOOK_S", 0.01)
    monkeypatch.setattr(awake, "_LINGER_S", 0.05)
    monkeypatch.setenv("STAND_IN_FOR_CAFFEINATE", str(program))
    return folder


def numbers(started: Path) -> list[int]:
    return [int(path.name) for path in started.iterdir() if path.name.isdigit()]


async def until_started(started: Path, num: int) -> list[int]:
    async with asyncio.timeout(20):
        while len(found := numbers(started)) < num:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def until_gone(process: int) -> None:
    async with asyncio.timeout(20):
        while psutil.pid_exists(process):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_it_is_held_awake_from_the_begin_of_work_until_some_time_after(started):
    is_busy = False
    task = asyncio.create_task(awake.keep_awake(lambda: is_busy))
    try:
        await asyncio.sleep(0.1)
        assert not numbers(started)
        is_busy = True
        (first,) = await until_started(started, 1)
        assert (started / str(first)).read_text() == f"-i -w {os.getpid()}\n"
        await asyncio.sleep(0.2)
        assert psutil.pid_exists(first)
        is_busy = False
        await until_gone(first)
        is_busy = True
        (second,) = set(await until_started(started, 2)) - {first}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not psutil.pid_exists(second), "no zombie either"


async def test_a_program_that_is_missing_is_one_line_in_the_log(started, monkeypatch, caplog):
    monkeypatch.setattr(awake, "_PROGRAM", str(started / "nowhere"))
    await awake.keep_awake(lambda: True)
    assert "may sleep while it works" in caplog.text


async def test_elsewhere_nothing_is_started(started, monkeypatch):
    monkeypatch.setattr(awake, "is_mac", lambda: False)
    await awake.keep_awake(lambda: True)
    assert not numbers(started)


@pytest.mark.slow
async def test_a_server_holds_the_mac_awake_while_it_answers(started):
    async with server() as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            answer = asyncio.create_task(complete(http))
            await in_progress(http, 1)
            await asyncio.sleep(0.3)  # longer than after the load
            async with asyncio.timeout(20):
                while not (held := list(filter(psutil.pid_exists, numbers(started)))):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (started / str(held[0])).read_text() == f"-i -w {running.process.pid}\n"
            running.signal(signal.SIGTERM)
            running.signal(signal.SIGUSR1)  # lets the answer go on
            assert (await answer).status_code == 200
            code, errors = await running.ended()
    assert code == 0, errors
    assert not psutil.pid_exists(held[0])
