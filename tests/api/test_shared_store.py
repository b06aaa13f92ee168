"""Two servers that count together and keep responses together, in a real Redis and a real Valkey.

Minutes pass by their own clock."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from mlx_server.api import shared_store
from mlx_server.api.auth import fleet_quotas
from mlx_server.api.auth.fleet_quotas import LEASE_S
from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.auth.keys import Caller
from mlx_server.api.auth.quotas import Demand
from mlx_server.api.openai.responses import store as kept
from mlx_server.config import Config
from mlx_server.errors import ConfigError, OverloadedError, QuotaExceededError
from mlx_server.fleet import FleetConfig
from mlx_server.tiers import Tier
from tests.api.fleets import PROMPT, Fleet, Server
from tests.api.sse import bodies
from tests.api.worlds import until
from tests.redis_servers import PROGRAMS, RedisServer, needs_redis, redis_server

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_redis]

PASSWORD = "sesame-street"


@pytest_asyncio.fixture(loop_scope="session", params=PROGRAMS, ids=lambda path: Path(path).name)
async def redis(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[RedisServer]:
    """However slow the machine is, a store that is there is never taken for one that is away."""
    monkeypatch.setattr(shared_store, "CALL_S", 60.0)
    monkeypatch.setattr(shared_store, "CONNECT_S", 60.0)
    monkeypatch.setattr(shared_store, "PROBE_S", 0.01)
    monkeypatch.setattr(kept, "TRANSFER_S", 60.0)
    monkeypatch.setattr(fleet_quotas, "SYNC_S", 0.01)
    async with redis_server(PASSWORD, request.param) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(redis: RedisServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(redis.url, tmp_path / "keys.sqlite")
    yield fleet
    await fleet.stop()


# --- quotas ---------------------------------------------------------------------------------------------------------


async def test_two_requests_a_minute_are_two_over_two_servers(fleet: Fleet):
    (key,) = await fleet.start(requests_per_minute=2)
    assert await fleet.statuses(key, 6) == [200, 200, 429, 429, 429, 429]
    fleet.now_s += 59
    assert await fleet.statuses(key, 2) == [429, 429]
    fleet.now_s += 1.3  # slots of a quarter second leave as a whole
    assert await fleet.statuses(key, 4) == [200, 200, 429, 429]


async def test_a_burst_over_two_servers_cannot_pass_all_at_once(fleet: Fleet):
    (key,) = await fleet.start(requests_per_minute=5)
    answers = await asyncio.gather(*(next(fleet.turns).ask(key) for _ in range(16)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 11


async def test_what_is_left_is_reported_for_all_servers(fleet: Fleet):
    (key,) = await fleet.start(requests_per_minute=3, tokens_per_minute=100)
    first, second = fleet.servers
    await first.ask(key)
    await fleet.reported()
    answer = await second.ask(key)
    left = {name: answer.headers[f"x-ratelimit-remaining-{name}"] for name in ("requests", "tokens")}
    assert left["requests"] == "1"
    num_left = 100 - 2 * len(PROMPT) - 4
    assert int(left["tokens"]) in (num_left, num_left - 4)  # the answer's own output may be reported before its headers
    await first.ask(key)
    refused = await second.ask(key)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "61"  # a minute after the end of the quarter second in which they came
    assert "3 requests have come within a minute; a key of the tier paid may send 3." in refused.text
    read = await second.http.post("/tokenize", json={"prompt": "ab"}, headers={"x-api-key": key})
    assert read.headers["x-ratelimit-remaining-requests"] == "2", "each server counts apart what is only read"


async def test_each_key_has_its_own_quota_and_a_tier_without_limits_does_not_ask(fleet: Fleet, redis: RedisServer):
    one, other = await fleet.start(2, requests_per_minute=1)
    assert await fleet.statuses(one, 2) == [200, 429]
    assert await fleet.statuses(other, 2) == [200, 429]
    with KeyFile.create(fleet.key_file) as file:
        unlimited = file.add("default", "").text
    with redis.client() as client:
        num_calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert await fleet.statuses(unlimited, 4) == [200] * 4
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == num_calls


async def test_tokens_of_all_servers_count(fleet: Fleet):
    (key,) = await fleet.start(tokens_per_minute=30)
    first, second = fleet.servers
    assert (await first.ask(key)).status_code == 200  # 10 of the prompt and 4 of the output
    await fleet.reported()
    refused = await second.ask(key, prompt=[5] * 17)
    assert (refused.status_code, "14 tokens were used within a minute" in refused.text) == (429, True)
    assert (await second.ask(key, prompt=[5] * 16)).status_code == 200


async def test_a_client_that_leaves_while_the_store_answers_has_nothing_counted_twice(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fleet_quotas, "SYNC_S", 0.3)
    (key,) = await fleet.start(tokens_per_minute=30)
    first, second = fleet.servers
    assert (await first.ask(key)).status_code == 200  # 4 tokens of the output are not reported yet
    run, has_run, may_go = first.store.run, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> Any:
        reply = await run(*args)
        has_run.set()
        await may_go.wait()
        return reply

    monkeypatch.setattr(first.store, "run", slow)
    leaving = asyncio.create_task(first.ask(key))
    await has_run.wait()
    leaving.cancel()
    await asyncio.sleep(0.1)
    may_go.set()
    await fleet.reported()
    refused = await second.ask(key, prompt=[5] * 17)
    assert (refused.status_code, "14 tokens were used within a minute" in refused.text) == (429, True)
    assert (await second.ask(key, prompt=[5] * 16)).status_code == 200


async def test_wrong_requests_count_and_refused_ones_do_not(fleet: Fleet):
    (key,) = await fleet.start(requests_per_minute=2)
    first, second = fleet.servers
    second.engine.refuse_with = OverloadedError("Full.", 1.0)
    assert (await second.ask(key)).status_code == 503
    second.engine.refuse_with = None
    assert (await first.ask(key, temperature=-1)).status_code == 400
    await fleet.reported()
    assert [(await second.ask(key)).status_code for _ in range(2)] == [200, 429]


async def test_answers_in_progress_count_over_all_servers(fleet: Fleet):
    (key,) = await fleet.start(max_concurrent_requests=2)
    first, second = fleet.servers
    first.engine.gate.clear()
    open_ones = [asyncio.create_task(first.ask(key)) for _ in range(2)]
    await until(lambda: len(first.engine.requests) == 2)
    refused = await second.ask(key)
    assert refused.status_code == 429
    assert "2 answers are in progress and the request asks for 1" in refused.text
    first.engine.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*open_ones)] == [200, 200]
    await fleet.reported()
    assert (await second.ask(key, n=2)).status_code == 200


async def test_one_at_a_time_in_turn_is_never_too_many(fleet: Fleet):
    (key,) = await fleet.start(max_concurrent_requests=1)
    assert await fleet.statuses(key, 20) == [200] * 20


async def test_a_seat_that_is_just_given_back_is_found(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    (key,) = await fleet.start(max_concurrent_requests=1)
    first, second = fleet.servers
    first.engine.gate.clear()
    asking = asyncio.create_task(first.ask(key))
    await until(lambda: first.engine.requests)
    num_pauses = 0

    async def pause() -> None:
        nonlocal num_pauses
        num_pauses += 1
        first.engine.gate.set()
        assert (await asking).status_code == 200
        await fleet.reported()

    monkeypatch.setattr(fleet_quotas.FleetQuotas, "_pause", staticmethod(pause))
    assert (await second.ask(key)).status_code == 200
    assert num_pauses == 1


async def test_a_seat_that_came_to_nothing_is_free_at_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    """Routers send elsewhere what a server is too busy for, and do not wait."""
    monkeypatch.setattr(fleet_quotas, "SYNC_S", 3600.0)
    (key,) = await fleet.start(max_concurrent_requests=1)
    first, second = fleet.servers
    first.engine.refuse_with = OverloadedError("Full.", 1.0)
    assert (await first.ask(key)).status_code == 503
    await fleet.reported()
    assert (await second.ask(key)).status_code == 200


async def test_a_killed_server_s_seats_are_free_when_its_lease_ends(fleet: Fleet):
    (key,) = await fleet.start(max_concurrent_requests=1)
    dying, staying = fleet.servers
    dying.engine.gate.clear()
    asking = asyncio.create_task(dying.ask(key))
    await until(lambda: dying.engine.requests)
    dying.store.is_here = False  # from here on nothing reaches the store
    fleet.now_s += LEASE_S - 1
    assert (await staying.ask(key)).status_code == 429
    fleet.now_s += 2
    assert (await staying.ask(key)).status_code == 200
    dying.engine.gate.set()
    await asking


async def test_a_long_answer_keeps_its_seat(fleet: Fleet):
    (key,) = await fleet.start(max_concurrent_requests=1)
    first, second = fleet.servers
    first.engine.gate.clear()
    asking = asyncio.create_task(first.ask(key))
    await until(lambda: first.engine.requests)
    for _ in range(4):
        fleet.now_s += LEASE_S / 2
        await fleet.reported()
    assert (await second.ask(key)).status_code == 429
    first.engine.gate.set()
    await asking


# --- a store that is away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_mac", [True, False])
async def test_a_network_that_macos_may_block_is_named(monkeypatch, caplog, is_mac: bool):
    async def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    monkeypatch.setattr(shared_store, "is_mac", lambda: is_mac)
    store = shared_store.SharedStore("redis://192.168.1.5:6379/0")
    await store.open()
    await store.close()
    assert "redis://192.168.1.5:6379/0 is away" in caplog.text
    assert ("Privacy & Security > Local Network" in caplog.text) == is_mac


async def test_a_store_that_goes_and_comes_again(fleet: Fleet, redis: RedisServer, caplog: pytest.LogCaptureFixture):
    """Each server's own limits hold meanwhile, and what was counted then counts when it is back."""
    caplog.set_level(logging.INFO, logger=shared_store.__name__)
    (key,) = await fleet.start(requests_per_minute=2)
    first, second = fleet.servers
    assert await fleet.statuses(key, 1) == [200]
    await redis.kill()
    assert [(await first.ask(key)).status_code for _ in range(2)] == [200, 429]
    assert [(await second.ask(key)).status_code for _ in range(3)] == [200, 200, 429]
    assert "mlx_serve:shared_store_up 0.0" in await second.metrics()
    assert "mlx_serve:shared_store_failures_total 0.0" not in await second.metrics()
    fleet.now_s += 61
    assert (await first.ask(key)).status_code == 200
    await redis.start()
    await until(lambda: first.store.is_here and second.store.is_here)
    assert "mlx_serve:shared_store_up 1.0" in await second.metrics()
    await fleet.reported()
    assert [(await second.ask(key)).status_code for _ in range(2)] == [200, 429]
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "limits hold for this server alone" in line]) == 2, "a line a server"
    assert len([line for line in lines if line.endswith("is back")]) == 2


async def test_what_a_store_refused_before_it_lost_its_data_is_forgotten_with_them(fleet: Fleet, redis: RedisServer):
    (key,) = await fleet.start(requests_per_minute=4)
    first, second = fleet.servers
    first.engine.gate.clear()
    open_one = asyncio.create_task(first.ask(key))
    await until(lambda: first.engine.open)
    assert [(await second.ask(key)).status_code for _ in range(3)] == [200] * 3
    for _ in range(2):  # the second one is not asked of the store
        refused = await first.ask(key)
        assert (refused.status_code, refused.json()["error"]["message"].split()[0]) == (429, "4")
    await redis.kill()
    await redis.start()
    first.engine.gate.set()
    assert (await open_one).status_code == 200
    await fleet.reported()
    assert [(await first.ask(key)).status_code for _ in range(4)] == [200, 200, 200, 429]


async def test_a_store_that_hangs_holds_up_one_call_only(
    fleet: Fleet, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    (key,) = await fleet.start(requests_per_minute=100)
    (first, _) = fleet.servers
    await first.ask(key)
    await fleet.reported()
    monkeypatch.setattr(shared_store, "CALL_S", 0.05)
    assert redis.process is not None
    redis.process.send_signal(signal.SIGSTOP)
    answers = await asyncio.gather(*(first.ask(key) for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert not first.store.is_here
    num_failures = first.store.num_failures
    assert (await first.ask(key)).status_code == 200
    assert num_failures == 1, "seven did not wait for it"
    monkeypatch.setattr(shared_store, "CALL_S", 60.0)
    redis.process.send_signal(signal.SIGCONT)
    await until(lambda: first.store.is_here)


async def test_a_seat_counted_by_a_store_that_answered_too_late_is_given_back(
    fleet: Fleet, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    (key,) = await fleet.start(max_concurrent_requests=1)
    first, second = fleet.servers
    assert await fleet.statuses(key, 2) == [200, 200]
    await fleet.reported()
    monkeypatch.setattr(shared_store, "CALL_S", 0.05)
    assert redis.process is not None
    redis.process.send_signal(signal.SIGSTOP)
    first.engine.refuse_with = OverloadedError("Full.", 1.0)  # so that nothing else is reported to the store
    assert (await first.ask(key)).status_code == 503
    assert not first.store.is_here
    monkeypatch.setattr(shared_store, "CALL_S", 60.0)
    redis.process.send_signal(signal.SIGCONT)  # and now it takes the seat
    await until(lambda: first.store.is_here)
    await fleet.reported()
    assert (await second.ask(key)).status_code == 200


async def test_a_burst_at_a_store_far_away_passes_no_limit(redis: RedisServer, monkeypatch: pytest.MonkeyPatch):
    """Each call is within its time, all of them together are not."""
    store = shared_store.SharedStore(redis.url)
    run = store.run

    async def slow(*args: Any) -> Any:
        await asyncio.sleep(0.02)
        return await run(*args)

    monkeypatch.setattr(store, "run", slow)
    caller = Caller("burst", Tier(name="t", max_concurrent_requests=3))
    here, there = fleet_quotas.FleetQuotas(store), fleet_quotas.FleetQuotas(store)

    async def enter(quotas: fleet_quotas.FleetQuotas) -> bool:
        try:
            with await quotas.reserve(caller, Demand()):
                quotas.check(caller, Demand())
                quotas.open(caller, Demand())
        except QuotaExceededError:
            return False
        return True

    assert [await enter(there) for _ in range(3)] == [True] * 3
    monkeypatch.setattr(shared_store, "CALL_S", 0.2)
    assert await asyncio.gather(*(enter(here) for _ in range(20))) == [False] * 20
    assert store.is_here
    monkeypatch.setattr(shared_store, "CALL_S", 60.0)
    for quotas in (here, there):
        await quotas.close()
    await store.close()


@pytest.mark.parametrize("option", ["socket_timeout=soon", "colour=blue"])
async def test_a_url_with_options_that_do_not_exist_is_refused_at_the_start(redis: RedisServer, option: str):
    with pytest.raises(ConfigError, match="--shared-store: the URL of unix") as refused:
        shared_store.SharedStore(f"{redis.url}?{option}")
    assert PASSWORD not in str(refused.value)


async def test_a_store_that_is_full_is_away(fleet: Fleet, redis: RedisServer):
    (key,) = await fleet.start(requests_per_minute=1)
    with redis.client() as client:
        client.config_set("maxmemory", "1")
        assert await fleet.statuses(key, 4) == [200, 200, 429, 429]
        assert not any(server.store.is_here for server in fleet.servers)
        client.config_set("maxmemory", "0")
    await until(lambda: all(server.store.is_here for server in fleet.servers))


async def test_the_password_is_shown_nowhere(redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    config = Config(fleet=FleetConfig(shared_store=redis.url.replace(PASSWORD, "wrong-word")))
    server = Server(config, lambda: 0.0)
    async with server.running():
        await server.store.open()
        assert not server.store.is_here
    shown = f"{config!r} {config.fleet} {server.store.name} {caplog.text}"
    assert "invalid username-password pair" in shown
    assert "wrong-word" not in shown


# --- responses ------------------------------------------------------------------------------------------------------


def asked(server: Server) -> str:
    return server.engine.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_a_conversation_goes_on_at_whichever_server(fleet: Fleet):
    (key,) = await fleet.start()
    previous, said = None, ""
    for turn in range(4):
        server = next(fleet.turns)
        answer = await server.respond(key, input=f"Turn {turn}", previous_response_id=previous)
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
        said += f"<|user|>Turn {turn}<|end|><|assistant|>"
        assert asked(server) == said
        said += "Hello world<|end|>"
    first, second = fleet.servers
    headers = {"x-api-key": key}
    assert [(await one.http.get(f"/v1/responses/{previous}", headers=headers)).json() for one in (first, second)] == [
        answer.json()
    ] * 2
    items = (await first.http.get(f"/v1/responses/{previous}/input_items", headers=headers)).json()
    assert len(items["data"]) == 7


async def test_a_stream_is_kept_before_its_end_is_sent(fleet: Fleet):
    (key,) = await fleet.start()
    first, second = fleet.servers
    streamed = await first.respond(key, stream=True)
    response = bodies(streamed.text)[-1]["response"]
    again = await second.http.get(f"/v1/responses/{response['id']}", headers={"x-api-key": key})
    assert again.json() == response


async def test_a_response_whose_client_leaves_at_its_end_is_moved_to_the_store(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    (key,) = await fleet.start()
    first, second = fleet.servers
    real, ids = first.store.run, list[str]()

    async def run(script: str, keys: Any, args: Any, timeout_s: float = 0.0) -> Any:
        if script is kept._PUT:
            ids.append(args[1])
            if len(ids) == 1:
                await asyncio.Event().wait()
        return await real(script, keys, args, timeout_s)

    monkeypatch.setattr(first.store, "run", run)
    headers, body = {"x-api-key": key}, {"model": "fake", "input": "Hi", "stream": True}
    async with first.http.stream("POST", "/v1/responses", json=body, headers=headers):
        await until(lambda: ids)
    await until(lambda: len(ids) == 2 and not any(owned.records for owned in first.context.records._by_owner.values()))
    assert (await second.http.get(f"/v1/responses/{ids[0]}", headers=headers)).status_code == 200


async def test_items_are_found_by_their_ids(fleet: Fleet):
    (key,) = await fleet.start()
    first, second = fleet.servers
    (item,) = (await first.respond(key)).json()["output"]
    reference = {"type": "item_reference", "id": item["id"]}
    answer = await second.respond(key, input=[reference, {"role": "user", "content": "And?"}])
    assert answer.status_code == 200, answer.text
    assert asked(second) == "<|assistant|>Hello world<|end|><|user|>And?<|end|><|assistant|>"
    sent = [{"type": "message", "role": "user", "content": f"é\n{n}", "id": f"msg_é{n}"} for n in range(3)]
    await first.respond(key, input=sent)
    references = [{"type": "item_reference", "id": f"msg_é{n}"} for n in (2, 0)]
    answer = await second.respond(key, input=[*references, reference])
    assert asked(second) == "<|user|>é\n2\né\n0<|end|><|assistant|>Hello world<|end|><|assistant|>"
    assert (await second.respond(key, input=[{"type": "item_reference", "id": "msg_é3"}])).status_code == 400


async def test_items_whose_bodies_a_full_store_has_evicted_are_as_if_not_kept(fleet: Fleet, redis: RedisServer):
    """With `maxmemory-policy allkeys-lru` one of an owner's keys may go, and the others stay."""
    (key,) = await fleet.start()
    first, second = fleet.servers
    (item,) = (await first.respond(key)).json()["output"]
    with redis.client() as client:
        assert client.delete(*client.scan_iter(f"{shared_store.PREFIX}*:bodies")) == 1
    answer = await second.respond(key, input=[{"type": "item_reference", "id": item["id"]}])
    assert answer.status_code == 400, answer.text


async def test_records_of_an_earlier_format_are_as_if_not_kept(fleet: Fleet, redis: RedisServer):
    """Those had no version before their lines. Servers of both formats may share the store while they are updated."""
    (key,) = await fleet.start()
    first, second = fleet.servers
    kept_one = (await first.respond(key)).json()["id"]
    with redis.client() as client:
        (found,) = client.scan_iter(f"{shared_store.PREFIX}*:bodies")
        _, kind, owner, _ = found.decode().split(":")
        packed = client.hget(found, kept_one).split(b"\n", 1)[1]
        used = client.zscore(f"{shared_store.PREFIX}{kind}:{owner}:uses", kept_one)
        client.flushdb()
        earlier = f"{shared_store.PREFIX}responses:{owner}"
        client.hset(f"{earlier}:bodies", kept_one, packed)
        client.hset(f"{earlier}:items", kept_one, '["msg_1"]')
        client.zadd(f"{earlier}:uses", {kept_one: used})
    answer = await second.http.get(f"/v1/responses/{kept_one}", headers={"x-api-key": key})
    assert answer.status_code == 404
    assert (await second.respond(key, input=[{"type": "item_reference", "id": "msg_1"}])).status_code == 400


async def test_responses_are_their_owner_s_and_deleted_for_all(fleet: Fleet):
    key, other = await fleet.start(2)
    first, second = fleet.servers
    kept_one = (await first.respond(key)).json()["id"]
    for server, asking in itertools.product(fleet.servers, ("get", "delete")):
        path = f"/v1/responses/{kept_one}"
        assert (await server.http.request(asking, path, headers={"x-api-key": other})).status_code == 404
    assert (await second.respond(other, previous_response_id=kept_one)).status_code == 400
    headers = {"x-api-key": key}
    assert (await second.http.delete(f"/v1/responses/{kept_one}", headers=headers)).status_code == 200
    for server in fleet.servers:
        assert (await server.http.get(f"/v1/responses/{kept_one}", headers=headers)).status_code == 404


@pytest.mark.parametrize("is_late", [False, True])
async def test_what_is_deleted_on_its_way_to_the_store_is_not_there_afterwards(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, is_late: bool
):
    """The store is taking it, or has taken it and its answer came too late."""
    (key,) = await fleet.start()
    first, second = fleet.servers
    headers = {"x-api-key": key}
    real, deleted = first.store.run, list[int]()

    async def delete(response_id: str) -> None:
        deleted.append((await first.http.delete(f"/v1/responses/{response_id}", headers=headers)).status_code)

    async def run(script: shared_store.Script, keys: Any, args: Any, timeout_s: float = 0.0) -> Any:
        reply = await real(script, keys, args, timeout_s)
        if script is kept._PUT:
            if is_late:
                first.store._on_failure(TimeoutError(), timeout_s)
                raise shared_store.StoreAwayError
            await delete(args[1])
        return reply

    monkeypatch.setattr(first.store, "run", run)
    response_id = (await first.respond(key)).json()["id"]
    if is_late:
        assert (await second.http.get(f"/v1/responses/{response_id}", headers=headers)).status_code == 200
        await delete(response_id)
        await until(lambda: first.store.is_here)
    assert deleted == [200]
    for server in fleet.servers:
        assert (await server.http.get(f"/v1/responses/{response_id}", headers=headers)).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        r'{"model": "fake", "input": "Hi", "previous_response_id": "resp_\ud800"}',
        r'{"model": "fake", "input": [{"type": "item_reference", "id": "msg_\udfff"}]}',
        r'{"model": "fake", "input": [{"type": "message", "role": "user", "content": "Hi", "id": "\ud800"}]}',
        r'{"model": "fake", "input": [{"type": "item_reference", "id": "\u0000]\"\\"}]}',
    ],
)
async def test_no_client_can_take_the_store_away_from_others(fleet: Fleet, body: str):
    """By text that the store's scripts could not read."""
    (key,) = await fleet.start()
    (first, _) = fleet.servers
    headers = {"x-api-key": key, "content-type": "application/json"}
    answer = await first.http.post("/v1/responses", content=body, headers=headers)
    assert answer.status_code in (200, 400), answer.text
    reference = {"type": "item_reference", "id": "msg_none"}
    assert (await first.respond(key, input=[reference])).status_code == 400
    assert first.store.num_failures == 0


async def test_responses_are_kept_for_a_day_and_within_a_size(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    (key,) = await fleet.start()
    first, second = fleet.servers

    async def find(response_id: str) -> int:
        return (await second.http.get(f"/v1/responses/{response_id}", headers={"x-api-key": key})).status_code

    async def respond() -> str:
        fleet.now_s += 1
        return str((await first.respond(key)).json()["id"])

    with monkeypatch.context() as patch:
        patch.setattr(kept, "MAX_RECORDS", 2)
        ids = [await respond() for _ in range(3)]
        assert [await find(each) for each in ids] == [404, 200, 200]
        patch.setattr(kept, "MAX_OWNER_BYTES", 100)
        assert await find(await respond()) == 404, "larger than all room"
        assert [await find(each) for each in ids] == [404, 404, 404]
    last = await respond()
    fleet.now_s += kept.TTL_S - 1
    assert await find(last) == 200
    fleet.now_s += kept.TTL_S
    assert await find(last) == 404


async def test_a_large_response_and_one_without_a_store_stay_where_they_are(
    fleet: Fleet, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    (key,) = await fleet.start()
    first, second = fleet.servers

    async def goes_on(server: Server, previous: str) -> httpx.Response:
        return await server.respond(key, previous_response_id=previous, store=False)

    with monkeypatch.context() as patch:
        patch.setattr(kept, "MAX_SHARED_BYTES", 100)
        large = (await first.respond(key)).json()["id"]
    assert [(await goes_on(server, large)).status_code for server in (first, second)] == [200, 400]
    shared = (await first.respond(key)).json()["id"]
    await redis.kill()
    alone = (await first.respond(key)).json()["id"]
    assert (await goes_on(first, alone)).status_code == 200
    refused = await goes_on(second, shared)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "The shared store does not answer" in refused.json()["error"]["message"]


# --- conversations --------------------------------------------------------------------------------------------------


async def test_both_servers_add_to_a_conversation_and_lose_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    (key,) = await fleet.start()
    first, second = fleet.servers
    headers = {"x-api-key": key}
    made = (await first.http.post("/v1/conversations", json={"metadata": {"a": "b"}}, headers=headers)).json()
    path = f"/v1/conversations/{made['id']}"
    assert (await second.http.get(path, headers=headers)).json() == made
    await first.respond(key, input="One", conversation=made["id"])
    await second.respond(key, input="Two", conversation=made["id"])
    one = "<|user|>One<|end|><|assistant|>Hello world<|end|><|user|>Two<|end|><|assistant|>"
    assert asked(second) == one
    real, num_puts = first.store.run, 0

    async def run(script: str, *args: Any) -> Any:
        """Another server adds something between a read and a write, once."""
        nonlocal num_puts
        if script is kept._PUT:
            num_puts += 1
            if num_puts == 1:
                items = [{"role": "user", "content": "Between"}]
                await second.http.post(f"{path}/items", json={"items": items}, headers=headers)
        return await real(script, *args)

    monkeypatch.setattr(first.store, "run", run)
    answer = await first.http.post(path, json={"metadata": {"c": "d"}}, headers=headers)
    assert (answer.json()["metadata"], num_puts) == ({"c": "d"}, 2)
    listed = (await second.http.get(f"{path}/items?order=asc", headers=headers)).json()["data"]
    assert [item["content"][0]["text"] for item in listed] == ["One", "Hello world", "Two", "Hello world", "Between"]
    gone = await second.http.delete(f"{path}/items/{listed[0]['id']}", headers=headers)
    assert gone.json()["metadata"] == {"c": "d"}
    assert (await first.http.delete(path, headers=headers)).status_code == 200
    assert (await second.http.get(path, headers=headers)).status_code == 404


async def test_a_conversation_without_a_store_stays_where_it_is(
    fleet: Fleet, redis: RedisServer, caplog: pytest.LogCaptureFixture
):
    (key,) = await fleet.start()
    (first, _) = fleet.servers
    headers = {"x-api-key": key}
    shared = (await first.http.post("/v1/conversations", json={}, headers=headers)).json()["id"]
    first.engine.gate.clear()
    answering = asyncio.create_task(first.respond(key, conversation=shared))
    await until(lambda: first.engine.requests)
    await redis.kill()
    first.engine.gate.set()
    assert (await answering).status_code == 200
    assert (
        f"not added to its conversation: The shared store does not answer, and the conversation {shared}" in caplog.text
    )
    assert (await first.respond(key, conversation=shared)).status_code == 503
    own = (await first.http.post("/v1/conversations", json={}, headers=headers)).json()["id"]
    for _ in range(2):
        assert (await first.respond(key, conversation=own)).status_code == 200
    listed = (await first.http.get(f"/v1/conversations/{own}/items", headers=headers)).json()
    assert len(listed["data"]) == 4
