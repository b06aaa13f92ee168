"""The server's life: from its port to its exit status.

listen (`listener`) -> import -> load models -> ready -> signal -> drain -> exit 0
                                                   `-> an engine dies: open streams get an error event -> exit 1

`/health` answers 503 from the first connection until the models are loaded, and again while the server drains. This
module imports neither MLX nor transformers: both are imported in a thread while probes are answered.

SIGTERM, SIGINT and SIGHUP (the terminal was closed) stop the server; SIGQUIT writes all threads' stacks to standard
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from sse_starlette.sse import AppStatus
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_server.api.auth.authentication import FREE_PATHS, exposure_warning
from mlx_server.api.awake import keep_awake
from mlx_server.api.http.connections import (
    ACCEPTED_AT_ONCE,
    ConnectionGate,
    FairSelector,
    GuardedListener,
    bounded_protocol,
    room_for_connections,
)
from mlx_server.api.http.listener import check_tls, local_url, tls_files
from mlx_server.api.http.middleware import ends_before
from mlx_server.combinations import without_effect
from mlx_server.config import Config, ServerConfig
from mlx_server.errors import ConfigError, ServeError
from mlx_server.observability.logs import leave, set_up_logging
from mlx_server.observability.tracing import open_tracing
from mlx_server.tiers import GENERATING_PATHS

if TYPE_CHECKING:
    from mlx_server.api.context import ServerContext
    from mlx_server.pool.model_pool import ModelPool
    from mlx_server.pool.pooled_model import PooledModel

logger = logging.getLogger(__name__)

_FLUSH_S = 5
"""How long connections may take to receive their last bytes at the end."""

_KEEP_ALIVE_S = 75
"""Longer than the idle timeout of common proxies, so that the proxy closes first."""

_HEALTH_PATHS = ("/health", "/ping")

_WATCH_S = 0.25


def serve(config: Config, listeners: Sequence[socket.socket], make_pool: Callable[[Config], ModelPool]) -> int:
    """Serves at all `listeners` until a signal. The exit code: 0 after a signal, 2 for a wrong setting, 1 when the
    server could not start for another reason or an engine died.

    Call it on the process's main thread, which gets the signals. `make_pool` is called in another thread, so that it
    may import what takes seconds.
    """
    _set_up_logging(config.server)
    for fault in without_effect(config):
        logger.warning("%s", fault)
    _dump_stacks_on_request()
    # Streams end by draining; sse-starlette would cut them when uvicorn begins to stop.
    AppStatus.enable_automatic_graceful_drain = False
    try:
        check_tls(config.server)
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FairSelector())) as runner:
            return runner.run(_Server(config, listeners).run(make_pool))
    except ServeError as error:
        logger.error("%s", error.message)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        open_tracing(config.observability).close()
        _end_children()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: uvicorn would stop at once and raise them again when it is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Entrance:
    """The ASGI application that uvicorn serves. It passes requests on to `app`; until that is there, it answers probes
    with `loading`, and other requests wait for `is_open`."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self.is_open = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in _HEALTH_PATHS:
            await self.is_open.wait()
        app = self.app or JSONResponse({"status": "loading"}, 503, {"retry-after": "1"})
        await app(scope, receive, send)


class _Server:
    """One run of the server."""

    _pool: ModelPool
    _context: ServerContext

    def __init__(self, config: Config, listeners: Sequence[socket.socket]) -> None:
        self._config = config
        self._settings = config.server
        self._gate = ConnectionGate(room_for_connections(config.server.max_connections))
        self._listeners: list[socket.socket] = [GuardedListener(listener, self._gate) for listener in listeners]
        self._entrance = _Entrance()
        self._stop_asked = asyncio.Event()

    async def run(self, make_pool: Callable[[Config], ModelPool]) -> int:
        """Listens at once, so that probes are answered while the rest is imported and loaded. Returns the exit code."""
        http = _Uvicorn(uvicorn_config(self._entrance, self._settings, self._gate))
        with self._signals():
            async with contextlib.AsyncExitStack() as at_end:
                serving = asyncio.create_task(http.serve(sockets=self._listeners))
                try:
                    if not await self._before_stop(self._build(make_pool, at_end)):
                        _leave(0)  # an import cannot be interrupted
                    return await self._live()
                finally:
                    self._entrance.is_open.set()
                    http.should_exit = True
                    await serving

    async def _build(self, make_pool: Callable[[Config], ModelPool], at_end: contextlib.AsyncExitStack) -> None:
        """Makes the pool and the application, lets requests in, and starts what else runs beside them. `at_end` gets
        what must be closed after the last request.

        What has been imported is frozen: a collection over all of it would stall streams for a tenth of a second.
        Models are loaded later, so their memory can be collected.
        """
        self._pool = await asyncio.to_thread(make_pool, self._config)
        await asyncio.to_thread(importlib.import_module, "mlx_server.api.app")
        gc.freeze()
        from mlx_server.api.answers.generation_service import watch_revocations
        from mlx_server.api.app import create_app

        app = create_app(self._pool, self._config)
        context = self._context = app.state.context
        if context.shared_store is not None:
            at_end.push_async_callback(context.shared_store.close)
        at_end.push_async_callback(context.quotas.close)
        at_end.push_async_callback(context.keys.usage.flush)
        at_end.callback(context.keys.close)
        self._entrance.app = app
        self._entrance.is_open.set()
        warning = exposure_warning(self._settings.host, context.keys)
        if warning is not None:
            logger.warning("%s", warning)
        logger.info("%s", context.keys.admins())
        for beside in (watch_revocations(context.keys, context.generations), keep_awake(self._is_busy)):
            at_end.callback(asyncio.create_task(beside).cancel)
        if context.shared_store is not None:
            await context.shared_store.open()

    def _is_busy(self) -> bool:
        """Whether there is work, as far as the machine may sleep without it."""
        at_work = (not (model.is_idle or model.is_down) for model in self._pool.models())
        return self._settings.keep_awake and (any(at_work) or any(self._context.fetches.running()))

    async def _live(self) -> int:
        drain_timeout_s = 0.0
        try:
            try:
                is_loaded = await self._before_stop(self._pool.start())
            except ServeError:  # the pool has logged it
                return 1
            if not is_loaded:
                _leave(0)  # the MLX thread cannot be interrupted, and Python cannot end under it
            self._announce()
            if await self._before_stop(self._death()):
                return 1
            drain_timeout_s = self._settings.drain_timeout_s
            logger.info("Draining; requests in progress: %d", self._context.generations.num_in_progress)
            return 0
        finally:
            # Pulls are not waited for, since the next one continues where they were. What is open at the end of the
            # drain fails; uvicorn then waits for the error events to be sent.
            await self._context.fetches.stop()
            await self._pool.stop(drain_timeout_s)

    async def _before_stop(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work`, and cancels it when a signal comes first. Returns whether `work` has finished."""
        working = asyncio.ensure_future(work)
        if not await ends_before(working, self._stop_asked.wait()):
            return False
        working.result()
        return True

    async def _death(self) -> None:
        """Returns when nothing can be generated any more."""
        while True:
            death = self._pool.death()
            if death is not None:
                logger.error("%s", death)
                return
            await asyncio.sleep(_WATCH_S)

    def _announce(self) -> None:
        """Prints the one line on standard output, once requests are served."""
        addresses = (listener.getsockname()[:2] for listener in self._listeners)
        url, *others = (local_url(self._settings, host, port) for host, port in addresses)
        ollama = "".join(f"  Ollama's API: {other}" for other in others)
        models = "  ".join(_described(model) for model in self._pool.models())
        sys.stdout.write(f"mlx-serve is ready: {url}/v1  live page: {url}/{ollama}  {models}\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def _signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        # When a terminal is closed, both the shell and the system send SIGHUP. Any other second signal ends the server
        # at once.
        if self._stop_asked.is_set() and number != signal.SIGHUP:
            _leave(128 + number)
        if not self._stop_asked.is_set():
            logger.info("Shutting down: %s", signal.Signals(number).name)
            self._stop_asked.set()


def _leave(status: int) -> NoReturn:
    try:
        _end_children()
    finally:
        leave(status)


def _end_children() -> None:
    """Ends the compilers and downloads that this process has started."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):  # for example without a free descriptor
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


def _described(model: PooledModel) -> str:
    names = ", ".join(offer.name for offer in model.spec.offers())
    engine = model.loaded_engine
    if engine is None:
        return f"model {names}, loaded on first use"
    stats = engine.stats()
    pool = f"KV pool of {stats.num_tokens} tokens"
    if stats.max_num_blocks > stats.num_blocks:
        pool += f", up to {stats.max_tokens} as memory allows"
    return f"model {names}: context of {engine.max_model_len} tokens, {pool}"


def _dump_stacks_on_request() -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is not a file
        faulthandler.register(signal.SIGQUIT, file=sys.__stderr__ or sys.stderr, all_threads=True)


def uvicorn_config(app: ASGIApp, server: ServerConfig, gate: ConnectionGate) -> uvicorn.Config:
    """The settings of uvicorn, with our protocol, which enforces the limits of connections."""
    cert, key = tls_files(server)
    return uvicorn.Config(
        app,
        http=bounded_protocol(server.client_timeout_s, gate),
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        ssl_certfile=cert,
        ssl_keyfile=key,
        lifespan="off",
        log_config=None,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FLUSH_S,
    )


def _set_up_logging(settings: ServerConfig) -> None:
    """Sets up logging; access lines are filtered by `_is_worth_a_line`."""
    set_up_logging(settings.log_level, settings.log_format)
    logging.getLogger("sse_starlette").setLevel(logging.INFO)
    if settings.log_level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each wrong head that anybody sends
    logging.getLogger("uvicorn.access").addFilter(_is_worth_a_line)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """False for probes, and for generations that were accepted: each of those has a line of its own when it ends. The
    arguments of uvicorn's access records are (client, method, path, HTTP version, status)."""
    if not isinstance(record.args, tuple):
        return True
    path, status = str(record.args[2]).partition("?")[0], record.args[4]
    return path not in FREE_PATHS and not (path in GENERATING_PATHS and status == 200)
