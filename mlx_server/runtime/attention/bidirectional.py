"""Attention of models in which each position sees its whole input: embedders that were trained so.

Nothing is read from the KV pool, and nothing written: an input is computed in one step, and is then of no more use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.attention.interface import ReferenceBackend, StepPlan


@dataclass(frozen=True, slots=True)
class InputRows:
    """Where each input's rows begin in a step; the last one is the step's end."""

    starts: tuple[int, ...]


class BidirectionalBackend(ReferenceBackend):
    """Each request's rows of a step are all of its input, and see each other. `window` w lets position p see positions
    p - w // 2 to p + w // 2, as Gemma 3's embedders were trained. Pools are the reference backend's, and stay empty."""

    name = "bidirectional"
    needs_synchronous_steps = False

    def plan(self, step: StepPlan) -> Any:
        return InputRows(tuple(step.query_starts.tolist()))

    def attend(
        self,
        pool: Any,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        metadata: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if keys is None or values is None:
            raise ModelLoadError("Layers that share K/V cannot see both sides; start the model with --pooling off.")
        parts = []
        for first, last in zip(metadata.starts, metadata.starts[1:]):
            mine = [x[first:last].transpose(2, 1, 0, 3) for x in (queries, keys, values)]
            mask = None
            if window is not None and last - first > window // 2 + 1:
                places = mx.arange(last - first)
                mask = mx.abs(places[:, None] - places[None]) <= window // 2
            out = mx.fast.scaled_dot_product_attention(*mine, scale=scale, mask=mask, sinks=sinks)
            parts.append(out.transpose(2, 1, 0, 3))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def state(self, pool: Any) -> list[mx.array]:
        return []
