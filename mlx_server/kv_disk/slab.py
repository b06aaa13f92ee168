"""The format on disk: a slab is a file of equal records, and a record is one block of K/V of all layers, as it is or in
8 bits a number (`Rounding`).

    slab     | header, 4096 bytes | record 0 | record 1 | ...
    record   | header, 128 bytes  | content  | up to the next multiple of 4096

All numbers are little endian. A header ends with the CRC-32 of the bytes before it, and a record's header has the
XXH3-128 of the content, so a torn, flipped or foreign record is recognised. The digest says what a record holds,
including the weights that computed it (`join_disk` makes their root). So a record is right for the model that finds
it; other models never find it.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

FORMAT_VERSION = 1
SUFFIX = ".kvslab"
SLAB_HEADER_BYTES = 4096
RECORD_HEADER_BYTES = 128

_ALIGNMENT = 4096
_SLAB_MAGIC = b"mlxkvSLB"
_RECORD_MAGIC = b"mlxkvREC"
_LABEL_BYTES = 256
_SLAB = struct.Struct(f"<8sIIQ16s{_LABEL_BYTES}s")
_RECORD = struct.Struct("<8sIIQ16s16x8s16s")
_CRC = struct.Struct("<I")


def stored_label(name: str) -> str:
    """A model's name as slabs have it: its first 256 bytes, without a part of a character."""
    return name.encode(errors="replace")[:_LABEL_BYTES].decode(errors="ignore")


@dataclass(frozen=True, slots=True)
class Space:
    """What the records of a slab have in common: the root of their model's digests, the name under which the model is
    served (cut to what a slab stores), and the size of a content."""

    root: bytes
    label: str
    content_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", stored_label(self.label))

    @property
    def stride(self) -> int:
        """Bytes from the start of one record to the next."""
        return -(-(RECORD_HEADER_BYTES + self.content_bytes) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """The header of a slab with room for `num_slots` records."""

    space: Space
    num_slots: int

    def offset(self, slot: int) -> int:
        return SLAB_HEADER_BYTES + slot * self.space.stride

    def pack(self) -> bytes:
        """The header as bytes."""
        label = self.space.label.encode()
        packed = _SLAB.pack(
            _SLAB_MAGIC, FORMAT_VERSION, self.num_slots, self.space.content_bytes, self.space.root, label
        )
        return (packed + _CRC.pack(zlib.crc32(packed))).ljust(SLAB_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> SlabHeader | None:
        """The header; None if the bytes are not one of this version."""
        if not _is_whole(packed, _SLAB):
            return None
        magic, version, num_slots, content_bytes, root, label = _SLAB.unpack_from(packed)
        if magic != _SLAB_MAGIC or version != FORMAT_VERSION:
            return None
        return cls(Space(root, label.rstrip(b"\0").decode(errors="replace"), content_bytes), num_slots)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """`digest` is the block's chained hash, `owner` stands for the callers who may hit it (zeros for everyone), and
    `checksum` is that of the content."""

    digest: bytes
    owner: bytes
    content_bytes: int
    checksum: bytes

    def pack(self) -> bytes:
        packed = _RECORD.pack(
            _RECORD_MAGIC, FORMAT_VERSION, 0, self.content_bytes, self.digest, self.owner, self.checksum
        )
        return (packed + _CRC.pack(zlib.crc32(packed))).ljust(RECORD_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> RecordHeader | None:
        """The header; None if the bytes are not one of this version."""
        if not _is_whole(packed, _RECORD):
            return None
        magic, version, _, content_bytes, digest, owner, checksum = _RECORD.unpack_from(packed)
        if magic != _RECORD_MAGIC or version != FORMAT_VERSION:
            return None
        return cls(digest, owner, content_bytes, checksum)


def checksum(content: memoryview) -> bytes:
    """XXH3-128, as 16 bytes."""
    return xxhash.xxh3_128_digest(content)


def _is_whole(packed: bytes | memoryview, form: struct.Struct) -> bool:
    end = form.size + _CRC.size
    return len(packed) >= end and _CRC.unpack_from(packed, form.size)[0] == zlib.crc32(packed[: form.size])


_GROUP = 32
_MOST = 127
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rounding:
    """Stores contents of `num_bytes` with numbers of `dtype` (`float32`, `float16` or `bfloat16`) as one byte for each
    number and one float32 scale for every 32 numbers: 36 bytes instead of 64 or 128. Any thread.

    Example: if the largest of 32 numbers is 12.7, the scale is 0.1; 3.14159 is stored as 31 and read as 3.1.
    """

    dtype: str
    num_bytes: int

    @property
    def packed_bytes(self) -> int:
        num_numbers = self.num_bytes // (4 if self.dtype == "float32" else 2)
        return num_numbers + num_numbers // _GROUP * 4

    def pack(self, content: memoryview) -> memoryview | None:
        """The stored form of a content; None if it has numbers that are not finite."""
        numbers = self._floats(content).reshape(-1, _GROUP)
        scales = np.abs(numbers).max(axis=1, keepdims=True) / np.float32(_MOST)
        if not np.isfinite(scales).all():
            return None
        codes = np.rint(numbers / np.where(scales == 0.0, np.float32(1.0), scales))
        codes = codes.clip(-_MOST, _MOST).astype(np.int8)  # the scale of denormal numbers is rounded, too
        packed = np.empty(self.packed_bytes, np.uint8)
        packed[: codes.size] = codes.reshape(-1).view(np.uint8)
        packed[codes.size :] = scales.reshape(-1).view(np.uint8)
        return packed.data

    def unpack(self, packed: memoryview) -> memoryview:
        """The content of a stored form."""
        data = np.frombuffer(packed, np.uint8)
        num_numbers = data.size * _GROUP // (_GROUP + 4)
        numbers = data[:num_numbers].view(np.int8).reshape(-1, _GROUP).astype(np.float32)
        numbers *= data[num_numbers:].copy().view(np.float32)[:, None]
        if self.dtype == "bfloat16":
            bits = numbers.view(np.uint32)
            stored = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
            return stored.reshape(-1).view(np.uint8).data
        return numbers.astype(self.dtype).reshape(-1).view(np.uint8).data

    def _floats(self, content: memoryview) -> _Floats:
        data = np.frombuffer(content, np.uint8)
        if self.dtype == "bfloat16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return data.view(self.dtype).astype(np.float32, copy=False)
