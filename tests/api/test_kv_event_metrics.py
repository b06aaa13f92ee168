"""What `/metrics` says of KV events."""

from __future__ import annotations

import asyncio
from collections import deque

import httpx
import pytest

from mlx_server.api.app import create_app
from mlx_server.batching.blocks.prefix_cache import CacheCleared
from mlx_server.config import Config
from mlx_server.engine.prefixes import kv_events
from mlx_server.engine.prefixes.kv_events import CacheEvents, KvEvents
from mlx_server.engine.prefixes.mirror import PrefixMirror
from mlx_server.fleet import FleetConfig
from tests.api.fakes import FakeEngine, fake_pool


async def test_what_is_reported_and_lost_is_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_events, "MAX_QUEUED", 1)
    events = KvEvents(FleetConfig(kv_events="tcp://127.0.0.1:0"))
    pool = fake_pool(FakeEngine())
    pool.events = events
    channel = events.open("kv@h@m", CacheEvents(PrefixMirror((None,)), str, lambda keys: keys))
    transport = httpx.ASGITransport(create_app(pool, Config()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        while channel.num_sent == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(channel, "_queue", deque([CacheCleared()]))  # one that nobody reads
            channel.add(CacheCleared())
        text = (await http.get("/metrics")).text
    assert 'mlx_serve:kv_event_batches_total{topic="kv@h@m"} 1.0' in text
    assert 'mlx_serve:kv_events_lost_total{topic="kv@h@m"} 1.0' in text
    events.close()
