"""Layers with several LoRA adapters at once: what is the model's is computed once for all rows of a batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_server.runtime.adapter_rows import AdapterRows, ColumnLayout


class LowRank(NamedTuple):
    """What one adapter, by its index, adds to a layer: `x lora_a lora_b`, its scale in `lora_b`; `[inputs, rank]` and
    `[rank, outputs]`, of experts one such pair each."""

    adapter: int
    lora_a: mx.array
    lora_b: mx.array


def layout_of(parts: Sequence[LowRank]) -> ColumnLayout:
    return ColumnLayout(tuple(part.adapter for part in parts), tuple(part.lora_b.shape[-2] for part in parts))


class _AdaptedLayer(nn.Module):  # type: ignore[misc]
    """`lora_a` is `[columns, inputs]` and `lora_b` `[columns, outputs]`, of all adapters."""

    def __init__(self, parts: Sequence[LowRank], rows: AdapterRows) -> None:
        super().__init__()
        self.lora_a = mx.concatenate([part.lora_a.T for part in parts])
        self.lora_b = mx.concatenate([part.lora_b for part in parts])
        self._layout = layout_of(parts)
        self._rows = rows


class AdaptedLinear(_AdaptedLayer):
    """A linear layer, quantised or not."""

    def __init__(self, linear: nn.Module, parts: Sequence[LowRank], rows: AdapterRows) -> None:
        super().__init__(parts, rows)
        self.linear = linear

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        columns = self._rows.columns(self._layout)
        if columns is None:
            return y
        z = self._rows.keep_own(columns, x @ self.lora_a[columns.span].T) @ self.lora_b[columns.span]
        return y + z.astype(x.dtype)


class AdaptedEmbedding(_AdaptedLayer):
    """An embedding, which may be the model's head as well."""

    def __init__(self, embedding: nn.Module, parts: Sequence[LowRank], rows: AdapterRows) -> None:
        super().__init__(parts, rows)
        self.embedding = embedding

    def __call__(self, ids: mx.array) -> mx.array:
        y: mx.array = self.embedding(ids)
        columns = self._rows.columns(self._layout)
        if columns is None:
            return y
        z = self._rows.keep_own(columns, self.lora_a[columns.span].T[ids]) @ self.lora_b[columns.span]
        return y + z.astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = self.embedding.as_linear(x)
        columns = self._rows.columns(self._layout)
        if columns is None:
            return y
        z = self._rows.keep_own(columns, x @ self.lora_b[columns.span].T) @ self.lora_a[columns.span]
        return y + z.astype(x.dtype)


class ExpertRoute:
    """How the experts of one layer are told whose rows they get: rows come to them in another order, with the index
    of an expert each. In a mixed batch that index says the adapter, too: `expert * num_owners + owner`."""

    def __init__(self, rows: AdapterRows) -> None:
        self.rows = rows
        self.is_mixed = False
        self._num_owners = len(rows.names) + 1

    def mix(self, indices: mx.array, owners: mx.array) -> mx.array:
        """`indices` `[rows, ..., k]` of experts with the owners `[rows]` in them."""
        return indices * self._num_owners + (owners + 1).reshape(-1, *[1] * (indices.ndim - 1)).astype(indices.dtype)

    def experts(self, indices: mx.array) -> mx.array:
        return indices // self._num_owners if self.is_mixed else indices

    def owners(self, indices: mx.array) -> mx.array | None:
        """Whose each row is; None in a batch of one adapter."""
        return (indices % self._num_owners).astype(mx.int32) - 1 if self.is_mixed else None


class AdaptedExperts(nn.Module):  # type: ignore[misc]
    """A layer of experts, whose products are `AdaptedExpertLinear`s. `adapters` are those of any of them."""

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
    columns, outputs]`, of all adapters; without any, there are only experts to be told."""

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
