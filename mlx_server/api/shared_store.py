"""The store of a fleet: a Redis or Valkey server, in which several servers count together and keep responses.

    await store.run(Script(LUA), keys, arguments) -> its reply, within a bounded time, or StoreAwayError

Each script is atomic. A store that does not answer is left alone until it does: nobody waits for it meanwhile, callers
go on with what their own server knows, one line of the log says so, and one when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_server.errors import ConfigError
from mlx_server.fleet import FleetConfig, parse_store

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)

PREFIX = "mlx-serve:"
"""Of all keys."""

CALL_S = 0.25
"""Longest time of a call that a request waits for."""

CONNECT_S = 2.0
PROBE_S = 1.0
"""Between looks at a store that is away."""

_MOST_OWED = 10_000
"""Of the scripts that are to run when the store is back, the last so many."""

_PROBE = "return redis.call('SET', KEYS[1], '1', 'PX', 1000)"


class StoreAwayError(Exception):
    """The store does not answer, or refuses."""


@dataclass(frozen=True, slots=True)
class Script:
    """Lua that the store runs. `ARGV[1]` is the time in milliseconds, see `now_ms`."""

    text: str


class SharedStore:
    """One server's connections to the store. Event-loop thread only."""

    def __init__(self, url: str, now_ms: Callable[[], int] | None = None) -> None:
        """Connects at its first use. Scripts get `now_ms`; 0, which is the default, bids them ask the store's own
        clock, so that those of the servers need not agree. Raises `ConfigError` without the library."""
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import ConnectionError as ConnectionLostError
            from redis.exceptions import RedisError
        except ImportError as error:
            raise ConfigError(
                f"--shared-store needs the package {error.name}. Install it with `pip install 'mlx-server[fleet]'`."
            ) from error
        self.name = parse_store(url)
        """What may be shown of the URL."""
        self.is_here = True
        self.num_failures = 0
        self._faults = (RedisError, OSError, TimeoutError)
        self._now_ms = now_ms
        # A connection that the store has closed since its last use is opened again, once.
        again = Retry(NoBackoff(), 1, supported_errors=(ConnectionLostError,))
        try:
            self._redis: Redis = Redis.from_url(url, retry=again, socket_connect_timeout=CONNECT_S)
            # Only so does it look at all that the URL asks for.
            self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        except (RedisError, TypeError, ValueError):
            raise ConfigError(
                f"--shared-store: the URL of {self.name} asks with ?... for what its client lacks; leave it out."
            ) from None  # which may show the password
        self._scripts: dict[Script, Callable[..., Any]] = {}
        self._probing: asyncio.Task[None] | None = None
        self._owed: deque[tuple[Script, Sequence[str], Sequence[Any]]] = deque(maxlen=_MOST_OWED)

    async def open(self) -> None:
        """Says at once if it is away; anybody may go on without."""
        with contextlib.suppress(StoreAwayError):
            await self._probe()

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any], timeout_s: float = 0.0) -> Any:
        """What the script replies, by default within `CALL_S`. Raises `StoreAwayError`: at once while the store is
        known to be away."""
        if not self.is_here:
            raise StoreAwayError
        return await self._run(script, keys, args, timeout_s or CALL_S)

    def owe(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> None:
        """Has the script run once the store is back, for a caller to whom it was away."""
        self._owed.append((script, keys, args))

    @contextlib.asynccontextmanager
    async def turn(self, lock: asyncio.Lock) -> AsyncIterator[None]:
        """Inside, what one after another must say. Who would wait for others longer than `CALL_S` goes on without:
        raises `StoreAwayError`."""
        try:
            async with asyncio.timeout(CALL_S):
                await lock.acquire()
        except TimeoutError as error:
            raise StoreAwayError from error
        try:
            yield
        finally:
            lock.release()

    async def close(self) -> None:
        self.is_here = False  # for who is late
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self._redis.aclose()

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Any], timeout_s: float) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self._redis.register_script(script.text)
        now_ms = 0 if self._now_ms is None else self._now_ms()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._scripts[script]([PREFIX + key for key in keys], [now_ms, *args])
        except self._faults as error:
            self._on_failure(error, timeout_s)
            raise StoreAwayError from error

    async def _probe(self) -> None:
        """Does what callers do: a store that is full, or read only, answers and is of no use."""
        await self._run(Script(_PROBE), ["probe"], [], CONNECT_S)

    def _on_failure(self, error: Exception, timeout_s: float) -> None:
        self.num_failures += 1
        if not self.is_here:
            return
        self.is_here = False
        why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else error
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
                while self._owed:
                    await self._run(*self._owed[0], CONNECT_S)
                    self._owed.popleft()
                self.is_here = True
        logger.info("The shared store %s is back", self.name)


def open_store(settings: FleetConfig, now_ms: Callable[[], int] | None = None) -> SharedStore | None:
    """The store that is configured, if one is. Raises `ConfigError`."""
    return None if settings.shared_store is None else SharedStore(settings.shared_store, now_ms)
