"""Converts the tensors of a GGUF file to MLX's affine layout: groups of 32 codes, where a number is code * scale +
bias.

GGUF's types with blocks of 32 numbers are such groups, so their codes are kept unchanged:

    type         a number is                code        scale      bias
    Q4_0, Q5_0   d * (q - 8), d * (q - 16)  q           d          -8 d, -16 d
    Q4_1, Q5_1   d * q + m                  q           d          m
    Q8_0         d * q, q from -128         q + 128     d          -128 d
    Q4_K, Q5_K   d * s * q - e * t          q           d * s      -e * t

In the first three rows the scale and the bias are exact in float16, the type that the file stores them in. In the last
row s and t are 6-bit integers, and the products are rounded to the model's type. The `gguf` package expands all other
types, which are then quantised again: to 4 bits if they had fewer, to 8 if they had more.

Example, Q4_1 with d = 0.5, m = -1: codes 0, 3, 15 stand for -1, 0.5, 6.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
"""How many numbers are converted at a time."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

WHOLE_KINDS = frozenset({Kind.F32, Kind.F16, Kind.BF16, Kind.F64})


@dataclass(frozen=True, slots=True)
class Groups:
    """`codes` `[groups, 32]`, and float32 `scales` and `biases` `[groups]`."""

    codes: Bytes
    scales: Floats
    biases: Floats


def _halves(packed: Bytes) -> Bytes:
    """`[n, 16]` to `[n, 32]`: the low halves of all bytes, then the high halves."""
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
    return Groups(blocks[:, 2:] ^ np.uint8(0x80), d, -128 * d)  # from a signed byte to an unsigned one


def _k_groups(blocks: Bytes, codes: Bytes) -> Groups:
    """A block of 256 numbers: eight groups whose scales and offsets are 6-bit integers times the block's two
    factors."""
    scales, offsets = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    d, e = _f16(blocks, 0)[:, None], _f16(blocks, 2)[:, None]
    return Groups(codes.reshape(-1, GROUP_SIZE), (d * scales).reshape(-1), (-e * offsets).reshape(-1))


def _k_halves(packed: Bytes) -> Bytes:
    """`[n, 128]` to `[n, 8, 32]`: each run of 32 bytes holds two groups, one in the low halves and one in the high."""
    pairs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 0x0F, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Groups:
    return _k_groups(blocks, _k_halves(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Groups:
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=-1, bitorder="little").transpose(
        0, 2, 1
    )  # bit g belongs to group g
    return _k_groups(blocks, _k_halves(blocks[:, 48:]) | fifth << np.uint8(4))


@dataclass(frozen=True, slots=True)
class _Kept:
    """How to read the codes of a type: a block of `block_bytes` holds some groups of codes of `bits`."""

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
    """The bits of a code after conversion; None for types that are not quantised."""
    if kind in WHOLE_KINDS:
        return None
    kept = _KEPT.get(kind)
    return kept.bits if kept is not None else 4 if kind in _FEW_BITS else 8


def pack_codes(codes: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Packs rows of codes, whose length is a multiple of 32, into rows of words: one stream of bits, the lowest bit of
    each code first."""
    if bits == 8:
        packed = codes
    elif bits == 4:
        packed = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    else:
        stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        packed = np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.uint32)


def convert_tensor(name: str, tensor: Any, dtype: mx.Dtype) -> dict[str, mx.array]:
    """A tensor of `gguf.GGUFReader`, evaluated: as `weight` of type `dtype`, or as `weight`, `scales` and `biases`.

    The caller may reorder the rows, in all of these alike. Raises `ModelLoadError` for an unknown type, and for numbers
    that are not finite.
    """
    kind, shape = tensor.tensor_type, tuple(int(size) for size in reversed(tensor.shape))
    if kind in WHOLE_KINDS or len(shape) == 1:
        parts = {"weight": mx.array(_expanded(name, tensor.data, kind)).astype(dtype)}
        mx.eval(parts)
        _check_finite(name, parts["weight"])
        return {"weight": parts["weight"].reshape(shape)}
    slabs = [_slab(name, rows, kind, dtype) for rows in _slabs(tensor.data, shape)]
    joined = {part: mx.concatenate([slab[part] for slab in slabs]) for part in slabs[0]}
    mx.eval(joined)
    _check_finite(name, joined["scales"])
    _check_finite(name, joined["biases"])
    return {part: array.reshape(*shape[:-1], array.shape[-1]) for part, array in joined.items()}


def expand_tensor(name: str, tensor: Any) -> mx.array:
    """The numbers of a tensor in float32, as GGUF defines them. Raises `ModelLoadError`."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return mx.array(_expanded(name, tensor.data, tensor.tensor_type)).reshape(shape)


def _expanded(name: str, data: Any, kind: Kind) -> Floats:
    if kind == Kind.F64:
        return np.asarray(data, np.float32)
    try:
        return np.asarray(dequantize(data, kind), np.float32)
    except NotImplementedError as error:
        raise ModelLoadError(f"{name} is of the type {kind.name}, which this version cannot read.") from error


def _slabs(data: Any, shape: tuple[int, ...]) -> Iterator[Bytes]:
    """The tensor's bytes, some rows at a time."""
    rows = data.reshape(-1, data.shape[-1])
    step = max(1, _SLAB_NUMBERS // shape[-1])
    for start in range(0, len(rows), step):
        yield np.asarray(rows[start : start + step])


def _slab(name: str, rows: Bytes, kind: Kind, dtype: mx.Dtype) -> dict[str, mx.array]:
    kept = _KEPT.get(kind)
    if kept is None:
        numbers = mx.array(_expanded(name, rows, kind)).astype(dtype)
        weight, scales, biases = mx.quantize(numbers, group_size=GROUP_SIZE, bits=bits_of(kind) or 8)
        return {"weight": weight, "scales": scales, "biases": biases}
    groups = kept.read(np.ascontiguousarray(rows).reshape(-1, kept.block_bytes))
    per_row = len(groups.scales) // len(rows)
    return {
        "weight": mx.array(pack_codes(groups.codes.reshape(len(rows), -1), kept.bits)),
        "scales": mx.array(groups.scales.reshape(-1, per_row)).astype(dtype),
        "biases": mx.array(groups.biases.reshape(-1, per_row)).astype(dtype),
    }


def _check_finite(name: str, array: mx.array) -> None:
    if not mx.isfinite(array).all().item():
        raise ModelLoadError(
            f"{name} holds numbers that are not finite (NaN), or too large for {array.dtype}: the file is damaged, or "
            "the model diverged in training."
        )
