"""The live page: what its events say of a real engine, who may read them, and that a browser shows them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from mlx_server.api import dashboard
from mlx_server.api.auth.authentication import PAGE_FILES
from mlx_server.config import CacheConfig, Config, ModelConfig, ServerConfig
from mlx_server.errors import EngineDeadError
from mlx_server.model_entries import ModelEntry
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.pool.model_pool import ModelPool, build_pool
from mlx_server.request import FinishReason
from tests.api.worlds import Site, World
from tests.browser import EXECUTABLE, browser

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCKS = 40
FILES = {"/": "text/html", "/dashboard": "text/html"} | {
    f"/dashboard/{name}": "text/css" if name.endswith(".css") else "text/javascript" for name in sorted(PAGE_FILES)
}
LOOPBACK = {"server": ServerConfig(api_key="user", admin_key="admin")}


def config(**sections: Any) -> Config:
    model = ModelConfig(model="random:mini", attention_backend="reference")
    return Config(model=model, cache=CacheConfig(num_kv_blocks=BLOCKS), **sections)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def pool() -> AsyncIterator[ModelPool]:
    pool = build_pool(config())
    await pool.start()
    yield pool
    await pool.stop(0)


@pytest.fixture
def served(site: Site, pool: ModelPool) -> Site:
    site.serve(pool, config())
    return site


async def snapshots(http: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("GET", "/dashboard/events") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data:"))


async def snapshot(http: httpx.AsyncClient) -> dict[str, Any]:
    """What the page shows of the one model now."""
    async with asyncio.timeout(10):
        async for found in snapshots(http):
            (model,) = found["models"]
            assert isinstance(model, dict)
            return model
    raise AssertionError("the events ended")


async def complete(http: httpx.AsyncClient, **body: Any) -> None:
    response = await http.post("/v1/completions", json={"ignore_eos": True, "temperature": 0, **body}, timeout=60)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("path", "kind"), FILES.items())
async def test_the_page_is_static_and_runs_no_foreign_script(served: Site, path: str, kind: str) -> None:
    response = await served.http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(kind)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    if "vendor" not in path:  # whose comments name its makers
        assert "http://" not in response.text
        assert "https://" not in response.text


async def test_a_request_is_seen_while_it_runs_and_when_it_has_ended(served: Site) -> None:
    before = await snapshot(served.http)
    prompt = list(range(1, 101))
    running = asyncio.create_task(complete(served.http, prompt=prompt, max_tokens=250))
    async with asyncio.timeout(30):
        while not (model := await snapshot(served.http))["requests"] or model["requests"][0]["num_output_tokens"] == 0:
            pass
    (request,) = model["requests"]
    assert (request["tier"], request["state"], request["num_prompt_tokens"]) == ("default", "decode", 100)
    assert request["num_computed_tokens"] == 100
    assert request["effective_priority"] == pytest.approx(1.0 - 0.1 * request["age_s"], abs=0.01)
    assert model["tiers"] == [{"name": "default", "running": 1, "waiting": 0}]
    assert model["stats"]["num_running"] == 1
    drawn = re.findall(r"\bstats\.(\w+)", (Path(dashboard.__file__).parent / "page.js").read_text(encoding="utf-8"))
    assert len(drawn) > 10
    assert set(drawn) <= set(model["stats"])
    states = model["stats"]["block_map"]
    assert len(states) == BLOCKS
    assert states.count("2") == BLOCKS - model["stats"]["num_free_blocks"] >= 4
    await running
    after = await snapshot(served.http)
    assert after["requests"] == []
    assert (after["recent"][0]["finish_reason"], after["recent"][0]["num_output_tokens"]) == ("length", 250)
    assert after["recent"][0]["ttft_s"] > 0 < after["recent"][0]["tpot_s"]
    gained = after["stats"]["num_generated_tokens"] - before["stats"]["num_generated_tokens"]
    assert gained == 250
    assert "2" not in after["stats"]["block_map"]
    assert after["stats"]["block_map"].count("1") == after["stats"]["num_cached_blocks"] == 349 // 32


async def test_blocks_of_a_common_prefix_are_shown_as_shared(served: Site) -> None:
    prompt = list(range(200, 300))
    await complete(served.http, prompt=prompt, max_tokens=1)
    pair = [
        asyncio.create_task(complete(served.http, prompt=[*prompt, last], max_tokens=200, seed=last)) for last in (5, 6)
    ]
    async with asyncio.timeout(30):
        while (model := await snapshot(served.http))["stats"]["num_running"] < 2:
            pass
    assert model["stats"]["block_map"].count("3") == 3
    await asyncio.gather(*pair)


async def test_events_come_once_a_period_and_end_when_the_server_drains(site: Site) -> None:
    pool = build_pool(config())
    site.serve(pool, config())
    seen = []
    async with asyncio.timeout(10):
        async for found in snapshots(site.http):
            seen.append(found["time_s"])
            assert found["models"][0]["state"] == "unloaded"
            if len(seen) == 2:
                await pool.stop(0.0)
    assert len(seen) == 3, "the last one shows the server draining"
    assert seen[1] - seen[0] > 0.9 * dashboard.PERIOD_S


async def test_events_end_when_an_engine_has_died(world: World) -> None:
    """The process waits for open streams before it ends with an error and is started again."""
    world.engine.die(EngineDeadError("bad luck"))
    async with asyncio.timeout(5):
        (last,) = [found async for found in snapshots(world.http)]
    assert [(model["state"], model["error"]) for model in last["models"]] == [("dead", "bad luck")]


async def test_only_admins_read_the_events_and_everyone_the_page(site: Site) -> None:
    pool = build_pool(config(**LOOPBACK))
    site.serve(pool, config(**LOOPBACK))
    assert (await site.http.get("/")).status_code == 200
    for key, status in ((None, 401), ("user", 403), ("wrong", 401)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        response = await site.http.get("/dashboard/events", headers=headers)
        assert response.status_code == status
        assert response.json()["error"]["message"]
    headers = {"authorization": "Bearer admin"}
    async with site.http.stream("GET", "/dashboard/events", headers=headers) as response:
        assert response.status_code == 200
    await pool.stop(0)


@pytest.mark.skipif(EXECUTABLE is None, reason="needs a browser: apt-get install chromium")
async def test_a_browser_shows_the_snapshot_and_chats(site: Site, pool: ModelPool) -> None:
    """Random weights have no chat template: the page shows the server's own refusal."""
    site.serve(pool, config(**LOOPBACK))
    async with asyncio.timeout(60), browser(site.url) as page:
        await page.until("document.getElementById('key-form')?.hidden === false")
        assert "for admins only" in await page.evaluate("document.getElementById('key-reason').textContent")
        await page.evaluate(
            "document.getElementById('key').value = 'admin'; document.getElementById('key-form').requestSubmit()"
        )
        await page.until("document.getElementById('connection').textContent === 'live'")
        await page.until(f"document.getElementById('blocks-note').textContent === '{BLOCKS} blocks of 32 tokens'")
        assert await page.evaluate("document.getElementById('running').textContent") == "0"
        engine = pool.engines()[0]
        speculation, stats = engine.scheduler.speculation, engine.stats()
        assert speculation is not None
        shown = "document.getElementById('{}').textContent"
        calls = f"{stats.num_generated_tokens / stats.num_model_calls:.2f}" if stats.num_model_calls else "–"
        assert await page.evaluate(shown.format("tokens-a-call")) == calls
        speculation.counters.num_draft_tokens = 2 * speculation.counters.num_accepted_tokens + 8
        speculation.counters.num_accepted_tokens += 4
        await page.until(f"{shown.format('acceptance')} === '50.0 %'")
        assert await page.evaluate("document.getElementById('model').value") == "random:mini"
        recent = engine.metrics.recent
        assert await page.evaluate("document.querySelectorAll('#recent tr').length") == len(recent)
        for count in (0, 2):
            recent.append(
                RequestSummary(f"r{count}", "default", FinishReason.STOP, 3, 0, 2, count, 0.25, 0.5, 0.1, 1.0)
            )
        queued = "[...document.querySelectorAll('#recent tr')].slice(0, 2).map((row) => row.cells[5].textContent)"
        await page.until(f"`${{{queued}}}` === '250 ms, preempted 2×,250 ms'")
        await page.evaluate("document.dispatchEvent(new KeyboardEvent('keydown', { key: '/', bubbles: true }))")
        assert await page.evaluate("document.activeElement.id") == "message"
        await page.evaluate(
            "document.getElementById('message').value = 'Hi'; document.getElementById('chat').requestSubmit()"
        )
        await page.until("document.querySelector('.turn.error')")
        assert "no tokenizer" in await page.evaluate("document.querySelector('.turn.error').textContent")
        assert page.errors == []


@pytest.mark.skipif(EXECUTABLE is None, reason="needs a browser: apt-get install chromium")
async def test_on_a_phone_the_page_fits_and_ids_are_short(served: Site) -> None:
    headers = {"x-request-id": "nightly-report-of-the-warehouse-0017"}
    body = {"prompt": [7] * 9, "max_tokens": 2, "ignore_eos": True}
    assert (await served.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    first_id = "document.querySelector('#recent td.id')"
    async with asyncio.timeout(30), browser(served.url) as page:
        await page.show(width=360, height=740)
        await page.until(f"{first_id}?.textContent.startsWith('cmpl-night…')")
        shown, whole = [await page.evaluate(f"{first_id}.{text}") for text in ("textContent", "title")]
        assert whole.startswith(f"cmpl-{headers['x-request-id']}-")
        assert shown == f"{whole[:10]}…{whole[-8:]}"
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        parts = await page.evaluate(
            "[...document.querySelectorAll('.card')].map((c) => c.getBoundingClientRect().right)"
        )
        assert max(parts) <= 360
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.show(width=1400, height=900, scheme="dark")
        await page.until(f"{first_id}.textContent === {first_id}.title")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != light
        assert page.errors == []


@pytest.mark.skipif(EXECUTABLE is None, reason="needs a browser: apt-get install chromium")
async def test_curves_blocks_and_every_models_memory_are_drawn(site: Site) -> None:
    folder, overrides = "random:mini", {"attention_backend": "reference"}
    entries = [ModelEntry(id=name, model=folder, overrides=overrides, pinned=name == "one") for name in ("one", "two")]
    settings = Config(models=tuple(entries), cache=CacheConfig(num_kv_blocks=BLOCKS))
    pool = build_pool(settings)
    await pool.start()
    site.serve(pool, settings)
    painted = "document.getElementById('{}').getContext('2d').getImageData(0, 0, 300, 30).data.some((part) => part > 0)"
    cells = "[...document.querySelectorAll('#models tr')].map((row) => row.innerText.trim().split(/\\s+/))"
    async with asyncio.timeout(60), browser(site.url) as page:
        await page.until("document.getElementById('blocks-note')?.textContent")
        assert not await page.evaluate(painted.format("ttft-line"))
        await complete(site.http, model="one", prompt=list(range(1, 65)), max_tokens=9)
        for canvas in ("rate-line", "ttft-line", "itl-line", "blocks"):
            await page.until(painted.format(canvas))
        await page.until("document.getElementById('running').textContent === '0'")
        one, two = await page.evaluate(cells)
        assert (one[:3], one[-3:]) == (["one", "ready,", "pinned"], ["0", "0", "Unload"])
        stats = pool.engines()[0].stats()
        assert one[3:5] == [f"{(stats.weight_bytes + stats.kv_pool_bytes) / 2**20:.0f}", "MiB"]
        assert two == ["two", "unloaded", "–", "–", "–", "Load"]
        assert page.errors == []
    await pool.stop(0)


@pytest.mark.skipif(EXECUTABLE is None, reason="needs a browser: apt-get install chromium")
async def test_a_keyboard_is_enough(served: Site) -> None:
    focused = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
    async with asyncio.timeout(30), browser(served.url) as page:
        await page.until("document.getElementById('connection')?.textContent === 'live'")
        seen = []
        for _ in range(20):
            await page.press("Tab")
            seen.append(await page.evaluate(focused))
        models = ["scroll", "BUTTON", "pull-name", "BUTTON"]
        models += ["adapter-name", "adapter-path", "adapter-replaces", "adapter-load"]
        chat = ["chats", "new-chat", "SUMMARY", "log", "message", "send"]
        assert seen == ["skip", "model", "scroll", "scroll", *models, *chat, "BODY", "skip"]
        await page.press("/")
        assert await page.evaluate(focused) == "message"
        await page.press("/")
        assert await page.evaluate("document.getElementById('message').value") == "/"
        await page.press("Enter")
        await page.until("document.querySelector('.turn.error')")
        assert page.errors == []
