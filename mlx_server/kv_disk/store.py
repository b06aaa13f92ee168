"""All records of one folder: which there are, where the next one goes, and which are evicted for it."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.slab import (
    RECORD_HEADER_BYTES,
    SLAB_HEADER_BYTES,
    SUFFIX,
    RecordHeader,
    SlabHeader,
    Space,
    checksum,
)

MAX_SLAB_BYTES = 256 * 2**20
_MIN_SLABS = 8
"""The limit is divided into at least this many slabs, since a slab is evicted as a whole."""

_TOUCH_S = 60.0
_HEADERS_AT_A_TIME = 256


@dataclass(slots=True, eq=False)
class _Slab:
    """`num_bytes` is the size of the file, including records that are being written. `header` is None until it has been
    read. A slab with users, who read or write it, is not removed."""

    name: str
    num_bytes: int
    header: SlabHeader | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    num_slots_used: int = 0
    is_made: bool = True
    num_users: int = 0
    touched_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Place:
    slab: _Slab
    slot: int


def smallest_slab(space: Space) -> int:
    """The bytes of a file with one record."""
    return SLAB_HEADER_BYTES + space.stride


class RecordStore:
    """Records by digest, in slabs of one folder. All slabs together never take more than `limit_bytes`: before a file
    grows, the slab that was unused for longest is removed. Any thread.

    `scan` finds the records that exist when the store is opened; it may run beside everything else. The store needs no
    clean shutdown: a record that was not completely written has no valid checksum, so its slot is free, and no index is
    written.

    Example: 8 MiB, contents of 100,000 bytes: slabs of 1 MiB, each with 10 records of 102,400 bytes after 4,096 bytes
    of header. The 80th record fills the eighth slab. The 81st would bring the files to 8,302,592 bytes, so the first
    slab is removed with its ten records.

    Methods raise `OSError` if the disk does. If something else has removed a slab, its records are simply gone.
    """

    def __init__(self, files: Files, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """The caller holds the folder's lock."""
        self.limit_bytes = limit_bytes
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._index: dict[bytes, _Place] = {}
        self._slabs: OrderedDict[str, _Slab] = OrderedDict(  # the longest unused first
            (entry.name, _Slab(entry.name, entry.num_bytes)) for entry in files.entries(SUFFIX)
        )
        self._num_bytes = sum(slab.num_bytes for slab in self._slabs.values())
        self.num_evicted = 0
        self.num_bad = 0
        # Called with the lock held, on any thread.
        self.on_change: Callable[[bytes, bool], None] = lambda digest, is_there: None
        with self._lock:
            self._make_room(0)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._num_bytes

    def entries(self) -> list[tuple[Space, RecordHeader]]:
        """All records by their headers, slab by slab."""
        found = []
        for slab in self._slabs.values():
            header = slab.header
            if header is not None:
                offsets = [header.offset(slot) for slot in sorted(slab.digests)]
                try:
                    headers = self._files.read(slab.name, offsets, RECORD_HEADER_BYTES)
                except FileNotFoundError:  # a server has just evicted it
                    continue
                for packed in headers:
                    if (record := RecordHeader.unpack(packed)) is not None:
                        found.append((header.space, record))
        return found

    def delete(self, is_wanted: Callable[[Space, RecordHeader], bool]) -> int:
        """Deletes the records for which `is_wanted` is true, and overwrites them; empty slabs are removed. Returns how
        many were deleted."""
        num_deleted = 0
        for slab in list(self._slabs.values()):
            header = slab.header
            if header is None:
                continue
            for slot, digest in list(slab.digests.items()):
                (packed,) = self._files.read(slab.name, [header.offset(slot)], RECORD_HEADER_BYTES)
                record = RecordHeader.unpack(packed)
                if record is None or is_wanted(header.space, record):
                    self._files.write(slab.name, header.offset(slot), bytes(header.space.stride))
                    num_deleted += 1
                    with self._lock:
                        self._drop(_Place(slab, slot), digest)
            if not slab.digests:
                with self._lock:
                    self._remove(slab)
        return num_deleted

    def scan(self, *, removes_broken: bool = True) -> None:
        """Finds the records of the slabs that existed at the start, the last used slab first. Files that are not slabs
        of this version are removed."""
        with self._lock:
            unknown = [slab for slab in reversed(self._slabs.values()) if slab.header is None]
        for slab in unknown:
            with self._lock:
                if slab.name not in self._slabs:
                    continue
                slab.num_users += 1
            try:
                self._scan(slab)
            finally:
                with self._lock:
                    slab.num_users -= 1
            with self._lock:
                if removes_broken and slab.header is None and slab.name in self._slabs:
                    self._remove(slab)

    def put(self, space: Space, digest: bytes, owner: bytes, content: memoryview) -> bool:
        """Writes a record; False if it exists already, or if there is no room even after evictions."""
        assert len(content) == space.content_bytes, "records of a space have one size"
        with self._lock:
            place = None if digest in self._index else self._place(space)
        if place is None:
            return False
        slab, header = place.slab, place.slab.header
        assert header is not None
        try:
            if not slab.is_made:
                self._files.create(slab.name, header.pack())
                slab.is_made = True
            record = RecordHeader(digest, owner, len(content), checksum(content))
            offset = header.offset(place.slot)
            self._files.write(slab.name, offset + RECORD_HEADER_BYTES, content)
            self._files.write(slab.name, offset, record.pack())
        except FileNotFoundError:
            self._forget(slab)
            return False
        finally:
            with self._lock:
                slab.num_users -= 1
        with self._lock:
            if slab.name in self._slabs and digest not in self._index:
                slab.digests[place.slot] = digest
                self._index[digest] = place
                self.on_change(digest, True)
        return True

    def get(self, digest: bytes) -> memoryview | None:
        """The checked content of a record; None if it does not exist, or was damaged, which removes it. Its slab counts
        as used."""
        with self._lock:
            place = self._index.get(digest)
            if place is None:
                return None
            slab, header = place.slab, place.slab.header
            slab.num_users += 1
            self._slabs.move_to_end(slab.name)
        assert header is not None
        try:
            num_bytes = RECORD_HEADER_BYTES + header.space.content_bytes
            (packed,) = self._files.read(slab.name, [header.offset(place.slot)], num_bytes)
            self._touch(slab)
        except FileNotFoundError:
            self._forget(slab)
            return None
        finally:
            with self._lock:
                slab.num_users -= 1
        content = memoryview(packed)[RECORD_HEADER_BYTES:]
        record = RecordHeader.unpack(packed)
        if record is not None and record.digest == digest and _is_whole(record, header, content):
            return content
        with self._lock:
            self._drop(place, digest)
        return None

    # --- with the lock held ---------------------------------------------------------------------------------

    def _place(self, space: Space) -> _Place | None:
        """A slot for a record, whose bytes are booked at once; None if there is no room."""
        slab = next((slab for slab in reversed(self._slabs.values()) if _has_room(slab, space)), None)
        if slab is None:
            slab = self._new_slab(space)
            if slab is None:
                return None
        slab.num_users += 1  # so that it is not removed for its own growth
        slot = slab.free.pop() if slab.free else slab.num_slots_used
        assert slab.header is not None
        growth = max(0, slab.header.offset(slot + 1) - slab.num_bytes)
        if not self._make_room(growth):
            if slot < slab.num_slots_used:
                slab.free.append(slot)
            slab.num_users -= 1
            if not slab.is_made:
                del self._slabs[slab.name]
            return None
        slab.num_slots_used = max(slab.num_slots_used, slot + 1)
        slab.num_bytes += growth
        self._num_bytes += growth
        self._slabs.move_to_end(slab.name)
        return _Place(slab, slot)

    def _new_slab(self, space: Space) -> _Slab | None:
        most = min(MAX_SLAB_BYTES, self.limit_bytes // _MIN_SLABS) - SLAB_HEADER_BYTES
        num_slots = max(1, most // space.stride)
        if smallest_slab(space) > self.limit_bytes:
            return None
        slab = _Slab(secrets.token_hex(8) + SUFFIX, 0, SlabHeader(space, num_slots), is_made=False)
        self._slabs[slab.name] = slab
        return slab

    def _make_room(self, num_bytes: int) -> bool:
        """Whether the files may grow by `num_bytes`, after the longest unused slabs are removed."""
        for slab in list(self._slabs.values()):
            if self._num_bytes + num_bytes <= self.limit_bytes:
                break
            if not slab.num_users:
                self.num_evicted += len(slab.digests)
                self._remove(slab)
        return self._num_bytes + num_bytes <= self.limit_bytes

    def _remove(self, slab: _Slab) -> None:
        self._files.remove(slab.name)
        del self._slabs[slab.name]
        self._num_bytes -= slab.num_bytes
        for slot, digest in list(slab.digests.items()):
            self._drop(_Place(slab, slot), digest)

    def _drop(self, place: _Place, digest: bytes) -> None:
        """Forgets a record; its slot is free."""
        if self._index.get(digest) == place:
            del self._index[digest]
            self.on_change(digest, False)
        if place.slab.digests.get(place.slot) == digest:
            del place.slab.digests[place.slot]
            place.slab.free.append(place.slot)
            self.num_bad += place.slab.name in self._slabs

    # --- without the lock -----------------------------------------------------------------------------------

    def _forget(self, slab: _Slab) -> None:
        """Something else has removed the file of a slab."""
        with self._lock:
            if slab.name in self._slabs:
                self._remove(slab)

    def _scan(self, slab: _Slab) -> None:
        """Reads the headers of a slab. If the file has no valid header, `slab.header` stays None."""
        try:
            (packed,) = self._files.read(slab.name, [0], SLAB_HEADER_BYTES)
            header = SlabHeader.unpack(packed)
            if header is None:
                return
            num_slots = min(header.num_slots, -(-(slab.num_bytes - SLAB_HEADER_BYTES) // header.space.stride))
            slots = range(max(0, num_slots))
            records: list[RecordHeader | None] = []
            for first in slots[::_HEADERS_AT_A_TIME]:
                offsets = [header.offset(slot) for slot in slots[first : first + _HEADERS_AT_A_TIME]]
                records += map(RecordHeader.unpack, self._files.read(slab.name, offsets, RECORD_HEADER_BYTES))
        except FileNotFoundError:
            return
        with self._lock:
            slab.num_slots_used = len(slots)
            for slot, record in zip(slots, records, strict=True):
                is_new = record is not None and record.digest not in self._index
                if record is None or not is_new or record.content_bytes != header.space.content_bytes:
                    slab.free.append(slot)
                else:
                    slab.digests[slot] = record.digest
                    self._index[record.digest] = _Place(slab, slot)
            slab.header = header

    def _touch(self, slab: _Slab) -> None:
        """Notes the use in the file's time: after a restart, files are evicted in that order."""
        now = self._clock()
        if now - slab.touched_s >= _TOUCH_S:
            slab.touched_s = now
            self._files.touch(slab.name)


def _has_room(slab: _Slab, space: Space) -> bool:
    header = slab.header
    return header is not None and header.space == space and bool(slab.free or slab.num_slots_used < header.num_slots)


def _is_whole(record: RecordHeader, slab: SlabHeader, content: memoryview) -> bool:
    return len(content) == slab.space.content_bytes == record.content_bytes and checksum(content) == record.checksum
