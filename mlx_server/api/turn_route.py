"""Routes whose requests are read by tier and by key in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from mlx_server.api.auth import caller_of
from mlx_server.api.body import JsonRoute
from mlx_server.api.disconnect import until_disconnect
from mlx_server.api.text_turns import TextTurn
from mlx_server.engine.fair_slots import Asker


class TurnRoute(JsonRoute):
    """A route whose requests, once their bodies are here, wait for their turn to be read."""

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
