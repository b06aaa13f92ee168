"""Starts generations, and knows those in progress: it counts, aborts and drains them.

A request keeps the model it uses from being unloaded, until its answer has been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_server.api.auth.authentication import caller_of, check_model_access
from mlx_server.api.auth.keys import KeyRing, revocation
from mlx_server.api.auth.quotas import Demand, Quotas, bounded
from mlx_server.api.body_reader import check_name
from mlx_server.api.generation import Generation, GenerationJob
from mlx_server.api.middleware import log_end, log_refusal, until_disconnect
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.errors import OverloadedError, ServeError
from mlx_server.pool.model_pool import ModelPool
from mlx_server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

REVOCATION_S = 0.5
"""How long a revoked key's open streams may go on."""

_DRAIN_RETRY_S = 5.0
_SEED_SPAN = 2**63


class GenerationService:
    """The generations of one server. On the event loop's thread."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._open: set[Generation] = set()
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_in_progress(self) -> int:
        return len(self._open)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def start(self, engine: AsyncEngine, job: GenerationJob) -> Generation:
        """Submits every choice or none, if the caller's quota allows. Raises what `AsyncEngine.submit` and
        `Quotas.check` raise, and `OverloadedError` while draining. Who starts a generation closes it."""
        try:
            generation = self._start(engine, job)
        except ServeError as error:
            log_refusal(job, engine.names.with_adapter(job.adapter), error)
            raise
        self._open.add(generation)
        self._is_idle.clear()
        return generation

    def _start(self, engine: AsyncEngine, job: GenerationJob) -> Generation:
        if self._is_draining:
            raise OverloadedError("The server is shutting down; send the request elsewhere.", _DRAIN_RETRY_S)
        requests = _requests(job)
        demand = Demand(len(requests), sum(len(prompt.token_ids) for prompt in job.prompts))
        self._quotas.check(job.caller, demand)
        streams: list[RequestStream] = []
        with contextlib.ExitStack() as undo:
            for request in requests:
                streams.append(engine.submit(request))
                undo.callback(streams[-1].abort)
            grant = self._quotas.open(job.caller, demand)
            undo.callback(grant.close)
            name = engine.names.with_adapter(job.adapter)
            generation = Generation(job, name, streams, grant, self._forget)
            undo.pop_all()
        return generation

    def abort(self, ids: Collection[str]) -> int:
        """Aborts the generations with these request or response ids; how many there were."""
        return self._abort([generation for generation in self._open if not generation.ids.isdisjoint(ids)])

    def abort_all(self) -> int:
        """Aborts everything in progress; how much there was."""
        return self._abort(list(self._open))

    def revoke(self, keys: KeyRing) -> int:
        """Ends the generations of keys that are revoked, with an error; how many there were."""
        callers = {generation.job.caller.key_id for generation in self._open}
        revoked = keys.revoked(key_id for key_id in callers if key_id is not None)
        generations = [generation for generation in self._open if generation.job.caller.key_id in revoked]
        for generation in generations:
            generation.abort(partial(revocation, generation.job.caller.identity))
        return len(generations)

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new work from now on and waits for the end of what is in progress; False after `timeout_s`."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _abort(self, generations: Collection[Generation]) -> int:
        for generation in generations:
            generation.abort()
        return len(generations)

    def _forget(self, generation: Generation) -> None:
        if generation not in self._open:
            return
        self._open.discard(generation)
        if not self._open:
            self._is_idle.set()
        log_end(generation.job, generation.model_name, generation.summaries())


async def watch_revocations(keys: KeyRing, generations: GenerationService) -> None:
    """Ends, for as long as it runs, what revoked keys have in progress."""
    while True:
        await asyncio.sleep(REVOCATION_S)
        num_ended = generations.revoke(keys)
        if num_ended:
            logger.warning("%d requests in progress were ended: their keys are revoked", num_ended)


def _requests(job: GenerationJob) -> list[GenerationRequest]:
    # The engine's ids are unique even when clients repeat theirs.
    unique = f"{job.response_id}-{uuid.uuid4().hex[:12]}"
    return [
        GenerationRequest(
            request_id=f"{unique}-{prompt_index}-{sample_index}",
            prompt_token_ids=prompt.token_ids,
            sampling=_seeded(bounded(job.sampling, job.caller.tier, len(prompt.token_ids)), sample_index),
            priority=job.priority,
            tier=job.caller.tier.name,
            extra_keys=job.extra_keys,
            adapter=job.adapter,
            num_samples=job.n,
            sample_index=sample_index,
            constraint=None if job.new_constraint is None else job.new_constraint(),
            kept_token_ids=job.kept_token_ids,
            continues_text=job.continues_text,
        )
        for prompt_index, prompt in enumerate(job.prompts)
        for sample_index in range(job.n)
    ]


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sample `index`: its own seed, so that samples differ and each can be repeated."""
    if sampling.seed is None or index == 0:
        return sampling
    seed = sampling.seed + index
    return replace(sampling, seed=seed if seed < _SEED_SPAN else seed - 2 * _SEED_SPAN)


class LeaseMiddleware:
    """Ends a request's leases when its answer, streamed or not, is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as leases:
            scope.setdefault("state", {})["leases"] = leases
            await self._app(scope, receive, send)


async def lease_engine(request: Request, pool: ModelPool, name: str | None) -> AsyncEngine:
    """The engine of a model, which is loaded first if need be, for as long as the request lasts. Raises what
    `ModelPool.acquire` raises, `PermissionDeniedError` for a model that the caller's tier may not use, and
    `ClientDisconnectedError`."""
    check_name(name, "model")
    check_model_access(pool, caller_of(request).tier, name)
    leases = request.state.leases
    assert isinstance(leases, contextlib.ExitStack)

    async def acquire() -> AsyncEngine:
        return leases.enter_context(await pool.acquire(name))

    return await until_disconnect(request, acquire())
