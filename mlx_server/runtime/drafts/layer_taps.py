"""Reads what layers of a model return, without a change of its code: drafters are given features of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.outputs import ScheduledChunk
from mlx_server.runtime.cache.row_pool import MakeRows
from mlx_server.runtime.drafts.hidden_states import HiddenStates, KeptRows
from mlx_server.runtime.layers.taps import Taps


class LayerTaps:
    """The outputs of some `layers` of a model in the forward pass after `open`, until `remove`. MLX thread only."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._outputs: dict[int, list[mx.array]] = {}
        self._num_layers = len(layers)
        self._is_open = False
        self._taps = Taps(layers, self._keep)

    def open(self) -> None:
        """The next forward pass is kept."""
        self._outputs = {place: [] for place in range(self._num_layers)}
        self._is_open = True

    @property
    def have_one_each(self) -> bool:
        """Whether each layer was called once since `open`."""
        return all(len(parts) == 1 for parts in self._outputs.values())

    def take(self, rows: Sequence[int]) -> mx.array:
        """The outputs `[len(rows), layers * D]` for rows of the batch, lazy."""
        columns = [self._outputs[place] for place in range(self._num_layers)]
        self._outputs, self._is_open = {}, False
        # A model that runs by group is called once for each, in the order of their rows.
        outputs = [parts[0] if len(parts) == 1 else mx.concatenate(parts) for parts in columns]
        if list(rows) != list(range(outputs[0].shape[0])):
            taken = mx.array(list(rows), dtype=mx.int32)
            outputs = [output[taken] for output in outputs]
        return mx.concatenate(outputs, axis=-1)

    def remove(self) -> None:
        """Restores the layers."""
        self._outputs, self._is_open = {}, False
        self._taps.remove()

    def _keep(self, place: int, output: Any) -> None:
        if self._is_open:
            hidden: mx.array = output[0] if isinstance(output, tuple) else output
            self._outputs[place].append(hidden.reshape(-1, hidden.shape[-1]))


def calls_each_once(model: Any, layers: Sequence[Any]) -> bool:
    """Whether a call of the model calls each of `layers` once, so that their outputs are features. Computes nothing."""
    taps = LayerTaps(layers)
    try:
        taps.open()
        model(mx.array([[0]]), cache=make_prompt_cache(model))
        return taps.have_one_each
    finally:
        taps.remove()


class FeatureStates(HiddenStates):
    """As `HiddenStates`, for features: `project` makes them, `[R, D]`, of the outputs of `layers`."""

    are_last = False

    def __init__(
        self,
        layers: Sequence[Any],
        project: Callable[[mx.array], mx.array],
        make_rows: MakeRows,
        num_requests: int,
        size: int,
        dtype: mx.Dtype,
        num_held: int,
    ) -> None:
        super().__init__(make_rows, num_requests, size, dtype, num_held)
        self._project = project
        self._taps = LayerTaps(layers)  # last: an error before leaves the model as it was

    def plan(self, chunks: Sequence[ScheduledChunk], ends: Sequence[int]) -> KeptRows:
        self._taps.open()
        return super().plan(chunks, ends)

    def keep(self, kept: KeptRows, hidden: mx.array | None) -> None:
        outputs = self._taps.take(kept.rows)
        if kept.rows:
            self.write(kept, self._project(outputs))

    def close(self) -> None:
        self._taps.remove()
