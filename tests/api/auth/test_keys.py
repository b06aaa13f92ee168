"""Keys from the key file, on a running server."""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import os
import sqlite3
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mlx_server.api.answers.generation_service import watch_revocations
from mlx_server.api.auth import key_file, keys
from mlx_server.api.auth.key_file import KeyFile, KeyRecord, KeyText
from mlx_server.api.auth.keys import KeyRing
from mlx_server.config import Config, ServerConfig
from mlx_server.errors import ConfigError, InvalidRequestError
from mlx_server.request import Priority
from mlx_server.tiers import Tier
from tests.api.sse import bodies
from tests.api.worlds import World, until, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

GOLD = Tier(name="gold", priority=Priority.HIGH)


@dataclass
class Keyed:
    """A world whose server reads its keys from `file`, which tests change beside it."""

    world: World
    file: KeyFile
    path: Path

    def new(self, tier: str = "gold") -> KeyText:
        return self.file.add(tier, "a label")

    async def status(self, key: str | None) -> int:
        headers = {} if key is None else {"x-api-key": key}
        return (await self.world.http.get("/v1/models", headers=headers)).status_code

    async def chat(self, key: str, **body: Any) -> int:
        return (await self.world.chat(headers={"x-api-key": key}, **body)).status_code

    async def record(self, key: KeyText) -> KeyRecord:
        await self.world.context.keys.usage.flush()
        return self.file.record(key.key_id)


@pytest.fixture
def keyed(world: World, tmp_path: Path) -> Any:
    path = tmp_path / "keys.sqlite"
    with KeyFile.create(path) as file:
        world.configure_server(GOLD, key_file=str(path))
        yield Keyed(world, file, path)


def other(key: KeyText) -> str:
    """The same id with another secret."""
    last = "0" if key.text[-1] != "0" else "1"
    return key.text[:-1] + last


async def test_a_key_opens_and_its_tier_counts(keyed: Keyed):
    key = keyed.new()
    assert await keyed.status(key.text) == 200
    assert await keyed.chat(key.text) == 200
    (request,) = keyed.world.engine.requests
    assert (request.tier, request.priority) == ("gold", Priority.HIGH)


@pytest.mark.parametrize(
    "sent",
    [
        lambda key: None,
        lambda key: "",
        lambda key: key.key_id,
        other,
        lambda key: key.text[:-1],
        lambda key: key.text + "0",
        lambda key: key.text.upper(),
        lambda key: key.text.replace(key.key_id, "0" * 12),
        lambda key: f"mlxs_{key.key_id}_",
        lambda key: f"mlxs_' OR 1=1 --_{key.text[-64:]}",
        lambda key: f"{key.text} {key.text}",
        lambda key: "unused",
    ],
)
async def test_nothing_else_opens(keyed: Keyed, sent: Any):
    key = keyed.new()
    assert await keyed.status(sent(key)) == 401


async def test_a_revoked_key_is_refused_on_the_next_request(keyed: Keyed):
    key, kept = keyed.new(), keyed.new()
    assert await keyed.status(key.text) == 200
    keyed.file.revoke(key.key_id)
    assert await keyed.status(key.text) == 401
    assert await keyed.status(other(key)) == 401
    assert await keyed.status(kept.text) == 200


STREAMS = {
    "/v1/chat/completions": {"messages": user("Hi")},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": user("Hi"), "max_tokens": 50},
    "/v1/responses": {"input": "Hi"},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_revoking_a_key_ends_its_open_requests_with_an_error(keyed: Keyed, path: str):
    """The streams of others go on."""
    world, key, kept = keyed.world, keyed.new(), keyed.new()
    world.engine.pause_after = 2

    def ask(owner: KeyText, stream: bool) -> asyncio.Task[httpx.Response]:
        body = {**STREAMS[path], "model": "fake", "stream": stream}
        return asyncio.create_task(world.http.post(path, json=body, headers={"x-api-key": owner.text}))

    revoked, whole, others = ask(key, True), ask(key, False), ask(kept, True)
    watching = asyncio.create_task(watch_revocations(world.context.keys, world.context.generations))
    try:
        await until(lambda: world.engine.num_paused == 3)
        keyed.file.revoke(key.key_id)
        text, refusal = (await revoked).text, await whole
    finally:
        watching.cancel()
    last = bodies(text)[-1]
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert error["message"] == f"The key {key.key_id} has been revoked; ask for a new one."
    assert refusal.status_code == 401
    assert refusal.json()["error"]["message"] == error["message"]
    assert not others.done()
    world.engine.resume()
    assert "revoked" not in (await others).text


async def test_a_key_that_is_gone_from_the_file_is_revoked_and_a_lost_file_revokes_none(keyed: Keyed):
    keys, key = keyed.world.context.keys, keyed.new()
    assert await keyed.status(key.text) == 200
    assert keys.revoked([key.key_id, "0" * 12]) == {"0" * 12}
    keyed.file.rotate(key.key_id)
    assert keys.revoked([key.key_id]) == set()
    keyed.path.unlink()
    assert keys.revoked([key.key_id]) == set()
    with KeyFile.create(keyed.path):
        assert keys.revoked([key.key_id]) == {key.key_id}


async def test_revoking_an_admin_s_key_ends_its_live_page(keyed: Keyed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_server.api.dashboard.PERIOD_S", 0.01)
    monkeypatch.setattr("mlx_server.api.dashboard.snapshot", lambda pool: {"models": []})
    keyed.world.configure_server(Tier(name="staff", admin=True), key_file=str(keyed.path))
    key = keyed.new("staff")
    async with keyed.world.http.stream("GET", "/dashboard/events", headers={"x-api-key": key.text}) as page:
        lines = page.aiter_lines()
        assert (await anext(lines)).startswith("data:")
        keyed.file.revoke(key.key_id)
        async with asyncio.timeout(5):
            async for _ in lines:
                pass


async def test_a_rotated_key_is_the_same_with_another_secret(keyed: Keyed):
    key = keyed.new()
    assert await keyed.chat(key.text) == 200
    new = keyed.file.rotate(key.key_id)
    assert new.key_id == key.key_id
    assert await keyed.status(key.text) == 401
    assert await keyed.chat(new.text) == 200
    assert (await keyed.record(key)).num_requests == 2


async def test_a_key_made_while_the_server_runs_closes_it_and_opens_it(world: World):
    world.configure_server(GOLD)  # the key file is at home, and not there yet
    assert (await world.http.get("/v1/models")).status_code == 200
    with KeyFile.create(keys.key_file_path(ServerConfig())) as file:
        key = file.add("gold", "")
        assert (await world.http.get("/v1/models")).status_code == 401
        assert (await world.http.get("/v1/models", headers={"x-api-key": key.text})).status_code == 200


async def test_losing_the_file_does_not_open_the_server(keyed: Keyed):
    key = keyed.new()
    assert await keyed.status(key.text) == 200
    keyed.path.unlink()
    assert await keyed.status(key.text) == 401
    assert await keyed.status(None) == 401


async def test_a_new_file_in_its_place_counts(keyed: Keyed):
    old = keyed.new()
    assert await keyed.status(old.text) == 200
    keyed.path.unlink()  # what SQLite keeps beside it stays, and must not be taken for the new file's
    with KeyFile.create(keyed.path) as file:
        new = file.add("gold", "")
    assert await keyed.status(new.text) == 200
    assert await keyed.status(old.text) == 401


async def test_revoking_the_last_key_does_not_open_the_server(keyed: Keyed):
    keyed.file.revoke(keyed.new().key_id)
    assert await keyed.status(None) == 401


async def test_a_tier_that_is_not_declared_may_do_nothing(keyed: Keyed):
    assert await keyed.status(keyed.new("silver").text) == 403


async def test_a_file_that_cannot_be_read_closes_the_server(keyed: Keyed, caplog: pytest.LogCaptureFixture):
    key = keyed.new()
    with KeyFile.create(keyed.path) as file, file._db as db:
        db.execute("DROP TABLE keys")
    assert [await keyed.status(key.text) for _ in range(3)] == [503] * 3
    assert await keyed.status(None) == 401
    assert caplog.text.count("The key file cannot be read") == 1


async def test_a_key_is_looked_up_while_another_process_writes(keyed: Keyed):
    key = keyed.new()
    with sqlite3.connect(keyed.path) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("UPDATE keys SET label = 'changed'")
        assert await keyed.status(key.text) == 200
        writer.rollback()
    writer.close()


async def test_the_shared_key_and_the_admin_s_work_beside_the_file(keyed: Keyed):
    keyed.world.configure_server(GOLD, key_file=str(keyed.path), api_key="sesame", admin_key="master")
    key = keyed.new()
    assert [await keyed.status(sent) for sent in (key.text, "sesame", "master", "other")] == [200, 200, 200, 401]


async def test_the_shared_key_has_a_tier(world: World):
    world.configure_server(GOLD, api_key="sesame", api_key_tier="gold")
    assert (await world.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-api-key": "sesame"})).is_success
    assert world.engine.requests[0].tier == "gold"


async def test_usage_is_recorded_of_each_key_by_itself(keyed: Keyed):
    first, second = keyed.new(), keyed.new()
    assert (await keyed.record(first)).last_used_s is None
    assert await keyed.chat(first.text) == 200
    assert await keyed.chat(first.text, stream=True) == 200
    assert await keyed.status(second.text) == 200
    usage = (await keyed.world.chat(headers={"x-api-key": first.text})).json()["usage"]
    record = await keyed.record(first)
    assert record.num_requests == 3
    assert record.num_prompt_tokens == 3 * usage["prompt_tokens"]
    assert record.num_output_tokens == 3 * usage["completion_tokens"]
    assert record.last_used_s is not None
    unused = await keyed.record(second)
    assert (unused.num_requests, unused.num_prompt_tokens, unused.num_output_tokens) == (0, 0, 0)
    assert unused.last_used_s is not None


async def test_who_scores_a_prompt_uses_no_output(keyed: Keyed):
    key = keyed.new()
    answer = await keyed.world.complete(max_tokens=0, echo=True, headers={"x-api-key": key.text})
    assert answer.json()["usage"]["completion_tokens"] == 0
    record = await keyed.record(key)
    assert (record.num_requests, record.num_output_tokens) == (1, 0)


async def test_a_refused_request_uses_nothing(keyed: Keyed):
    key = keyed.new()
    assert await keyed.chat(key.text, temperature=-1) == 400
    keyed.world.engine.max_open = 0
    assert await keyed.chat(key.text) == 503
    assert (await keyed.record(key)).num_requests == 0


async def test_usage_is_written_by_itself_and_not_on_the_event_loop(keyed: Keyed, monkeypatch: pytest.MonkeyPatch):
    written, threads = threading.Event(), []
    add_usage = KeyFile.add_usage

    def noted(file: KeyFile, usage: Any) -> None:
        threads.append(threading.current_thread())
        add_usage(file, usage)
        written.set()

    monkeypatch.setattr(KeyFile, "add_usage", noted)
    monkeypatch.setattr("mlx_server.api.auth.keys.FLUSH_S", 0.01)
    key = keyed.new()
    assert await keyed.chat(key.text) == 200
    while not written.is_set():
        await keyed.status(key.text)
    assert threading.main_thread() not in threads
    assert keyed.file.record(key.key_id).last_used_s is not None


async def test_usage_of_a_file_that_is_gone_is_lost_with_a_word(keyed: Keyed, caplog: pytest.LogCaptureFixture):
    assert await keyed.status(keyed.new().text) == 200
    keyed.path.unlink()
    await keyed.world.context.keys.usage.flush()
    assert "The usage of 1 keys is lost" in caplog.text


# --- what must not leak --------------------------------------------------------------------------------------------


async def test_keys_are_compared_in_constant_time(keyed: Keyed, monkeypatch: pytest.MonkeyPatch):
    compared: list[tuple[bytes, bytes]] = []

    def noted(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return hmac.compare_digest(first, second)

    class Recorder:
        compare_digest = staticmethod(noted)

    monkeypatch.setattr(key_file, "hmac", Recorder)
    monkeypatch.setattr(keys, "hmac", Recorder)
    keyed.world.configure_server(GOLD, key_file=str(keyed.path), api_key="sesame", admin_key="master")
    key = keyed.new()
    for sent in (key.text, other(key), "sesame", "wrong", "master"):
        compared.clear()
        await keyed.status(sent)
        # Digests of one length, whatever was sent: nothing of the key itself decides how long it takes.
        assert compared
        assert {len(part) for pair in compared for part in pair} == {32}


async def test_the_line_of_a_request_names_its_key_by_the_public_id(keyed: Keyed, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "mlx_server.requests")
    keys = [keyed.new(), keyed.new()]
    for key in keys:
        assert await keyed.chat(key.text) == 200
    await keyed.world.settle()
    lines = [record for record in caplog.records if record.name == "mlx_server.requests"]
    assert [(line.fields["key"], line.fields["tier"]) for line in lines] == [(key.key_id, "gold") for key in keys]


async def test_no_key_is_in_logs_errors_or_what_the_server_tells(keyed: Keyed, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    keyed.world.configure_server(GOLD, key_file=str(keyed.path), api_key="sesame", admin_key="master")
    key = keyed.new()
    secret, wrong = key.text.rpartition("_")[2], other(key).rpartition("_")[2]
    texts = []
    for sent in (key.text, other(key), "sesame", "master", f"x{key.text}"):
        headers = {"authorization": f"Bearer {sent}"}
        for path in ("/server_info", "/v1/models", "/openapi.json", "/metrics", "/nowhere", "/dashboard"):
            texts.append((await keyed.world.http.get(path, headers=headers)).text)
        for path in ("/v1/chat/completions", "/v1/messages", "/flush_cache"):
            texts.append((await keyed.world.http.post(path, json={"messages": 1}, headers=headers)).text)
    keyed.file.revoke(key.key_id)
    texts.append((await keyed.world.http.get("/v1/models", headers={"x-api-key": key.text})).text)
    everything = "".join(texts) + caplog.text + repr(keyed.world.context.keys)
    for shown in (secret, wrong, "sesame", "master"):
        assert shown not in everything


async def test_the_file_holds_no_key_and_is_its_owner_s(keyed: Keyed):
    key = keyed.new()
    keyed.file.close()
    secret = key.text.rpartition("_")[2]
    for path in keyed.path.parent.glob("keys.sqlite*"):
        content = path.read_bytes()
        assert secret.encode() not in content
        assert bytes.fromhex(secret) not in content
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_equal_secrets_would_have_different_digests(keyed: Keyed):
    first, second = keyed.file.secret(keyed.new().key_id), keyed.file.secret(keyed.new().key_id)
    assert first is not None
    assert second is not None
    assert first.salt != second.salt


# --- the file ------------------------------------------------------------------------------------------------------


async def test_keys_are_unknown_revoked_or_listed_in_their_order(keyed: Keyed):
    first, second = keyed.new(), keyed.new()
    assert [record.key_id for record in keyed.file.records()] == [first.key_id, second.key_id]
    for change in (keyed.file.revoke, keyed.file.rotate, keyed.file.record):
        with pytest.raises(InvalidRequestError, match="no key with the id 'nothing'"):
            change("nothing")
    keyed.file.revoke(first.key_id)
    revoked_s = keyed.file.record(first.key_id).revoked_s
    keyed.file.revoke(first.key_id)
    assert keyed.file.record(first.key_id).revoked_s == revoked_s
    with pytest.raises(InvalidRequestError, match="revoked for good"):
        keyed.file.rotate(first.key_id)


async def test_a_file_of_something_else_is_refused(tmp_path: Path):
    path = tmp_path / "other.sqlite"
    path.write_text("not a database, and long enough to have a header: " + "x" * 100)
    for make in (KeyFile, KeyFile.create):
        with pytest.raises(ConfigError, match="cannot be read as a file of keys"):
            make(path)
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE others (a)")
    db.close()
    for make in (KeyFile, KeyFile.create):
        with pytest.raises(ConfigError, match="is not a file of keys that this version can read"):
            make(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"key_file": "{path}/none.sqlite"}, "does not exist; `mlx-serve keys create --key-file"),
        ({"key_file": "{path}/" + "x" * 300}, "cannot be read as a file of keys: .*too long"),
        ({"api_key_file": "{path}/none"}, "api_key_file: .* cannot be read"),
        ({"admin_key_file": "{path}/empty"}, "admin_key_file: .*/empty must hold the key, one line of printable ASCII"),
        ({"api_key_file": "{path}/two"}, "must hold the key, one line"),
        ({"api_key": "sésame"}, "api_key must hold the key, one line of printable ASCII: clients can send no other"),
        ({"admin_key": " "}, "admin_key must hold the key"),
        ({"api_key_file": "{path}/one", "api_key": "sesame"}, "api_key and api_key_file are both set"),
    ],
)
async def test_keys_that_cannot_be_read_are_reported_at_the_start(tmp_path: Path, settings: dict[str, str], words: str):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "one").write_text("sesame\n")
    (tmp_path / "two").write_text("sesame\nother\n")
    server = ServerConfig(**{name: value.format(path=tmp_path) for name, value in settings.items()})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        KeyRing(Config(server=server))


async def test_the_key_file_is_open_until_the_keys_are_closed(tmp_path: Path):
    path = tmp_path / "keys.sqlite"
    with KeyFile.create(path) as file:
        key = file.add("default", "")
    ring = KeyRing(Config(server=ServerConfig(key_file=str(path))))

    def is_open() -> bool:
        return str(path) in {opened.path for opened in psutil.Process().open_files()}

    ring.identify(key.text, is_local=False)
    assert is_open()
    ring.close()
    assert not is_open()


async def test_keys_are_required_while_nobody_can_know_whether_there_are_any(monkeypatch: pytest.MonkeyPatch):
    """The folder of the keys may not be read any more."""
    ring = KeyRing(Config())
    assert not ring.requires_keys

    def refused(path: Path, **options: Any) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refused)
    assert ring.requires_keys


async def test_the_shared_and_the_admin_key_may_come_from_files(world: World, tmp_path: Path):
    (tmp_path / "shared").write_text("sesame\n")
    (tmp_path / "admin").write_text("master")
    world.configure_server(api_key_file=str(tmp_path / "shared"), admin_key_file=str(tmp_path / "admin"))
    assert (await world.http.get("/v1/models")).status_code == 401
    assert (await world.http.get("/v1/models", headers={"x-api-key": "sesame"})).status_code == 200
    assert (await world.http.post("/flush_cache", headers={"x-api-key": "sesame"})).status_code == 403
    assert (await world.http.post("/flush_cache", headers={"x-api-key": "master"})).status_code == 200
