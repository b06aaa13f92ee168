"""What the process asks the system for."""

from __future__ import annotations

import stat
import threading
from functools import partial
from pathlib import Path

import pytest

from mlx_server import environment
from mlx_server.errors import DownloadError, ModelLoadError
from mlx_server.kv_disk.files import Files
from mlx_server.runtime.models.resolve import resolve_model
from tests.gguf_files import write_gguf


@pytest.fixture
def tmutil(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which a stand-in for macOS's `tmutil` writes its arguments."""
    program, calls = tmp_path / "tmutil", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexit 1\n')
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(environment, "is_mac", lambda: True)
    monkeypatch.setattr(environment, "_TMUTIL", str(program))
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    return calls


def test_what_can_be_made_again_is_left_out_of_backups_once(tmutil: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    for _ in range(2):
        Files(tmp_path / "home" / "kv-disk")
        resolve_model(str(tmp_path / "tiny.gguf"))
        (tmp_path / "tiny.gguf").touch()
    excluded = [f"addexclusion {tmp_path / 'home' / name}" for name in ("kv-disk", "models")]
    assert tmutil.read_text().splitlines() == excluded


def test_a_disk_that_is_not_attached_is_named(tmutil: Path, monkeypatch, tmp_path: Path) -> None:
    disks = tmp_path / "Volumes"
    disks.mkdir()
    monkeypatch.setattr(environment, "_DISKS", disks)
    reason = f"no disk is mounted there; attach it: '{disks / 'fast'}'"
    with pytest.raises(OSError, match=reason):
        Files(disks / "fast" / "kv")
    (tmp_path / "link").symlink_to(disks / "fast")
    for model in (disks / "fast" / "qwen", disks / "fast" / "qwen.gguf", tmp_path / "link" / "qwen"):
        with pytest.raises(ModelLoadError, match=reason):
            resolve_model(str(model))
    monkeypatch.setenv("MLX_SERVE_HOME", str(disks / "fast" / "home"))
    with pytest.raises(DownloadError, match=f"in {disks / 'fast'}: no disk is mounted there; attach it"):
        resolve_model("smollm2")
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(DownloadError, match="no disk is mounted there"):
        resolve_model(str(tmp_path / "tiny.gguf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(disks / "fast" / "hub"))
    with pytest.raises(ModelLoadError, match=reason):
        resolve_model("mlx-community/Qwen3-0.6B-4bit")
    assert not (disks / "fast" / "kv").exists()


@pytest.mark.parametrize("is_mac", [True, False])
def test_without_the_program_the_folder_is_made_all_the_same(monkeypatch, tmutil, tmp_path, is_mac) -> None:
    monkeypatch.setattr(environment, "_TMUTIL", str(tmp_path / "nowhere"))
    monkeypatch.setattr(environment, "is_mac", lambda: is_mac)
    assert Files(tmp_path / "kv-disk").entries("") == []
    assert not tmutil.exists()


def test_jobs_run_side_by_side_and_none_begins_after_the_first_error() -> None:
    side_by_side, stop = threading.Barrier(3, timeout=20), threading.Event()
    begun, stopped = list[int](), list[bool]()

    def job(number: int) -> None:
        begun.append(number)
        side_by_side.wait()
        if number == 1:
            raise DownloadError("the first")
        stopped.append(stop.wait(20))

    with pytest.raises(DownloadError, match="the first"):
        environment.run_all([partial(job, number) for number in range(6)], 3, stop)
    assert (sorted(begun), stopped) == ([0, 1, 2], [True, True])
