"""A step while it is put together, and while its result is awaited."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class SubmittedStep:
    """A step that the executor has and whose result is not here yet.

    `requests` are those that the step computes and that have not been preempted and have not ended since:
    the rows of others are dropped when the result comes. `detached` blocks may go then.
    """

    step_id: int
    requests: dict[str, Request]
    num_sampling: int
    shape: StepShape
    pool_change: PoolChange | None = None
    detached: list[list[Block]] = field(default_factory=list)


class StepBuilder:
    """The step being put together; single-token chunks come first in it, whatever the order of adding.

    `given` are the prompt tokens of each who computes its prompt, and `block_ids` what is new to their tables. `filled`
    are requests whose chunk begins or ends a block: they may have full blocks to share.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.given: Counter[Request] = Counter()
        self.block_ids: dict[str, BlockIds] = {}
        self.filled: list[Request] = []
        self.new_requests: list[NewRequestData] = []
        self.num_sampling = 0
        self.num_decode_tokens = 0
        self.num_prompt_tokens = 0
        self.prompt_cost = 0.0
        self._singles: list[ScheduledChunk] = []
        self._longer: list[ScheduledChunk] = []

    def add(self, request: Request, chunk: ScheduledChunk) -> None:
        self.requests[request.request_id] = request
        self.num_sampling += chunk.is_sampling
        if chunk.num_tokens == 1:
            self._singles.append(chunk)
        else:
            self._longer.append(chunk)

    def output(
        self, step_id: int, dropped_request_ids: tuple[str, ...], pool_change: PoolChange | None
    ) -> SchedulerOutput:
        """The step as the executor gets it."""
        chunks = tuple(self._singles + self._longer)
        return SchedulerOutput(
            step_id, chunks, tuple(self.new_requests), dropped_request_ids, self.num_prompt_tokens, pool_change
        )

    def submitted(self, step_id: int, pool_change: PoolChange | None) -> SubmittedStep:
        """The step as it is remembered until its result is here."""
        shape = StepShape(self.num_decode_tokens, self.num_prompt_tokens, self.prompt_cost)
        return SubmittedStep(step_id, self.requests, self.num_sampling, shape, pool_change)
