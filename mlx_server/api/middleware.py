"""Counts and times every exchange for the metrics, by route.

One line in the log for each generation that has ended or was refused. No text of prompts or answers is in it.

Every request has an id, and every error answer tells it: what a client reports can be found in the log.

Stops work for clients that have gone, before an answer has begun.

Load reports in response headers, for routers that ask for them (ORCA, as vLLM answers it).

Which names a server that is open to its own machine answers to.

Without keys, whoever can connect may use the server, and a web browser connects for whatever page it has open: a page
may name our address as its own (DNS rebinding), or send a form here. Both show in what browsers tell with a request.

Which web pages a browser lets call the server: those of the configured origins, and no others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server.api.auth.authentication import host_of, is_loopback
from mlx_server.api.auth.keys import KeyRing
from mlx_server.api.errors import ClientDisconnectedError, error_info
from mlx_server.api.generation import GenerationJob
from mlx_server.config import ServerConfig
from mlx_server.errors import PermissionDeniedError, ServeError
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.observability.logs import log_event
from mlx_server.observability.server_metrics import HttpMetrics
from mlx_server.outputs import EngineStats
from mlx_server.setting import ANY_ORIGIN, parse_hosts, parse_origins

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


logger = logging.getLogger("mlx_server.requests")


def log_end(job: GenerationJob, model_name: str, choices: Sequence[RequestSummary]) -> None:
    """A generation has ended, in whatever way. Tokens are summed over its choices; times are those of the choice
    that came first, and `tpot_ms` is the mean over all tokens after a choice's first."""
    decoded = [choice for choice in choices if choice.tpot_s is not None]
    num_later_tokens = sum(choice.num_output_tokens - 1 for choice in decoded)
    decode_s = sum((choice.tpot_s or 0.0) * (choice.num_output_tokens - 1) for choice in decoded)
    fields = {
        **_identity(job, model_name, choices[0].tier),
        "choices": len(choices),
        "prompt_tokens": sum(choice.num_prompt_tokens for choice in choices),
        "cached_tokens": sum(choice.num_cached_tokens for choice in choices),
        "output_tokens": sum(choice.num_output_tokens for choice in choices),
        "queue_ms": _ms(_least(choice.queue_s for choice in choices)),
        "ttft_ms": _ms(_least(choice.ttft_s for choice in choices)),
        "tpot_ms": _ms(decode_s / num_later_tokens if num_later_tokens else None),
        "finish_reason": ",".join(sorted({choice.finish_reason.value for choice in choices})),
    }
    log_event(logger, "request ended", fields)


def log_refusal(job: GenerationJob, model_name: str, error: ServeError) -> None:
    """A generation was refused; its error's name stands for the reason."""
    fields = {
        **_identity(job, model_name, job.caller.tier.name),
        "choices": job.n * len(job.prompts),
        "prompt_tokens": job.n * sum(len(prompt.token_ids) for prompt in job.prompts),
        "error": type(error).__name__,
    }
    log_event(logger, "request refused", fields)


def _identity(job: GenerationJob, model_name: str, tier: str) -> dict[str, Any]:
    return {"request_id": job.request_id, "key": job.caller.identity, "model": model_name, "tier": tier}


def _least(times_s: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(1000.0 * time_s, 3)


REQUEST_ID_HEADER = "x-request-id"


MAX_ID_CHARS = 128
_REQUEST_ID = re.compile(r"[!-~]+")


def is_request_id(text: str) -> bool:
    """Whether a client's id can stand in headers and logs as it is."""
    return len(text) <= MAX_ID_CHARS and _REQUEST_ID.fullmatch(text) is not None


class RequestIdMiddleware:
    """Puts the id, the client's where it sent a good one, into the state; a route may replace it. What no handler knows
    becomes a 500 here, and one line with its id in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        state = scope.setdefault("state", {})
        state["request_id"] = sent if is_request_id(sent) else uuid.uuid4().hex
        has_begun = False

        async def with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                if message["status"] >= 400:
                    MutableHeaders(scope=message).setdefault(REQUEST_ID_HEADER, state["request_id"])
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except Exception as error:
            logger.exception("The request %s failed: %s %s", state["request_id"], scope["method"], scope["path"])
            if has_begun:
                raise
            await error_info(error).response(scope["path"])(scope, receive, with_id)
        return None


T = TypeVar("T")


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end, or cancels it and raises `ClientDisconnectedError` once the client has gone.

    The body must have been read: what arrives after it can only be the disconnect.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        await _cancel(working, watching)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


REQUEST_HEADER = "endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"


def load_headers(requested: Mapping[str, str], stats: EngineStats) -> dict[str, str]:
    """The header with KV use and queue length in the format that `requested` (request headers) names."""
    wanted = requested.get(REQUEST_HEADER, "").upper()
    used = kv_cache_usage(stats)
    if wanted == "JSON":
        metrics = {"kv_cache_usage_perc": used, "num_requests_waiting": stats.num_waiting}
        return {RESPONSE_HEADER: "JSON " + json.dumps({"named_metrics": metrics})}
    if wanted == "TEXT":
        text = f"named_metrics.kv_cache_usage_perc={used}, named_metrics.num_requests_waiting={stats.num_waiting}"
        return {RESPONSE_HEADER: "TEXT " + text}
    return {}


def kv_cache_usage(stats: EngineStats) -> float:
    """Share of blocks that requests hold; cached blocks that nobody holds count as free."""
    return round(stats.kv_usage, 4)


_MAX_SHOWN_CHARS = 100


class HostMiddleware:
    """Refuses requests for names that are not this machine's, and from other sites' pages, as long as no key is asked
    for and only this machine can connect."""

    def __init__(self, app: ASGIApp, server: ServerConfig, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys
        self._is_local_only = is_loopback(server.host)
        self._hosts = frozenset(parse_hosts(server.allowed_hosts))
        self._origins = frozenset(parse_origins(server.allowed_origins or ""))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_local_only and not self._keys.asks_for_keys:
            refusal = _refusal(Headers(scope=scope), self._hosts, self._origins)
            if refusal is not None:
                return await error_info(refusal).response(scope["path"])(scope, receive, send)
        return await self._app(scope, receive, send)


def _refusal(headers: Headers, hosts: Collection[str], origins: Collection[str]) -> PermissionDeniedError | None:
    host = headers.get("host", "")
    if host and not _is_ours(host_of(f"//{host}"), hosts):
        return PermissionDeniedError(
            f"This server answers to its own machine only, and was asked as {host[:_MAX_SHOWN_CHARS]!r}: a web page "
            "could hide behind such a name. Call it at 127.0.0.1 or localhost, name the host with --allowed-hosts, or "
            "ask for keys (`mlx-serve keys create`)."
        )
    origin = headers.get("origin")
    if origin is None or origin in origins or ANY_ORIGIN in origins or _is_own_page(origin, hosts):
        return None
    return PermissionDeniedError(
        f"Web pages of {origin[:_MAX_SHOWN_CHARS]!r} may not use this server. Allow them with --allowed-origins."
    )


def _is_own_page(origin: str, hosts: Collection[str]) -> bool:
    """Of this machine, or of an application, which has a scheme of its own: no web page can pretend to that."""
    scheme, _, _ = origin.partition("://")
    return origin != "null" and (scheme not in ("http", "https") or _is_ours(host_of(origin), hosts))


def _is_ours(host: str, hosts: Collection[str]) -> bool:
    return is_loopback(host) or host in hosts


def allow_origins(app: FastAPI, server: ServerConfig) -> None:
    """Answers browsers' preflights and names the origin in answers, refusals included, as far as `server` allows it.

    Pages may read every header. They need the same keys as any client, and are never taken for a local admin."""
    if server.allowed_origins is None:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=parse_origins(server.allowed_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
        allow_private_network=True,
    )
