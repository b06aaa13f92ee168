"""All access to the disk, in one place: tests replace it to tear writes, flip bits, refuse, and stop."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_server.config import MemoryConfig, home
from mlx_server.environment import expanded, make_cache_folder
from mlx_server.kv_disk.slab import SUFFIX

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_MODE = 0o600


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the folder; `used_s` is when it was last written or touched, since the epoch."""

    name: str
    num_bytes: int
    used_s: float


def disk_folder(settings: MemoryConfig) -> Path:
    """The folder for prefixes, whether or not it exists."""
    return expanded(settings.kv_disk_dir) if settings.kv_disk_dir else home() / "kv-disk"


class Files:
    """The files of one folder that only this user can read. All methods raise `OSError`; any thread."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder. An existing folder must already belong to this user alone: it may be shared on purpose,
        so its mode is not changed."""
        make_cache_folder(folder, mode=0o700)
        stat = folder.stat()
        if stat.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user; name another with --kv-disk-dir")
        if stat.st_mode & 0o077:
            names = os.listdir(folder)
            is_for_prefixes = not names or any(name.endswith(SUFFIX) for name in names)
            fault = "" if is_for_prefixes else " and has files that are no prefixes"
            more = ", or run chmod 700 on it" if is_for_prefixes else ""
            raise PermissionError(f"{folder} is open to others{fault}; name another with --kv-disk-dir{more}")
        self.folder = folder

    def entries(self, suffix: str) -> list[FileEntry]:
        """Regular files whose names end in `suffix`, the longest unused first."""
        found = []
        with os.scandir(self.folder) as scan:
            for entry in scan:
                if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # a server removes files while `mlx-serve cache` looks
                        stat = entry.stat(follow_symlinks=False)
                        found.append(FileEntry(entry.name, stat.st_size, stat.st_mtime))
        return sorted(found, key=lambda entry: (entry.used_s, entry.name))

    def read(self, name: str, offsets: Sequence[int], num_bytes: int) -> list[bytes]:
        """`num_bytes` bytes at each offset, fewer at the end of the file."""
        with self._opened(name, os.O_RDONLY) as descriptor:
            return [os.pread(descriptor, num_bytes, offset) for offset in offsets]

    def create(self, name: str, content: bytes) -> None:
        """Creates a file, which must not exist."""
        os.close(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, _MODE))
        self.write(name, 0, content)

    def write(self, name: str, offset: int, content: bytes | memoryview) -> None:
        """Writes all of the content into an existing file."""
        left = memoryview(content)
        with self._opened(name, os.O_WRONLY) as descriptor:
            while left:
                num_written = os.pwrite(descriptor, left, offset)
                offset, left = offset + num_written, left[num_written:]

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        (self.folder / name).unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        """Marks a file as used now."""
        os.utime(self.folder / name)

    def free_bytes(self) -> int:
        """Bytes that this user may still write on the disk."""
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize

    def replace(self, name: str, content: bytes) -> None:
        """Writes a small file as a whole; if that fails, the old one stays."""
        temporary = f"{name}.new"
        self.remove(temporary)
        self.create(temporary, content)
        os.replace(self.folder / temporary, self.folder / name)

    def lock(self, name: str, timeout_s: float = 0.0) -> int | None:
        """A descriptor that holds the lock of that name until it is closed or the process ends; None if another process
        still has it after `timeout_s`."""
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | _FLAGS, _MODE)
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    os.close(descriptor)
                    return None
                time.sleep(0.05)

    def check_lock(self, name: str, descriptor: int) -> None:
        """Raises `OSError` if the file of that name is not the one that `lock` opened any more: the folder was deleted,
        and another process may have made it again and hold that lock."""
        try:
            is_same = os.path.samestat(os.fstat(descriptor), os.stat(self.folder / name))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise FileNotFoundError(f"the folder, or the file `{name}` in it, was deleted while this server used it")

    @contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        descriptor = os.open(self.folder / name, flags | _FLAGS, _MODE)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
