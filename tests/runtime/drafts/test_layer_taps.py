"""What a model's layers return, read without a change of its code."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_server.runtime.drafts.layer_taps import LayerTaps


class _Adds(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def __call__(self, x: mx.array, gives_more: bool = False) -> mx.array | tuple[mx.array, None]:
        return (x + self.number, None) if gives_more else x + self.number


def test_rows_of_groups_come_in_the_order_of_their_calls() -> None:
    """Also of layers that return something besides, and only between `open` and `take`."""
    layers = [_Adds(0.0), _Adds(10.0)]
    taps = LayerTaps(layers)

    def call(*groups: mx.array) -> None:
        for group in groups:
            layers[0](group)
            layers[1](group, gives_more=True)

    first, second = mx.array([[[1.0]], [[2.0]]]), mx.array([[[3.0], [4.0], [5.0]]])
    call(second)
    taps.open()
    call(first, second)
    assert taps.take([0, 2, 4]).tolist() == [[1.0, 11.0], [3.0, 13.0], [5.0, 15.0]]
    call(first)
    taps.open()
    call(second)
    assert taps.take([0, 1, 2]).tolist() == [[3.0, 13.0], [4.0, 14.0], [5.0, 15.0]]
    taps.remove()
    assert all(type(layer) is _Adds and "_tap" not in vars(layer) for layer in layers)
