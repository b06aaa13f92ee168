"""LoRA and DoRA adapters in mlx-lm's format, and LoRA adapters in PEFT's. A model can have several LoRA adapters, and
each row of a batch its own.

A layer computes its own product once for all rows. The matrices of its adapters lie side by side; each takes as many
columns as its rank:

    columns of x lora_a      |-- first, rank 8 --|-- second, rank 4 --|
    a row of the first       | its products      | zeros              |
    a row of none            | zeros             | zeros              |

So a mixed batch costs two small products for each layer, for any rows and ranks, and a row's result is the same as with
its own adapter alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import load_adapters

from mlx_server.errors import ModelLoadError
from mlx_server.model_entries import Adapter, hub_id
from mlx_server.runtime.attention.cache_views import RowGroup, UnpageableError
from mlx_server.runtime.attention.interface import IntArray
from mlx_server.runtime.layers.peft import BASE_LAYER, PEFT_WEIGHTS, SETTINGS_FILE, apply_peft
from mlx_server.runtime.models.folder import TensorHeader, read_headers

NONE = -1
"""The adapter index of a row without an adapter."""


@dataclass(frozen=True)
class ColumnLayout:
    """The adapters of one layer by ascending index, and their ranks. Many layers have equal layouts."""

    adapters: tuple[int, ...]
    ranks: tuple[int, ...]

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
    """The `names` of a model's adapters, and the adapters of the rows that its layers compute now.

    Shared by a model's layers and the code that calls them. Between forward passes no row has an adapter, so the model
    then computes what it does without adapters.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._scope: RowScope | None = None  # None if no row of the batch has an adapter
        self._groups: dict[tuple[int, int], RowScope] = {}

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


def layout_of(parts: Sequence[LowRank]) -> ColumnLayout:
    return ColumnLayout(tuple(part.adapter for part in parts), tuple(part.lora_b.shape[-2] for part in parts))


class _AdaptedLayer(nn.Module):  # type: ignore[misc]
    """The layer `base` with adapters: `lora_a` `[columns, inputs]` and `lora_b` `[columns, outputs]` have the columns
    of all of them."""

    def __init__(self, base: nn.Module, parts: Sequence[LowRank], rows: AdapterRows) -> None:
        super().__init__()
        self.base = base
        self.lora_a = mx.concatenate([part.lora_a.T for part in parts])
        self.lora_b = mx.concatenate([part.lora_b for part in parts])
        self._layout = layout_of(parts)
        self._rows = rows


def is_adapted(part: nn.Module) -> bool:
    """Whether `part` of a model has a layer with adapters that may differ by row."""
    return any(isinstance(module, (_AdaptedLayer, AdaptedExperts)) for module in part.modules())


class AdaptedLinear(_AdaptedLayer):
    """A linear layer with adapters, quantised or not."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.base(x)
        columns = self._rows.columns(self._layout)
        if columns is None:
            return y
        z = self._rows.keep_own(columns, x @ self.lora_a[columns.span].T) @ self.lora_b[columns.span]
        return y + z.astype(x.dtype)


class AdaptedEmbedding(_AdaptedLayer):
    """An embedding with adapters, which may also be the model's output head."""

    def __call__(self, ids: mx.array) -> mx.array:
        y: mx.array = self.base(ids)
        columns = self._rows.columns(self._layout)
        if columns is None:
            return y
        z = self._rows.keep_own(columns, self.lora_a[columns.span].T[ids]) @ self.lora_b[columns.span]
        return y + z.astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = self.base.as_linear(x)
        columns = self._rows.columns(self._layout)
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
        self._num_owners = len(rows.names) + 1

    def mix(self, indices: mx.array, owners: mx.array) -> mx.array:
        """Expert `indices` `[rows, ..., k]` with the `owners` `[rows]` encoded in them."""
        return indices * self._num_owners + (owners + 1).reshape(-1, *[1] * (indices.ndim - 1)).astype(indices.dtype)

    def experts(self, indices: mx.array) -> mx.array:
        return indices // self._num_owners if self.is_mixed else indices

    def owners(self, indices: mx.array) -> mx.array | None:
        """The adapter of each row; None if all rows of the batch have the same one."""
        return (indices % self._num_owners).astype(mx.int32) - 1 if self.is_mixed else None


class AdaptedExperts(nn.Module):  # type: ignore[misc]
    """A layer of experts whose products are `AdaptedExpertLinear`s. `adapters` are those of any of its products."""

    def __init__(self, experts: nn.Module, adapters: Collection[int], route: ExpertRoute) -> None:
        super().__init__()
        self.experts = experts
        self._layout = ColumnLayout(tuple(sorted(adapters)), (1,) * len(adapters))
        self._route = route

    def __call__(self, x: mx.array, indices: mx.array) -> Any:
        route = self._route
        columns = route.rows.columns(self._layout)
        if columns is None or columns.owners is None:
            return self.experts(x, indices)
        route.is_mixed = True
        try:
            return self.experts(x, route.mix(indices, route.rows.owners(indices.shape[0])))
        finally:
            route.is_mixed = False


class AdaptedExpertLinear(nn.Module):  # type: ignore[misc]
    """One of the products of a layer of experts. `lora_a` is `[experts, columns, inputs]` and `lora_b` `[experts,
    columns, outputs]`, for all adapters. A product without adapters must still decode the indices."""

    def __init__(self, linear: nn.Module, parts: Sequence[LowRank], route: ExpertRoute) -> None:
        super().__init__()
        self.linear = linear
        self._layout = layout_of(parts)
        self._route = route
        if parts:
            self.lora_a = mx.concatenate([part.lora_a.swapaxes(-1, -2) for part in parts], axis=1)
            self.lora_b = mx.concatenate([part.lora_b for part in parts], axis=1)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        experts = self._route.experts(indices)
        y: mx.array = self.linear(x, experts, sorted_indices=sorted_indices)
        columns = self._route.rows.columns(self._layout)
        if columns is None:
            return y
        lora_a, lora_b = self.lora_a[:, columns.span].swapaxes(-1, -2), self.lora_b[:, columns.span]
        z = mx.gather_mm(x, lora_a, rhs_indices=experts, sorted_indices=sorted_indices)
        owners = self._route.owners(indices)
        z = columns.keep_own(z, None if owners is None else owners[..., None, None])
        z = mx.gather_mm(z, lora_b, rhs_indices=experts, sorted_indices=sorted_indices)
        return y + z.astype(x.dtype)


WEIGHTS_FILE = "adapters.safetensors"


def apply_adapter(model: Any, adapter: Adapter) -> None:
    """Applies an adapter to `model` for all rows. Its weights are lazy until they are evaluated. Raises
    `ModelLoadError` if the folder has no adapter, or one for another model."""
    folder = adapter.path
    weights = _weights_file(adapter)
    missing = [name for name in (SETTINGS_FILE, weights) if not (folder / name).is_file()]
    if missing:
        on_hub = (
            ""
            if folder.exists() or hub_id(adapter.folder) is None
            else (f" One of the hub must be fetched first: hf download {adapter.folder} --local-dir FOLDER.")
        )
        raise ModelLoadError(
            f"--adapter {adapter.folder} has no {' and no '.join(missing)}; it must be a folder that mlx_lm.lora has "
            f"written, or PEFT, with {PEFT_WEIGHTS}.{on_hub}"
        )
    try:
        if weights == PEFT_WEIGHTS:
            apply_peft(model, adapter)
        else:
            load_adapters(model, str(folder))
    except Exception as error:  # mlx-lm raises errors of any kind for bad files
        raise ModelLoadError(
            f"The adapter in {folder} does not fit the model: {type(error).__name__}: {error}"
        ) from error
    model.eval()  # without dropout


def install_adapters(model: Any, adapters: Sequence[Adapter]) -> AdapterRows:
    """Installs adapters in `model` so that each row of a batch may have a different one, or none; the returned
    `AdapterRows` say which. Raises like `apply_adapter`, and also for an adapter whose changes cannot be computed by
    row."""
    rows = AdapterRows([adapter.name for adapter in adapters])
    parts: defaultdict[str, list[LowRank]] = defaultdict(list)
    for index, adapter in enumerate(adapters):
        for path, layer in _take_layers(model, adapter).items():
            parts[path].append(_low_rank(index, layer))
    for path, experts in list(model.named_modules()):
        if isinstance(experts, SwitchGLU | SwitchMLP):
            _adapt_experts(model, path, experts, parts, rows)
    modules = dict(model.named_modules())
    _replace(model, {path: _adapted(modules[path], parts[path], rows) for path in parts})
    return rows


def must_be_merged(adapter: Adapter) -> bool:
    """Whether an adapter must be merged into the model, because it is more than products of two matrices beside the
    model's own: DoRA, or full weights. False for settings that cannot be read, which loading refuses."""
    try:
        return _kind(adapter) != "lora"
    except (OSError, ValueError, AttributeError):
        return False


def merged_adapter(adapters: Sequence[Adapter]) -> Adapter | None:
    """The adapter that is merged into the model for all requests: the only one given, if it cannot differ by request.
    Else None."""
    return adapters[0] if len(adapters) == 1 and must_be_merged(adapters[0]) else None


def adapter_tensors(adapter: Adapter) -> list[TensorHeader]:
    """The headers of an adapter's own tensors; empty if there is no file."""
    path = adapter.path / _weights_file(adapter)
    headers = read_headers(path) if path.is_file() else {}
    return [header for name, header in headers.items() if not name.endswith(BASE_LAYER)]


def _weights_file(adapter: Adapter) -> str:
    """mlx-lm's, unless there is only PEFT's."""
    is_peft = not (adapter.path / WEIGHTS_FILE).is_file() and (adapter.path / PEFT_WEIGHTS).is_file()
    return PEFT_WEIGHTS if is_peft else WEIGHTS_FILE


def _kind(adapter: Adapter) -> str:
    """The adapter's type as mlx-lm names it: lora, dora or full."""
    settings = json.loads((adapter.path / SETTINGS_FILE).read_text(encoding="utf-8"))
    return str(settings.get("fine_tune_type", "lora"))


def _take_layers(model: Any, adapter: Adapter) -> dict[str, nn.Module]:
    """The layers that mlx-lm makes for an adapter, by path. The model is left as it was."""
    if must_be_merged(adapter) and _kind(adapter) == "full":
        raise _refusal(adapter, "replaces weights of the model")
    before = dict(model.named_modules())
    apply_adapter(model, adapter)
    changed = {path: layer for path, layer in model.named_modules() if before.get(path, layer) is not layer}
    _replace(model, {path: before[path] for path in changed})
    for path, layer in changed.items():
        owner = before.get(path.rpartition(".")[0])
        is_known = isinstance(layer, LoRALinear | LoRAEmbedding) or (
            isinstance(layer, LoRASwitchLinear) and isinstance(owner, SwitchGLU | SwitchMLP)
        )
        if not is_known:
            raise _refusal(adapter, f"makes {path} a {type(layer).__name__}")
    return changed


def _refusal(adapter: Adapter, what: str) -> ModelLoadError:
    remedy = "put it into the model with `mlx_lm.fuse`, and serve the result"
    if must_be_merged(adapter):
        remedy = f"serve the model with this adapter alone: --adapter {adapter.folder} and no other"
    return ModelLoadError(f"The adapter {adapter.name} {what}, which cannot differ by request; {remedy}.")


def _low_rank(adapter: int, layer: Any) -> LowRank:
    """Converts a layer of mlx-lm, which stores both matrices of experts transposed."""
    lora_b = (layer.scale * layer.lora_b).astype(layer.lora_b.dtype)
    if isinstance(layer, LoRASwitchLinear):
        return LowRank(adapter, layer.lora_a.swapaxes(-1, -2), lora_b.swapaxes(-1, -2))
    return LowRank(adapter, layer.lora_a, lora_b)


def _adapt_experts(
    model: Any, path: str, experts: nn.Module, parts: dict[str, list[LowRank]], rows: AdapterRows
) -> None:
    """Moves the `parts` for a layer of experts, if there are any, into that layer. Then all of its products must decode
    the indices of a mixed batch."""
    kinds = SwitchLinear | QuantizedSwitchLinear
    products = {name: child for name, child in experts.children().items() if isinstance(child, kinds)}
    own = {name: parts.pop(f"{path}.{name}", []) for name in products}
    if any(own.values()):
        route = ExpertRoute(rows)
        experts.update_modules({name: AdaptedExpertLinear(child, own[name], route) for name, child in products.items()})
        adapters = {part.adapter for some in own.values() for part in some}
        _replace(model, {path: AdaptedExperts(experts, adapters, route)})


def _adapted(base: nn.Module, parts: Sequence[LowRank], rows: AdapterRows) -> nn.Module:
    kind = AdaptedEmbedding if isinstance(base, nn.Embedding | nn.QuantizedEmbedding) else AdaptedLinear
    return kind(base, parts, rows)


def _replace(model: Any, modules: dict[str, nn.Module]) -> None:
    if modules:
        model.update_modules(tree_unflatten(list(modules.items())))
