"""Routes whose requests are metered, and read by tier and by key in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from mlx_server.api.auth import caller_of
from mlx_server.api.body import JsonRoute
from mlx_server.api.disconnect import until_disconnect
from mlx_server.api.errors import error_info
from mlx_server.api.quotas import Demand
from mlx_server.api.text_turns import TextTurn
from mlx_server.engine.fair_slots import Asker
from mlx_server.errors import QuotaExceededError, ServeError
from mlx_server.tiers import GENERATING_PATHS


class TurnRoute(JsonRoute):
    """A route whose requests, once their bodies are here, wait for their turn to be read.

    They must be within their caller's rates before that, and count once: one that generates when it is granted, or
    refused for what it says; one that only has text read when it comes."""

    @contextmanager
    def metered(self, request: Request) -> Iterator[None]:
        caller, quotas = caller_of(request), request.app.state.context.quotas
        generates = request.url.path in GENERATING_PATHS
        if generates:
            quotas.check(caller, Demand())
        else:
            quotas.begin_reading(caller)
        request.state.is_counted = not generates
        try:
            yield
        except (ServeError, RequestValidationError, HTTPException) as error:
            if not request.state.is_counted and _is_refusal(error):
                quotas.refuse(caller)
            raise

    @asynccontextmanager
    async def turn(self, request: Request) -> AsyncIterator[None]:
        caller = caller_of(request)
        asker = Asker(caller.identity, caller.priority_at(request.url.path))
        turn = request.state.turn = TextTurn(request.app.state.context.text_workers, asker)
        try:
            if not turn.try_begin():
                await until_disconnect(request, turn.begin())
            yield
        finally:
            turn.end()


def _is_refusal(error: Exception) -> bool:
    """Whether it is the request that is wrong, rather than too much for now."""
    if isinstance(error, QuotaExceededError):
        return False
    return not isinstance(error, ServeError) or error_info(error).status < 500
