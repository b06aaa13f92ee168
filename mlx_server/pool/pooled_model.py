"""One model of the pool: its state and its users."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.memory.budget import MemoryShare
from mlx_server.engine.memory.need import MemoryNeed
from mlx_server.errors import InsufficientMemoryError, InsufficientStorageError, OverloadedError, ServeError
from mlx_server.pool.catalog import ModelSpec


class ModelState(enum.StrEnum):
    """The state of a model.

    UNLOADED --begin_load--> LOADING --become_ready--> READY --begin_drain--> DRAINING --become_unloaded--> UNLOADED
                               | ^                                                ^
                    fail_load, | | begin_load
                               v |
                             FAILED        LOADING --give_up_load--> UNLOADED
    """

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class LoadResult(enum.StrEnum):
    """How a load ended."""

    READY = "ready"
    FAILED = "failed"
    NO_ROOM = "no_room"
    GIVEN_UP = "given_up"


class Lease:
    """The use of a model: it is not unloaded for another until the lease ends, and otherwise when the time of its drain
    is over. A context manager that gives the engine."""

    def __init__(self, model: PooledModel, clock: Callable[[], float], on_end: Callable[[PooledModel], None]) -> None:
        self.since_s = clock()
        model.users.add(self)
        self._model: PooledModel | None = model
        self._clock = clock
        self._on_end = on_end

    def __enter__(self) -> AsyncEngine:
        assert self._model is not None, "the lease has ended"
        assert self._model.engine is not None, "a model in use has an engine"
        return self._model.engine

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Idempotent."""
        if self._model is not None:
            model, self._model = self._model, None
            model.end_use(self, self._clock())
            self._on_end(model)


@dataclass(slots=True, eq=False)
class PooledModel:
    """A model and its engine, which it has while LOADING, READY or DRAINING. Only the pool changes it.

    `need` is the last estimate of the memory that it needs, `share` what is booked for it while it has an engine.
    `past` is the engine of an earlier load, for its counts. `users` has the leases of requests that use the engine or
    wait for it to load. While `is_yielding`, the model is to become idle and make room for another (`takes_new`). It
    `is_asked_for` while an admin waits for its load. After `retry_s`, a model that is not loaded because of `failure`
    may be loaded again. `num_deaths` counts engines that have died, the last one at `died_s`. While a model `is_lost`,
    its engine has died, and it should be loaded again without a request. `keep_alive_s` is the idle time that a client
    asked for, until the model is unloaded: infinity is forever (also if an engine dies), None means what the
    specification says. `drain_over` is set when the last drain has no users left, or no time.
    """

    spec: ModelSpec
    state: ModelState = ModelState.UNLOADED
    engine: AsyncEngine | None = None
    need: MemoryNeed | None = None
    share: MemoryShare | None = None
    past: AsyncEngine | None = None
    failure: Exception | None = None
    retry_s: float = 0.0
    users: set[Lease] = field(default_factory=set)
    loads: Counter[LoadResult] = field(default_factory=lambda: Counter(dict.fromkeys(LoadResult, 0)))
    ready_s: float = 0.0
    num_deaths: int = 0
    died_s: float = -math.inf
    last_used_s: float = 0.0
    longest_use_s: float = 0.0
    longest_before_s: float = 0.0
    load_progress: float = 0.0
    is_yielding: bool = False
    first_users: frozenset[Lease] = frozenset()
    yields_by_s: float = 0.0
    is_lost: bool = False
    is_asked_for: bool = False
    keep_alive_s: float | None = None
    drain_over: asyncio.Event = field(default_factory=asyncio.Event)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def num_loads(self) -> int:
        """Successful loads."""
        return self.loads[LoadResult.READY]

    @property
    def is_ready(self) -> bool:
        return self.state is ModelState.READY

    @property
    def is_loaded(self) -> bool:
        """Ready or draining."""
        return self.state in (ModelState.READY, ModelState.DRAINING)

    @property
    def loaded_engine(self) -> AsyncEngine | None:
        """The engine for those who only read it: None while it loads, once it has died, and while its memory is
        freed."""
        return self.engine if self.engine is not None and self.engine.state.is_loaded else None

    @property
    def is_down(self) -> bool:
        """Unloaded or failed: neither loaded nor being loaded."""
        return self.state in (ModelState.UNLOADED, ModelState.FAILED)

    @property
    def num_users(self) -> int:
        """Requests that use the engine or wait for it to load."""
        return len(self.users)

    @property
    def is_wanted(self) -> bool:
        """Whether a load of the model has a purpose: a request waits for it, or it is loaded without one."""
        return self.num_users > 0 or self.spec.is_pinned or self.is_lost or self.is_asked_for

    @property
    def is_idle(self) -> bool:
        """Ready and unused."""
        return self.is_ready and self.num_users == 0

    @property
    def idle_ttl_s(self) -> float | None:
        """How long the model may be idle before it is unloaded; None is forever. A pinned model is unloaded only if a
        client asked for 0."""
        asked = self.keep_alive_s
        if asked is None or (self.spec.is_pinned and asked > 0):
            return self.spec.idle_ttl_s
        return None if math.isinf(asked) else asked

    @property
    def held_bytes(self) -> int:
        return 0 if self.share is None else self.share.need.total_bytes

    def takes_new(self, now: float) -> bool:
        """Whether a new request may use the model now. One that yields takes new requests as long as any of its first
        users, those from before it yielded, goes on: until then nobody else could use its memory. It takes none that
        would end too late for the other model if it took as long as the longest use of this load or the one before."""
        if self.is_yielding:
            ends_s = now + max(self.longest_use_s, self.longest_before_s)
            if ends_s >= self.yields_by_s or self.users.isdisjoint(self.first_users):
                return False
        return self.is_ready

    def begin_yield(self, now: float, deadline_s: float) -> None:
        """The model becomes idle as soon as it can, by `deadline_s` if its requests take no longer than the longest so
        far, open ones included."""
        self.longest_use_s = max([self.longest_use_s, *(self._use_s(lease, now) for lease in self.users)])
        self.is_yielding, self.first_users, self.yields_by_s = True, frozenset(self.users), deadline_s

    def end_yield(self) -> None:
        self.is_yielding, self.first_users = False, frozenset()

    def end_use(self, lease: Lease, now: float) -> None:
        self.users.discard(lease)
        if not self.users:
            self.drain_over.set()
        self.last_used_s = now
        if self.is_loaded:
            self.longest_use_s = max(self.longest_use_s, self._use_s(lease, now))

    def refusal(self, failure: Exception, now: float) -> ServeError:
        """The error for requests while the model is not loaded because of `failure`; a new one for each request."""
        if isinstance(failure, InsufficientMemoryError):
            return InsufficientMemoryError(failure.message)
        if isinstance(failure, OverloadedError):
            return OverloadedError(failure.message, failure.retry_after_s)
        reason = failure.message if isinstance(failure, ServeError) else "the server's log has the reason."
        retry_s = max(0.0, self.retry_s - now)
        message = f"The model `{self.name}` is not loaded: {reason} It may be tried again in {retry_s:.0f} s."
        if isinstance(failure, InsufficientStorageError):
            return InsufficientStorageError(message)
        return OverloadedError(message, retry_s)

    def begin_load(self) -> None:
        self._move((ModelState.UNLOADED, ModelState.FAILED), ModelState.LOADING)
        self.failure = None
        self.load_progress = 0.0

    def become_ready(self, now: float) -> None:
        assert self.engine is not None, "a model is ready with an engine"
        self._move((ModelState.LOADING,), ModelState.READY)
        self.loads[LoadResult.READY] += 1
        self.ready_s = self.last_used_s = now
        self.longest_before_s, self.longest_use_s = self.longest_use_s, 0.0
        self.is_lost = self.is_asked_for = False
        self.load_progress = 1.0

    def fail_load(self, failure: Exception, retry_s: float) -> None:
        self._move((ModelState.LOADING,), ModelState.FAILED)
        self.failure, self.retry_s = failure, retry_s
        self.loads[LoadResult.FAILED] += 1
        self._drop_engine()

    def give_up_load(self, reason: LoadResult) -> None:
        self._move((ModelState.LOADING,), ModelState.UNLOADED)
        self.loads[reason] += 1
        self._drop_engine()

    def begin_drain(self) -> None:
        self._move((ModelState.READY,), ModelState.DRAINING)
        self.drain_over = asyncio.Event()
        if not self.users:
            self.drain_over.set()

    def become_unloaded(self) -> None:
        self._move((ModelState.DRAINING,), ModelState.UNLOADED)
        self.past = self.engine
        self._drop_engine()

    def _use_s(self, lease: Lease, now: float) -> float:
        return now - max(lease.since_s, self.ready_s)

    def _drop_engine(self) -> None:
        self.engine, self.is_asked_for = None, False
        self.end_yield()
        if not self.is_lost:
            self.keep_alive_s = None
        if self.share is not None:
            self.share.release()
            self.share = None

    def _move(self, allowed: tuple[ModelState, ...], state: ModelState) -> None:
        assert self.state in allowed, f"{self.name} cannot become {state} while {self.state}"
        self.state = state
