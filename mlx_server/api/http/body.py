"""Routes that read JSON: they receive a body, wait for the request's turn, and parse the body into their model."""

from __future__ import annotations

import email.message
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.auth.quotas import Demand
from mlx_server.api.context import ServerContext
from mlx_server.api.errors import error_info
from mlx_server.api.http.middleware import until_disconnect
from mlx_server.api.http.request_bounds import parse_json
from mlx_server.api.http.text_turns import TextTurn
from mlx_server.engine.fair_slots import Requester
from mlx_server.errors import InvalidRequestError, QuotaExceededError, ServeError
from mlx_server.tiers import GENERATING_PATHS

SMALL_BYTES = 16 * 1024
"""Smaller bodies are parsed on the event loop: handing them to a thread would cost more."""

_JSON = (b"content-type", b"application/json")


class _JsonRequest(Request):
    """A request that parses its body into the route's model before FastAPI asks for it."""

    async def parse(self, field: Any) -> None:
        """`field` is FastAPI's description of the body: its `validate` returns the model, or a list of errors. A body
        that is not declared as JSON is left for FastAPI to refuse. Raises `RequestValidationError` for a body that does
        not fit the route's schema, and what `parse_json` raises."""
        context, body = self.app.state.context, await self.body()
        assert isinstance(context, ServerContext)
        if (encoding := self.headers.get("content-encoding", "identity")) != "identity":
            raise InvalidRequestError(
                f"The body is encoded as {encoding[:40]}; this server does not decode bodies. Send it "
                "without Content-Encoding."
            )
        if body and _is_json(self.headers.get("content-type", "")):
            if len(body) <= SMALL_BYTES:
                self._json = _validated(body, field)
            else:
                caller = caller_of(self)
                requester = Requester(caller.identity, caller.tier.priority)
                self._json = await context.text_workers.parse(requester, len(body), lambda: _validated(body, field))
            self._body = b"{}"

    async def json(self) -> Any:
        return self._json


def _is_json(content_type: str) -> bool:
    """The same decision as FastAPI's."""
    message = email.message.Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def _validated(body: bytes, field: Any) -> Any:
    """The route's model. FastAPI accepts it as it is, since it is an instance already."""
    value, problems = field.validate(parse_json(body), {}, loc=("body",))
    if problems:
        raise RequestValidationError(problems)
    return value


class JsonRoute(APIRoute):
    """A route that reads its body with `_JsonRequest`. For `APIRouter(route_class=JsonRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handle

        async def read(request: Request) -> Response:
            reading = _JsonRequest(request.scope, request.receive)

            async def parse_and_handle() -> Response:
                await reading.parse(field)
                return await handle(reading)

            return await self.answer(reading, parse_and_handle)

        return read

    async def answer(self, request: _JsonRequest, parse_and_handle: Callable[[], Awaitable[Response]]) -> Response:
        await request.body()
        return await parse_and_handle()


class TurnRoute(JsonRoute):
    """A route whose requests are metered, and wait for their turn by tier and key after their bodies have arrived. All
    that they do until their answer begins is cancelled when the client disconnects.

    The caller's rates are checked before that. A request counts once: one that generates counts when it is granted, or
    when it is refused because it is wrong; one that only has text read counts when it arrives.
    """

    async def answer(self, request: _JsonRequest, parse_and_handle: Callable[[], Awaitable[Response]]) -> Response:
        caller, quotas = caller_of(request), request.app.state.context.quotas
        generates = request.url.path in GENERATING_PATHS
        request.state.is_reading = not generates
        if generates:
            quotas.check(caller, Demand())
        else:
            quotas.begin_reading(caller)
        request.state.is_counted = not generates
        try:
            await request.body()
            return await until_disconnect(request, _in_turn(request, parse_and_handle))
        except (ServeError, RequestValidationError, HTTPException) as error:
            if not request.state.is_counted and _is_refusal(error):
                quotas.count_wrong_request(caller)
            raise


class AnyTypeRoute(JsonRoute):
    """Takes any content type for JSON, as Ollama does: its examples for curl send none.

    A request from a web page must still declare JSON, because browsers ask the server before they send that to another
    site.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            if "origin" not in request.headers and "sec-fetch-site" not in request.headers:
                others = [header for header in request.scope["headers"] if header[0] != _JSON[0]]
                request = Request({**request.scope, "headers": [*others, _JSON]}, request.receive)
            return await handle(request)

        return read


class AnyTypeTurnRoute(AnyTypeRoute, TurnRoute):
    """The same for metered requests."""


async def _in_turn(request: Request, parse_and_handle: Callable[[], Awaitable[Response]]) -> Response:
    """In the request's turn, which lasts from before its body is parsed until its answer begins."""
    caller = caller_of(request)
    requester = Requester(caller.identity, caller.priority_at(request.url.path))
    turn = request.state.turn = TextTurn(request.app.state.context.text_workers, requester)
    try:
        await turn.begin()
        return await parse_and_handle()
    finally:
        turn.end()


def _is_refusal(error: Exception) -> bool:
    """Whether the request is wrong, as opposed to too much for now."""
    if isinstance(error, QuotaExceededError):
        return False
    return not isinstance(error, ServeError) or error_info(error).status < 500
