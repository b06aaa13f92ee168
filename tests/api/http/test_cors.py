"""Which web pages may call the server from a browser."""

from __future__ import annotations

import httpx
import pytest

from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE, STRANGER = "http://localhost:3000", "https://evil.example"
GRANT = "access-control-allow-origin"


async def preflight(world: World, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return await world.http.options("/v1/chat/completions", headers=headers)


async def test_no_page_of_another_site_may_unless_it_is_told(world: World) -> None:
    for origin in (STRANGER, "null", f"{PAGE}.evil.example", "http://localhost.evil.example"):
        assert (await preflight(world, origin)).status_code == 400
        assert GRANT not in (await world.chat(headers={"origin": origin})).headers


@pytest.mark.parametrize(
    "page", [PAGE, "http://localhost", "http://127.0.0.1:5173", "https://[::1]:8443", "app://obsidian.md"]
)
async def test_pages_of_this_machine_may(world: World, page: str) -> None:
    for allowed in (None, "https://chat.example"):
        world.configure_server(allowed_origins=allowed)
        assert (await preflight(world, page)).headers[GRANT] == page
        answer = await world.chat(headers={"origin": page})
        assert (answer.status_code, answer.headers[GRANT]) == (200, page)
    sent = {"origin": page, "sec-fetch-site": "same-site"}
    assert (await world.http.post("/flush_cache", headers=sent)).status_code == 401


async def test_pages_of_the_configured_origins_may(world: World) -> None:
    world.configure_server(allowed_origins=f"https://chat.example, {PAGE}", api_key="sesame")
    asked = await preflight(world, PAGE)
    assert asked.status_code == 200
    assert asked.headers[GRANT] == PAGE
    assert {"authorization", "content-type"} <= set(asked.headers["access-control-allow-headers"].split(","))
    answer = await world.chat(headers={"origin": PAGE, "authorization": "Bearer sesame"})
    assert (answer.status_code, answer.headers[GRANT]) == (200, PAGE)
    refusal = await world.chat(headers={"origin": PAGE})
    assert (refusal.status_code, refusal.headers[GRANT]) == (401, PAGE)


async def test_others_may_not(world: World) -> None:
    world.configure_server(allowed_origins=PAGE)
    assert GRANT not in (await preflight(world, STRANGER)).headers
    assert GRANT not in (await world.chat(headers={"origin": STRANGER})).headers


async def test_a_star_is_every_page(world: World) -> None:
    world.configure_server(allowed_origins="*")
    body = {"messages": user("Hi"), "stream": True}
    for origin in (PAGE, STRANGER, "null"):
        assert (await preflight(world, origin)).headers[GRANT] == "*"
        streamed = await world.http.post("/v1/chat/completions", json=body, headers={"origin": origin})
        assert (streamed.status_code, streamed.headers[GRANT]) == (200, "*")


async def test_a_page_that_may_call_is_no_admin(world: World) -> None:
    world.configure_server(allowed_origins="*")
    assert (await world.http.post("/flush_cache")).status_code == 200
    assert (await world.http.post("/flush_cache", headers={"origin": STRANGER})).status_code == 401
