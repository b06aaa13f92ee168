"""Routes that read JSON: a body is received, waits for its turn, is parsed and becomes the route's model.

JsonRoute    any route with a body
TurnRoute    one whose requests are metered, and read by tier and by key in turn
"""

from __future__ import annotations

import email.message
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import Any, Protocol

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.auth.quotas import Demand
from mlx_server.api.context import ServerContext
from mlx_server.api.door import HeldBody
from mlx_server.api.errors import ClientDisconnectedError, error_info
from mlx_server.api.middleware import until_disconnect
from mlx_server.api.request_bounds import parse_json
from mlx_server.api.text_turns import TextTurn, TextWorkers
from mlx_server.engine.fair_slots import Asker
from mlx_server.errors import QuotaExceededError, ServeError
from mlx_server.tiers import GENERATING_PATHS

SMALL_BYTES = 16 * 1024
"""What is parsed at once: another thread would cost more."""


class _Field(Protocol):
    """A route's body as FastAPI knows it. `validate` returns the model, or what is wrong at which places."""

    def validate(self, value: Any, values: dict[str, Any], *, loc: tuple[str, ...]) -> tuple[Any, Any]: ...


class _JsonRequest(Request):
    """A request whose body has become the route's model before FastAPI asks for it, and is kept as nothing else."""

    async def receive_body(self) -> bytes:
        try:
            return await self.body()
        except ClientDisconnect:
            raise ClientDisconnectedError from None

    async def take(self, body: bytes, field: _Field, workers: TextWorkers) -> None:
        """Parses the body. One that is not said to be JSON is left to FastAPI to refuse. Raises
        `RequestValidationError` for a body that the route's schema refuses, and what `parse_json` raises."""
        held = self.state.held_body
        assert isinstance(held, HeldBody)
        if body and _is_json(self.headers.get("content-type", "")):
            if len(body) <= SMALL_BYTES:
                self._json = _validated(body, field)
            else:
                caller = caller_of(self)
                asker = Asker(caller.identity, caller.tier.priority)
                self._json = await workers.parse(asker, lambda: _validated(body, field))
            self._body = b"{}"
        held.release()

    async def json(self) -> Any:
        return self._json


def _is_json(content_type: str) -> bool:
    """As FastAPI decides."""
    message = email.message.Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def _validated(body: bytes, field: _Field) -> Any:
    """The route's model. FastAPI lets one pass that is an instance already."""
    try:
        parsed = parse_json(body)
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise RequestValidationError([{**problem, "ctx": {"error": error.msg}}]) from error
    value, problems = field.validate(parsed, {}, loc=("body",))
    if problems:
        raise RequestValidationError(problems)
    return value


class JsonRoute(APIRoute):
    """A route that reads its body with `_JsonRequest`; for `APIRouter(route_class=JsonRoute)`.

    It is received and handled within `metered`, and once its body is here, within `turn`."""

    def metered(self, request: Request) -> AbstractContextManager[None]:
        """Entered before the body is received; may refuse the request."""
        return nullcontext()

    def turn(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Entered when the body is here, before it is parsed, until the answer begins."""
        return nullcontext()

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handle

        async def checked(request: Request) -> Response:
            context = request.app.state.context
            assert isinstance(context, ServerContext)
            reading = _JsonRequest(request.scope, request.receive)
            with self.metered(request):
                body = await reading.receive_body()
                async with self.turn(reading):
                    await reading.take(body, field, context.text_workers)
                    return await handle(reading)

        return checked


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
