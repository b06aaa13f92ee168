"""How many bytes one decode attention must move, and how many a variant of the kernel moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.kernels.gpu_plan import make_work
from mlx_server.runtime.kernels.gpu_variant import DecodeShape, KernelVariant


@dataclass(frozen=True, slots=True)
class DecodeBytes:
    """Bytes of one layer's decode attention.

    required  each visible K and V row once, queries in, results out: no kernel can move less
    moved     what this variant's loads and stores add up to, caches not counted
    """

    required: int
    moved: int


def decode_bytes(
    shape: DecodeShape,
    context_lens: Sequence[int],
    variant: KernelVariant,
    *,
    num_cores: int,
    window: int | None = None,
) -> DecodeBytes:
    """Counts for one decode of `len(context_lens)` sequences on a GPU of `num_cores`."""
    contexts = np.asarray(context_lens, np.int32)
    work = make_work(contexts, window, shape, variant, num_cores)
    tokens = int((work.items[:, 2] - work.items[:, 1]).sum())
    blocks = int((-(-work.items[:, 2] // BLOCK_SIZE) - work.items[:, 1] // BLOCK_SIZE).sum())
    rows = tokens * shape.spec.token_bytes
    queries = shape.num_query_heads * shape.key_dim * shape.dtype.size
    results = shape.num_query_heads * shape.value_dim * shape.dtype.size
    required = rows + len(contexts) * (queries + results)

    num_items = len(work.items)
    reads = variant.row_reads(shape)
    indices = 4 * shape.num_kv_heads * reads * (blocks + 4 * num_items)
    stats = 2 * 4 * num_items * shape.num_query_heads
    moved = rows * reads + num_items * queries * variant.streams(shape) + indices + stats + len(contexts) * results
    if work.is_split:
        partial = num_items * shape.num_query_heads * shape.value_dim * mx.float32.size
        moved += 2 * partial + stats
    return DecodeBytes(required=required, moved=moved)
