"""What is known of the kernels on this machine: the variants that `mlx-serve bench kernels` found fastest, kept in a
file, and whether their numbers are right, which each GPU must prove on small pools before they are used.

An entry of the file holds for one chip and one attention shape, the whole file for one version of the decode kernels.
It changes speed only: whatever is wrong with it, the backends take the default variants.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server import config
from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention import LayerSpec
from mlx_server.runtime.kernels.cpu.rows import exact_rows
from mlx_server.runtime.kernels.gpu.kernels import DecodeKernels, PagedKernels, Scores, read_text
from mlx_server.runtime.kernels.gpu.plan import (
    DTYPES,
    DecodeIndices,
    DecodeShape,
    Gather,
    KernelVariant,
    Seen,
    check_variant,
    default_variant,
    make_work,
    unsupported_reason,
)
from mlx_server.runtime.kernels.gpu.pool import GpuPool
from mlx_server.runtime.kernels.gpu.rows import attend_rows, read_rows

logger = logging.getLogger(__name__)

_VERSION = 1
_KERNEL_FILES = ("paged_decode.msl", "paged_reduce.msl")
_SIZES = ("num_query_heads", "num_kv_heads", "key_dim", "value_dim")
_FAULTS = (ValueError, TypeError, LookupError, AttributeError)
"""What reading raises for a file that is not ours, or no longer."""


Choices = dict[str, dict[DecodeShape, KernelVariant]]
"""By chip and shape."""


def choices_path() -> Path:
    """The file, in the user's cache folder."""
    return config.home() / "kernels" / "variants.json"


def load_choice() -> Callable[[DecodeShape], KernelVariant]:
    """What GPU backends take as `choose_variant`: the stored choice for this chip, else `default_variant`.

    A file that cannot be read, holds anything but choices that can be launched, or was measured with other
    kernels is ignored as a whole, with one warning.
    """
    path = choices_path()
    try:
        here = _read(path).get(chip_name(), {})
    except (OSError, *_FAULTS) as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning("%s is ignored (%s); `mlx-serve bench kernels` writes it anew.", path, reason)
        here = {}
    return lambda shape: here.get(shape) or default_variant(shape)


def store_choices(variants: Mapping[DecodeShape, KernelVariant]) -> Path:
    """Keeps `variants` for this chip, beside what the file says of other chips and shapes; a file that cannot be
    used is replaced. Others see the old file or the new one. Raises `OSError`."""
    path = choices_path()
    try:
        choices = _read(path)
    except _FAULTS:
        choices = {}
    choices.setdefault(chip_name(), {}).update(variants)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder, path.name)
        whole.write_text(json.dumps(_document(choices), indent=2) + "\n", encoding="utf-8")
        whole.replace(path)
    return path


def chip_name() -> str:
    """The chip of MLX's default device, as its maker calls it."""
    return str(mx.device_info().get("device_name", platform.processor()))


def _read(path: Path) -> Choices:
    """All choices; none if there is no file."""
    choices: Choices = {}
    if not path.exists():
        return choices
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["version"] != _VERSION or document["kernels"] != _kernels_digest():
        raise ValueError("it was measured with other kernels")
    for entry in document["choices"]:
        shape, variant = _parse(entry)
        choices.setdefault(str(entry["chip"]), {})[shape] = variant
    return choices


def _parse(entry: Mapping[str, Any]) -> tuple[DecodeShape, KernelVariant]:
    """Raises one of `_FAULTS` for what no backend could launch."""
    dtypes = {_dtype_name(dtype): dtype for dtype in DTYPES}
    sizes, cut = ({name: _whole(value) for name, value in entry[part].items()} for part in ("shape", "variant"))
    bits, tokens = (None if entry[name] is None else _whole(entry[name]) for name in ("kv_bits", "partition_tokens"))
    shape = DecodeShape(**sizes, dtype=dtypes[entry["dtype"]], bits=bits)
    variant = KernelVariant(**cut, partition_tokens=tokens)
    reason = unsupported_reason(shape)
    if reason is not None:
        raise ValueError(reason)
    check_variant(shape, variant)
    return shape, variant


def _document(choices: Choices) -> dict[str, Any]:
    entries = []
    for chip, variants in choices.items():
        for shape, variant in variants.items():
            sizes = {name: getattr(shape, name) for name in _SIZES}
            cut = dataclasses.asdict(variant)
            tokens = cut.pop("partition_tokens")
            entry = {"chip": chip, "shape": sizes, "dtype": _dtype_name(shape.dtype), "kv_bits": shape.bits}
            entries.append({**entry, "variant": cut, "partition_tokens": tokens})
    return {"version": _VERSION, "kernels": _kernels_digest(), "choices": entries}


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a positive whole number")
    return value


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _kernels_digest() -> str:
    """Another text of the kernels has other best variants."""
    texts = "\0".join(read_text(name) for name in _KERNEL_FILES)
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


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
            rng, places = np.random.default_rng(step), (BLOCK_SIZE, spec.num_kv_heads, 1)
            keys, values = (
                exact_rows(rng, (*places, dim), spec.dtype, spec.bits) for dim in (spec.key_dim, spec.value_dim)
            )
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
    """Why the decode kernel's numbers cannot be trusted here, or None. Raises what MLX raises if it cannot run.

    Compiles and runs it with and without split sequences against MLX's own attention over the same rows.
    """
    contexts = np.array([1, BLOCK_SIZE + 1, 3 * BLOCK_SIZE], np.int32)
    tables = np.arange(12, dtype=np.int32).reshape(3, 4)
    pool, reader = _random_pool(kernels, shape, tables.size), kernels.of_pool(shape.spec)
    queries = exact_rows(np.random.default_rng(1), (3, shape.num_query_heads, 1, shape.key_dim), shape.dtype, None)
    decodes = DecodeKernels(kernels, shape, variant, scores)
    for tokens in (BLOCK_SIZE, 4 * BLOCK_SIZE):
        cut = dataclasses.replace(variant, partition_tokens=tokens)
        indices = DecodeIndices.of(make_work(contexts, None, shape, cut, num_cores=1), mx.array(tables))
        out = decodes.decode(pool, queries, indices, scores.sinks).astype(mx.float32)
        for sequence, context in enumerate(contexts.tolist()):
            rows = tables[sequence, :3] * shape.num_kv_heads + np.arange(shape.num_kv_heads, dtype=np.int32)[:, None]
            gather = Gather.of(Seen(slice(sequence, sequence + 1), rows[None], 0, context, "causal"))
            (found,) = read_rows(reader, pool, gather)
            wanted = attend_rows(queries[sequence : sequence + 1], found, scores)
            error = float(mx.abs(out[sequence] - wanted[0].astype(mx.float32)).max())
            if not error <= _TOLERANCE[shape.dtype]:
                return f"attention over a context of {context} is off by {error:.2g}"
    return None


def _random_pool(kernels: PagedKernels, shape: DecodeShape, num_blocks: int) -> GpuPool:
    rng, dims = np.random.default_rng(0), (shape.key_dim, shape.value_dim)
    if shape.bits is None:
        blocks = num_blocks, shape.num_kv_heads, BLOCK_SIZE
        return GpuPool.of(shape.spec, *(exact_rows(rng, (*blocks, dim), shape.dtype, None) for dim in dims))
    pool, num_tokens = GpuPool.make(shape.spec, num_blocks), num_blocks * BLOCK_SIZE
    keys, values = (exact_rows(rng, (num_tokens, shape.num_kv_heads, 1, dim), shape.dtype, shape.bits) for dim in dims)
    kernels.of_pool(shape.spec).write(pool, keys, values, mx.arange(num_tokens, dtype=mx.int32))
    return pool
