"""Who may change the server."""

from __future__ import annotations

import pytest

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
    world.configure_server(api_key="sesame")
    assert await status(world, {**headers, "x-api-key": "sesame"}) == 403
    assert await status(world, {"x-api-key": "sesame"}) == 200
    assert world.engine.num_resets == 1


@pytest.mark.parametrize("headers", [{"host": "[::1]:8000"}, {"origin": "http://localhost:8000"}], ids=str)
async def test_names_of_this_machine_are_local(world: World, headers: dict[str, str]):
    assert await status(world, headers) == 200


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
