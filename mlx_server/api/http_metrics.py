"""Counts and times every exchange for the metrics, by route."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server.observability.server_metrics import HttpMetrics

_UNCOUNTED_PATHS = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
"""What is asked again and again by machines, and would drown what clients do; vLLM leaves out the same."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Anything may stand in a request line, and a series for each would be a way to fill our memory."""

_GONE = 499
"""For clients that went before there was an answer, as nginx has it."""


class HttpMetricsMiddleware:
    """The outermost middleware, so that refusals count too."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNCOUNTED_PATHS:
            return await self._app(scope, receive, send)
        start_s, status, num_received, num_sent = time.monotonic(), _GONE, 0, 0

        async def read() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            return message

        async def watch(message: Message) -> None:
            nonlocal status, num_sent
            if message["type"] == "http.response.start":
                status = message["status"]
            num_sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, read, watch)
        finally:
            # Routing leaves its finding in the scope; the path itself may hold ids.
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.on_exchange(handler, method, status, time.monotonic() - start_s)
            self._metrics.on_bodies(handler, num_received, num_sent)
        return None
