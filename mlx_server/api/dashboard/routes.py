"""The live page at `/` and `/dashboard`: static files, and the events that feed them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from mlx_server.api import sse
from mlx_server.api.admin_auth import RequireAdmin
from mlx_server.api.auth import caller_of
from mlx_server.api.caller import Caller
from mlx_server.api.context import Context, ServerContext
from mlx_server.api.dashboard.reading import snapshot

router = APIRouter(include_in_schema=False)

PERIOD_S = 1.0

_FOLDER = Path(__file__).parent
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/")
@router.get("/dashboard")
async def page() -> Response:
    return FileResponse(_FOLDER / "page.html", headers=_HEADERS)


@router.get("/dashboard/page.css")
async def style() -> Response:
    return FileResponse(_FOLDER / "page.css", headers=_HEADERS)


@router.get("/dashboard/page.js")
async def script() -> Response:
    return FileResponse(_FOLDER / "page.js", headers=_HEADERS, media_type="text/javascript")


@router.get("/dashboard/events", dependencies=[RequireAdmin])
async def events(request: Request, context: Context) -> Response:
    """One snapshot of all models a second, as server-sent events, until the client leaves, its key is revoked or the
    server ends."""
    return sse.event_stream(_snapshots(context, caller_of(request)), 0, on_close=lambda: None)


async def _snapshots(context: ServerContext, caller: Caller) -> AsyncIterator[bytes]:
    own_key = () if caller.key_id is None else (caller.key_id,)
    while not context.keys.revoked(own_key):
        yield sse.data(snapshot(context.pool))
        if context.generations.is_draining or context.pool.death() is not None:
            return  # the process is about to end, and waits for open streams
        await asyncio.sleep(PERIOD_S)
