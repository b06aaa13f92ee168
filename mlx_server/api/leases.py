"""A request keeps the model it uses from being unloaded, until its answer has been sent."""

from __future__ import annotations

import contextlib

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_server.api.auth import caller_of
from mlx_server.api.disconnect import until_disconnect
from mlx_server.api.model_access import check_model_access
from mlx_server.api.sizes import check_name
from mlx_server.engine.engine import AsyncEngine
from mlx_server.pool.model_pool import ModelPool


class LeaseMiddleware:
    """Ends a request's leases when its answer, streamed or not, is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as leases:
            scope.setdefault("state", {})["leases"] = leases
            await self._app(scope, receive, send)


async def lease_engine(request: Request, pool: ModelPool, name: str | None) -> AsyncEngine:
    """The engine of a model, which is loaded first if need be, for as long as the request lasts. Raises what
    `ModelPool.acquire` raises, `PermissionDeniedError` for a model that the caller's tier may not use, and
    `ClientDisconnectedError`."""
    check_name(name, "model")
    check_model_access(pool, caller_of(request).tier, name)
    leases = request.state.leases
    assert isinstance(leases, contextlib.ExitStack)

    async def acquire() -> AsyncEngine:
        return leases.enter_context(await pool.acquire(name))

    return await until_disconnect(request, acquire())
