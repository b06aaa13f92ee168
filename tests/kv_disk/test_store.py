"""Records on disk: what was written is found, and nothing else ever is, whatever happens to the files."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import time
import zlib

import pytest

from mlx_server.kv_disk import slab
from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.slab import RECORD_HEADER_BYTES, SLAB_HEADER_BYTES, SUFFIX, Space
from mlx_server.kv_disk.store import RecordStore
from tests.kv_disk.faults import FaultyFiles, Killed

SPACE = Space(b"r" * 16, "model", 5000)  # records of 8,192 bytes


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content_of(number: int, space: Space = SPACE) -> memoryview:
    """What the block of that number holds: computed from the number alone."""
    return memoryview(random.Random(f"{number} {space.root!r}").randbytes(space.content_bytes))


def put(store: RecordStore, number: int, space: Space = SPACE) -> bool:
    return store.put(space, digest_of(number), b"owner...", content_of(number, space))


def opened(folder, limit_bytes: int = 2**20, files: Files | None = None, clock=time.monotonic) -> RecordStore:
    store = RecordStore(files or Files(folder), limit_bytes, clock)
    store.scan()
    return store


def slab_paths(folder):
    return sorted(folder.glob(f"*{SUFFIX}"))


def num_on_disk(folder) -> int:
    return sum(path.stat().st_size for path in slab_paths(folder))


def test_what_is_written_is_read_after_a_restart(tmp_path):
    store = opened(tmp_path)
    assert all(put(store, number) for number in range(20))
    for found in (store, opened(tmp_path)):
        assert len(found) == 20
        assert [found.get(digest_of(number)) for number in range(20)] == [content_of(number) for number in range(20)]
        assert found.get(digest_of(99)) is None


def test_records_with_the_hash_of_the_block_before_are_read(tmp_path):
    """Earlier versions wrote it where 16 bytes of a record's header are not used."""
    put(opened(tmp_path), 1)
    (path,) = slab_paths(tmp_path)
    header = bytearray(path.read_bytes()[SLAB_HEADER_BYTES : SLAB_HEADER_BYTES + RECORD_HEADER_BYTES])
    assert header[40:56] == bytes(16)
    header[40:56] = digest_of(0xFFFF)
    header[80:84] = zlib.crc32(header[:80]).to_bytes(4, "little")
    with path.open("r+b") as file:
        file.seek(SLAB_HEADER_BYTES)
        file.write(header)
    assert opened(tmp_path).get(digest_of(1)) == content_of(1)


def test_a_record_is_written_once(tmp_path):
    store = opened(tmp_path)
    assert put(store, 1)
    before = num_on_disk(tmp_path)
    assert not put(store, 1)
    assert num_on_disk(tmp_path) == before


def test_folder_and_files_are_this_users_alone(tmp_path):
    folder = tmp_path / "made"
    put(opened(folder), 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in slab_paths(folder)} == {0o600}


def test_the_longest_unused_slab_goes_first(tmp_path):
    store = opened(tmp_path, limit_bytes=8 * (SLAB_HEADER_BYTES + 2 * SPACE.stride))  # 8 slabs of 2
    for number in range(16):
        assert put(store, number)
    store.get(digest_of(0))
    assert put(store, 16)
    assert [number for number in range(17) if digest_of(number) in store] == [0, 1, *range(4, 17)]
    assert store.num_evicted == 2


def test_use_counts_over_a_restart(tmp_path):
    limit = 8 * (SLAB_HEADER_BYTES + 2 * SPACE.stride)
    store = opened(tmp_path, limit)
    for number in range(16):
        put(store, number)
    for age, path in enumerate(slab_paths(tmp_path)):  # in the order of their names, which is none of use
        os.utime(path, (1000 + age, 1000 + age))
    oldest = slab_paths(tmp_path)[0].name
    store = opened(tmp_path, limit)
    for number in range(16, 20):
        put(store, number)
    assert oldest not in [path.name for path in slab_paths(tmp_path)]


def test_a_lower_limit_holds_from_the_start(tmp_path):
    store = opened(tmp_path)
    for number in range(100):
        put(store, number)
    assert num_on_disk(tmp_path) > 400_000
    opened(tmp_path, 400_000)
    assert num_on_disk(tmp_path) <= 400_000


def test_a_block_larger_than_the_limit_is_not_written(tmp_path):
    store = opened(tmp_path, limit_bytes=SPACE.stride)
    assert not put(store, 1)
    assert slab_paths(tmp_path) == []


@pytest.mark.parametrize("place", ["record header", "content", "slab header"])
def test_a_flipped_bit_is_found(tmp_path, place):
    store = opened(tmp_path)
    for number in range(3):
        put(store, number)
    (path,) = slab_paths(tmp_path)
    offset = {
        "slab header": 20,
        "record header": SLAB_HEADER_BYTES + SPACE.stride + 40,
        "content": SLAB_HEADER_BYTES + SPACE.stride + RECORD_HEADER_BYTES + 4999,
    }[place]
    packed = bytearray(path.read_bytes())
    packed[offset] ^= 4
    path.write_bytes(packed)
    found = opened(tmp_path)
    wanted = {"slab header": []}.get(place, [0, 2])
    assert [number for number in range(3) if found.get(digest_of(number))] == wanted
    assert len(found) == len(wanted)
    assert put(found, 1)
    assert found.get(digest_of(1)) == content_of(1)
    if place != "slab header":
        assert num_on_disk(tmp_path) == len(packed), "the slot is used again"


def test_swapped_records_are_found_where_they_are(tmp_path):
    store = opened(tmp_path)
    for number in range(4):
        put(store, number)
    (path,) = slab_paths(tmp_path)
    packed = path.read_bytes()
    first, second = (SLAB_HEADER_BYTES + slot * SPACE.stride for slot in (1, 2))
    swapped = bytearray(packed)
    swapped[first : first + SPACE.stride] = packed[second : second + SPACE.stride]
    swapped[second : second + SPACE.stride] = packed[first : first + SPACE.stride]
    path.write_bytes(swapped)
    assert store.get(digest_of(1)) is None  # it knew another place
    assert store.get(digest_of(3)) == content_of(3)
    found = opened(tmp_path)
    assert [found.get(digest_of(number)) for number in range(4)] == [content_of(number) for number in range(4)]


def test_a_content_under_another_header_is_none(tmp_path):
    """As a crash leaves it where a slot was used again: the header is new, the content is not, or only half of it."""
    store = opened(tmp_path)
    put(store, 1)
    put(store, 2)
    (path,) = slab_paths(tmp_path)
    packed = bytearray(path.read_bytes())
    first, second = (SLAB_HEADER_BYTES + slot * SPACE.stride for slot in (0, 1))
    packed[first : first + RECORD_HEADER_BYTES] = packed[second : second + RECORD_HEADER_BYTES]
    path.write_bytes(packed)
    found = opened(tmp_path)
    assert found.get(digest_of(1)) is None
    assert found.get(digest_of(2)) in (None, content_of(2))


@pytest.mark.parametrize("num_bytes", [0, 10, SLAB_HEADER_BYTES, SLAB_HEADER_BYTES + 50, SLAB_HEADER_BYTES + 9000])
def test_a_file_may_end_anywhere(tmp_path, num_bytes):
    store = opened(tmp_path)
    for number in range(3):
        put(store, number)
    (path,) = slab_paths(tmp_path)
    os.truncate(path, num_bytes)
    found = opened(tmp_path)
    kept = [number for number in range(3) if found.get(digest_of(number)) is not None]
    assert kept == [0] * (num_bytes > SLAB_HEADER_BYTES + SPACE.stride - 3000)
    assert all(put(found, number) for number in range(3) if number not in kept)
    assert [found.get(digest_of(number)) for number in range(3)] == [content_of(number) for number in range(3)]


def test_removed_and_foreign_files_are_no_errors(tmp_path):
    store = opened(tmp_path)
    put(store, 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"foreign{SUFFIX}").write_bytes(b"x" * 10_000)
    (tmp_path / f"link{SUFFIX}").symlink_to(tmp_path / "notes.txt")
    found = opened(tmp_path)
    assert found.get(digest_of(1)) == content_of(1)
    assert not (tmp_path / f"foreign{SUFFIX}").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    for path in slab_paths(tmp_path):
        path.unlink()
    assert found.get(digest_of(1)) is None
    assert found.num_bytes == 0
    put(store, 2)  # it still knows the file that has gone
    assert put(found, 3)
    assert found.get(digest_of(3)) == content_of(3)


def test_what_another_version_has_written_is_removed(tmp_path, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(slab, "FORMAT_VERSION", slab.FORMAT_VERSION + 1)
        put(opened(tmp_path), 1)
    assert len(opened(tmp_path)) == 0
    assert slab_paths(tmp_path) == []


def test_a_record_of_another_version_is_none(tmp_path, monkeypatch):
    put(store := opened(tmp_path), 1)
    with monkeypatch.context() as other:
        other.setattr(slab, "FORMAT_VERSION", slab.FORMAT_VERSION + 1)
        put(store, 2)
    found = opened(tmp_path)
    assert [found.get(digest_of(number)) for number in (1, 2)] == [content_of(1), None]


def test_slabs_that_a_server_evicts_meanwhile_are_not_listed(tmp_path, monkeypatch):
    """`mlx-serve cache` looks at the folder of a running server."""
    store = opened(tmp_path)
    put(store, 1)
    (first,) = slab_paths(tmp_path)
    put(store, 2, Space(b"o" * 16, "other", 300))
    looking = opened(tmp_path)
    first.unlink()
    assert [record.digest for _, record in looking.entries()] == [digest_of(2)]


def test_models_share_a_folder_but_no_slab(tmp_path):
    other = Space(b"o" * 16, "other", 300)
    store = opened(tmp_path)
    put(store, 1)
    put(store, 2, other)
    found = opened(tmp_path)
    assert (found.get(digest_of(1)), found.get(digest_of(2))) == (content_of(1), content_of(2, other))
    assert len(slab_paths(tmp_path)) == 2


def test_errors_of_the_disk_are_raised(tmp_path):
    files = FaultyFiles(tmp_path, random.Random(0))
    store = opened(tmp_path, files=files)
    put(store, 1)
    files.fails_in, files.fault = 0, OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        put(store, 2)
    assert digest_of(2) not in store
    assert store.get(digest_of(1)) == content_of(1)


@pytest.mark.parametrize("seed", range(6))
def test_ten_thousand_operations_among_faults(tmp_path, seed):
    """Kills between and within any two writes, refused writes, flips, cuts, swaps, removals and a clock that jumps: a
    block that is found is the right one, the files never exceed the limit, and what was written last is there when
    nothing hit it."""
    rng = random.Random(seed)
    limit = rng.choice([60_000, 200_000, 700_000])
    spaces = [SPACE, Space(b"s" * 16, "small", 700)]
    files = FaultyFiles(tmp_path, rng)
    now = [0.0]
    store = opened(tmp_path, limit, files, lambda: now[0])
    num_hits = 0
    for _ in range(1700):
        action = rng.random()
        number = rng.randrange(150)
        space = spaces[number % 2]
        now[0] += rng.choice([0.1, 100.0, 1e9, -1e9])
        if action < 0.02:
            damage(tmp_path, rng)
        elif action < 0.06:
            files.fails_in, files.fault = (
                rng.randrange(4),
                rng.choice([Killed(), OSError(errno.EIO, "EIO"), OSError(errno.ENOSPC, "full")]),
            )
        elif action < 0.1:
            limit = rng.choice([60_000, 200_000, 700_000])
            files.fails_in = -1
            store = opened(tmp_path, limit, files, lambda: now[0])
            files.most_bytes = 0
        try:
            if rng.random() < 0.6 and put(store, number, space):
                assert digest_of(number) in store
            number = rng.randrange(150)
            found = store.get(digest_of(number))
            if found is not None:
                num_hits += 1
                assert found == content_of(number, spaces[number % 2]), "a wrong block"
        except (OSError, Killed):
            files.fails_in = -1
            files.most_bytes = 0
            store = opened(tmp_path, limit, files, lambda: now[0])
        assert num_on_disk(tmp_path) <= store.num_bytes, "bytes that are not counted"
        assert files.most_bytes <= limit, "over the limit"
    assert num_hits > 100


def damage(folder, rng: random.Random) -> None:
    """What may happen to a file without the store's doing."""
    paths = slab_paths(folder)
    if not paths:
        return
    path = rng.choice(paths)
    packed = bytearray(path.read_bytes())
    kind = rng.randrange(4)
    if kind == 0 and packed:
        packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
        path.write_bytes(packed)
    elif kind == 1:
        os.truncate(path, rng.randrange(len(packed) + 1))
    elif kind == 2:
        path.unlink()
    else:
        other = rng.choice(paths)
        both = packed, bytearray(other.read_bytes())
        size = min(map(len, both)) - SLAB_HEADER_BYTES
        if size > 8192:
            first = SLAB_HEADER_BYTES + rng.randrange(size // 4096) * 4096
            piece = both[1][first : first + 4096]
            packed[first : first + len(piece)] = piece
            path.write_bytes(packed)


def test_a_copied_folder_is_the_same_cache(tmp_path):
    store = opened(tmp_path / "one")
    put(store, 1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert opened(tmp_path / "two").get(digest_of(1)) == content_of(1)
