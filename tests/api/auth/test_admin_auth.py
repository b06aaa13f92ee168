"""Who may change the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.auth.keys import key_file_path
from mlx_server.config import ServerConfig
from mlx_server.tiers import Tier
from tests.api.worlds import World

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROUTES = [
    ("POST", "/reset_prefix_cache"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/abort_requests"),
    ("POST", "/abort_request"),
]


async def status(world: World, headers: dict[str, str], method: str = "POST", path: str = "/flush_cache") -> int:
    json = {"abort_all": True} if "abort" in path else None
    return (await world.http.request(method, path, json=json, headers=headers)).status_code


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_an_admin_key_a_local_program_is_one(world: World, method: str, path: str):
    assert await status(world, {}, method, path) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "10.0.0.7"},
        {"forwarded": "for=10.0.0.7"},
        {"x-real-ip": "127.0.0.1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
async def test_proxies_and_web_pages_are_not_local_programs(world: World, headers: dict[str, str]):
    assert await status(world, headers) == 401
    assert await status(world, {**headers, "authorization": "Bearer guess"}) == 403
    assert world.engine.num_resets == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "mac.example"},
        {"host": "mac.example:8000"},
        {"host": "[::1"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
    ids=str,
)
async def test_nor_are_those_who_call_it_by_another_name(world: World, headers: dict[str, str]):
    """Even where the operator lets such names and pages use the server."""
    world.configure_server(allowed_hosts="mac.example", allowed_origins="*")
    refusal = 403 if headers.get("host") == "[::1" else 401
    assert await status(world, headers) == refusal
    assert await status(world, {}) == 200
    assert world.engine.num_resets == 1


@pytest.mark.parametrize("headers", [{"host": "[::1]:8000"}, {"origin": "http://localhost:8000"}], ids=str)
async def test_names_of_this_machine_are_local(world: World, headers: dict[str, str]):
    assert await status(world, headers) == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_key_is_no_admin_however_near_it_is_used(world: World, method: str, path: str):
    """Behind a proxy that names no client, whoever is far away looks like this."""
    world.configure_server(api_key="sesame")
    assert await status(world, {}, method, path) == 401
    assert await status(world, {"x-api-key": "sesame"}, method, path) == 403
    assert world.engine.num_resets == 0


async def test_a_refusal_says_what_to_do(world: World):
    world.configure_server(api_key="sesame")
    refusal = (await world.http.post("/flush_cache", headers={"x-api-key": "sesame"})).json()["error"]["message"]
    assert "MLX_SERVE_SERVER_ADMIN_KEY" in refusal
    assert "`admin = true`" in refusal
    assert "sesame" not in refusal


@pytest.mark.parametrize("admin_key", [None, "master"])
async def test_keys_of_a_tier_that_says_so_are_admins_and_others_are_not(
    world: World, tmp_path: Path, admin_key: str | None
):
    tiers = (Tier(name="staff", admin=True), Tier(name="users"))
    with KeyFile.create(tmp_path / "keys.sqlite") as file:
        keys = {tier.name: file.add(tier.name, "").text for tier in tiers}
    world.configure_server(*tiers, key_file=str(tmp_path / "keys.sqlite"), admin_key=admin_key)
    assert await status(world, {"x-api-key": keys["staff"], "x-forwarded-for": "10.0.0.7"}) == 200
    assert await status(world, {"x-api-key": keys["users"]}) == 403
    assert await status(world, {}) == 401


async def test_a_tier_of_admins_makes_none_of_those_without_a_key(world: World):
    world.configure_server(Tier(name="default", admin=True))
    assert await status(world, {"x-forwarded-for": "10.0.0.7"}) == 401


async def test_the_first_key_closes_the_routes_for_admins(world: World):
    world.configure_server()
    assert await status(world, {}) == 200
    with KeyFile.create(key_file_path(ServerConfig())) as file:
        key = file.add("default", "").text
    assert await status(world, {"x-api-key": key}) == 403


@pytest.mark.parametrize(
    ("settings", "tiers", "expected"),
    [
        ({}, (), "open to all programs on this machine, until there is a key."),
        ({"admin_key": "master"}, (), "open to the admin key."),
        ({"api_key": "sesame"}, (), "open to nobody: set MLX_SERVE_SERVER_ADMIN_KEY, or declare"),
        ({"api_key": "sesame"}, (Tier(name="staff", admin=True),), "open to keys of the tier staff."),
        (
            {"api_key": "sesame", "admin_key": "master"},
            (Tier(name="staff", admin=True),),
            "open to the admin key and keys of the tier staff.",
        ),
    ],
)
async def test_admins_are_reported(world: World, settings: dict[str, str], tiers: tuple[Tier, ...], expected: str):
    world.configure_server(*tiers, **settings)
    assert expected in world.context.keys.admins()


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_with_an_admin_key_nothing_else_opens(world: World, method: str, path: str):
    world.configure_server(api_key="sesame", admin_key="master")
    assert await status(world, {}, method, path) == 401
    assert await status(world, {"authorization": "Bearer sesame"}, method, path) == 403
    assert await status(world, {"authorization": "Bearer maste"}, method, path) == 401
    assert await status(world, {"authorization": "Bearer master"}, method, path) == 200
    assert await status(world, {"x-api-key": "master", "host": "evil.example"}, method, path) == 200


async def test_an_admin_key_closes_nothing_but_its_routes(world: World):
    world.configure_server(admin_key="master")
    assert (await world.chat()).status_code == 200
    assert await status(world, {}) == 401
    response = await world.http.post("/flush_cache", headers={"x-api-key": "guess"})
    assert response.status_code == 403
    assert response.json()["error"]["type"] == "PermissionDeniedError"
    assert "master" not in response.text
    assert "guess" not in response.text


async def test_the_admin_key_opens_everything_else_too(world: World):
    world.configure_server(api_key="sesame", admin_key="master")
    assert (await world.http.get("/v1/models", headers={"x-api-key": "master"})).status_code == 200
