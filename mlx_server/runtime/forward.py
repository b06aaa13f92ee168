"""One forward pass over a ragged batch, at the level that a model allows, with logits only for the rows that need them.

OpenBLAS takes up to 1.9 times as long for a product of 9 to 15 rows as for one of 16 (BENCHMARKS.md). So a step of 9
tokens is computed in 16 rows, and one of 5, or of 20, as it is. A padding row belongs to no request, stores nothing and
attends to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_server.runtime.adapters import NONE, AdapterRows
from mlx_server.runtime.attention import IntArray, StepPlan
from mlx_server.runtime.cache_views import RowGroup
from mlx_server.runtime.kv_cache import PagedKVCache
from mlx_server.runtime.regroup import LEVELS, Level, Regrouping, Scope, StepGroups
from mlx_server.runtime.seam import caches_in_use

_TILE = 16
_FEWEST = 8
"""From this many rows beyond whole tiles on, a step takes longer than with another whole tile."""

_BY_ROW = (nn.QuantizedLinear, nn.QuantizedEmbedding, nn.QQLinear, SwitchLinear, QuantizedSwitchLinear)
"""Layers whose time on a CPU grows with each row: those that unpack weights, and those that pick an expert."""

_BODIES = ("model", "backbone", "transformer")
"""Names that mlx-lm's models give to the part before their head."""


def padded(num_rows: int) -> int:
    """The rows to compute in place of `num_rows`."""
    rest = num_rows % _TILE
    return num_rows if rest < _FEWEST else num_rows - rest + _TILE


class RowSelector:
    """Replaces the body of a model and passes on only the rows of its hidden states that will be sampled, counted over
    the whole batch: the head then computes S rows of logits instead of T.

    It is set in the instance's own namespace, not in the module tree, so that parameters, quantisation and
    saving see the model as it was; `remove` restores the model. Other attributes pass through.
    """

    def __init__(self, owner: Any, name: str, adapters: AdapterRows) -> None:
        self._owner = owner
        self._name = name
        self._adapters = adapters
        self._inner = getattr(owner, name)
        self.rows: list[int] | None = None

    @classmethod
    def install(cls, model: Any, adapters: AdapterRows) -> RowSelector | None:
        """Puts a selector into `model`, or into the language model inside it; None if no body is called apart from a
        head. `adapters` are told of the rows that the head gets."""
        owners = [owner for owner in (model, getattr(model, "language_model", None)) if isinstance(owner, nn.Module)]
        for owner in owners:
            children = owner.children()
            name = next((name for name in _BODIES if isinstance(children.get(name), nn.Module)), None)
            if name is not None:
                selector = cls(owner, name, adapters)
                object.__setattr__(owner, name, selector)
                return selector
        return None

    def remove(self) -> None:
        """Restores the model."""
        vars(self._owner).pop(self._name, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._inner(*args, **kwargs)
        if self.rows is None:
            return hidden
        self._adapters.select(self.rows)
        return hidden.reshape(-1, 1, hidden.shape[-1])[mx.array(self.rows, dtype=mx.int32)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ModelForward:
    """Calls an mlx-lm model on steps, at the level that `use` sets. `num_calls` is how often the last step has called
    it: more than once only at the whole model's level. MLX thread only."""

    def __init__(self, model: Any, cache: PagedKVCache, adapters: AdapterRows) -> None:
        self.num_calls = 0
        self.adapters = adapters
        self.level = LEVELS[0]
        self._model = model
        self._cache = cache
        self._step = StepGroups(adapters)
        self._regrouping = Regrouping(model, self.level, self._step)
        self._selector = RowSelector.install(model, adapters)
        self._selects_rows = self._selector is not None
        self._gains_by_padding = not any(isinstance(module, _BY_ROW) for module in model.modules())

    @property
    def can_select_rows(self) -> bool:
        return self._selector is not None

    def use(self, level: Level, *, selects_rows: bool) -> None:
        """Runs at `level` from now on. `selects_rows`: the head sees only rows whose logits are asked for."""
        self._regrouping.remove()
        self._regrouping = Regrouping(self._model, level, self._step)
        self._cache.forget_views()
        self.level = level
        self._selects_rows = selects_rows and self.can_select_rows

    def close(self) -> None:
        """Restores the model."""
        self._regrouping.remove()
        if self._selector is not None:
            self._selector.remove()

    def __call__(
        self, plans: Sequence[StepPlan], ids: mx.array, rows: Sequence[int], owners: IntArray | None = None
    ) -> mx.array:
        """Logits `[len(rows), vocabulary]` of the rows asked for. Lazy. `plans` are the step's, one for each layer
        group; `owners` `[T]` the adapters of all rows, by index, or None if no row has one."""
        self.num_calls = 0
        num_tokens = plans[0].num_tokens
        num_rows = padded(num_tokens) if self._pads else num_tokens
        plans = self._cache.begin(plans, num_rows)
        if num_rows > num_tokens:
            ids = mx.pad(ids, (0, num_rows - num_tokens))
            if owners is not None:
                owners = np.pad(owners, (0, num_rows - num_tokens), constant_values=NONE)
        try:
            with self.adapters.step(owners):
                return self._run(plans, ids, list(rows) or [0])
        finally:
            self._cache.end()

    @property
    def _pads(self) -> bool:
        return self._gains_by_padding and self._cache.backend.takes_padding and self.level.scope is Scope.NOTHING

    def _run(self, plans: Sequence[StepPlan], ids: mx.array, wanted: list[int]) -> mx.array:
        if self.level.scope is not Scope.NOTHING:
            self._step.begin(plans, batches_decodes=self.level.batches_decodes)
        if self.level.scope is Scope.MODEL:
            return self._by_group(ids, wanted)
        return self._call(ids[:, None], self._cache.layers, wanted)

    def _by_group(self, ids: mx.array, rows: list[int]) -> mx.array:
        """The whole model, once a group; the logits in the order of `rows`."""
        parts: list[mx.array] = []
        order: list[int] = []
        for group in self._step.groups:
            mine = [index for index, row in enumerate(rows) if group.first <= row < group.last]
            logits = self._call_on_group(group, ids, [rows[index] - group.first for index in mine])
            if mine:
                parts.append(logits)
                order += mine
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        return logits if order == sorted(order) else logits[mx.array(np.argsort(order).astype(np.int32))]

    def _call_on_group(self, group: RowGroup, ids: mx.array, rows: list[int]) -> mx.array:
        batch = ids[group.first : group.last].reshape(group.num_requests, group.length)
        with self.adapters.group(group):
            return self._call(batch, [cache.view(group) for cache in self._cache.layers], rows or [0])

    def _call(self, batch: mx.array, cache: list[Any], rows: list[int]) -> mx.array:
        """Logits of `rows` of the batch, counted over all of its tokens."""
        self.num_calls += 1
        if self._selector is not None:  # padded, too, where that takes the head less time
            selected = rows + rows[:1] * (padded(len(rows)) - len(rows)) if self._pads else rows
            self._selector.rows = selected if self._selects_rows else None
        token = caches_in_use.set(self._cache.paged)
        try:
            logits: mx.array = self._model(batch, cache=cache)
        finally:
            caches_in_use.reset(token)
        logits = logits.reshape(-1, logits.shape[-1])
        return logits[: len(rows)] if self._selects_rows else logits[mx.array(rows, dtype=mx.int32)]
