"""The kernel variants that `mlx-serve bench kernels` found fastest on this machine, stored in a file; and the
self-tests on small pools that kernels must pass on each GPU before they are used.

The file has an entry for each attention shape and is valid for one version of the decode kernels. If it cannot be used,
the backends use the default variants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import IntArray, LayerSpec
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.gpu.choice_files import StoredChoices, digest, dtype_name, whole_number
from mlx_server.runtime.kernels.gpu.kernels import DecodeKernels, PagedKernels, Scores, read_text
from mlx_server.runtime.kernels.gpu.plan import DecodeIndices, Gather, Seen, Work, make_work
from mlx_server.runtime.kernels.gpu.pool import GpuPool
from mlx_server.runtime.kernels.gpu.rows import attend_rows, read_rows
from mlx_server.runtime.kernels.gpu.shared_work import SharedWork, make_shared_work
from mlx_server.runtime.kernels.gpu.variants import (
    DTYPES,
    DecodeShape,
    KernelVariant,
    check_variant,
    default_variant,
    unsupported_reason,
)
from mlx_server.runtime.kernels.sharing import Readers, Run
from mlx_server.runtime.kernels.trials import KERNEL_TOLERANCES, exact_kv, exact_rows

_KERNEL_FILES = ("paged_decode.msl", "paged_reduce.msl")
_SIZES = ("num_query_heads", "num_kv_heads", "key_dim", "value_dim")


def load_choice() -> Callable[[DecodeShape], KernelVariant]:
    """Returns the `choose_variant` of a GPU backend: this chip's stored variant for a shape, else `default_variant`."""
    here = _stored().load()
    return lambda shape: here.get(shape) or default_variant(shape)


def store_choices(variants: Mapping[DecodeShape, KernelVariant]) -> Path:
    """Stores `variants` for this chip. Raises `OSError`."""
    return _stored().store(variants)


def _stored() -> StoredChoices[DecodeShape, KernelVariant]:
    kernels = digest(*(read_text(name) for name in _KERNEL_FILES))
    return StoredChoices("variants.json", kernels, _parse, _document, "`mlx-serve bench kernels`")


def _parse(entry: Mapping[str, Any]) -> tuple[DecodeShape, KernelVariant]:
    """The key and value of a stored entry. Raises `ValueError` or another reading error if it cannot be launched."""
    dtypes = {dtype_name(dtype): dtype for dtype in DTYPES}
    sizes, cut = ({name: whole_number(value) for name, value in entry[part].items()} for part in ("shape", "variant"))
    bits = None if entry["kv_bits"] is None else KvBits.of(entry["kv_bits"])
    tokens = None if entry["partition_tokens"] is None else whole_number(entry["partition_tokens"])
    shape = DecodeShape(**sizes, dtype=dtypes[entry["dtype"]], bits=bits)
    variant = KernelVariant(**cut, partition_tokens=tokens)
    reason = unsupported_reason(shape)
    if reason is not None:
        raise ValueError(reason)
    check_variant(shape, variant)
    return shape, variant


def _document(shape: DecodeShape, variant: KernelVariant) -> dict[str, Any]:
    cut = dataclasses.asdict(variant)
    tokens = cut.pop("partition_tokens")
    return {
        "shape": {name: getattr(shape, name) for name in _SIZES},
        "dtype": dtype_name(shape.dtype),
        "kv_bits": None if shape.bits is None else str(shape.bits),
        "variant": cut,
        "partition_tokens": tokens,
    }


_STEPS = 8
_ROUNDING = 1e-3
"""The error allowed after quantising and back, for compilers that divide inexactly. The smallest step of an exact row
is about 8 times as large."""


def write_failure(kernels: PagedKernels, spec: LayerSpec) -> str | None:
    """The reason why K/V cannot be written in place on this GPU, or None.

    Fills one block repeatedly, as if it were freed and taken by another request, reads it back after every write, and
    submits all of this without waiting, so that a write that is lost or in the wrong order makes a reading wrong.
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
            rng, places = np.random.default_rng(step), (BLOCK_SIZE, spec.num_kv_heads, 1)
            keys, values = exact_kv(rng, places, spec)
            writer.write(pool, keys, values, slots)
            (found,) = read_rows(writer, pool, gather)
            mx.async_eval(found.keys, found.values, pool.memory.token)  # type: ignore[no-untyped-call]
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
    """The reason why the decode kernel's results are wrong on this GPU, or None. Raises MLX's error if it cannot run.

    Compares it with MLX's attention over the same rows, with and without split sequences.
    """
    contexts = np.array([1, BLOCK_SIZE + 1, 3 * BLOCK_SIZE], np.int32)
    tables = np.arange(12, dtype=np.int32).reshape(3, 4)
    cuts = (dataclasses.replace(variant, partition_tokens=tokens) for tokens in (BLOCK_SIZE, 4 * BLOCK_SIZE))
    works = [make_work(contexts, None, shape, cut, num_cores=1) for cut in cuts]
    return _failure(kernels, DecodeKernels(kernels, shape, variant, scores), scores, works, tables, tables, contexts)


def shared_failure(kernels: PagedKernels, shape: DecodeShape, variant: KernelVariant, scores: Scores) -> str | None:
    """As `decode_failure`, for the shared kernel: three rows of one request and one row of another. Tests it with a
    shared prefix and partial results, and without both."""
    tables = np.array([[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]], np.int32)
    counts, beyond = np.array([3, 1], np.int32), np.array([22, 12], np.int32)
    decodes = DecodeKernels(kernels, shape, variant, scores, is_shared=True)
    for num_shared in (4, 0):
        contexts = num_shared * BLOCK_SIZE + beyond
        readers = Readers(tables, np.array([0, 3], np.int32), counts, contexts)
        runs = [Run(0, num_shared, np.arange(2))] if num_shared else []
        work = make_shared_work(readers, runs, None, shape, variant, num_cores=1)
        row_contexts = np.append(contexts[0] - np.arange(3)[::-1], contexts[1])
        failure = _failure(kernels, decodes, scores, [work], tables, tables[[0, 0, 0, 1]], row_contexts)
        if failure is not None:
            return failure
    return None


def _failure(
    kernels: PagedKernels,
    decodes: DecodeKernels,
    scores: Scores,
    works: Sequence[Work | SharedWork],
    tables: IntArray,
    row_tables: IntArray,
    row_contexts: IntArray,
) -> str | None:
    """The first difference between the result of one of `works` and MLX's attention, or None."""
    shape = decodes.shape
    pool, reader = _random_pool(kernels, shape, 12), kernels.of_pool(shape.spec)
    places = len(row_contexts), shape.num_query_heads, 1, shape.key_dim
    queries = exact_rows(np.random.default_rng(1), places, shape.dtype, None)
    for work in works:
        indices = DecodeIndices.of(work, mx.array(tables))
        out = decodes.decode(pool, queries, indices, scores.sinks).astype(mx.float32)
        for row, context in enumerate(row_contexts.tolist()):
            blocks = row_tables[row, : -(-context // BLOCK_SIZE)]
            rows = blocks * shape.num_kv_heads + np.arange(shape.num_kv_heads, dtype=np.int32)[:, None]
            (found,) = read_rows(reader, pool, Gather.of(Seen(slice(row, row + 1), rows[None], 0, context, "causal")))
            wanted = attend_rows(queries[row : row + 1], found, scores)
            error = float(mx.abs(out[row] - wanted[0].astype(mx.float32)).max())
            if not error <= KERNEL_TOLERANCES[shape.dtype]:
                return f"attention over a context of {context} is off by {error:.2g}"
    return None


def _random_pool(kernels: PagedKernels, shape: DecodeShape, num_blocks: int) -> GpuPool:
    rng, dims = np.random.default_rng(0), (shape.key_dim, shape.value_dim)
    if shape.bits is None:
        blocks = num_blocks, shape.num_kv_heads, BLOCK_SIZE
        return GpuPool.of(shape.spec, *(exact_rows(rng, (*blocks, dim), shape.dtype, None) for dim in dims))
    pool, num_tokens = GpuPool.make(shape.spec, num_blocks), num_blocks * BLOCK_SIZE
    keys, values = exact_kv(rng, (num_tokens, shape.num_kv_heads, 1), shape.spec)
    kernels.of_pool(shape.spec).write(pool, keys, values, mx.arange(num_tokens, dtype=mx.int32))
    return pool
