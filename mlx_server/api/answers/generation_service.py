"""Starts generations, and knows those in progress: it counts, aborts and logs them.

The log has one line for each generation that has ended or was refused, with no text of prompts or answers. A request
keeps the model it uses from being unloaded, until its answer has been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request

from mlx_server.api.answers.generation import Generation, GenerationJob
from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.auth.keys import KeyRing, revocation
from mlx_server.api.auth.quotas import Demand, Grant, Quotas, bounded
from mlx_server.api.http.request_bounds import check_name
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.errors import OverloadedError, QueueFullError, ServeError
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.observability.logs import log_event
from mlx_server.pool.model_pool import ModelPool
from mlx_server.request import Vector

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("mlx_server.requests")

REVOCATION_S = 0.5
"""How long a revoked key's open streams may continue."""


class PoolingRun:
    """The inputs of one job for vectors or scores, each a request of its own in the ragged batch. Await its results
    once; `close` it on every path. Event-loop thread only.

    Only some inputs are in the engine at a time, so that a client with two thousand of them neither fills the queue nor
    takes all seats: when one ends, the next goes to the end of the queue. To the tier's limits, all are one answer."""

    def __init__(
        self,
        job: GenerationJob,
        engine: AsyncEngine,
        requests: Iterable[GenerationRequest],
        width: Callable[[], int],
        grant: Grant,
        on_close: Callable[[PoolingRun], None],
    ) -> None:
        """At most `width()` of `requests` enter the engine at a time; it is at least 1, and may change meanwhile. All
        have the adapter that has the job's name for it now."""
        self._at_close = contextlib.ExitStack()
        if job.adapter is not None:
            key, end_hold = engine.hold_adapter(job.adapter)
            self._at_close.callback(end_hold)
            requests = [replace(request, adapter_key=key) for request in requests]
        self.job = job
        self.model_name = engine.names.with_adapter(job.adapter)
        self.ids = frozenset((job.request_id, job.response_id))
        self._engine = engine
        self._requests = list(requests)
        self._left = list(range(len(self._requests)))[::-1]  # inputs that have not entered yet, the next one last
        self._width = width
        self._grant = grant
        self._on_close = on_close
        self._open: dict[int, RequestStream] = {}
        self._results: dict[int, Vector] = {}
        self._summaries: list[RequestSummary] = []
        self._output_ready = asyncio.Event()
        self._ended_by: Callable[[], ServeError] | None = None

    async def results(self) -> list[Vector]:
        """The results of all inputs, in their order. Raises the `ServeError` that refuses or ends an input, or all."""
        while self._left or self._open:
            self._output_ready.clear()
            self._submit()
            if not self._take():
                await self._output_ready.wait()
        if self._ended_by is not None:
            raise self._ended_by()
        return [result for _, result in sorted(self._results.items())]

    def summaries(self) -> list[RequestSummary]:
        """Summaries of the inputs that have ended."""
        return self._summaries

    def abort(self, new_error: Callable[[], ServeError] | None = None) -> None:
        """Ends all inputs with an error, which the client gets."""
        self._ended_by = new_error or _aborted
        self._left.clear()
        for index in list(self._open):
            self._open[index].abort()
            self._leave(index)
        self._output_ready.set()

    def close(self) -> None:
        """Aborts unfinished inputs, gives the caller's seat back, and forgets the job. Idempotent."""
        self.abort()
        self._at_close.close()
        self._grant.close()
        self._on_close(self)

    def _submit(self) -> None:
        """Submits inputs while there are seats for them. If the queue is full, the rest wait until an input of this
        job ends; without one in the engine, the job is refused."""
        while self._left and len(self._open) < self._width():
            index = self._left[-1]
            try:
                stream = self._engine.submit(self._requests[index])
            except OverloadedError:
                if not self._open:
                    raise
                return
            self._left.pop()
            stream.on_output = self._output_ready.set
            self._open[index] = stream

    def _take(self) -> int:
        """Takes the results that are there; returns how many inputs have left the engine. One that has lost its place
        in a full queue enters again later, if others of this job are in the engine."""
        num_open = len(self._open)
        for index, stream in list(self._open.items()):
            for delta in stream.take():
                if delta.pooled is not None:
                    self._results[index] = delta.pooled
            if stream.is_complete:
                self._leave(index)
                try:
                    stream.is_over()  # raises what has ended it
                except QueueFullError:
                    if not self._open:
                        raise
                    self._left.append(index)
                    continue
                if index not in self._results:
                    raise _aborted()
        return num_open - len(self._open)

    def _leave(self, index: int) -> None:
        stream = self._open.pop(index)
        if stream.summary is not None:
            self._summaries.append(stream.summary)


def _aborted() -> ServeError:
    return OverloadedError("The request was aborted by an administrator, or the client has gone.")


class GenerationService:
    """The generations of one server. On the event loop's thread."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._open: set[Generation | PoolingRun] = set()

    @property
    def num_in_progress(self) -> int:
        return len(self._open)

    async def start(self, engine: AsyncEngine, job: GenerationJob) -> Generation:
        """Submits every choice or none, if the caller's quota allows. Raises what `AsyncEngine.submit` and
        `Quotas.check` raise. The caller closes what it starts."""
        async with self._admitted(engine, job, job.n * len(job.plan.prompts)) as demand:
            with contextlib.ExitStack() as undo:
                streams = engine.submit_all(_requests(job))
                for stream in streams:
                    undo.callback(stream.abort)
                grant = self._quotas.open(job.caller, demand)
                undo.callback(grant.close)
                name = engine.names.with_adapter(job.adapter)
                generation = Generation(job, name, streams, grant, self._forget)
                undo.pop_all()
            self._open.add(generation)
        return generation

    async def start_pooling(self, engine: AsyncEngine, job: GenerationJob) -> PoolingRun:
        """Like `start`, for inputs that are pooled: they take one of the caller's seats together, and go in as there is
        room."""
        most = max(1, engine.info.max_num_seqs // 2)  # leaves half of the engine's seats to others

        def width() -> int:
            return min(most, self._quotas.inputs_at_a_time(job.caller))

        async with self._admitted(engine, job, 1) as demand:
            with contextlib.ExitStack() as undo:
                grant = self._quotas.open(job.caller, demand)
                undo.callback(grant.close)
                run = PoolingRun(job, engine, _requests(job), width, grant, self._forget)
                undo.pop_all()
            self._open.add(run)
        return run

    @contextlib.asynccontextmanager
    async def _admitted(self, engine: AsyncEngine, job: GenerationJob, num_answers: int) -> AsyncIterator[Demand]:
        """Around the start of a job, which counts as `num_answers`; the block must not await. The caller's quota is
        reserved first, and checked again afterwards, since other requests may have come meanwhile."""
        demand = Demand(num_answers, sum(len(prompt.token_ids) for prompt in job.plan.prompts))
        try:
            self._quotas.check(job.caller, demand)
            with await self._quotas.reserve(job.caller, demand):
                self._quotas.check(job.caller, demand)
                yield demand
        except ServeError as error:
            _log_refusal(job, engine.names.with_adapter(job.adapter), error)
            raise

    def abort(self, ids: Collection[str] | None = None) -> int:
        """Aborts the generations with these request or response ids (None: all); returns how many there were."""
        generations = [each for each in self._open if ids is None or not each.ids.isdisjoint(ids)]
        for generation in generations:
            generation.abort()
        return len(generations)

    def revoke(self, keys: KeyRing) -> int:
        """Ends the generations of revoked keys with an error; returns how many there were."""
        callers = {generation.job.caller.key_id for generation in self._open}
        revoked = keys.revoked(key_id for key_id in callers if key_id is not None)
        generations = [generation for generation in self._open if generation.job.caller.key_id in revoked]
        for generation in generations:
            generation.abort(partial(revocation, generation.job.caller.identity))
        return len(generations)

    def _forget(self, generation: Generation | PoolingRun) -> None:
        if generation not in self._open:
            return
        self._open.discard(generation)
        _log_end(generation.job, generation.model_name, generation.summaries())


async def watch_revocations(keys: KeyRing, generations: GenerationService) -> None:
    """Ends the generations of revoked keys, for as long as it runs."""
    while True:
        await asyncio.sleep(REVOCATION_S)
        num_ended = generations.revoke(keys)
        if num_ended:
            logger.warning("%d requests in progress were ended: their keys are revoked", num_ended)


def _requests(job: GenerationJob) -> list[GenerationRequest]:
    plan = job.plan
    # The engine's ids are unique even when clients repeat theirs.
    unique = f"{job.response_id}-{uuid.uuid4().hex[:12]}"
    return [
        GenerationRequest(
            request_id=f"{unique}-{prompt_index}-{sample_index}",
            prompt_token_ids=prompt.token_ids,
            sampling=bounded(job.sampling, job.caller.tier, len(prompt.token_ids)).of_sample(sample_index),
            priority=job.priority,
            tier=job.caller.tier.name,
            client=job.caller.identity,
            extra_keys=job.extra_keys,
            adapter=job.adapter,
            num_samples=job.n,
            sample_index=sample_index,
            constraint=None if plan.new_constraint is None else plan.new_constraint(),
            kept_token_ids=plan.kept_token_ids,
            continues_text=plan.continues_text,
            reasoning=plan.reasoning,
            prediction_token_ids=plan.prediction_token_ids,
            pooling=job.pooling,
            images=prompt.images,
        )
        for prompt_index, prompt in enumerate(plan.prompts)
        for sample_index in range(job.n)
    ]


def _log_end(job: GenerationJob, model_name: str, choices: Sequence[RequestSummary]) -> None:
    """Logs the end of a generation. Tokens are summed over its choices; times are of the choice that came first, and
    `tpot_ms` is the mean over all tokens after a choice's first."""
    decoded = [choice for choice in choices if choice.tpot_s is not None]
    num_later_tokens = sum(choice.num_output_tokens - 1 for choice in decoded)
    decode_s = sum((choice.tpot_s or 0.0) * (choice.num_output_tokens - 1) for choice in decoded)
    fields = {
        **_identity(job, model_name),
        "choices": len(choices),
        "prompt_tokens": sum(choice.num_prompt_tokens for choice in choices),
        **_images(job),
        "cached_tokens": sum(choice.num_cached_tokens for choice in choices),
        "output_tokens": sum(choice.num_output_tokens for choice in choices),
        "queue_ms": _ms(_least(choice.queue_s for choice in choices)),
        "ttft_ms": _ms(_least(choice.ttft_s for choice in choices)),
        "tpot_ms": _ms(decode_s / num_later_tokens if num_later_tokens else None),
        "finish_reason": ",".join(sorted({choice.finish_reason.value for choice in choices})),
    }
    log_event(request_logger, "request ended", fields)


def _log_refusal(job: GenerationJob, model_name: str, error: ServeError) -> None:
    fields = {
        **_identity(job, model_name),
        "choices": job.n * len(job.plan.prompts),
        "prompt_tokens": job.n * sum(len(prompt.token_ids) for prompt in job.plan.prompts),
        **_images(job),
        "error": type(error).__name__,
    }
    log_event(request_logger, "request refused", fields)


def _images(job: GenerationJob) -> dict[str, int]:
    """The images' tokens, summed over all choices as `prompt_tokens` are; nothing without images."""
    num_tokens = sum(image.num_tokens for prompt in job.plan.prompts for image in prompt.images)
    return {"image_tokens": job.n * num_tokens} if num_tokens else {}


def _identity(job: GenerationJob, model_name: str) -> dict[str, Any]:
    caller = job.caller
    return {"request_id": job.request_id, "key": caller.identity, "model": model_name, "tier": caller.tier.name}


def _least(times_s: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(1000.0 * time_s, 3)


async def lease_engine(request: Request, pool: ModelPool, name: str | None) -> AsyncEngine:
    """The engine of a model, which is loaded first if need be, for as long as the request lasts. Raises what
    `ModelPool.acquire` raises, and `PermissionDeniedError` for a model that the caller's tier may not use."""
    check_name(name)
    pool.check_access(caller_of(request).tier, name)
    leases: contextlib.ExitStack = request.state.leases
    return leases.enter_context(await pool.acquire(name))
