"""One forward pass over a ragged batch, at the level that a model allows, with logits only for rows that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_server.runtime.attention.cache_views import RowGroup, UnpageableError
from mlx_server.runtime.attention.interface import IntArray, StepPlan
from mlx_server.runtime.attention.regroup import LEVELS, Level, Regrouping, Scope, StepGroups
from mlx_server.runtime.attention.seam import caches_in_use, swiglu_in_use
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.layers.adapters import AdapterRows
from mlx_server.runtime.layers.cpu import SWIGLU
from mlx_server.runtime.vision import ImageRows

_BODIES = ("model", "backbone", "transformer")
"""Attribute names of the part before the head, in mlx-lm's models."""


class RowSelector:
    """Replaces the body of a model and returns only the rows of hidden states that will be sampled: the head then
    computes S rows of logits instead of T.

    It is set in the instance's own namespace, not in the module tree, so that parameters, quantisation and
    saving see the model as it was; `remove` restores the model. Other attributes pass through.
    """

    def __init__(self, owner: Any, name: str, adapters: AdapterRows) -> None:
        self._owner = owner
        self._name = name
        self._adapters = adapters
        self._inner = getattr(owner, name)
        self.rows: list[int] | None = None
        self.hidden: list[mx.array] | None = None
        """A list that gets what the body returns, call by call."""

    @classmethod
    def install(cls, model: Any, adapters: AdapterRows) -> RowSelector | None:
        """Installs a selector in `model`, or in its language model; None if the model has no separate body. `adapters`
        are informed which rows the head gets."""
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
        if self.hidden is not None:
            self.hidden.append(hidden.reshape(-1, hidden.shape[-1]))
        if self.rows is None:
            return hidden
        self._adapters.select(self.rows)
        return hidden.reshape(-1, 1, hidden.shape[-1])[mx.array(self.rows, dtype=mx.int32)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ModelForward:
    """Runs an mlx-lm model on steps, at the level that `use` sets. `num_calls` is how often the last step called the
    model: more than once only at the level of the whole model. MLX thread only."""

    def __init__(self, model: Any, cache: PagedKVCache, adapters: AdapterRows) -> None:
        self.num_calls = 0
        self.adapters = adapters
        self.level = LEVELS[0]
        self.model = model
        self._cache = cache
        self._step = StepGroups(adapters)
        self._regrouping = Regrouping(model, self.level, self._step)
        self._selector = RowSelector.install(model, adapters)
        self.selects_rows = self._selector is not None
        self._hidden: mx.array | None = None
        self._images: ImageRows | None = None

    @property
    def can_select_rows(self) -> bool:
        return self._selector is not None

    def use(self, level: Level, *, selects_rows: bool) -> None:
        """Runs at `level` from now on. With `selects_rows`, the head gets only the rows whose logits are asked for."""
        self._regrouping.remove()
        self._regrouping = Regrouping(self.model, level, self._step)
        self._cache.forget_views()
        self.level = level
        self.selects_rows = selects_rows and self.can_select_rows

    def close(self) -> None:
        """Restores the model."""
        self._regrouping.remove()
        if self._selector is not None:
            self._selector.remove()

    def __call__(
        self,
        plans: Sequence[StepPlan],
        ids: mx.array,
        rows: Sequence[int],
        owners: IntArray | None = None,
        hidden_rows: Sequence[int] = (),
        images: ImageRows | None = None,
        blocks: IntArray | None = None,
    ) -> mx.array:
        """Logits `[len(rows), vocabulary]` of `rows`. Lazy. `plans` has one plan for each layer group, and `owners`
        `[T]` the index of each row's adapter; None if no row has one. `take_hidden` returns the hidden states of
        `hidden_rows`. `images` are the step's image rows. Rows of one of the `blocks` `[S, 2]` (first and last row,
        exclusive) see each other in layers without a window, as those of images do in some models."""
        self.num_calls = 0
        spans = blocks if images is None else images.spans
        if spans is not None and len(spans):
            if self.level.scope is not Scope.NOTHING or self._cache.recurrent:
                raise UnpageableError("images that see both ways, in modules that run by group")
            windows = self._cache.windows
            in_windows = images is not None and images.in_windows
            if in_windows and not any(windows):
                raise UnpageableError(
                    "images that only layers with a window see both ways, where all layers share blocks"
                )
            both_ways = [not window if images is None else window or not in_windows for window in windows]
            plans = [plan.with_spans(spans) if both else plan for plan, both in zip(plans, both_ways, strict=True)]
        self._images = images
        plans = self._cache.begin(plans)
        try:
            with self.adapters.step(owners):
                if hidden_rows:
                    return self._run_and_keep(plans, ids, list(rows) or [0], hidden_rows)
                return self._run(plans, ids, list(rows) or [0])
        finally:
            self._images = None
            self._cache.end()

    def take_hidden(self) -> mx.array | None:
        """The hidden states of the last call's `hidden_rows`, `[len(hidden_rows), D]`, lazy. Can be taken once."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def _run_and_keep(
        self, plans: Sequence[StepPlan], ids: mx.array, wanted: list[int], hidden_rows: Sequence[int]
    ) -> mx.array:
        assert self._selector is not None, "a model without a separate body is refused when it is loaded"
        kept = self._selector.hidden = []
        try:
            logits = self._run(plans, ids, wanted)
        finally:
            self._selector.hidden = None
        hidden = kept[0] if len(kept) == 1 else mx.concatenate(kept)  # groups come in the order of their rows
        is_all = list(hidden_rows) == list(range(hidden.shape[0]))
        self._hidden = hidden if is_all else hidden[mx.array(list(hidden_rows), dtype=mx.int32)]
        return logits

    def _run(self, plans: Sequence[StepPlan], ids: mx.array, wanted: list[int]) -> mx.array:
        if self.level.scope is not Scope.NOTHING:
            self._step.begin(plans, batches_decodes=self.level.batches_decodes)
        if self.level.scope is Scope.MODEL:
            return self._by_group(ids, wanted)
        return self._call(ids[:, None], self._cache.layers, wanted, self._images)

    def _by_group(self, ids: mx.array, rows: list[int]) -> mx.array:
        """Calls the whole model for each group; the logits are in the order of `rows`."""
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
        images = None if self._images is None else self._images.cut(group.first, group.last)
        with self.adapters.group(group):
            return self._call(batch, [cache.view(group) for cache in self._cache.layers], rows or [0], images)

    def _call(self, batch: mx.array, cache: list[Any], rows: list[int], images: ImageRows | None) -> mx.array:
        """Logits of `rows` of the batch, counted over all of its tokens."""
        self.num_calls += 1
        if self._selector is not None:
            self._selector.rows = rows if self.selects_rows else None
        token = caches_in_use.set(self._cache.paged)
        swiglu_token = swiglu_in_use.set(getattr(self.model, SWIGLU, None))
        try:
            more = {} if images is None else {"image_rows": images}
            logits: mx.array = self.model(batch, cache=cache, **more)
        finally:
            if self._selector is not None:
                self._selector.rows = None  # direct calls of the model get all rows
            caches_in_use.reset(token)
            swiglu_in_use.reset(swiglu_token)
        logits = logits.reshape(-1, logits.shape[-1])
        return logits if self.selects_rows else logits[mx.array(rows, dtype=mx.int32)]
