"""The inputs of one request that wants vectors or scores, on their way through the engine.

Each input is a request of its own in the ragged batch. Only some of them are there at a time, so that one client's two
thousand inputs neither fill the queue nor hold all seats: the next goes in when one is done, behind whoever has come
meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from mlx_server.api.answers.generation import GenerationJob
from mlx_server.api.auth.quotas import Grant
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.errors import OverloadedError, ServeError
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.request import Vector


def most_at_a_time(engine: AsyncEngine) -> int:
    """How many inputs of one request may be in the engine: half of its seats are left to others."""
    return max(1, engine.info.max_num_seqs // 2)


class PoolingRun:
    """One job's inputs in progress. Await its results once; `close` it on every path. Event-loop thread only."""

    def __init__(
        self,
        job: GenerationJob,
        engine: AsyncEngine,
        requests: Iterable[GenerationRequest],
        width: int,
        grant: Grant,
        on_close: Callable[[PoolingRun], None],
    ) -> None:
        """At most `width` of `requests` are in the engine at a time."""
        self.job = job
        self.model_name = engine.names.with_adapter(job.adapter)
        self.ids = frozenset((job.request_id, job.response_id))
        self._engine = engine
        self._requests = list(enumerate(requests))[::-1]
        self._width = width
        self._grant = grant
        self._on_close = on_close
        self._open: dict[int, RequestStream] = {}
        self._results: dict[int, Vector] = {}
        self._summaries: list[RequestSummary] = []
        self._news = asyncio.Event()
        self._ended_by: Callable[[], ServeError] | None = None

    async def results(self) -> list[Vector]:
        """Of all inputs, in their order. Raises the `ServeError` that refuses or ends one of them, or all."""
        while self._requests or self._open:
            self._news.clear()
            self._submit()
            if not self._take():
                await self._news.wait()
        if self._ended_by is not None:
            raise self._ended_by()
        return [result for _, result in sorted(self._results.items())]

    def summaries(self) -> list[RequestSummary]:
        """Of the inputs that have ended."""
        return self._summaries

    def abort(self, new_error: Callable[[], ServeError] | None = None) -> None:
        """Ends all inputs, with an error that the client gets."""
        self._ended_by = new_error or _aborted
        self._requests.clear()
        for index in list(self._open):
            self._open[index].abort()
            self._leave(index)
        self._news.set()

    def close(self) -> None:
        """Aborts what is unfinished, gives the caller's seats back, and forgets the job. Idempotent."""
        self.abort()
        self._grant.close()
        self._on_close(self)

    def _submit(self) -> None:
        """Lets inputs in as long as there are seats for them. A queue that is full is waited for where inputs of this
        request are on their way through it."""
        while self._requests and len(self._open) < self._width:
            index, request = self._requests[-1]
            try:
                stream = self._engine.submit(request)
            except OverloadedError:
                if not self._open:
                    raise
                return
            self._requests.pop()
            stream.on_news = self._news.set
            self._open[index] = stream

    def _take(self) -> int:
        """Takes results that are there; how many inputs have ended."""
        num_open = len(self._open)
        for index, stream in list(self._open.items()):
            for delta in stream.take():
                if delta.pooled is not None:
                    self._results[index] = delta.pooled
            if stream.is_complete:
                self._leave(index)
                stream.is_over()  # raises what has ended it
                if index not in self._results:
                    raise _aborted()
        return num_open - len(self._open)

    def _leave(self, index: int) -> None:
        stream = self._open.pop(index)
        if stream.summary is not None:
            self._summaries.append(stream.summary)


def _aborted() -> ServeError:
    return OverloadedError("The request was aborted by an administrator, or the client has gone.")
