"""A request of Ollama's: its model, how long that is to stay, and what the answer says of both.

A model's name that is served as it stands is taken as it stands. Else `hf.co/` before it and the tag `:latest` behind
it are left out, and then case does not matter. Models are listed with a tag, as Ollama's clients expect:
`smollm2:latest`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from mlx_server.api.auth.authentication import caller_of, check_model_access, require_admin
from mlx_server.api.context import ServerContext
from mlx_server.api.http.request_bounds import check_name
from mlx_server.api.ollama.fields import OllamaFields
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.pool.model_pool import ModelPool

NOT_ENFORCED_HEADER = "x-options-not-enforced"
"""What of the request the answer does not keep to: docs/ollama.md says when."""

_LATEST = ":latest"
_HUBS = ("hf.co/", "huggingface.co/")


def listed(name: str) -> str:
    """What a model of ours is called to Ollama's clients."""
    return name if ":" in name else f"{name}{_LATEST}"


def plain(name: str) -> str:
    """The name without what only Ollama's clients write."""
    for hub in _HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(_LATEST)


async def find_name(pool: ModelPool, name: str | None) -> str | None:
    """Our name of the model that a client means: `plain` of it where there is none, so that the refusal names it; None
    is the default model. Raises `InvalidRequestError` for what cannot be a name."""
    check_name(name, "model")
    if not name:
        return None
    for form in dict.fromkeys((name, plain(name))):
        if pool.look_up(form) is not None:
            return form
    wanted = plain(name).lower()
    served = await asyncio.to_thread(lambda: [offer.name for offer in pool.offered()])
    return next((ours for ours in served if ours.lower() == wanted), plain(name))


@dataclass(frozen=True, slots=True)
class OllamaCall:
    """An open exchange. `name` is the model's as the client wrote it, `load_s` how long the model was waited for."""

    exchange: Exchange
    name: str
    started_s: float
    load_s: float
    is_kept: bool
    """Whether the model stays for as long as the request asks, if it does."""

    def finish(self, response: Response) -> Response:
        """The answer with its note on what is not enforced."""
        body, engine = self.exchange.body, self.exchange.engine
        assert isinstance(body, OllamaFields)
        notes = [] if self.is_kept else ["keep_alive"]
        if body.options is not None:
            notes += body.options.not_enforced(body.sampling(engine.default_sampling), engine.max_model_len)
        if notes:
            response.headers[NOT_ENFORCED_HEADER] = ", ".join(notes)
        return response


async def open_call(body: OllamaFields, request: Request, context: ServerContext) -> OllamaCall:
    """Raises what `open_exchange` raises."""
    started_s, asked = time.monotonic(), body.model
    body.model = await find_name(context.pool, asked)
    exchange = await open_exchange(body, request, context)
    is_kept = keep_model(context.pool, body.model, body.keep_alive, request)
    return OllamaCall(exchange, asked or exchange.model_name, started_s, time.monotonic() - started_s, is_kept)


def keep_model(pool: ModelPool, name: str | None, idle_s: float | None, request: Request) -> bool:
    """Lets a model stay idle for so long, if the caller may say so: it holds for all who use the model. Whether what
    was asked is done; nothing is asked by None."""
    if idle_s is not None and caller_of(request).is_admin:
        pool.keep_alive(name, idle_s)
        return True
    return idle_s is None


async def unload(body: OllamaFields, request: Request, context: ServerContext) -> str:
    """Has the model unloaded as soon as nobody uses it; its name. Raises `ServeError`, for callers that are no admins,
    too."""
    await require_admin(request)
    name = await find_name(context.pool, body.model)
    check_model_access(context.pool, caller_of(request).tier, name)
    context.pool.keep_alive(name, 0.0)
    await context.pool.expire_idle()
    return body.model or plain(context.pool.find(name).name)
