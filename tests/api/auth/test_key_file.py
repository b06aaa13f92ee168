"""How the file of keys comes to be."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_server.api.auth import key_file
from mlx_server.api.auth.key_file import KeyFile, KeyText


def test_a_file_that_several_create_at_once_has_the_keys_of_all(tmp_path: Path):
    num_creators, at_once = 8, threading.Barrier(8)

    def create(path: Path) -> KeyText:
        at_once.wait()
        with KeyFile.create(path) as file:
            return file.add("gold", "")

    with ThreadPoolExecutor(num_creators) as creators:
        for number in range(50):
            path = tmp_path / str(number) / "keys.sqlite"
            made = list(creators.map(create, [path] * num_creators))
            with KeyFile(path) as file:
                assert {record.key_id for record in file.records()} == {key.key_id for key in made}


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty one is filled, and a link is followed."""
    path = tmp_path / "keys.sqlite"
    path.with_name("keys.sqlite.new").write_text("left by a process that was killed")
    with monkeypatch.context() as broken:
        broken.setattr(key_file, "_TABLE", f"{key_file._TABLE}; it breaks")
        with pytest.raises(sqlite3.Error):
            KeyFile.create(path)
    assert list(tmp_path.iterdir()) == []
    path.touch()
    path.chmod(0o640)
    before = path.stat()
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(other)
    for made in (path, link):
        with KeyFile.create(made) as file:
            assert file.records() == []
    assert (path.stat().st_ino, path.stat().st_mode) == (before.st_ino, before.st_mode), "as its owner has prepared it"
    assert link.is_symlink()
    assert other.stat().st_mode & 0o777 == 0o600


def test_an_empty_file_that_cannot_be_filled_stays_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "keys.sqlite"
    path.touch()
    monkeypatch.setattr(key_file, "_TABLE", f"{key_file._TABLE}; it breaks")
    with pytest.raises(sqlite3.Error):
        KeyFile.create(path)
    assert path.stat().st_size == 0


def test_nothing_is_left_beside_a_file_that_is_there(tmp_path: Path):
    """It may belong to another user than the one who adds a key."""
    path = tmp_path / "keys.sqlite"
    for _ in range(2):
        KeyFile.create(path).close()
        assert {left.name for left in tmp_path.iterdir()} <= {"keys.sqlite", "keys.sqlite-wal", "keys.sqlite-shm"}
