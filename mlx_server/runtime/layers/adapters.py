"""LoRA adapters in a model's layers. A model can have several, and each row of a batch its own.

A layer computes its own product once for all rows. The matrices of its adapters lie side by side; each takes as many
columns as its rank:

    columns of x lora_a      |-- first, rank 8 --|-- second, rank 4 --|
    a row of the first       | its products      | zeros              |
    a row of none            | zeros             | zeros              |

So a mixed batch costs two small products for each layer, for any rows and ranks, and a row's result is the same as with
its own adapter alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlx_server.model_entries import Adapter
from mlx_server.runtime.attention.cache_views import RowGroup, UnpageableError
from mlx_server.runtime.attention.interface import IntArray
from mlx_server.runtime.layers.adapter_files import replace_modules, take_layers

NONE = -1
"""The adapter index of a row without an adapter."""


@dataclass(frozen=True)
class ColumnLayout:
    """The adapters of one layer in the order of their columns, and their ranks. Many layers have equal layouts."""

    adapters: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def joined(self, adapter: int, rank: int) -> ColumnLayout:
        """With one more adapter, behind the others."""
        return ColumnLayout((*self.adapters, adapter), (*self.ranks, rank))

    def left(self, adapter: int) -> tuple[ColumnLayout, slice]:
        """Without one of the adapters, and where its columns were."""
        place = self.adapters.index(adapter)
        first = sum(self.ranks[:place])
        others = [pair for pair in zip(self.adapters, self.ranks) if pair[0] != adapter]
        rest = ColumnLayout(tuple(one for one, _ in others), tuple(rank for _, rank in others))
        return rest, slice(first, first + self.ranks[place])

    def span(self, owners: IntArray) -> slice | None:
        """The columns from the first to the last adapter that occurs in `owners`; None if the layer has none of
        them."""
        used = [place for place, adapter in enumerate(self.adapters) if (owners == adapter).any()]
        return slice(sum(self.ranks[: used[0]]), sum(self.ranks[: used[-1] + 1])) if used else None


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a layer that a batch needs: those at `span`. `owners` are the adapters of these columns; None if
    all rows have the same adapter, so that each row uses all of them."""

    span: slice
    owners: mx.array | None

    def keep_own(self, products: mx.array, row_owners: mx.array | None) -> mx.array:
        """`products` `[..., columns]` with zeros where a row has another adapter than the column. `row_owners` is
        `[..., 1]`."""
        return products if self.owners is None else mx.where(self.owners == row_owners, products, 0)


@dataclass(eq=False)
class RowScope:
    """The adapters of the rows of a batch `[R, length, ...]`: `owners` `[R]` has one for each request."""

    owners: IntArray
    length: int = 1
    _columns: dict[ColumnLayout, Columns | None] = field(default_factory=dict)
    _row_owners: dict[int, mx.array] = field(default_factory=dict)

    def columns(self, layout: ColumnLayout) -> Columns | None:
        """The columns that a layer must compute; None if no row of the batch has an adapter there. Computed once for
        each layout."""
        if layout not in self._columns:
            span, owners = layout.span(self.owners), None
            if span is not None and (self.owners != self.owners[0]).any():
                owners = mx.array(np.repeat(np.array(layout.adapters, dtype=np.int32), layout.ranks)[span])
            self._columns[layout] = None if span is None else Columns(span, owners)
        return self._columns[layout]

    def row_owners(self, num_rows: int) -> mx.array:
        """The adapter of each row of a layer's input, `[num_rows]`. The rows are the batch's requests or its tokens.
        Raises `UnpageableError` for any other number of rows."""
        if num_rows not in self._row_owners:
            num_requests = len(self.owners)
            if num_rows not in (num_requests, num_requests * self.length):
                raise UnpageableError(f"adapters for {num_rows} rows, of a batch {num_requests} x {self.length}")
            self._row_owners[num_rows] = mx.array(np.repeat(self.owners, num_rows // num_requests))
        return self._row_owners[num_rows]

    def select(self, rows: Sequence[int]) -> RowScope:
        """The scope of some rows of the batch, given by their index among all of its tokens."""
        return RowScope(np.repeat(self.owners, self.length)[list(rows)])


class AdapterRows:
    """A model's adapters, and the adapters of the rows that its layers compute now.

    `keys` has one key for each adapter, at its index; None is free for another one. `by_name` has the keys of the
    adapters by the names that requests give, and belongs to who serves the model. Names whose adapters have equal
    content share a key. Shared by a model's layers and the code that calls them. Between forward passes no row has an
    adapter, so the model then computes what it does without adapters.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        """With adapters whose names are their keys."""
        self.keys: list[str | None] = list(names)
        self.by_name = {name: name for name in names}
        self._scope: RowScope | None = None  # None if no row of the batch has an adapter
        self._groups: dict[tuple[int, int], RowScope] = {}

    @classmethod
    def of(cls, adapters: Sequence[Adapter]) -> AdapterRows:
        """Of adapters that are known by their content, or else by their names."""
        rows = cls()
        rows.by_name = {adapter.name: adapter.key or adapter.name for adapter in adapters}
        rows.keys = list(dict.fromkeys(rows.by_name.values()))
        return rows

    def add(self, key: str) -> int:
        """The index of a new adapter."""
        if None not in self.keys:
            self.keys.append(None)
        index = self.keys.index(None)
        self.keys[index] = key
        return index

    def name_of(self, index: int) -> str:
        """A name of an adapter."""
        return next((name for name, key in self.by_name.items() if key == self.keys[index]), str(self.keys[index]))

    def columns(self, layout: ColumnLayout) -> Columns | None:
        """The columns that a layer of this layout must compute; None if there are none."""
        return None if self._scope is None else self._scope.columns(layout)

    def keep_own(self, columns: Columns, products: mx.array) -> mx.array:
        """Like `Columns.keep_own`, for `products` `[rows, ..., columns]`. Raises `UnpageableError` if the rows are not
        those of the batch."""
        if columns.owners is None:
            return products
        num_rows = products.shape[0]
        return columns.keep_own(products, self.owners(num_rows).reshape(num_rows, *[1] * (products.ndim - 1)))

    def owners(self, num_rows: int) -> mx.array:
        """Like `RowScope.row_owners`, for a batch with adapters."""
        assert self._scope is not None, "no row of the batch has an adapter"
        return self._scope.row_owners(num_rows)

    @contextmanager
    def step(self, owners: IntArray | None) -> Iterator[None]:
        """Within the context, a forward pass runs over a ragged batch whose rows have the adapters `owners` `[T]`; None
        if no row has one."""
        self._scope = None if owners is None or (owners == NONE).all() else RowScope(owners)
        self._groups.clear()
        try:
            yield
        finally:
            self._scope = None

    @contextmanager
    def group(self, group: RowGroup) -> Iterator[None]:
        """Within the context, inside a step, layers compute only this group of its rows."""
        whole = self._scope
        if whole is not None:
            self._scope = self._groups.setdefault(
                (group.first, group.last),
                RowScope(whole.owners[group.first : group.last : group.length], group.length),
            )
        try:
            yield
        finally:
            self._scope = whole

    def select(self, rows: Sequence[int]) -> None:
        """From now to the end of the step or group, layers compute only some rows, given by their index among its
        tokens."""
        if self._scope is not None:
            self._scope = self._scope.select(rows)


class LowRank(NamedTuple):
    """What one adapter, given by its index, adds to a layer: `x lora_a lora_b`, with the scale included in `lora_b`.
    `lora_a` is `[inputs, rank]` and `lora_b` `[rank, outputs]`; layers of experts have one such pair for each
    expert."""

    adapter: int
    lora_a: mx.array
    lora_b: mx.array


class LowRankColumns(nn.Module):  # type: ignore[misc]
    """The matrices of a layer's adapters: `lora_a` `[columns, inputs]` and `lora_b` `[columns, outputs]`. `axis` is
    that of the columns; layers of experts have an axis of experts before it. Without adapters, there are none."""

    axis = 0
    lora_a: mx.array
    lora_b: mx.array

    def __init__(self, parts: Sequence[LowRank]) -> None:
        super().__init__()
        self.layout = ColumnLayout()
        for part in parts:
            self.join(part)

    def join(self, part: LowRank) -> None:
        """Adds the columns of one more adapter. Lazy."""
        for name, more in (("lora_a", part.lora_a.swapaxes(-1, -2)), ("lora_b", part.lora_b)):
            self[name] = mx.concatenate([self[name], more], axis=self.axis) if name in self else more
        self.layout = self.layout.joined(part.adapter, part.lora_b.shape[-2])

    def leave(self, adapter: int) -> None:
        """Removes the columns of an adapter. Lazy."""
        self.layout, gone = self.layout.left(adapter)
        for name in ("lora_a", "lora_b"):
            before, _, after = mx.split(self.pop(name), [gone.start, gone.stop], axis=self.axis)
            if self.layout.adapters:
                self[name] = mx.concatenate([before, after], axis=self.axis)

    def part(self, adapter: int) -> LowRank:
        """What the only adapter of this layer adds, as another one's `adapter`."""
        return LowRank(adapter, self.lora_a.swapaxes(-1, -2), self.lora_b)


class AdaptedLayer(LowRankColumns):
    """The layer `base` with adapters."""

    def __init__(self, base: nn.Module, parts: Sequence[LowRank], rows: AdapterRows) -> None:
        super().__init__(parts)
        self.base = base
        self._rows = rows


def is_adapted(part: nn.Module) -> bool:
    """Whether `part` of a model has a layer with adapters that may differ by row."""
    return any(isinstance(module, AdaptedLayer | AdaptedExperts) for module in part.modules())


class AdaptedLinear(AdaptedLayer):
    """A linear layer with adapters, quantised or not."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.base(x)
        columns = self._rows.columns(self.layout)
        if columns is None:
            return y
        z = self._rows.keep_own(columns, x @ self.lora_a[columns.span].T) @ self.lora_b[columns.span]
        return y + z.astype(x.dtype)


class AdaptedEmbedding(AdaptedLayer):
    """An embedding with adapters, which may also be the model's output head."""

    def __call__(self, ids: mx.array) -> mx.array:
        y: mx.array = self.base(ids)
        columns = self._rows.columns(self.layout)
        if columns is None:
            return y
        z = self._rows.keep_own(columns, self.lora_a[columns.span].T[ids]) @ self.lora_b[columns.span]
        return y + z.astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = self.base.as_linear(x)
        columns = self._rows.columns(self.layout)
        if columns is None:
            return y
        z = self._rows.keep_own(columns, x @ self.lora_b[columns.span].T) @ self.lora_a[columns.span]
        return y + z.astype(x.dtype)


class ExpertRoute:
    """Tells the experts of one layer which adapter each row has. Rows come to experts in another order, each with the
    index of an expert. In a mixed batch that index also encodes the adapter, as `expert * num_owners + owner`. Example
    with two adapters (`num_owners` is 3): expert 5 gets the index 15 for a row without an adapter (owner 0), and 17 for
    one with the second adapter."""

    def __init__(self, rows: AdapterRows) -> None:
        self.rows = rows
        self.is_mixed = False

    @property
    def _num_owners(self) -> int:
        return len(self.rows.keys) + 1

    def mix(self, indices: mx.array, owners: mx.array) -> mx.array:
        """Expert `indices` `[rows, ..., k]` with the `owners` `[rows]` encoded in them."""
        return indices * self._num_owners + (owners + 1).reshape(-1, *[1] * (indices.ndim - 1)).astype(indices.dtype)

    def experts(self, indices: mx.array) -> mx.array:
        return indices // self._num_owners if self.is_mixed else indices

    def owners(self, indices: mx.array) -> mx.array | None:
        """The adapter of each row; None if all rows of the batch have the same one."""
        return (indices % self._num_owners).astype(mx.int32) - 1 if self.is_mixed else None


class AdaptedExperts(nn.Module):  # type: ignore[misc]
    """A layer of experts whose `products` are `AdaptedExpertLinear`s. `layout` has the adapters of any of them."""

    def __init__(self, experts: nn.Module, rows: AdapterRows) -> None:
        super().__init__()
        kinds = SwitchLinear | QuantizedSwitchLinear
        self._route = ExpertRoute(rows)
        plain = {name: child for name, child in experts.children().items() if isinstance(child, kinds)}
        adapted = {name: AdaptedExpertLinear(child, self._route) for name, child in plain.items()}
        experts.update_modules(adapted)
        self.experts = experts
        self.layout = ColumnLayout()

    @property
    def products(self) -> dict[str, AdaptedExpertLinear]:
        return {name: child for name, child in self.experts.items() if isinstance(child, AdaptedExpertLinear)}

    def refresh(self) -> None:
        """Call when a product has other adapters than before."""
        adapters = sorted({adapter for product in self.products.values() for adapter in product.layout.adapters})
        self.layout = ColumnLayout(tuple(adapters), (1,) * len(adapters))

    def plain(self) -> nn.Module:
        """The layer as it was without adapters."""
        self.experts.update_modules({name: product.linear for name, product in self.products.items()})
        return self.experts

    def __call__(self, x: mx.array, indices: mx.array) -> Any:
        route = self._route
        columns = route.rows.columns(self.layout)
        if columns is None or columns.owners is None:
            return self.experts(x, indices)
        route.is_mixed = True
        try:
            return self.experts(x, route.mix(indices, route.rows.owners(indices.shape[0])))
        finally:
            route.is_mixed = False


class AdaptedExpertLinear(LowRankColumns):
    """One of the products of a layer of experts. `lora_a` is `[experts, columns, inputs]` and `lora_b` `[experts,
    columns, outputs]`. A product without adapters must still decode the indices."""

    axis = 1

    def __init__(self, linear: nn.Module, route: ExpertRoute) -> None:
        super().__init__(())
        self.linear = linear
        self._route = route

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        experts = self._route.experts(indices)
        y: mx.array = self.linear(x, experts, sorted_indices=sorted_indices)
        columns = self._route.rows.columns(self.layout)
        if columns is None:
            return y
        lora_a, lora_b = self.lora_a[:, columns.span].swapaxes(-1, -2), self.lora_b[:, columns.span]
        z = mx.gather_mm(x, lora_a, rhs_indices=experts, sorted_indices=sorted_indices)
        owners = self._route.owners(indices)
        z = columns.keep_own(z, None if owners is None else owners[..., None, None])
        z = mx.gather_mm(z, lora_b, rhs_indices=experts, sorted_indices=sorted_indices)
        return y + z.astype(x.dtype)


def install_adapters(model: Any, adapters: Sequence[Adapter]) -> AdapterRows:
    """Installs adapters in `model` so that each row of a batch may have a different one, or none; the returned
    `AdapterRows` say which. Raises like `apply_adapter`, and also for an adapter whose changes cannot be computed by
    row."""
    rows = AdapterRows.of(adapters)
    by_key = {rows.by_name[adapter.name]: adapter for adapter in adapters}
    layers = [take_layers(model, by_key[key]) for key in rows.keys if key is not None]
    modules = dict(model.named_modules())
    for index, taken in enumerate(layers):
        for path, layer in taken.items():
            join_layer(model, modules, path, _low_rank(index, layer), rows)
    return rows


def join_layer(model: Any, modules: dict[str, nn.Module], path: str, part: LowRank, rows: AdapterRows) -> nn.Module:
    """Adds what an adapter adds to the layer that is at `path` of the model without adapters, and returns the layer or
    the layer of experts around it. `modules` are the model's by path, and are kept up to date. Lazy."""
    owner_path, _, name = path.rpartition(".")
    owner, found = modules.get(owner_path), modules.get(path)
    if isinstance(owner, SwitchGLU | SwitchMLP):
        owner = _put(model, modules, owner_path, AdaptedExperts(owner, rows))
    if isinstance(owner, AdaptedExperts):
        owner.products[name].join(part)
        owner.refresh()
        return owner
    if isinstance(found, AdaptedLayer):
        found.join(part)
        return found
    kind = AdaptedEmbedding if isinstance(found, nn.Embedding | nn.QuantizedEmbedding) else AdaptedLinear
    return _put(model, modules, path, kind(found, (part,), rows))


def leave_layer(model: Any, modules: dict[str, nn.Module], path: str, adapter: int) -> nn.Module:
    """Removes what an adapter adds to the `AdaptedLayer` or `AdaptedExperts` at `path`, and returns what is there then.
    Lazy."""
    found = modules[path]
    assert isinstance(found, AdaptedLayer | AdaptedExperts), "only these have adapters"
    for columns in found.products.values() if isinstance(found, AdaptedExperts) else (found,):
        if adapter in columns.layout.adapters:
            columns.leave(adapter)
    if isinstance(found, AdaptedExperts):
        found.refresh()
    if found.layout.adapters:
        return found
    return _put(model, modules, path, found.plain() if isinstance(found, AdaptedExperts) else found.base)


def _put(model: Any, modules: dict[str, nn.Module], path: str, module: nn.Module) -> nn.Module:
    replace_modules(model, {path: module})
    modules[path] = module
    return module


def _low_rank(adapter: int, layer: Any) -> LowRank:
    """Converts a layer of mlx-lm, which stores both matrices of experts transposed."""
    lora_b = (layer.scale * layer.lora_b).astype(layer.lora_b.dtype)
    if isinstance(layer, LoRASwitchLinear):
        return LowRank(adapter, layer.lora_a.swapaxes(-1, -2), lora_b.swapaxes(-1, -2))
    return LowRank(adapter, layer.lora_a, lora_b)
