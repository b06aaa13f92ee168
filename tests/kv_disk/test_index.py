"""What the index of a folder costs at a server's start and in memory, in bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.slab import RECORD_HEADER_BYTES, SLAB_HEADER_BYTES, Space
from mlx_server.kv_disk.store import RecordStore

NUM_RECORDS = 3000


class CountingFiles(Files):
    num_read = 0

    def read(self, name: str, offsets: Sequence[int], num_bytes: int) -> list[bytes]:
        found = super().read(name, offsets, num_bytes)
        self.num_read += sum(map(len, found))
        return found


def test_a_scan_reads_headers_only_and_a_record_takes_300_bytes_of_memory(tmp_path: Path) -> None:
    files, space = CountingFiles(tmp_path), Space(bytes(16), "model", 5000)
    store = RecordStore(files, 2**40)
    for number in range(NUM_RECORDS):
        assert store.put(space, number.to_bytes(16, "big"), b"owner...", memoryview(bytes(5000)))
    files.num_read = 0
    tracemalloc.start()
    found = RecordStore(files, 2**40)
    found.scan()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(found) == NUM_RECORDS
    num_slabs = len(list(tmp_path.iterdir()))
    assert files.num_read == NUM_RECORDS * RECORD_HEADER_BYTES + num_slabs * SLAB_HEADER_BYTES
    assert num_bytes < NUM_RECORDS * 300
