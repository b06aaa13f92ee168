"""The memory that Linux lets this process have: a container's, or a systemd unit's, whose limit kills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """A control group's limit, and what its processes hold of it that cannot be dropped at once."""

    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def read_group_memory(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> GroupMemory | None:
    """Of the groups that this process is in, the one that has the least left; None where no limit is set, as on a Mac.
    Cheap enough for every second. Any thread. Both versions of control groups are read (cgroups(7))."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    readings = [reading for line in lines for reading in _readings(line, mount)]
    return min(readings, key=lambda reading: reading.available_bytes, default=None)


def _readings(line: str, mount: Path) -> Iterator[GroupMemory]:
    """Of the group that a line of `/proc/self/cgroup` names, and of those around it."""
    _, controllers, path = line.split(":", 2)
    if controllers not in ("", "memory"):
        return
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    root = mount / "memory"
    if not controllers:
        names, root = ("memory.max", "memory.current", "inactive_file"), mount
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        reading = _reading(group, *names)
        if reading is not None:
            yield reading
        if group == root:
            return


def _reading(group: Path, limit: str, usage: str, droppable: str) -> GroupMemory | None:
    try:
        limit_bytes = int((group / limit).read_text())  # `max` is no number: no limit
        used_bytes = int((group / usage).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return GroupMemory(limit_bytes, max(0, used_bytes - int(statistics.get(droppable, 0))))
    except (OSError, ValueError):
        return None
