"""Which adapter each row of a forward pass uses, as every layer that adapters change reads it.

The adapters of a layer lie side by side, each of its rank in columns of its own:

    columns of x lora_a      |-- first, rank 8 --|-- second, rank 4 --|
    a row of the first       | its products      | zeros              |
    a row of none            | zeros             | zeros              |

so that a mixed batch costs two products a layer, whatever rows it has and whatever ranks there are, and a row's
result is what its own adapter alone would give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlx_server.runtime.attention import IntArray
from mlx_server.runtime.cache_views import UnpageableError
from mlx_server.runtime.row_groups import RowGroup

NONE = -1
"""In place of an adapter's index: the model itself."""


@dataclass(frozen=True)
class ColumnLayout:
    """The adapters of one layer, by index and ascending, and the rank of each. Layers have equal ones."""

    adapters: tuple[int, ...]
    ranks: tuple[int, ...]

    def span(self, owners: IntArray) -> slice | None:
        """The columns from the first to the last adapter among `owners`; None if none of them is here."""
        used = [place for place, adapter in enumerate(self.adapters) if (owners == adapter).any()]
        return slice(sum(self.ranks[: used[0]]), sum(self.ranks[: used[-1] + 1])) if used else None

    def column_owners(self) -> IntArray:
        """The adapter of each column."""
        return np.repeat(np.array(self.adapters, dtype=np.int32), self.ranks)


@dataclass(frozen=True, slots=True)
class Columns:
    """What a batch needs of a layer's columns: those at `span`, and of them each row its own adapter's, which
    `owners` are; None if all rows have one adapter, so that all are everybody's."""

    span: slice
    owners: mx.array | None

    def keep_own(self, products: mx.array, row_owners: mx.array | None) -> mx.array:
        """`products` `[..., columns]` with zeros for what is another's; `row_owners` `[..., 1]`."""
        return products if self.owners is None else mx.where(self.owners == row_owners, products, 0)


@dataclass(eq=False)
class RowScope:
    """A batch `[R, length, ...]`: `owners` `[R]` are the requests' adapters."""

    owners: IntArray
    length: int = 1
    _columns: dict[ColumnLayout, Columns | None] = field(default_factory=dict)
    _row_owners: dict[int, mx.array] = field(default_factory=dict)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all have one adapter."""
        return bool((self.owners == self.owners[0]).all())

    def columns(self, layout: ColumnLayout) -> Columns | None:
        """What a layer has to compute; None if no row of the batch has an adapter there. Made once a layout."""
        if layout not in self._columns:
            span = layout.span(self.owners)
            owners = None if span is None or self.is_uniform else mx.array(layout.column_owners()[span])
            self._columns[layout] = None if span is None else Columns(span, owners)
        return self._columns[layout]

    def row_owners(self, num_rows: int) -> mx.array:
        """The adapter of each of a layer's rows, which are the batch's requests or its tokens: `[num_rows]`. Raises
        `UnpageableError` for any others."""
        if num_rows not in self._row_owners:
            num_requests = len(self.owners)
            if num_rows not in (num_requests, num_requests * self.length):
                raise UnpageableError(f"adapters for {num_rows} rows, of a batch {num_requests} x {self.length}")
            self._row_owners[num_rows] = mx.array(np.repeat(self.owners, num_rows // num_requests))
        return self._row_owners[num_rows]

    def select(self, rows: Sequence[int]) -> RowScope:
        """Of these rows of the batch, counted over all of its tokens."""
        return RowScope(np.repeat(self.owners, self.length)[list(rows)])


class AdapterRows:
    """The adapters of one model by `names`, and which of them the rows have that its layers compute now.

    Shared by a model's layers and by what calls them. Between forward passes nobody has an adapter: the model is then
    the one that the adapters were made for.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._scope: RowScope | None = None  # None if nobody in the batch has an adapter
        self._groups: dict[tuple[int, int], RowScope] = {}

    def columns(self, layout: ColumnLayout) -> Columns | None:
        """What a layer of this layout has to compute; None for nothing."""
        return None if self._scope is None else self._scope.columns(layout)

    def keep_own(self, columns: Columns, products: mx.array) -> mx.array:
        """`products` `[rows, ..., columns]` with zeros for what is another's. Raises `UnpageableError` if its rows are
        not those of the batch."""
        if columns.owners is None:
            return products
        num_rows = products.shape[0]
        return columns.keep_own(products, self.owners(num_rows).reshape(num_rows, *[1] * (products.ndim - 1)))

    def owners(self, num_rows: int) -> mx.array:
        """The adapter of each of a layer's rows, `[num_rows]`, in a batch that has any. Raises `UnpageableError` if
        they are not those of the batch."""
        assert self._scope is not None, "nobody in the batch has an adapter"
        return self._scope.row_owners(num_rows)

    @contextmanager
    def step(self, owners: IntArray | None) -> Iterator[None]:
        """A forward pass over a ragged batch whose rows have these adapters, `[T]`; None if nobody has one."""
        self._scope = None if owners is None or (owners == NONE).all() else RowScope(owners)
        self._groups.clear()
        try:
            yield
        finally:
            self._scope = None

    @contextmanager
    def group(self, group: RowGroup) -> Iterator[None]:
        """Within a step: layers compute this group of its rows."""
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
        """Within a step or group: what is computed from here to its end are these rows of its tokens."""
        if self._scope is not None:
            self._scope = self._scope.select(rows)
