"""The tensors of a GGUF file in MLX's affine layout: groups of 32 codes that stand for code * scale + bias.

GGUF's types of 32 numbers are such groups themselves, so their codes are kept as they are:

    type         a number is                code        scale      bias
    Q4_0, Q5_0   d * (q - 8), d * (q - 16)  q           d          -8 d, -16 d
    Q4_1, Q5_1   d * q + m                  q           d          m
    Q8_0         d * q, q from -128         q + 128     d          -128 d
    Q4_K, Q5_K   d * s * q - e * t          q           d * s      -e * t

In the first three rows the scale and the bias are exact in float16, which the file has them in. In the last row s and
t are whole numbers of 6 bits, and the products are rounded to the model's type. What has no such groups is expanded by
the `gguf` package and quantised anew, in 4 bits if it had less and in 8 if it had more. How far the result is from the
file's numbers is measured.

Example, Q4_1 with d = 0.5, m = -1: codes 0, 3, 15 stand for -1, 0.5, 6.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf.quants import Q4_K, dequantize

from mlx_server.errors import ModelLoadError

GROUP_SIZE = 32
"""Numbers that share a scale."""

_SLAB_NUMBERS = 2**24
"""So many are expanded at a time."""
_SAMPLED_ROWS = 64
"""Rows of a tensor whose error is measured where its codes are kept."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

WHOLE_KINDS = frozenset({Kind.F32, Kind.F16, Kind.BF16, Kind.F64})


@dataclass(frozen=True, slots=True)
class Groups:
    """`codes` `[groups, 32]`, and float32 `scales` and `biases` `[groups]`."""

    codes: Bytes
    scales: Floats
    biases: Floats


@dataclass(slots=True)
class Loss:
    """What conversion has changed, by the file's types: how many numbers, and the squares of their errors and of
    themselves."""

    by_kind: dict[str, tuple[float, float, int]] = field(default_factory=dict)

    def add(self, kind: str, got: Floats, wanted: Floats, num_numbers: int) -> None:
        """`got` stands for `wanted` in a part of a tensor of `num_numbers`."""
        error, size, count = self.by_kind.get(kind, (0.0, 0.0, 0))
        share = num_numbers / max(1, wanted.size)
        difference = (got - wanted).astype(np.float64)
        self.by_kind[kind] = (
            error + share * float(np.square(difference).sum()),
            size + share * float(np.square(wanted.astype(np.float64)).sum()),
            count + num_numbers,
        )

    def join(self, other: Loss) -> None:
        """Adds what `other` has counted."""
        for kind, sums in other.by_kind.items():
            mine = self.by_kind.get(kind, (0.0, 0.0, 0))
            self.by_kind[kind] = (mine[0] + sums[0], mine[1] + sums[1], mine[2] + sums[2])

    def relative(self) -> dict[str, float]:
        """The error of each type's numbers, relative to them, as roots of mean squares; 0.0 is none at all."""
        return {kind: math.sqrt(error / size) if size else 0.0 for kind, (error, size, _) in self.by_kind.items()}


def _halves(packed: Bytes) -> Bytes:
    """`[n, 16]` to `[n, 32]`: all low halves of the bytes, then all high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _f16(blocks: Bytes, start: int) -> Floats:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)[:, 0]


def _q4_0(blocks: Bytes) -> Groups:
    d = _f16(blocks, 0)
    return Groups(_halves(blocks[:, 2:]), d, -8 * d)


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_halves(blocks[:, 4:]), _f16(blocks, 0), _f16(blocks, 2))


def _fifth_bits(words: Bytes) -> Bytes:
    """`[n, 4]` to `[n, 32]`: bit i of 32, as the fifth bit of code i."""
    return np.unpackbits(words, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Groups:
    d = _f16(blocks, 0)
    return Groups(_halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), d, -16 * d)


def _q5_1(blocks: Bytes) -> Groups:
    return Groups(_halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _f16(blocks, 0), _f16(blocks, 2))


def _q8_0(blocks: Bytes) -> Groups:
    d = _f16(blocks, 0)
    return Groups(blocks[:, 2:] ^ np.uint8(0x80), d, -128 * d)  # of a signed byte, as an unsigned one plus 128


def _k_groups(blocks: Bytes, codes: Bytes) -> Groups:
    """Of a block of 256: eight groups whose scales and offsets have 6 bits, times the block's two numbers."""
    scales, offsets = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    d, e = _f16(blocks, 0)[:, None], _f16(blocks, 2)[:, None]
    return Groups(codes.reshape(-1, GROUP_SIZE), (d * scales).reshape(-1), (-e * offsets).reshape(-1))


def _k_halves(packed: Bytes) -> Bytes:
    """`[n, 128]` to `[n, 8, 32]`: each 32 bytes hold two groups in their halves."""
    pairs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 0x0F, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Groups:
    return _k_groups(blocks, _k_halves(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Groups:
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=-1, bitorder="little").transpose(0, 2, 1)  # bit g: of group g
    return _k_groups(blocks, _k_halves(blocks[:, 48:]) | fifth << np.uint8(4))


@dataclass(frozen=True, slots=True)
class _Kept:
    """How the codes of a type are read: `block_bytes` hold some groups of codes of `bits`."""

    bits: int
    block_bytes: int
    read: Callable[[Bytes], Groups]


_KEPT = MappingProxyType(
    {
        Kind.Q4_0: _Kept(4, 18, _q4_0),
        Kind.Q4_1: _Kept(4, 20, _q4_1),
        Kind.Q5_0: _Kept(5, 22, _q5_0),
        Kind.Q5_1: _Kept(5, 24, _q5_1),
        Kind.Q8_0: _Kept(8, 34, _q8_0),
        Kind.Q4_K: _Kept(4, 144, _q4_k),
        Kind.Q5_K: _Kept(5, 176, _q5_k),
    }
)
_FEW_BITS = frozenset(
    {Kind.Q2_K, Kind.Q3_K, Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S}
)


def bits_of(kind: Kind) -> int | None:
    """Bits a code of what a tensor of that type becomes; None for whole numbers."""
    if kind in WHOLE_KINDS:
        return None
    kept = _KEPT.get(kind)
    return kept.bits if kept is not None else 4 if kind in _FEW_BITS else 8


def pack_codes(codes: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Rows of codes, a multiple of 32 each, as rows of words: one stream of bits, the lowest of each code first."""
    if bits == 8:
        packed = codes
    elif bits == 4:
        packed = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    else:
        stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        packed = np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.uint32)


def convert_tensor(name: str, tensor: Any, dtype: mx.Dtype, loss: Loss) -> dict[str, mx.array]:
    """A tensor of `gguf.GGUFReader`, evaluated: as `weight` of type `dtype`, or as `weight`, `scales` and `biases`.

    Rows may be put in another order afterwards, in all of them alike. Adds to `loss`. Raises `ModelLoadError` for a
    type that is not known, and for numbers that are no numbers.
    """
    kind, shape = tensor.tensor_type, tuple(int(size) for size in reversed(tensor.shape))
    if kind in WHOLE_KINDS or len(shape) == 1:
        parts = {"weight": mx.array(_expanded(name, tensor.data, kind)).astype(dtype)}
        mx.eval(parts)
        _check_finite(name, parts["weight"])
        return {"weight": parts["weight"].reshape(shape)}
    slabs = [_slab(name, rows, kind, dtype, loss) for rows in _slabs(tensor.data, shape)]
    joined = {part: mx.concatenate([slab[part] for slab in slabs]) for part in slabs[0]}
    mx.eval(joined)
    _check_finite(name, joined["scales"])
    _check_finite(name, joined["biases"])
    return {part: array.reshape(*shape[:-1], array.shape[-1]) for part, array in joined.items()}


def expand_tensor(name: str, tensor: Any) -> mx.array:
    """The numbers of a tensor in float32, as the file's format defines them. Raises `ModelLoadError`."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return mx.array(_expanded(name, tensor.data, tensor.tensor_type)).reshape(shape)


def _expanded(name: str, data: Any, kind: Kind) -> Floats:
    if kind == Kind.F64:
        return np.asarray(data, np.float32)
    try:
        return np.asarray(dequantize(data, kind), np.float32)
    except NotImplementedError as error:
        raise ModelLoadError(f"{name} is of the type {kind.name}, which cannot be read here.") from error


def _slabs(data: Any, shape: tuple[int, ...]) -> Iterator[Bytes]:
    """The bytes of some rows at a time."""
    rows = data.reshape(-1, data.shape[-1])
    step = max(1, _SLAB_NUMBERS // shape[-1])
    for start in range(0, len(rows), step):
        yield np.asarray(rows[start : start + step])


def _slab(name: str, rows: Bytes, kind: Kind, dtype: mx.Dtype, loss: Loss) -> dict[str, mx.array]:
    kept = _KEPT.get(kind)
    if kept is None:
        wanted = _expanded(name, rows, kind)
        bits = bits_of(kind) or 8
        weight, scales, biases = mx.quantize(mx.array(wanted).astype(dtype), group_size=GROUP_SIZE, bits=bits)
        parts = {"weight": weight, "scales": scales, "biases": biases}
        loss.add(kind.name, _values(parts, bits), wanted, wanted.size)
        return parts
    groups = kept.read(np.ascontiguousarray(rows).reshape(-1, kept.block_bytes))
    per_row = len(groups.scales) // len(rows)
    parts = {
        "weight": mx.array(pack_codes(groups.codes.reshape(len(rows), -1), kept.bits)),
        "scales": mx.array(groups.scales.reshape(-1, per_row)).astype(dtype),
        "biases": mx.array(groups.biases.reshape(-1, per_row)).astype(dtype),
    }
    sample = np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLED_ROWS)).astype(np.int64)
    few = {part: array[mx.array(sample)] for part, array in parts.items()}
    loss.add(kind.name, _values(few, kept.bits), _expanded(name, rows[sample], kind), groups.codes.size)
    return parts


def _values(parts: dict[str, mx.array], bits: int) -> Floats:
    """What is stored, computed in float32."""
    scales, biases = (parts[part].astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(parts["weight"], scales, biases, group_size=GROUP_SIZE, bits=bits))


def _check_finite(name: str, array: mx.array) -> None:
    if not mx.isfinite(array).all().item():
        raise ModelLoadError(
            f"{name} holds numbers that are no numbers (NaN), or too large for {array.dtype}: the file is damaged, or "
            "its model diverged in training."
        )
