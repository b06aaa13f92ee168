"""Every request has an id, and every error answer tells it: what a client reports can be found in the log."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server.api.errors import error_info

REQUEST_ID_HEADER = "x-request-id"

logger = logging.getLogger(__name__)

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
