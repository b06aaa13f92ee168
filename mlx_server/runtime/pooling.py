"""Hidden states of a ragged batch, pooled to one vector a request, chunk by chunk.

Every method is a weighted sum over positions whose weights are known from the prompt's length. So a chunk adds its part
to what the chunks before have left, and only rows with a weight are looked at. MEAN over a prompt of 5 tokens in chunks
of 3 and 2: weights 0.2 0.2 0.2 | 0.2 0.2, two parts, one sum. LAST: no row of the first chunk, one of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_server.outputs import NewRequestData, ScheduledChunk
from mlx_server.request import PoolingMethod, PoolingParams, Vector

FloatArray = npt.NDArray[np.float32]

ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = MappingProxyType(
    {"Identity": lambda x: x, "Tanh": mx.tanh, "ReLU": nn.relu, "GELU": nn.gelu, "Sigmoid": mx.sigmoid}
)
"""By the names of torch's classes, which sentence-transformers writes down."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """`activation(x @ weight.T + bias)` of pooled vectors, in float32. `weight` is `[out, in]`, `bias` `[out]`."""

    weight: mx.array
    bias: mx.array | None
    activation: str

    def __call__(self, x: mx.array) -> mx.array:
        y = x @ self.weight.T
        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


@dataclass(frozen=True, slots=True)
class _Pooled:
    """A request that runs: what it wants, and its prompt's length."""

    params: PoolingParams
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One request's share of a step: so many of the planned hidden rows, from `first` on, by `weights`. The last one
    `ends` it."""

    request_id: str
    first: int
    weights: FloatArray
    ends: bool


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """Rows of the batch whose hidden states are pooled, and rows whose logits are wanted, each with its request."""

    hidden_rows: list[int]
    parts: list[_Part]
    logit_rows: list[int]
    scored: list[str]


NO_POOLING = PoolingPlan([], [], [], [])
"""Of steps in which nobody pools."""


@dataclass(frozen=True, slots=True)
class PooledBatch:
    """Results of requests that end with a step, lazy; and sums of others, which are evaluated with it."""

    vectors: mx.array | None
    request_ids: list[str]
    scores: dict[str, mx.array]
    sums: list[mx.array]

    def arrays(self) -> list[mx.array]:
        """Everything to submit with the step."""
        return [*(() if self.vectors is None else (self.vectors,)), *self.scores.values(), *self.sums]

    def fetch(self) -> dict[str, Vector]:
        """Waits for the values."""
        rows: FloatArray = np.zeros((0, 0), np.float32) if self.vectors is None else np.array(self.vectors)
        found = {request_id: row.tobytes() for request_id, row in zip(self.request_ids, rows, strict=True)}
        return found | {request_id: np.array(scores).tobytes() for request_id, scores in self.scores.items()}


class Pooler:
    """What a runner remembers of requests that pool. MLX thread only."""

    def __init__(self, dense: Sequence[DenseLayer] = ()) -> None:
        """`dense` are those behind the pooling, in their order. `requests` are those that pool, by id."""
        self.requests: dict[str, _Pooled] = {}
        self._dense = tuple(dense)
        self._sums: dict[str, mx.array] = {}

    @property
    def num_dimensions(self) -> int | None:
        """Of the vectors, where there are dense layers; else those of the hidden states."""
        return self._dense[-1].weight.shape[0] if self._dense else None

    def add(self, data: NewRequestData) -> None:
        """A request that was admitted, or starts anew after a preemption; ignored if it does not pool."""
        if data.pooling is not None:
            self.requests[data.request_id] = _Pooled(data.pooling, len(data.prompt_token_ids))

    def drop(self, request_id: str) -> None:
        """Forgets a request; unknown ones are ignored."""
        self.requests.pop(request_id, None)
        self._sums.pop(request_id, None)

    def plan(self, chunks: Sequence[ScheduledChunk], ends: Sequence[int]) -> PoolingPlan:
        """What is needed of a step, of which chunk i ends before row `ends[i]`."""
        plan = PoolingPlan([], [], [], [])
        for chunk, end_row in zip(chunks, ends):
            pooled = self.requests.get(chunk.request_id)
            if pooled is None:
                continue
            end = chunk.start + chunk.num_tokens
            if pooled.params.logit_ids:
                if end == pooled.num_tokens:
                    plan.logit_rows.append(end_row - 1)
                    plan.scored.append(chunk.request_id)
                continue
            positions, weights = position_weights(pooled.params.method, pooled.num_tokens, chunk.start, end)
            plan.parts.append(_Part(chunk.request_id, len(plan.hidden_rows), weights, end == pooled.num_tokens))
            plan.hidden_rows.extend(end_row - end + position for position in positions)
        return plan

    def pool(self, plan: PoolingPlan, hidden: mx.array | None, logits: mx.array) -> PooledBatch:
        """Adds up the plan's hidden rows, `[rows, D]`, and picks from its rows of logits. Nothing is evaluated."""
        done: dict[str, mx.array] = {}
        open_sums: list[mx.array] = []
        rows = None if hidden is None else hidden.astype(mx.float32)
        for part in plan.parts:
            total = self._sums.pop(part.request_id, None)
            if rows is not None and part.weights.size:
                mine = rows[part.first : part.first + part.weights.size]
                new = (mx.array(part.weights)[:, None] * mine).sum(axis=0)
                total = new if total is None else total + new
            if total is None:
                continue
            if part.ends:
                done[part.request_id] = total
            else:
                self._sums[part.request_id] = total
                open_sums.append(total)
        vectors = None
        if done:
            vectors = mx.stack(list(done.values()))
            for layer in self._dense:
                vectors = layer(vectors)
        scores = {
            request_id: logits[index, mx.array(self.requests[request_id].params.logit_ids)].astype(mx.float32)
            for index, request_id in enumerate(plan.scored)
        }
        return PooledBatch(vectors, list(done), scores, open_sums)


def position_weights(method: PoolingMethod, num_tokens: int, start: int, end: int) -> tuple[range, FloatArray]:
    """Those of positions [start, end) of a prompt that count in its vector, and how much each."""
    if method in (PoolingMethod.LAST, PoolingMethod.CLS):
        position = num_tokens - 1 if method is PoolingMethod.LAST else 0
        positions = range(position, position + 1) if start <= position < end else range(0)
        return positions, np.ones(len(positions), np.float32)
    positions = range(start, end)
    if method is PoolingMethod.WEIGHTED_MEAN:
        weights = np.arange(start + 1, end + 1) / (num_tokens * (num_tokens + 1) / 2)
        return positions, weights.astype(np.float32)
    share = 1.0 / num_tokens if method is PoolingMethod.MEAN else num_tokens**-0.5
    return positions, np.full(len(positions), share, np.float32)
