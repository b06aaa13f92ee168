"""Around every request: its id, its metrics, the caller's quota, errors that no handler knows, and CORS.

The id is in every error answer and in the log, so that a reported error can be found there.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server.api.auth.authentication import PROBE_PATHS
from mlx_server.api.auth.keys import Caller
from mlx_server.api.auth.quotas import Quotas, quota_headers
from mlx_server.api.errors import ANTHROPIC_PREFIX, CLIENT_CLOSED_REQUEST, error_info
from mlx_server.api.http.sse import PIECE_WRITER, PieceWriter
from mlx_server.config import ServerConfig
from mlx_server.observability.server_metrics import HttpMetrics
from mlx_server.setting import parse_origins

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
ANTHROPIC_ID_HEADER = "request-id"
"""The name that Anthropic's clients read."""

MAX_ID_CHARS = 128
_REQUEST_ID = re.compile(r"[!-~]+")

_UNCOUNTED_PATHS = PROBE_PATHS | {"/load", "/server_info"}
"""These would outnumber what clients do; vLLM leaves out the same."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""A request line may contain anything, and a series for each method would fill our memory."""

T = TypeVar("T")


def request_id(scope: Scope) -> str:
    """The id that the client sent, if it is valid, or else a new one."""
    sent = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return sent if len(sent) <= MAX_ID_CHARS and _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


def name_request(scope: Scope, headers: MutableHeaders, request_id: str) -> None:
    """Puts the id of a request into the headers of its answer, under the names that clients of its protocol read."""
    headers.setdefault(REQUEST_ID_HEADER, request_id)
    if scope["path"].startswith(ANTHROPIC_PREFIX):
        headers[ANTHROPIC_ID_HEADER] = request_id


class ExchangeMiddleware:
    """The outermost middleware. It puts the request's id into the state, where a route may replace it, and into the
    header `x-request-id` of every error and `request-id` of Anthropic's answers; counts and times requests by route;
    tells callers what remains of their quota; and turns unexpected exceptions into a 500 and a log entry."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, quotas: Quotas) -> None:
        self._app = app
        self._metrics = metrics
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["request_id"] = request_id(scope)
        start_s, status, num_sent = time.monotonic(), 0, 0

        async def write(message: Message) -> None:
            nonlocal status, num_sent
            if message["type"] == "http.response.start":
                status = message["status"]
                self._on_head(scope, message)
            num_sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, write)
        except Exception as error:
            logger.exception("The request %s failed: %s %s", state["request_id"], scope["method"], scope["path"])
            if status:
                raise
            await error_info(error).response(scope["path"])(scope, receive, write)
        finally:
            if scope["path"] not in _UNCOUNTED_PATHS:
                # The route's pattern; the path itself may contain ids.
                handler = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                time_s = time.monotonic() - start_s
                pieces: PieceWriter | None = state.get(PIECE_WRITER)
                num_sent += 0 if pieces is None else pieces.num_bytes
                num_received = state["held_body"].num_received if "held_body" in state else 0
                status = status or CLIENT_CLOSED_REQUEST
                self._metrics.on_exchange(handler, method, status, time_s, num_received, num_sent)

    def _on_head(self, scope: Scope, head: Message) -> None:
        """Adds the id to an error and to Anthropic's answers, and the caller's quota to every answer. Counts answers
        that a quota refused."""
        state, headers = scope["state"], MutableHeaders(scope=head)
        if head["status"] >= 400 or scope["path"].startswith(ANTHROPIC_PREFIX):
            name_request(scope, headers, state["request_id"])
        caller = state.get("caller")
        if isinstance(caller, Caller):  # unless it was refused
            if head["status"] == 429:
                self._quotas.refused[caller.tier.name] += 1
            rates = self._quotas.rates(caller, is_reading=state.get("is_reading", False))
            headers.update(quota_headers(rates, scope["path"]))


_OWN_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?|(app|tauri|vscode-webview|vscode-file)://[^/]*"
"""What people run on their own machine: web pages, and applications, whose schemes no web page can have."""


def allow_origins(app: FastAPI, server: ServerConfig) -> None:
    """Answers CORS preflights and allows pages of this machine, and the origins that `server` lists.

    Pages may read all headers. They need the same keys as other clients, and never count as local admins.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=parse_origins(server.allowed_origins or ""),
        allow_origin_regex=_OWN_PAGES,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
        allow_private_network=True,
    )


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Runs `work`, or cancels it and raises `ClientDisconnect` when the client disconnects first.

    The body must have been read: the only message after it is the disconnect.
    """
    working = asyncio.ensure_future(work)
    if not await ends_before(working, _disconnected(request)):
        raise ClientDisconnect
    return working.result()


async def ends_before(working: asyncio.Future[Any], other: Coroutine[Any, Any, object]) -> bool:
    """Waits for one of the two, and cancels the other. Returns whether `working` has ended."""
    watching = asyncio.ensure_future(other)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.done()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
