"""The emulator is tested by faults planted in the kernels: each must be caught, and for the right reason."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest
from emulator.errors import EmulatorError
from emulator.kernel import Emulator
from emulator.worlds import check_decode, decode_world, toolchain

from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant

WRONG_NUMBERS = "wrong numbers"
VARIANT = KernelVariant(heads_per_simdgroup=2, simdgroups=4, lanes_per_row=16, rows_ahead=2, partition_tokens=64)
"""Two head simdgroups, two streams, two rows side by side, and sequences in parts: every path of the kernel."""

BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in a kernel's body, and decoding must fail with an error of `kind`."""

    name: str
    kind: str
    old: str
    new: str
    kernel: str = "paged_decode"
    dtype: mx.Dtype = mx.float32

    @property
    def needs_flat_build(self) -> bool:
        """Races and alignment are checked in a build of their own."""
        return self.kind == "data race" or "misaligned" in self.name


FAULTS = (
    Fault(
        "no barrier before the merge reads",
        "data race",
        f"{BARRIER}  for (int i = simdgroup",
        "  for (int i = simdgroup",
    ),
    Fault("no barrier before the next head writes", "data race", f"  }}\n{BARRIER}}}", "  }\n}"),
    Fault("a barrier of the simdgroup alone", "data race", "threadgroup_barrier(", "simdgroup_barrier("),
    Fault("a barrier in a divergent branch", "divergence", BARRIER, f"  if (stream == 0) {{\n{BARRIER}  }}\n"),
    Fault(
        "an early return before a barrier",
        "divergence",
        "float query[",
        "if (first + stream * BLOCK >= end) return;\nfloat query[",
    ),
    Fault(
        "a simd operation in a divergent branch",
        "divergence",
        "score += simd_shuffle_xor(score, ushort(hop));",
        "if (turn + u * ROWS + row < high) score += simd_shuffle_xor(score, ushort(hop));",
    ),
    Fault(
        "an unmasked tail",
        WRONG_NUMBERS,
        "turn + u * ROWS + row < high ? fast::exp2(scores[u] - top) : 0.0f",
        "fast::exp2(scores[u] - top)",
    ),
    Fault(
        "one token too many", WRONG_NUMBERS, "min(end - block * BLOCK, BLOCK)", "min(end - block * BLOCK + 1, BLOCK)"
    ),
    Fault("one token too few", WRONG_NUMBERS, "min(end - block * BLOCK, BLOCK)", "min(end - block * BLOCK - 1, BLOCK)"),
    Fault(
        "a window one token too wide",
        WRONG_NUMBERS,
        "max(first - block * BLOCK, 0)",
        "max(first - block * BLOCK - 1, 0)",
    ),
    Fault("a skipped block", WRONG_NUMBERS, "first / BLOCK + stream;", "first / BLOCK + stream + 1;"),
    Fault("streams that overlap", WRONG_NUMBERS, "block += STREAMS", "block += 1"),
    Fault(
        "a partition left out",
        WRONG_NUMBERS,
        "item < end; ++item) {\n  const",
        "item < end - 1; ++item) {\n  const",
        "paged_reduce",
    ),
    Fault("a wrong address space", "compile", "const device P* key_run", "const constant P* key_run"),
    Fault("a pointer without address space", "lint", "const device P* key_run", "const P* key_run"),
    Fault(
        "threadgroup memory as device memory",
        "compile",
        "const int lane",
        "device float* alias = shared_sums;\nconst int lane",
    ),
    Fault(
        "a pointer to threadgroup memory",
        "lint",
        "const int lane",
        "threadgroup float* alias = shared_sums;\nconst int lane",
    ),
    Fault("a write to a const input", "compile", "const int lane", "key_pool[0] = T(0.0f);\nconst int lane"),
    Fault("const cast away by a reader", "lint", "const int lane", "*(device T*)key_pool = T(0.0f);\nconst int lane"),
    Fault(
        "const cast away past the lint",
        "written input",
        "const int lane",
        "*const_cast<device T*>(key_pool) = T(0.0f);\nconst int lane",
    ),
    Fault(
        "an implicit float to bfloat",
        "compile",
        "= OT(total > 0.0f ? sum / total : 0.0f)",
        "= total > 0.0f ? sum / total : 0.0f",
        dtype=mx.bfloat16,
    ),
    Fault("a double literal", "lint", "float sum = 0.0f", "float sum = 0.0"),
    Fault("a constructor that CUDA lacks", "lint", "float score = 0.0f", "float score = float2(0.0f, 0.0f)[0]"),
    Fault(
        "too much threadgroup memory",
        "launch",
        "shared_sums[SIMDGROUPS * VALUE_DIM]",
        "shared_sums[SIMDGROUPS * VALUE_DIM * 40]",
    ),
    Fault("a local array overrun", "undefined behaviour", "tops[j] = LOWEST", "tops[j + 1] = LOWEST"),
    Fault("a block table of the wrong sequence", "out of bounds", "sequence * block_tables_shape[1]", "0"),
    Fault(
        "a hidden pointer without address space",
        "compile",
        "const int lane",
        "typedef T Plain;\nconst Plain* plain = key_pool;\nconst int lane",
    ),
    Fault(
        "a simd operation on bfloat",
        "compile",
        "score += simd_shuffle_xor(score, ushort(hop));",
        "score += float(simd_shuffle_xor(T(score), ushort(hop)));",
        dtype=mx.bfloat16,
    ),
    Fault(
        "a misaligned vector load",
        "undefined behaviour",
        "part) * KEY_WIDTH;",
        "part) * KEY_WIDTH + 1;",
        dtype=mx.float16,
    ),
    Fault(
        "the heads of another simdgroup",
        WRONG_NUMBERS,
        "simdgroup % HEAD_SIMDGROUPS) * HEADS",
        "simdgroup / STREAMS) * HEADS",
    ),
    Fault("a sum that starts undefined", WRONG_NUMBERS, "totals[j] = 0.0f;", ""),
    Fault("a sink forgotten", WRONG_NUMBERS, "totals[j] = 1.0f;", "totals[j] = 0.0f;"),
    Fault("a sink in every partition", WRONG_NUMBERS, " && work_items[item * 4 + 3] == 1", ""),
    Fault("a sink in every stream", WRONG_NUMBERS, "SINKS && stream == 0", "SINKS"),
    Fault("rows merged with the wrong lanes", WRONG_NUMBERS, "int hop = LANES; hop < 32", "int hop = 1; hop < 2"),
    Fault(
        "a result beyond its buffer",
        "out of bounds",
        "(int64_t(sequence) * QUERY_HEADS + head)",
        "(int64_t(sequence + 1) * QUERY_HEADS + head)",
        "paged_reduce",
    ),
    Fault("a result that is not written", WRONG_NUMBERS, "if (head < GROUP) {", "if (head < GROUP - 1) {"),
)

TILE_BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  const int begin"
SHARED_FAULTS = tuple(
    Fault(*words, kernel="paged_shared")
    for words in (
        ("no barrier before a tile is used", "data race", TILE_BARRIER, "  const int begin"),
        ("no barrier before the next tile", "data race", f"    }}\n  }}\n{BARRIER}}}", "    }\n  }\n}"),
        ("a draft that sees the next", WRONG_NUMBERS, "base + at < highs[j]", "base + at <= highs[j]"),
        ("a draft that does not see itself", WRONG_NUMBERS, "base + at < highs[j]", "base + at < highs[j] - 1"),
        ("a draft with the window of another", WRONG_NUMBERS, "base + at >= lows[j] && ", ""),
        ("an unmasked tail", WRONG_NUMBERS, "at < high && base", "base"),
        ("the query of another row", "out of bounds", "int64_t(item_rows[entry])", "int64_t(item_rows[entry + 1])"),
        ("the result of another row", WRONG_NUMBERS, "at / GROUP) * 4 + 1]", "at / GROUP) * 4]"),
        (
            "the head of another row",
            WRONG_NUMBERS,
            "kv_head * GROUP + at % GROUP;\n  const",
            "kv_head * GROUP;\n  const",
        ),
        ("streams that overlap", WRONG_NUMBERS, "turn += streams * ROWS * AHEAD", "turn += ROWS * AHEAD"),
        ("a skipped tile", WRONG_NUMBERS, "first / TILE * TILE;", "first / TILE * TILE + TILE;"),
        ("a tile of the block's beginning", WRONG_NUMBERS, "base % BLOCK + i / KEY_ROW", "i / KEY_ROW"),
        ("values of the block's beginning", WRONG_NUMBERS, "base % BLOCK + i / VALUE_ROW", "i / VALUE_ROW"),
        ("sums of another column", WRONG_NUMBERS, "shared_sums[s * VALUE_DIM", "shared_sums[s / columns * VALUE_DIM"),
        ("a sink in every item", WRONG_NUMBERS, " && work_items[item * 8 + 3] == 1", ""),
        ("a sink in every stream", WRONG_NUMBERS, "SINKS && stream == 0", "SINKS"),
        ("rows merged with the wrong lanes", WRONG_NUMBERS, "int hop = LANES; hop < 32", "int hop = 1; hop < 2"),
        ("a result that is not written", WRONG_NUMBERS, "HEADS + j < packed)", "HEADS + j < packed - 1)"),
    )
)


def planted(fault: Fault | None, *, check_races: bool) -> MetalBackend:
    mutations = {} if fault is None else {fault.kernel: ((fault.old, fault.new),)}
    emulator = Emulator(toolchain(), check_races=check_races, mutations=mutations)
    return MetalBackend(emulator.metal_kernel, num_cores=4, choose_variant=lambda shape: VARIANT)


def decode(backend: MetalBackend, dtype: mx.Dtype) -> None:
    """Sequences of one to four parts, windows that begin inside a block, sinks, and rows past a tail."""
    shape = DecodeShape(num_query_heads=8, num_kv_heads=2, key_dim=64, value_dim=64, dtype=dtype)
    for contexts, window in (((70, 33, 200), None), ((40, 33), 20)):
        check_decode(backend, decode_world(backend, shape, contexts), window=window, has_sinks=True)


def decode_shared(backend: MetalBackend, dtype: mx.Dtype) -> None:
    """Drafts and requests that begin alike; two rows of a block side by side, tiles that are parts of a block."""
    shape = DecodeShape(num_query_heads=8, num_kv_heads=2, key_dim=160, value_dim=96, dtype=dtype)
    drafted = decode_world(backend, shape, [70, 33, 200], counts=[2, 3, 5])
    alike = decode_world(backend, shape, [200, 170, 300], num_shared=[0, 4, 4])
    check_decode(backend, drafted, has_sinks=True)
    check_decode(backend, drafted, window=20, has_sinks=True)
    check_decode(backend, alike, has_sinks=True)


def kind_of_failure(fault: Fault) -> str | None:
    try:
        backend = planted(fault, check_races=fault.needs_flat_build)
        (decode_shared if fault.kernel == "paged_shared" else decode)(backend, fault.dtype)
    except EmulatorError as error:
        return error.kind
    except AssertionError:
        return WRONG_NUMBERS
    return None


@pytest.mark.parametrize("fault", FAULTS + SHARED_FAULTS, ids=lambda fault: f"{fault.kernel}: {fault.name}")
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    assert kind_of_failure(fault) == fault.kind


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("check_races", [False, True])
def test_nothing_is_caught_where_nothing_is_planted(check_races: bool, dtype: mx.Dtype) -> None:
    backend = planted(None, check_races=check_races)
    decode(backend, dtype)
    decode_shared(backend, dtype)
