"""The limit of a container's memory, as Linux tells it in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_server.runtime import memory
from mlx_server.runtime.machine import GroupMemory, read_group_memory

MIB = 2**20
UNLIMITED = 9223372036854771712
"""What the first version says where no limit is set."""


def group(folder: Path, limit: object, used_mib: int, droppable_mib: int = 0, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {droppable_mib * MIB}\n")


def reading(root: Path, membership: str) -> GroupMemory | None:
    (root / "membership").write_text(membership)
    return read_group_memory(root / "membership", root)


def test_the_second_version(tmp_path: Path):
    group(tmp_path / "a" / "b", 500 * MIB, 300, 100)
    assert reading(tmp_path, "0::/a/b\n") == GroupMemory(500 * MIB, 200 * MIB)


def test_the_first_version_among_other_controllers(tmp_path: Path):
    group(tmp_path / "memory" / "a", 500 * MIB, 300, 100, version=1)
    assert reading(tmp_path, "3:cpu:/a\n2:memory:/a\n0::/\n") == GroupMemory(500 * MIB, 200 * MIB)


def test_the_group_with_the_least_left_counts(tmp_path: Path):
    group(tmp_path / "a" / "b", 500 * MIB, 100)
    group(tmp_path / "a", 600 * MIB, 590)
    assert reading(tmp_path, "0::/a/b\n") == GroupMemory(600 * MIB, 590 * MIB)


@pytest.mark.parametrize("membership", ["0::/a\n", "0::/elsewhere\n", "", "5:cpu:/a\n"])
def test_without_a_limit_there_is_none(tmp_path: Path, membership: str):
    group(tmp_path / "a", "max", 300)
    assert reading(tmp_path, membership) is None
    assert read_group_memory(tmp_path / "nothing", tmp_path) is None


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path):
    group(tmp_path / "memory", 500 * MIB, 100, version=1)
    assert reading(tmp_path, "2:memory:/docker/0a1b\n") == GroupMemory(500 * MIB, 100 * MIB)


@pytest.mark.parametrize(("limit", "total"), [(500 * MIB, 500 * MIB), (UNLIMITED, 2000 * MIB)])
def test_models_live_in_what_the_group_leaves(monkeypatch: pytest.MonkeyPatch, limit: int, total: int):
    class Machine:
        total = 2000 * MIB
        available = 1500 * MIB

    monkeypatch.setattr(memory.psutil, "virtual_memory", Machine)
    monkeypatch.setattr(memory.mx, "device_info", dict)
    monkeypatch.setattr(memory.mx, "get_cache_memory", lambda: 0)
    monkeypatch.setattr(memory, "read_group_memory", lambda: GroupMemory(limit, 200 * MIB))
    found = memory.read_memory()
    assert found.total_bytes == total
    assert found.available_bytes == min(1500 * MIB, limit - 200 * MIB)
