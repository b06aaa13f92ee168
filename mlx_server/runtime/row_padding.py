"""How many rows a step is computed in: as many as it has tokens, or a few more where that takes less time.

OpenBLAS computes a product of 9 to 15 rows with a weight in up to 1.9 times the time of one of 16 (BENCHMARKS.md).
So rows of padding go along behind a step's own: each is a token that no request owns, stores nothing and attends to
nothing.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

_TILE = 16
_FEWEST = 8
"""So many rows beyond whole tiles take longer than another tile, with all that a model does besides products."""

_BY_ROW = (nn.QuantizedLinear, nn.QuantizedEmbedding, nn.QQLinear, SwitchLinear, QuantizedSwitchLinear)
"""Layers that take time for each row, on a CPU: those that unpack weights, and those that pick an expert."""


def padded(num_rows: int) -> int:
    """The rows to compute in place of `num_rows`."""
    rest = num_rows % _TILE
    return num_rows if rest < _FEWEST else num_rows - rest + _TILE


def gains_by_padding(model: Any) -> bool:
    """Whether all products of `model` are of whole float weights."""
    return not any(isinstance(module, _BY_ROW) for module in model.modules())
