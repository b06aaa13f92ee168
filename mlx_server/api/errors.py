"""The HTTP status and body of every error, in each protocol's form.

Errors of routes, of middleware and of streams that have begun all come here, so a client gets one form:

    OpenAI's routes        {"error": {"message", "type", "param", "code"}}
    below /v1/messages     {"type": "error", "error": {"type", "message"}}
    below /api/            {"error": message}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from mlx_server import errors

ANTHROPIC_PREFIX = "/v1/messages"
OLLAMA_PREFIX = "/api/"
CLIENT_CLOSED_REQUEST = 499
_MAX_LISTED_ERRORS = 10
_MAX_MESSAGE_CHARS = 1000
_MAX_ERROR_CHARS = 4000
_REMEDY_RETRY_S = "5"
_MAX_PARAM_CHARS = 200
_MAX_SHOWN_CHARS = 40


class NotFoundError(errors.ServeError):
    """The thing that a path names is not kept here, or no longer."""


_STATUSES: Mapping[type[Exception], int] = {
    errors.InvalidRequestError: 400,
    errors.ModelNotFoundError: 404,
    NotFoundError: 404,
    errors.AuthenticationError: 401,
    errors.PermissionDeniedError: 403,
    errors.UnsupportedError: 501,
    errors.QuotaExceededError: 429,
    errors.OverloadedError: 503,
    errors.EngineDeadError: 503,
    errors.UnknownModelError: 404,  # this and the next two are of pulls: a load that fails is an `OverloadedError`
    errors.ModelLoadError: 501,
    errors.DownloadError: 503,
    errors.InsufficientStorageError: 507,
    errors.InsufficientMemoryError: 507,
    errors.ServeError: 500,
}
_TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    507: "InsufficientStorageError",
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""By this, Anthropic's client library sends the whole conversation instead."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error for HTTP, before it takes a protocol's form."""

    status: int
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def openai_body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "HTTPError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def anthropic_body(self) -> dict[str, Any]:
        fallback = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, fallback)
        details = {"details": _UNTHREADED} if self.param == "thread" else {}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}

    def ollama_body(self) -> dict[str, Any]:
        return {"error": self.message}

    def body(self, path: str) -> dict[str, Any]:
        """The body in the form that clients of `path` parse."""
        if path.startswith(OLLAMA_PREFIX):
            return self.ollama_body()
        return self.anthropic_body() if path.startswith(ANTHROPIC_PREFIX) else self.openai_body()

    def response(self, path: str) -> Response:
        content = json.dumps(self.body(path)).encode()
        return Response(content, self.status, dict(self.headers), media_type="application/json")


def _cut(text: str, most: int) -> str:
    """Errors may quote names and values of clients, which may be as long as a body."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def error_info(error: Exception) -> ErrorInfo:
    """Looks `error` up in `_STATUSES`. Other errors than `ServeError` are the server's fault: a 500 without details."""
    if not isinstance(error, errors.ServeError):
        return ErrorInfo(500, "Internal server error; the server's log has the details.")
    status = next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)
    headers = {} if status in (429, 503) else {"x-should-retry": "false"}
    if isinstance(error, errors.OverloadedError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    # Clients should not repeat at once what may have been the reason, or what may need a remedy.
    if status == 503 and isinstance(error, errors.EngineDeadError | errors.DownloadError):
        headers |= {"x-should-retry": "false", "retry-after": _REMEDY_RETRY_S}
    param = "model" if isinstance(error, errors.ModelNotFoundError | errors.UnknownModelError) else None
    if isinstance(error, errors.InvalidRequestError) and error.param is not None:
        param = _cut(error.param, _MAX_PARAM_CHARS)
    return ErrorInfo(status, _cut(error.message, _MAX_ERROR_CHARS), param, headers)


_BODY_WORDS = {
    "missing": "The body is empty; send a JSON object.",
    "model_attributes_type": "The body must be a JSON object.",
}


_NO_OBJECT = frozenset({"model_attributes_type", "model_type", "dict_type"})


def validation_info(problems: Sequence[Any]) -> ErrorInfo:
    """The 400 for a body or query that does not fit its schema; `param` is the path of the first problem."""
    lines = []
    for problem in problems[:_MAX_LISTED_ERRORS]:
        if tuple(problem["loc"]) == ("body",):
            lines.append(_BODY_WORDS.get(problem["type"], str(problem["msg"])))
            continue
        where = dotted(problem["loc"])
        detail = problem.get("ctx", {}).get("error")
        is_no_object = problem["type"] in _NO_OBJECT
        message = "Input should be an object" if is_no_object else str(problem["msg"]).removeprefix("Value error, ")
        what = f"{message}: {detail}" if problem["type"] == "json_invalid" else message
        lines.append((f"{where}: {what}" if where else what) + _got(problem))
    first = dotted(problems[0]["loc"]) if problems else ""
    message = "; ".join(lines)[:_MAX_MESSAGE_CHARS]
    return error_info(errors.InvalidRequestError(message, first or None))


def _content_type_info(request: Request, error: RequestValidationError) -> ErrorInfo | None:
    """The 400 for a body whose content type is not JSON. Such bodies are not read, since browsers send them to other
    sites without asking first."""
    if not isinstance(error.body, bytes) or not error.body:
        return None
    sent = request.headers.get("content-type")
    what = "no content type" if sent is None else f"the content type {sent[:_MAX_MESSAGE_CHARS]}"
    message = f"The body has {what}; this server reads JSON. Send the header `Content-Type: application/json`."
    return error_info(errors.InvalidRequestError(message))


def _got(problem: Mapping[str, Any]) -> str:
    """`, got 0` if the wrong value is short and plain."""
    value = problem.get("input")
    is_plain = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _MAX_SHOWN_CHARS)
    shown = json.dumps(value) if is_plain and problem["type"] not in ("missing", "json_invalid") else ""
    return f", got {shown}" if 0 < len(shown) <= _MAX_SHOWN_CHARS else ""


def dotted(location: Sequence[str | int]) -> str:
    """`messages[0].role` for pydantic's ("body", "messages", 0, "role"); empty for the whole body. Names of a union's
    types, like "str" or "list[dict[str,any]]", are left out."""
    parts = location[1:] if location and location[0] in ("body", "query", "path", "header") else location
    parts = [part for part in parts if isinstance(part, int) or not (part == "str" or part.endswith("]"))]
    if len(parts) == 1 and isinstance(parts[0], int):  # a character position in text that is not JSON
        return ""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


class OpenAIErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class OpenAIError(BaseModel):
    error: OpenAIErrorDetail


def error_responses(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: a route's errors."""
    return {
        "4XX": {"model": model, "description": "The request is wrong, or refused"},
        "5XX": {"model": model, "description": "The server cannot serve it, or not now"},
    }


def install_error_handlers(app: FastAPI) -> None:
    """Answers the exceptions of routes in their protocol's form; `ExchangeMiddleware` handles unknown ones."""

    @app.exception_handler(errors.ServeError)
    async def on_serve_error(request: Request, error: errors.ServeError) -> Response:
        return error_info(error).response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        info = _content_type_info(request, error) or validation_info(error.errors())
        return info.response(request.url.path)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        return _http_info(error, request).response(request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def on_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def _remedy(request: Request) -> str:
    """Names the right path if the client's base URL has a `/v1` too many or too few, or a doubled slash."""
    path = request.url.path
    if "//" in path:
        meant = re.sub("//+", "/", path)
    else:
        meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    scope = {**request.scope, "path": meant}
    if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
        wrong = "the doubled slash" if "//" in path else "/v1"
        return f", but {meant} is; {f'remove {wrong} from' if len(meant) < len(path) else 'add /v1 to'} the base URL."
    return "; see /docs for what is."


def _http_info(error: HTTPException, request: Request) -> ErrorInfo:
    message = str(error.detail)
    if error.status_code == 405 and error.headers and "Allow" in error.headers:
        message = f"{message}: {request.url.path} takes {error.headers['Allow']}, not {request.method}."
    elif error.status_code in (404, 405):
        message = f"{message}: {request.method} {request.url.path} is not served here{_remedy(request)}"
    headers = {"x-should-retry": "false", **(error.headers or {})}
    return ErrorInfo(error.status_code, _cut(message, _MAX_ERROR_CHARS), None, headers)
