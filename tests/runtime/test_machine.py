"""The memory that this machine has for models."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlx_server.runtime import machine, memory
from mlx_server.runtime.machine import GroupMemory, available_memory, read_group_memory

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

    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    monkeypatch.setattr(memory.mx, "device_info", dict)
    monkeypatch.setattr(memory.mx, "get_cache_memory", lambda: 0)
    monkeypatch.setattr(memory, "read_group_memory", lambda: GroupMemory(limit, 200 * MIB))
    found = memory.read_memory()
    assert found.total_bytes == total
    assert found.available_bytes == min(1500 * MIB, limit - 200 * MIB)


class Kernel:
    """A Mac's: its numbers have 4 or 8 bytes."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = {f"vm.{name}": number for name, number in numbers.items()}

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: ctypes.c_size_t) -> int:
        assert (new, new_size.value, size._obj.value) == (None, 0, 8)
        number = self.numbers.get(name.decode())
        if number is None:
            return -1
        ctypes.memmove(ctypes.byref(value._obj), number.to_bytes(4, "little"), 4)
        return 0


@pytest.mark.parametrize(("pages", "available_mib"), [({"page_purgeable_count": 64}, 3 + 5 + 1), ({}, 77)])
def test_a_mac_has_what_neither_programs_nor_its_kernel_use(
    monkeypatch: pytest.MonkeyPatch, pages: dict[str, int], available_mib: int
) -> None:
    """Where its kernel has no such number, psutil's is taken."""
    kernel = Kernel(page_free_count=3 * 64, page_pageable_external_count=5 * 64, pagesize=16384, **pages)
    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(machine, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: kernel}))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**40, available=77 * MIB))
    assert available_memory() == available_mib * MIB
    assert memory.read_memory().available_bytes == available_mib * MIB + memory.mx.get_cache_memory()
