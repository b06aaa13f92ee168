"""An open server is its own machine's: web pages that a browser there has open cannot use it."""

from __future__ import annotations

import re

import pytest

from mlx_server.config import load_config
from mlx_server.errors import ConfigError
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATHS = ["/v1/models", "/metrics", "/health", "/", "/dashboard/page.js", "/v1/nothing"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.168.1.7", "[::1"])
async def test_a_name_that_was_bound_to_our_address_is_refused(world: World, host: str) -> None:
    for path in PATHS:
        assert (await world.http.get(path, headers={"host": host})).status_code == 403, path
    response = await world.chat(headers={"host": host})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (403, "PermissionDeniedError")
    assert repr(host) in error["message"]
    assert "--allowed-hosts" in error["message"]
    assert not world.engine.requests


async def test_the_refusal_has_the_protocols_shape(world: World) -> None:
    body = {"max_tokens": 5, "messages": user("Hi")}
    response = await world.http.post("/v1/messages", json=body, headers={"host": "evil.example"})
    assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "api.localhost", "0.0.0.0:8000"],
)
async def test_names_of_this_machine_are_answered(world: World, host: str) -> None:
    assert (await world.chat(headers={"host": host})).status_code == 200


async def test_containers_on_this_machine_are_answered(world: World) -> None:
    assert (await world.chat(headers={"host": "host.docker.internal:8000"})).status_code == 200


async def test_hosts_that_are_configured_are_answered(world: World) -> None:
    world.configure_server(allowed_hosts="Mac.example, other.example")
    for host in ("mac.example", "MAC.example:443", "other.example"):
        page = {"host": host, "origin": f"https://{host}".lower()}
        assert (await world.chat(headers=page)).status_code == 200
    assert (await world.chat(headers={"host": "host.docker.internal"})).status_code == 403


@pytest.mark.parametrize("settings", [{"api_key": "sesame"}, {"host": "0.0.0.0"}], ids=str)
async def test_who_asks_for_keys_or_is_open_to_others_answers_to_any_name(
    world: World, settings: dict[str, str]
) -> None:
    world.configure_server(**settings)
    headers = {"host": "mac.example", "origin": "https://chat.example", "x-api-key": "sesame"}
    assert (await world.chat(headers=headers)).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost.evil.example", "http://[::1", "null"])
async def test_pages_of_other_sites_are_refused(world: World, origin: str) -> None:
    response = await world.chat(headers={"origin": origin, "content-type": "text/plain"})
    assert response.status_code == 403
    assert repr(origin) in response.json()["error"]["message"]
    assert not world.engine.requests


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1", "vscode-webview://1b2c", "tauri://localhost"]
)
async def test_pages_and_applications_of_this_machine_are_answered(world: World, origin: str) -> None:
    assert (await world.chat(headers={"origin": origin})).status_code == 200


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
async def test_what_browsers_send_without_asking_is_not_read_as_json(world: World, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/admin/models/load"):
        response = await world.http.post(path, content=b'{"messages": [{"role": "user"}]}', headers=headers)
        assert response.status_code == 400, path
        message = response.json()["error"]["message"]
        assert (content_type or "no content type") in message
        assert "Content-Type: application/json" in message
    assert not world.engine.requests


@pytest.mark.parametrize("text", ["http://mac.local", "mac.local:8000", "a b", "*"])
async def test_what_is_no_name_of_a_host_is_refused_at_start(text: str) -> None:
    with pytest.raises(ConfigError, match=f"allowed_hosts is .*; {re.escape(text)} is not a host name"):
        load_config(flags={"allowed_hosts": text}, environ={})
