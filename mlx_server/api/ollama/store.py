"""What changes the models of this machine, for admins: POST /api/pull and DELETE /api/delete; others are refused."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BeforeValidator
from starlette.responses import JSONResponse, Response

from mlx_server.api.auth.authentication import RequireAdmin
from mlx_server.api.context import Context
from mlx_server.api.errors import error_info
from mlx_server.api.http import sse
from mlx_server.api.http.body import AnyTypeRoute
from mlx_server.api.http.middleware import until_disconnect
from mlx_server.api.ollama.fields import ERROR_RESPONSES, ModelBody, default_true
from mlx_server.api.ollama.opening import find_name
from mlx_server.api.ollama.output import NDJSON, line
from mlx_server.api.openai.fields import Bool
from mlx_server.api.pulls import begin_pull
from mlx_server.engine.models.store import Fetch, remove_stored
from mlx_server.errors import InvalidRequestError, PermissionDeniedError, UnsupportedError

_PERIOD_S = 0.5
_SUCCESS = {"status": "success"}

router = APIRouter(tags=["ollama"], route_class=AnyTypeRoute, responses=ERROR_RESPONSES, dependencies=[RequireAdmin])


class PullRequest(ModelBody):
    """The body of POST /api/pull."""

    stream: Annotated[Bool, BeforeValidator(default_true)] = True


@router.post("/api/pull", responses=sse.whole_or_streamed("status", media_type=NDJSON))
async def pull(body: PullRequest, request: Request, context: Context) -> Response:
    """Fetches a model that is not here yet, with its progress a line each unless `stream` is false."""
    name = await find_name(context.pool, body.asked())
    assert name is not None
    fetch = await begin_pull(context, name)
    if fetch is None:
        return _streamed(None) if body.stream else _success()
    if not body.stream:
        await until_disconnect(request, _wait(fetch))
        return _success()
    with contextlib.suppress(TimeoutError):  # what fails at once has a status
        await asyncio.wait_for(asyncio.shield(fetch.done), _PERIOD_S)
    return _streamed(fetch)


def _streamed(fetch: Fetch | None) -> Response:
    return sse.event_stream(sse.told_by(_lines(fetch)), 0, media_type=NDJSON)


async def _wait(fetch: Fetch) -> None:
    await asyncio.shield(fetch.done)


async def _lines(fetch: Fetch | None) -> AsyncGenerator[bytes, None]:
    """Progress as Ollama tells it: the manifest, bytes, success. None is of a model that is here."""
    yield line({"status": "pulling manifest"})
    if fetch is not None:
        digest = hashlib.sha256(fetch.name.encode()).hexdigest()  # by which clients know what the bytes are of
        part: dict[str, Any] = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}"}
        while not fetch.done.done():
            num_bytes, total = fetch.progress()
            yield line({**part, **({} if not total else {"total": total, "completed": min(num_bytes, total)})})
            await asyncio.wait((fetch.done,), timeout=_PERIOD_S)
        error = fetch.done.exception()
        if error is not None:
            yield line(error_info(error if isinstance(error, Exception) else RuntimeError()).ollama_body())
            return
    yield line(_SUCCESS)


@router.delete("/api/delete")
async def delete(body: ModelBody, context: Context) -> Response:
    """Deletes a pulled model from this machine, unloaded first."""
    name = await find_name(context.pool, body.asked())
    assert name is not None
    offer = context.pool.offer(name)
    if context.pool.is_configured(offer):
        raise PermissionDeniedError(
            f"{offer.spec.name} is a part of the server's configuration. Take it out there, then delete it with "
            "`mlx-serve models rm`."
        )
    await context.pool.unload(name, context.config.server.drain_timeout_s)
    if not await asyncio.to_thread(remove_stored, name):
        raise InvalidRequestError(f"{name} was not pulled: it lies in a folder of models. Delete it there.", "model")
    return Response()


@router.post("/api/copy", status_code=501)
@router.post("/api/create", status_code=501)
@router.post("/api/push", status_code=501)
async def unsupported(request: Request) -> None:
    """Not done: models are folders, made by mlx-lm's tools and named in the configuration."""
    raise UnsupportedError(
        f"{request.url.path} is not served: models are folders in mlx-lm format. Name one under [[models]] in the "
        "configuration, with aliases and adapters of its own."
    )


def _success() -> Response:
    return JSONResponse(_SUCCESS)
