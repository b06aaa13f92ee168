"""Small worlds for the GPU kernels: pools with known rows and NaN elsewhere, and the answer in float64."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from emulator.kernel import Emulator
from emulator.toolchain import Toolchain
from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import LayerSpec, StepPlan
from mlx_server.runtime.cache.row_pool import KV_GROUP_SIZE, side_bits
from mlx_server.runtime.kernels.gpu.backend import PRELUDE, CudaBackend, GpuBackend, MetalBackend
from mlx_server.runtime.kernels.gpu.kernels import MakeKernel, read_text
from mlx_server.runtime.kernels.gpu.pool import GpuPool, host_view
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant, default_variant

TOLERANCE = {mx.float32: 3e-6, mx.float16: 1.5e-3, mx.bfloat16: 1.2e-2}
NO_BLOCK = 2**31 - 1


def gpu() -> str | None:
    """The GPU that MLX computes on, `metal` or `cuda`; None if the emulator runs the kernels."""
    if mx.default_device() == mx.cpu:
        return None
    return "cuda" if mx.cuda.is_available() else "metal"


@functools.cache
def toolchain() -> Toolchain:
    """The compiler, with the builds of all workers of this run. Skips the test if the emulator cannot run."""
    if sys.platform != "linux" or gpu() is not None:
        pytest.skip("the kernel emulator needs Linux and MLX on the CPU")
    try:
        return Toolchain(Path(os.environ["EMULATOR_BUILDS"]))
    except LookupError as error:
        pytest.skip(str(error))


def kernel_maker(seed: int = 0) -> MakeKernel:
    """Makes kernels for the GPU of this machine, or for the emulator. CUDA always gets the prelude."""
    if gpu() is None:
        return Emulator(toolchain(), seed=seed).metal_kernel
    if gpu() == "metal":
        return mx.fast.metal_kernel
    return lambda **definition: mx.fast.cuda_kernel(**{**definition, "header": read_text(PRELUDE)})


def make_backend(
    seed: int = 0, num_cores: int = 4, choose_variant: Callable[[DecodeShape], KernelVariant] = default_variant
) -> GpuBackend:
    kind = CudaBackend if gpu() == "cuda" else MetalBackend
    return kind(kernel_maker(seed), num_cores=num_cores, choose_variant=choose_variant)


@dataclass(frozen=True, slots=True)
class DecodeWorld:
    """Attention of the last tokens of several sequences whose K/V are all in the pool. `keys` and `values` are the
    pool's rows in float64."""

    shape: DecodeShape
    pool: GpuPool
    keys: np.ndarray
    values: np.ndarray
    step: StepPlan
    queries: mx.array
    sinks: mx.array


def decode_world(
    backend: GpuBackend,
    shape: DecodeShape,
    contexts: Sequence[int],
    seed: int = 0,
    *,
    counts: Sequence[int] = (),
    num_shared: Sequence[int] = (),
) -> DecodeWorld:
    """A world with blocks in random order, NaN in every slot that no sequence owns, and invalid block ids after the end
    of a table. Each sequence attends from its last token, or its last `counts` tokens, and shares its first
    `num_shared` blocks with the sequence before it."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(contexts, np.int32)
    sizes = -(-lengths // BLOCK_SIZE)
    num_blocks = int(sizes.sum()) + 3
    pool = backend.make_pool(shape.spec, num_blocks)
    tables = np.full((len(lengths), max(1, sizes.max())), NO_BLOCK, np.int32)
    free = rng.permutation(num_blocks).astype(np.int32)
    is_owned = np.zeros((num_blocks, BLOCK_SIZE), bool)
    for index, (table, length, size) in enumerate(zip(tables, lengths, sizes)):
        table[:size], free = free[:size], free[size:]
        if num_shared and index:
            table[: num_shared[index]] = tables[index - 1, : num_shared[index]]
        slots = np.arange(length)
        is_owned[table[slots // BLOCK_SIZE], slots % BLOCK_SIZE] = True
    stored = []
    for array, dim, bits in zip((pool.keys, pool.values), (shape.key_dim, shape.value_dim), side_bits(shape.bits)):
        rows = rng.standard_normal((num_blocks, shape.num_kv_heads, BLOCK_SIZE, dim), np.float32)
        rows[~is_owned[:, None].repeat(shape.num_kv_heads, 1)] = np.nan
        stored.append(_fill(array, _typed(rows, shape.dtype), bits))
    counts = counts or [1] * len(lengths)
    spans = [np.arange(length - count, length) for length, count in zip(lengths, counts)]
    positions = np.maximum(np.concatenate(spans), 0).astype(np.int32)
    step = StepPlan(
        num_decodes=len(list(itertools.takewhile(lambda count: count == 1, counts))),
        positions=positions,
        slot_mapping=np.zeros(len(positions), np.int64),
        query_starts=np.cumsum([0, *counts], dtype=np.int32),
        context_lens=lengths,
        block_tables=tables,
    )
    queries = rng.standard_normal((len(positions), shape.num_query_heads, 1, shape.key_dim), np.float32)
    sinks = rng.standard_normal(shape.num_query_heads, np.float32)
    return DecodeWorld(shape, pool, *stored, step, _typed(queries, shape.dtype), _typed(sinks, shape.dtype))


def _fill(pool: mx.array, rows: mx.array, bits: int | None) -> np.ndarray:
    """Writes rows `[num_blocks, num_kv_heads, 32, dim]` into a pool of K or V; returns its content in float64."""
    if bits is None:
        host_view(pool)[...] = host_view(rows)
        return _float64(rows)
    packed, scales, biases = quantised(rows, bits)
    host_view(pool)[...] = host_view(runs_of(packed, scales, biases))
    parts = (part.astype(mx.float32) for part in (scales, biases))
    return _float64(mx.dequantize(packed, *parts, group_size=KV_GROUP_SIZE, bits=bits).astype(rows.dtype))


def quantised(rows: mx.array, bits: int) -> list[mx.array]:
    """MLX's codes, scales and biases of rows, with NaN scales for NaN rows."""
    parts = mx.quantize(rows, group_size=KV_GROUP_SIZE, bits=bits)
    is_nan = mx.isnan(rows[..., :1])
    return [parts[0], *(mx.where(is_nan, mx.array(mx.nan, part.dtype), part) for part in parts[1:])]


def runs_of(packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """The words of each block and head: the codes of 32 rows, then their scales, then their biases."""
    runs = [mx.contiguous(part.reshape(*part.shape[:2], -1)).view(mx.uint32) for part in (packed, scales, biases)]
    joined = mx.concatenate(runs, axis=-1)
    mx.eval(joined)
    return joined


def check_decode(
    backend: GpuBackend,
    world: DecodeWorld,
    *,
    window: int | None = None,
    has_sinks: bool = False,
) -> None:
    """Decodes, and compares with the float64 answer within the dtype's tolerance."""
    scale = world.shape.key_dim**-0.5
    sinks = world.sinks if has_sinks else None
    out = backend.attend(
        world.pool,
        world.queries,
        None,
        None,
        backend.plan(world.step),
        scale=scale,
        window=window,
        sinks=sinks,
    )
    wanted = oracle(world, scale, window, sinks)
    tolerance = TOLERANCE[world.shape.dtype]
    np.testing.assert_allclose(_float64(out), wanted, atol=tolerance, rtol=tolerance)


def oracle(world: DecodeWorld, scale: float, window: int | None, sinks: mx.array | None) -> np.ndarray:
    """Attention in float64, for one row and head at a time."""
    queries, keys, values = _float64(world.queries), world.keys, world.values
    group = world.shape.group_size
    out = np.zeros((*queries.shape[:3], world.shape.value_dim))
    owners = np.repeat(np.arange(world.step.num_requests), np.diff(world.step.query_starts))
    lengths = world.step.context_lens[owners] - world.step.query_starts[1:][owners] + np.arange(len(owners)) + 1
    for row, (sequence, length) in enumerate(zip(owners, lengths)):
        slots = np.arange(0 if window is None else max(0, length - window), length)
        blocks, offsets = world.step.block_tables[sequence][slots // BLOCK_SIZE], slots % BLOCK_SIZE
        for head in range(world.shape.num_query_heads if length else 0):
            logits = keys[blocks, head // group, offsets] @ queries[row, head, 0] * scale
            extra = [] if sinks is None else [_float64(sinks)[head]]
            top = max([*extra, logits.max()])
            weights = np.exp(logits - top)
            total = weights.sum() + sum(np.exp(sink - top) for sink in extra)
            out[row, head, 0] = weights @ values[blocks, head // group, offsets] / total
    return out


def _typed(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    array = mx.array(values).astype(dtype)
    mx.eval(array)
    return array


def _float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The chunk of one request in a step: `length` tokens from position `start`, with K/V in `blocks`."""

    blocks: tuple[int, ...]
    start: int
    length: int = 1


def step_of(chunks: Sequence[Chunk], num_decodes: int) -> StepPlan:
    """The plan of a step of these chunks, decodes first."""
    ends = [chunk.start + chunk.length for chunk in chunks]
    positions = np.concatenate([np.arange(chunk.start, end) for chunk, end in zip(chunks, ends)])
    owners = np.repeat(np.arange(len(chunks)), [chunk.length for chunk in chunks])
    tables = np.zeros((len(chunks), max(len(chunk.blocks) for chunk in chunks)), np.int32)
    for table, chunk in zip(tables, chunks):
        table[: len(chunk.blocks)] = chunk.blocks
    return StepPlan(
        num_decodes=num_decodes,
        positions=positions.astype(np.int32),
        slot_mapping=tables[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=np.concatenate([[0], np.cumsum([chunk.length for chunk in chunks])]).astype(np.int32),
        context_lens=np.array(ends, np.int32),
        block_tables=tables,
    )


def step_rows(seed: int, spec: LayerSpec, num_query_heads: int, num_tokens: int) -> tuple[mx.array, ...]:
    """Random queries `[T, H, 1, key_dim]`, keys and values of a step."""
    rng = np.random.default_rng(seed)
    sizes = (num_query_heads, spec.key_dim), (spec.num_kv_heads, spec.key_dim), (spec.num_kv_heads, spec.value_dim)
    return tuple(
        _typed(rng.standard_normal((num_tokens, heads, 1, dim), np.float32), spec.dtype) for heads, dim in sizes
    )
