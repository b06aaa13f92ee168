"""A step while it is put together, and while its result is awaited."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

from mlx_server.batching.block import Block
from mlx_server.batching.step_budget import StepShape
from mlx_server.outputs import BlockIds, ModelRunnerOutput, NewRequestData, PoolChange, ScheduledChunk, SchedulerOutput
from mlx_server.request import Request


class Executor(Protocol):
    """Runs submitted steps in order, on the MLX thread."""

    def submit(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        """Queues a step; the future belongs to the running loop, and is resolved when the step is over."""
        ...


class Step:
    """A step while it is put together and while its result is awaited; single-token chunks come first in it, whatever
    the order of adding.

    `requests` are those that it computes and that, once it is submitted, have not been preempted and have not ended
    since: the rows of others are dropped when the result comes, and `detached` blocks may go then. `given` are the
    prompt tokens of each who computes its prompt, and `block_ids` what is new to their tables. `filled` are requests
    whose chunk begins or ends a block: they may have full blocks to share.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.given: Counter[Request] = Counter()
        self.block_ids: dict[str, BlockIds] = {}
        self.filled: list[Request] = []
        self.new_requests: list[NewRequestData] = []
        self.num_sampling = 0
        self.num_decode_tokens = 0
        self.prompt_cost = 0.0
        self.step_id = 0
        self.pool_change: PoolChange | None = None
        self.detached: list[list[Block]] = []
        self._singles: list[ScheduledChunk] = []
        self._longer: list[ScheduledChunk] = []

    @property
    def shape(self) -> StepShape:
        return StepShape(self.num_decode_tokens, self.given.total(), self.prompt_cost)

    def add(self, request: Request, chunk: ScheduledChunk) -> None:
        self.requests[request.request_id] = request
        self.num_sampling += chunk.is_sampling
        (self._singles if chunk.num_tokens == 1 else self._longer).append(chunk)

    def submit(
        self, step_id: int, dropped_request_ids: tuple[str, ...], pool_change: PoolChange | None
    ) -> SchedulerOutput:
        """The step as the executor gets it."""
        self.step_id, self.pool_change = step_id, pool_change
        chunks, new_requests = tuple(self._singles + self._longer), tuple(self.new_requests)
        return SchedulerOutput(step_id, chunks, new_requests, dropped_request_ids, self.given.total(), pool_change)
