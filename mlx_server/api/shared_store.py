"""The store of a fleet: a Redis or Valkey server in which several servers count together and keep responses.

    await store.run(LUA, keys, arguments) -> its reply within a bounded time, or StoreAwayError

Each script is atomic, and gets the time in milliseconds as `ARGV[1]`. When the store does not answer, it is not asked
again until a probe succeeds: callers do not wait, and go on with what their own server knows. The log has one line when
the store goes away and one when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlx_server.environment import install_command, is_mac
from mlx_server.errors import ConfigError
from mlx_server.fleet import parse_store

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)

PREFIX = "mlx-serve:"
"""The prefix of all keys."""

CALL_S = 0.25
"""Timeout of a call that a request waits for."""

CONNECT_S = 2.0
PROBE_S = 1.0
"""Time between probes of a store that is away."""

_MAX_DEFERRED = 10_000
"""How many scripts are kept to run when the store is back; older ones are dropped."""

_PROBE = "return redis.call('SET', KEYS[1], '1', 'PX', 1000)"


class StoreAwayError(Exception):
    """The store does not answer, or refuses."""


class SharedStore:
    """One server's connections to the store. Event-loop thread only."""

    def __init__(self, url: str, now_ms: Callable[[], int] | None = None) -> None:
        """Connects at the first call. Scripts get `now_ms()`; without it they get 0 and use the clock of the store, so
        that the clocks of the servers need not agree. Raises `ConfigError` if the library is missing or the URL is
        wrong."""
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import ConnectionError as ConnectionLostError
            from redis.exceptions import RedisError
        except ImportError as error:
            raise ConfigError(
                f"--shared-store needs the package {error.name}. Install it: {install_command('fleet')}."
            ) from error
        self.name = parse_store(url)
        """The URL without secrets."""
        self.is_here = True
        self.num_failures = 0
        self._faults = (RedisError, OSError, TimeoutError)
        self._now_ms = now_ms
        # Reconnects once if the store has closed the connection since its last use.
        again = Retry(NoBackoff(), 1, supported_errors=(ConnectionLostError,))
        try:
            self._redis: Redis = Redis.from_url(url, retry=again, socket_connect_timeout=CONNECT_S)
            # Checks the options in the URL, which happens only when a connection is made.
            self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        except (RedisError, TypeError, ValueError):
            raise ConfigError(
                f"--shared-store: the URL of {self.name} has unknown options after `?`; leave them out."
            ) from None  # the error may show the password
        self._scripts: dict[str, Callable[..., Any]] = {}
        self._probing: asyncio.Task[None] | None = None
        self._deferred: deque[tuple[str, Sequence[str], Sequence[Any]]] = deque(maxlen=_MAX_DEFERRED)

    async def open(self) -> None:
        """Probes the store, so that the log says at once if it is away."""
        with contextlib.suppress(StoreAwayError):
            await self._probe()

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Any], timeout_s: float = 0.0) -> Any:
        """The reply of the script, by default within `CALL_S`. Raises `StoreAwayError`, at once while the store is
        known to be away."""
        if not self.is_here:
            raise StoreAwayError
        return await self._run(script, keys, args, timeout_s or CALL_S)

    def defer(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> None:
        """Runs the script once the store is back. For callers that got `StoreAwayError`."""
        self._deferred.append((script, keys, args))

    async def close(self) -> None:
        self.is_here = False  # for late callers
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self._redis.aclose()

    async def _run(self, script: str, keys: Sequence[str], args: Sequence[Any], timeout_s: float) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self._redis.register_script(script)
        now_ms = 0 if self._now_ms is None else self._now_ms()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._scripts[script]([PREFIX + key for key in keys], [now_ms, *args])
        except self._faults as error:
            self._on_failure(error, timeout_s)
            raise StoreAwayError from error

    async def _probe(self) -> None:
        """Writes, as callers do: a store that is full or read-only answers and is of no use."""
        await self._run(_PROBE, ["probe"], [], CONNECT_S)

    def _on_failure(self, error: Exception, timeout_s: float) -> None:
        self.num_failures += 1
        if not self.is_here:
            return
        self.is_here = False
        why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        if is_mac() and os.strerror(errno.EHOSTUNREACH) in why:
            why += "; macOS may block it: see System Settings > Privacy & Security > Local Network"
        logger.warning(
            "The shared store %s is away (%s): until it is back, limits hold for this server alone, and responses are "
            "kept here",
            self.name,
            why,
        )
        self._probing = asyncio.create_task(self._await_return(), name="probe of the shared store")

    async def _await_return(self) -> None:
        while not self.is_here:
            await asyncio.sleep(PROBE_S)
            with contextlib.suppress(StoreAwayError):
                await self._probe()
                while self._deferred:
                    await self._run(*self._deferred[0], CONNECT_S)
                    self._deferred.popleft()
                self.is_here = True
        logger.info("The shared store %s is back", self.name)
