"""What a GPU must prove before its kernels are used: small pools, known numbers, nothing waited for in between."""

from __future__ import annotations

import dataclasses
import math

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention import LayerSpec
from mlx_server.runtime.kernels.exact_rows import exact_rows
from mlx_server.runtime.kernels.gpu_gather import attend_rows, read_rows
from mlx_server.runtime.kernels.gpu_kernels import DecodeKernels, PagedKernels, Scores, score_factors
from mlx_server.runtime.kernels.gpu_plan import DecodeIndices, Gather, Seen, make_work
from mlx_server.runtime.kernels.gpu_pool import GpuPool
from mlx_server.runtime.kernels.gpu_variant import DecodeShape, KernelVariant

_STEPS = 8
_TOLERANCE = {mx.float32: 5e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Wide: MLX may round float32 products to TF32, and what this looks for is kernels compiled wrongly."""

_ROUNDING = 1e-3
"""Of quantising and back, by compilers that divide inexactly; the smallest step of an exact row is 8 times that."""


def write_failure(kernels: PagedKernels, spec: LayerSpec) -> str | None:
    """Why in-place writes cannot be trusted here, or None.

    Fills one block again and again, as if it were freed and taken by another request, reads it back after every
    write, and submits all of that without waiting: a write that is lost, late or early shows in some reading.
    """
    if spec.key_dim % 4 or spec.value_dim % 4:  # rows that can be quantised always can
        return f"rows of {spec.key_dim} and {spec.value_dim} elements cannot be moved in fours"
    pool, writer = GpuPool.make(spec, 2), kernels.of_pool(spec)
    pool.check_moves()
    slots = mx.arange(BLOCK_SIZE, 2 * BLOCK_SIZE, dtype=mx.int32)
    rows = np.arange(spec.num_kv_heads, 2 * spec.num_kv_heads, dtype=np.int32)[None, :, None]
    gather = Gather.of(Seen(slice(0, BLOCK_SIZE), rows, 0, BLOCK_SIZE, "causal"))
    readings = []
    try:
        for step in range(_STEPS):
            keys, values = (_pattern(spec, dim, step) for dim in (spec.key_dim, spec.value_dim))
            writer.write(pool, keys, values, slots)
            (found,) = read_rows(writer, pool, gather)
            mx.async_eval(found.keys, found.values, pool.token)  # type: ignore[no-untyped-call]
            readings.append(((keys, values), (found.keys, found.values)))
        for step, (written, seen) in enumerate(readings):
            for name, wrote, read in zip(("keys", "values"), written, seen):
                if not mx.allclose(wrote[:, :, 0].swapaxes(0, 1), read[0], rtol=0, atol=_ROUNDING).item():
                    return f"{name} of write {step} of {_STEPS} were not read back"
        if mx.any(pool.keys[0] != 0).item() or mx.any(pool.values[0] != 0).item():
            return "a block that nobody wrote has changed"
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "a pool was copied" if pool.check_moves() else None


def decode_failure(kernels: PagedKernels, shape: DecodeShape, variant: KernelVariant, scores: Scores) -> str | None:
    """Why the decode kernel's numbers cannot be trusted here, or None. Raises what MLX raises if it cannot run.

    Compiles and runs it with and without split sequences against MLX's own attention over the same rows.
    """
    contexts = np.array([1, BLOCK_SIZE + 1, 3 * BLOCK_SIZE], np.int32)
    tables = np.arange(12, dtype=np.int32).reshape(3, 4)
    pool, reader = _random_pool(kernels, shape, tables.size), kernels.of_pool(shape.spec)
    queries = _random(10, (3, shape.num_query_heads, 1, shape.key_dim), shape.dtype)
    decodes, factors = DecodeKernels(kernels, shape, variant, scores), score_factors(kernels, scores)
    for tokens in (BLOCK_SIZE, 4 * BLOCK_SIZE):
        cut = dataclasses.replace(variant, partition_tokens=tokens)
        indices = DecodeIndices.of(make_work(contexts, None, shape, cut, num_cores=1), mx.array(tables))
        out = decodes.decode(pool, queries, indices, factors, scores.sinks).astype(mx.float32)
        for sequence, context in enumerate(contexts.tolist()):
            rows = tables[sequence, :3] * shape.num_kv_heads + np.arange(shape.num_kv_heads, dtype=np.int32)[:, None]
            gather = Gather.of(Seen(slice(sequence, sequence + 1), rows[None], 0, context, "causal"))
            (found,) = read_rows(reader, pool, gather)
            wanted = attend_rows(queries[sequence : sequence + 1], found, scores)
            error = float(mx.abs(out[sequence] - wanted[0].astype(mx.float32)).max())
            if not error <= _TOLERANCE[shape.dtype]:
                return f"attention over a context of {context} is off by {error:.2g}"
    return None


def _pattern(spec: LayerSpec, dim: int, step: int) -> mx.array:
    """Rows `[32, num_kv_heads, 1, dim]` that come back as they are from every pool, and differ at every step."""
    rows = (BLOCK_SIZE, spec.num_kv_heads, 1, dim)
    if spec.bits is not None:
        return exact_rows(np.random.default_rng(step), rows, spec.dtype, spec.bits)
    numbers = np.arange(math.prod(rows)) * 7 + step + 1
    return mx.array((numbers % 251).astype(np.float32).reshape(rows)).astype(spec.dtype)


def _random_pool(kernels: PagedKernels, shape: DecodeShape, num_blocks: int) -> GpuPool:
    if shape.bits is not None:
        pool = GpuPool.make(shape.spec, num_blocks)
        rng, rows = np.random.default_rng(0), (num_blocks * BLOCK_SIZE, shape.num_kv_heads, 1)
        keys, values = (
            exact_rows(rng, (*rows, dim), shape.dtype, shape.bits) for dim in (shape.key_dim, shape.value_dim)
        )
        kernels.of_pool(shape.spec).write(pool, keys, values, mx.arange(num_blocks * BLOCK_SIZE, dtype=mx.int32))
        return pool
    rows = num_blocks, shape.num_kv_heads, BLOCK_SIZE
    keys, values = (
        _random(seed, (*rows, dim), shape.dtype) for seed, dim in ((11, shape.key_dim), (12, shape.value_dim))
    )
    return GpuPool.of(shape.spec, keys, values)


def _random(seed: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
