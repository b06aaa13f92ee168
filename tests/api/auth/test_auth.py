"""Who gets in."""

from __future__ import annotations

import openai
import pytest

from mlx_server.api.auth.authentication import exposure_warning, is_loopback
from mlx_server.api.auth.keys import KeyRing
from mlx_server.config import Config, ServerConfig
from mlx_server.errors import ConfigError
from mlx_server.fleet import FleetConfig
from mlx_server.request import Priority
from mlx_server.tiers import Tier
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sesame"},
        {"authorization": "bearer sesame"},
        {"x-api-key": "sesame"},
        {"authorization": "Basic abc", "x-api-key": "sesame"},
    ],
)
async def test_the_key_opens(world: World, headers: dict[str, str]):
    world.configure_server(api_key="sesame")
    assert (await world.http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer sesam"},
        {"authorization": "Bearer sésame".encode("latin-1")},
        {"authorization": "Bearer"},
        {"authorization": "sesame"},
        {"x-api-key": ""},
        {"authorization": "Bearer wrong", "x-api-key": "sesame"},
    ],
)
async def test_nothing_else_does(world: World, headers: dict[str, str]):
    world.configure_server(api_key="sesame")
    response = await world.http.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "AuthenticationError"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "sesame" not in response.text


async def test_the_client_library_gets_in_by_its_key(world: World):
    world.configure_server(api_key="sesame")
    client = world.openai.with_options(api_key="sesame")
    assert (await client.chat.completions.create(model="fake", messages=user("Hi"))).choices
    with pytest.raises(openai.AuthenticationError, match="X-Api-Key"):
        await world.openai.chat.completions.create(model="fake", messages=user("Hi"))


async def test_a_stranger_s_body_is_not_read(world: World):
    world.configure_server(api_key="sesame")
    response = await world.http.post("/v1/chat/completions", content=b"{")
    assert response.status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
async def test_probes_need_no_key(world: World, path: str):
    world.configure_server(api_key="sesame")
    assert (await world.http.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/load", "/server_info", "/docs", "/openapi.json", "/v1/models/fake"])
async def test_all_else_needs_one(world: World, path: str):
    world.configure_server(api_key="sesame")
    assert (await world.http.get(path)).status_code == 401


async def test_the_messages_route_refuses_in_anthropic_s_shape(world: World):
    world.configure_server(api_key="sesame")
    body = (await world.http.post("/v1/messages", json={})).json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("mac.local", False),
    ],
)
async def test_strangers_are_warned_of(host: str, is_local: bool):
    assert is_loopback(host) is is_local
    assert (exposure_warning(host, KeyRing(Config())) is None) is is_local
    assert exposure_warning(host, KeyRing(Config(server=ServerConfig(api_key="sesame")))) is None


@pytest.mark.parametrize(
    ("base", "requested", "priority"),
    [
        (Priority.HIGH, None, Priority.HIGH),
        (Priority.HIGH, 1, Priority.NORMAL),
        (Priority.NORMAL, -3, Priority.NORMAL),
        (Priority.NORMAL, 7, Priority.LOW),
        (Priority.LOW, -1, Priority.LOW),
    ],
)
async def test_a_requested_priority(world: World, base: Priority, requested: int | None, priority: Priority):
    world.configure_server(Tier(priority=base))
    assert (await world.chat(priority=requested)).status_code == 200
    (request,) = world.engine.requests
    assert (request.priority, request.tier) == (priority, "default")


# --- the discovery key ------------------------------------------------------------------------------------------

ROUTER = {"authorization": "Bearer finder"}


@pytest.fixture
def discovered(world: World) -> World:
    world.configure(Config(server=ServerConfig(api_key="sesame"), fleet=FleetConfig(discovery_key="finder")))
    return world


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/fake", "/health", "/metrics", "/server_info", "/v1/loads", "/kv_event_sources"]
)
async def test_a_router_finds_models_with_the_discovery_key(discovered: World, path: str):
    assert (await discovered.http.get(path, headers=ROUTER)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/v1/messages"),
        ("POST", "/tokenize"),
        ("POST", "/v1/models"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/admin/models"),
        ("GET", "/api/tags"),
        ("GET", "/no/such/path"),
    ],
)
async def test_the_discovery_key_is_good_for_nothing_else(discovered: World, method: str, path: str):
    response = await discovered.http.request(method, path, headers=ROUTER, json={"messages": user("Hi")})
    assert response.status_code == 401
    assert "discovery key" in response.text


async def test_the_discovery_key_is_no_other_key():
    config = Config(server=ServerConfig(api_key="same"), fleet=FleetConfig(discovery_key="same"))
    with pytest.raises(ConfigError, match="discovery_key equals api_key or admin_key"):
        KeyRing(config)
