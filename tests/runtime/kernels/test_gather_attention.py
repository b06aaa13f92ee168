"""Attention over gathered rows in pieces: what it gives, and what it never has in memory at once."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.runtime.kernels.gpu.kernels import Scores
from mlx_server.runtime.kernels.gpu.plan import Seen
from mlx_server.runtime.kernels.gpu.rows import GatheredRows, attend_rows

NUM_HEADS, NUM_KV_HEADS, LENGTH, NUM_KEYS = 4, 2, 100, 150


def random(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def attend(dim: int, mask: mx.array | str, scores: Scores, value_dim: int | None = None) -> mx.array:
    """Over rows of which the first 5 and the last 15 are not wanted."""
    sizes = (dim, value_dim or dim)
    keys, values = (random(seed, 1, NUM_KV_HEADS, NUM_KEYS + 20, size) for seed, size in enumerate(sizes, 1))
    seen = Seen(slice(0, LENGTH), np.zeros((1, NUM_KV_HEADS, 1), np.int32), 5, 5 + NUM_KEYS, mask)
    return attend_rows(random(0, 1, NUM_HEADS, LENGTH, dim), GatheredRows(seen, keys, values), scores)


def window_mask() -> mx.array:
    keys, queries = np.arange(NUM_KEYS), np.arange(NUM_KEYS - LENGTH, NUM_KEYS)[:, None]
    return mx.array(((keys <= queries) & (keys > queries - 40))[None, None])


@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), [(256, 256), (512, 512), (96, 64)])
def test_pieces_give_what_the_whole_gives(
    mask: str, has_sinks: bool, dim: int, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = Scores(dim**-0.5, random(3, NUM_HEADS) if has_sinks else None)
    seen: mx.array | str = window_mask() if mask == "window" else mask
    whole = attend(dim, seen, scores, value_dim)
    pieces = []
    concatenate = mx.concatenate

    def spy(parts: list[mx.array], axis: int) -> mx.array:
        pieces.append([part.shape[2] for part in parts])
        return concatenate(parts, axis=axis)

    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "0")
    with monkeypatch.context() as patch:
        patch.setattr(mx, "concatenate", spy)
        cut = attend(dim, seen, scores, value_dim)
    assert [32, 32, 32, 4] in pieces
    np.testing.assert_allclose(np.array(cut), np.array(whole), atol=2e-6, rtol=0)


def test_heads_that_mlx_has_a_kernel_for_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "0")
    monkeypatch.setattr(mx, "concatenate", None)
    assert attend(128, "causal", Scores(0.1)).shape == (1, NUM_HEADS, LENGTH, 128)
