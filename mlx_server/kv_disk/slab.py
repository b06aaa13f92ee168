"""The format on disk: a slab is a file of equal records, and a record is one block of K/V of all layers.

    slab     | header, 4096 bytes | record 0 | record 1 | ...
    record   | header, 128 bytes  | content  | up to the next multiple of 4096

Everything is little endian. A header ends with the CRC-32 of what is before it, and a record's has the XXH3-128 of its
content: so a torn, flipped or foreign record is none. The digest says what the record holds, down to the weights that
computed it (`join_disk` makes their root), so nothing on disk is ever wrong, it can only be of no use any more.
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
    """What the records of a slab have in common: the model that they are of, by what its digests are rooted in and by
    the name that it is served under, and the size of their contents."""

    root: bytes
    label: str
    content_bytes: int

    @property
    def stride(self) -> int:
        """Bytes from a record to the next."""
        return -(-(RECORD_HEADER_BYTES + self.content_bytes) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """`num_slots` records have room."""

    space: Space
    num_slots: int

    def offset(self, slot: int) -> int:
        return SLAB_HEADER_BYTES + slot * self.space.stride

    def pack(self) -> bytes:
        """A header's bytes. A label is cut to what has room."""
        label = self.space.label.encode()[:256]
        packed = _SLAB.pack(
            _SLAB_MAGIC, FORMAT_VERSION, self.num_slots, self.space.content_bytes, self.space.root, label
        )
        return (packed + _CRC.pack(zlib.crc32(packed))).ljust(SLAB_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> SlabHeader | None:
        """None for what is no header of this version."""
        if not _is_whole(packed, _SLAB):
            return None
        magic, version, num_slots, content_bytes, root, label = _SLAB.unpack_from(packed)
        if magic != _SLAB_MAGIC or version != FORMAT_VERSION:
            return None
        return cls(Space(root, label.rstrip(b"\0").decode(errors="replace"), content_bytes), num_slots)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """`digest` is the chained hash of the block and `parent` that of the one before; `owner` stands for who may hit it,
    if not everyone; `checksum` is the content's."""

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
        """None for what is no header of this version."""
        if not _is_whole(packed, _RECORD):
            return None
        magic, version, _, content_bytes, digest, parent, owner, checksum = _RECORD.unpack_from(packed)
        if magic != _RECORD_MAGIC or version != FORMAT_VERSION:
            return None
        return cls(digest, parent, owner, content_bytes, checksum)


def checksum(content: memoryview) -> bytes:
    """XXH3-128: 16 bytes."""
    return xxhash.xxh3_128_digest(content)


def _is_whole(packed: bytes | memoryview, form: struct.Struct) -> bool:
    end = form.size + _CRC.size
    return len(packed) >= end and _CRC.unpack_from(packed, form.size)[0] == zlib.crc32(packed[: form.size])
