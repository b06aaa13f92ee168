"""Runs modules that cannot read a ragged batch on groups of its rows.

No model code is copied or changed: a stand-in is set as an attribute of the instance, outside the module tree, so
parameters, quantisation and saving see the original model.

Example: a step has 5 decodes and prompt chunks of 40 and 100 tokens, that is 145 rows and 3 groups, because all decodes
are one. With `Scope.NOTHING` each module runs once, over 145 rows. With `Scope.MIXERS` each attention or recurrent
module runs three times (5 x 1, 1 x 40, 1 x 100 tokens) and everything else once. With `Scope.MODEL` the whole model
runs three times. If decodes cannot be batched either, there are 7 groups.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.runtime.attention.cache_views import RowGroup, StepMask, row_groups
from mlx_server.runtime.attention.interface import StepPlan
from mlx_server.runtime.cache.kv_cache import LayerCache, PagedLayerCache
from mlx_server.runtime.layers.adapters import AdapterRows


class Scope(enum.StrEnum):
    """The part of a model that runs once a group instead of once a step."""

    NOTHING = "ragged"
    RECURRENT_MIXERS = "recurrent mixers"
    MIXERS = "mixers"
    MODEL = "whole model"


@dataclass(frozen=True, slots=True)
class Level:
    """A way to run a model on a ragged batch. With `batches_decodes`, all decodes are one group instead of one each."""

    scope: Scope
    batches_decodes: bool = True

    def __str__(self) -> str:
        return self.scope.value if self.batches_decodes else f"{self.scope.value}, one request at a time"


LEVELS = (
    Level(Scope.NOTHING),
    Level(Scope.RECURRENT_MIXERS),
    Level(Scope.MIXERS),
    Level(Scope.MODEL),
    Level(Scope.MIXERS, batches_decodes=False),
    Level(Scope.MODEL, batches_decodes=False),
)
"""All levels, in the order of trying."""


class StepGroups:
    """The groups of the current step, for all modules that run on groups."""

    def __init__(self, adapters: AdapterRows) -> None:
        self.adapters = adapters
        self.groups: list[RowGroup] = []
        self._plans: Sequence[StepPlan] = ()

    def begin(self, plans: Sequence[StepPlan], *, batches_decodes: bool) -> None:
        self.groups = row_groups(plans, batches_decodes=batches_decodes)
        self._plans = plans
        self.__dict__.pop("requests", None)

    @property
    def num_tokens(self) -> int:
        return self.groups[-1].last

    @cached_property
    def requests(self) -> list[RowGroup]:
        """Every request as a group of its own."""
        return row_groups(self._plans, batches_decodes=False)


@dataclass(frozen=True, slots=True)
class GroupValues:
    """A result that has no row for each token, such as the keys that a layer chooses for later layers: the groups that
    a module ran on, and what it returned for each. Only modules that run on groups can take it."""

    groups: list[RowGroup]
    values: list[Any]


class RegroupedModule:
    """Stands in for a token-mixing module: called with the whole ragged batch and a layer's cache, it calls the module
    once a group, with the group's rows, cache view and mask, and joins the results.

    Other attributes pass through. With `only_recurrent`, calls without a recurrent cache go to the module unchanged.

    A module with several K/V caches selects keys by their distance from the end of the longest context, so it gets one
    request at a time, without padding.
    """

    def __init__(self, inner: nn.Module, step: StepGroups, *, only_recurrent: bool) -> None:
        self._inner = inner
        self._step = step
        self._only_recurrent = only_recurrent
        self._names = list(inspect.signature(type(inner).__call__).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args)) | kwargs
        cache = given.get("cache")
        if not isinstance(cache, LayerCache) or (self._only_recurrent and not cache.is_recurrent):
            return self._inner(**given)
        earlier = next((value.groups for value in given.values() if isinstance(value, GroupValues)), None)
        groups = earlier or (self._step.requests if cache.num_paged > 1 else self._step.groups)
        parts = [self._run(group, given, cache, number) for number, group in enumerate(groups)]
        return _after_writes(_join(groups, parts), cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _run(self, group: RowGroup, given: dict[str, Any], cache: LayerCache, number: int) -> Any:
        view: Any = cache.view(group)
        mine = {
            name: value.values[number] if isinstance(value, GroupValues) else _cut(value, group, self._step.num_tokens)
            for name, value in given.items()
        }
        if "mask" in self._names:
            asked = given.get("mask")
            is_array, window = (asked.is_array, asked.window) if isinstance(asked, StepMask) else (False, None)
            mine["mask"] = view.make_mask(group.length, is_array, window)
        mine["cache"] = view
        with self._step.adapters.group(group):
            return self._inner(**mine)


class Regrouping:
    """The stand-ins of one model at one level, until `remove`."""

    def __init__(self, model: nn.Module, level: Level, step: StepGroups) -> None:
        self._set: list[tuple[nn.Module, str]] = []
        if level.scope in (Scope.RECURRENT_MIXERS, Scope.MIXERS):
            only_recurrent = level.scope is Scope.RECURRENT_MIXERS
            for layer in getattr(model, "layers", ()):
                self._stand_in(layer, step, only_recurrent)

    def remove(self) -> None:
        """Restores the model."""
        for layer, name in self._set:
            vars(layer).pop(name, None)
        self._set.clear()

    def _stand_in(self, layer: Any, step: StepGroups, only_recurrent: bool) -> None:
        for name, child in layer.children().items() if isinstance(layer, nn.Module) else ():
            parts = child if isinstance(child, list) else [child]
            if any(map(_takes_cache, parts)):
                stand_ins = [
                    RegroupedModule(part, step, only_recurrent=only_recurrent) if _takes_cache(part) else part
                    for part in parts
                ]
                object.__setattr__(layer, name, stand_ins if isinstance(child, list) else stand_ins[0])
                self._set.append((layer, name))


def possible_levels(caches: Sequence[LayerCache]) -> list[Level]:
    """The levels at which a model with these caches can run, the best first."""
    is_recurrent = any(cache.is_recurrent for cache in caches)
    refused = Scope.NOTHING if is_recurrent else Scope.RECURRENT_MIXERS
    return [level for level in LEVELS if level.scope is not refused]


def _takes_cache(module: Any) -> bool:
    return isinstance(module, nn.Module) and "cache" in inspect.signature(type(module).__call__).parameters


def _cut(value: Any, group: RowGroup, num_tokens: int) -> Any:
    """The group's part of an argument with a row for each of the step's `num_tokens` tokens; for positions without a
    second axis, the first of each request."""
    if isinstance(value, mx.array) and value.shape == (3, num_tokens, 1):  # positions in three axes
        return mx.stack([group.cut(axis) for axis in value])
    if not isinstance(value, mx.array) or value.shape[:1] != (num_tokens,):
        return value
    if value.ndim == 1:
        return group.firsts(value)
    return group.cut(value) if value.shape[1] == 1 else value


def _join(groups: list[RowGroup], parts: list[Any]) -> Any:
    """One result of the groups' results, which may be tuples: its rows are those of all groups."""
    if isinstance(parts[0], tuple):
        return tuple(_join(groups, list(column)) for column in zip(*parts, strict=True))
    if all(part is None for part in parts):
        return None
    has_rows = all(
        isinstance(part, mx.array) and part.shape[:2] == (group.num_requests, group.length)
        for group, part in zip(groups, parts)
    )
    if not has_rows or len({part.shape[2:] for part in parts}) > 1:
        return GroupValues(groups, parts)
    rows = [group.flat(part) for group, part in zip(groups, parts)]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)


def _after_writes(result: Any, cache: LayerCache) -> Any:
    """The result, as a value that depends on the writes of the layer's states. Otherwise MLX would write them at the
    end of the step, and keep the arrays that contain them in every layer until then."""
    tokens = [] if isinstance(cache, PagedLayerCache) else cache.tokens()
    return mx.depends([result], tokens)[0] if tokens and isinstance(result, mx.array) else result
