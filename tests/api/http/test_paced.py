"""Answers that take long to compute are computed for all who ask at once, and seldom or away from the streams."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from mlx_server.api import app as applications
from mlx_server.api import probes
from mlx_server.api.http import paced
from tests.api.worlds import World

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_flood_of_scrapes_is_computed_a_few_times(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []

    def render(*args: object) -> bytes:
        began.append(len(began))
        time.sleep(0.05)  # so the next one is after a second
        return str(began[-1]).encode()

    monkeypatch.setattr(probes, "render", render)
    answers = await asyncio.gather(*(world.http.get("/metrics") for _ in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(began) <= 3
    num_before = len(began)
    assert int((await world.http.get("/metrics")).text) == num_before  # it is newer than its request


async def test_a_scrape_that_fails_ends_with_its_requests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(probes, "render", lambda *args: 1 // 0)
        answers = await asyncio.gather(*(world.http.get("/metrics") for _ in range(2)))
        assert [answer.status_code for answer in answers] == [500, 500]
    assert (await world.http.get("/metrics")).status_code == 200


async def test_a_scrape_after_one_that_stalled_comes_before_prometheus_gives_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slept = [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def stall(*args: object) -> bytes:
        clock[0] += 60.0
        return b""

    monkeypatch.setattr(probes, "render", stall)
    monkeypatch.setattr(paced, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(paced, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    for _ in range(2):
        await world.http.get("/metrics")
    assert 0 < slept[1] < 10


async def test_the_document_is_made_once_and_not_by_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by: list[threading.Thread] = []

    class Counted(applications.JSONResponse):
        def render(self, content: object) -> bytes:
            made_by.append(threading.current_thread())
            return super().render(content)

    monkeypatch.setattr(applications, "JSONResponse", Counted)
    first, second = await asyncio.gather(*(world.http.get("/openapi.json") for _ in range(2)))
    third = await world.http.get("/openapi.json")
    assert "/v1/chat/completions" in first.json()["paths"]
    assert first.headers["content-type"] == "application/json"
    assert first.content == second.content == third.content
    assert len(made_by) == 1
    assert made_by[0] is not threading.current_thread()
