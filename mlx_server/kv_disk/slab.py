"""The format on disk: a slab is a file of equal records, and a record is one block of K/V of all layers.

    slab     | header, 4096 bytes | record 0 | record 1 | ...
    record   | header, 128 bytes  | content  | up to the next multiple of 4096

All numbers are little endian. A header ends with the CRC-32 of the bytes before it, and a record's header has the
XXH3-128 of the content, so a torn, flipped or foreign record is recognised. The digest says what a record holds,
including the weights that computed it (`join_disk` makes their root). So nothing on disk can be wrong for a model; it
can only be of no use to any model.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import xxhash

FORMAT_VERSION = 1
SUFFIX = ".kvslab"
SLAB_HEADER_BYTES = 4096
RECORD_HEADER_BYTES = 128

_ALIGNMENT = 4096
_SLAB_MAGIC = b"mlxkvSLB"
_RECORD_MAGIC = b"mlxkvREC"
_SLAB = struct.Struct("<8sIIQ16s256s")
_RECORD = struct.Struct("<8sIIQ16s16s8s16s")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Space:
    """What the records of a slab have in common: the root of their model's digests, the name under which the model is
    served, and the size of a content."""

    root: bytes
    label: str
    content_bytes: int

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
        """The header as bytes; a long label is cut to 256 bytes."""
        label = self.space.label.encode()[:256]
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
    """`digest` is the block's chained hash, `parent` that of the block before it, `owner` stands for the callers who
    may hit it (zeros for everyone), and `checksum` is that of the content."""

    digest: bytes
    parent: bytes
    owner: bytes
    content_bytes: int
    checksum: bytes

    def pack(self) -> bytes:
        packed = _RECORD.pack(
            _RECORD_MAGIC,
            FORMAT_VERSION,
            0,
            self.content_bytes,
            self.digest,
            self.parent,
            self.owner,
            self.checksum,
        )
        return (packed + _CRC.pack(zlib.crc32(packed))).ljust(RECORD_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> RecordHeader | None:
        """The header; None if the bytes are not one of this version."""
        if not _is_whole(packed, _RECORD):
            return None
        magic, version, _, content_bytes, digest, parent, owner, checksum = _RECORD.unpack_from(packed)
        if magic != _RECORD_MAGIC or version != FORMAT_VERSION:
            return None
        return cls(digest, parent, owner, content_bytes, checksum)


def checksum(content: memoryview) -> bytes:
    """XXH3-128, as 16 bytes."""
    return xxhash.xxh3_128_digest(content)


def _is_whole(packed: bytes | memoryview, form: struct.Struct) -> bool:
    end = form.size + _CRC.size
    return len(packed) >= end and _CRC.unpack_from(packed, form.size)[0] == zlib.crc32(packed[: form.size])
