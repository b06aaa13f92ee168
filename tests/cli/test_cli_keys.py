"""`mlx-serve keys` from the outside, and what `mlx-serve serve` says of keys on its command line."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import pytest

from mlx_server.api.auth.key_file import KeyFile, Usage, parse_key
from mlx_server.api.auth.keys import key_file_path
from mlx_server.batching.blocks.disk_saves import owner_tag
from mlx_server.cli.main import main
from mlx_server.config import ServerConfig
from mlx_server.kv_disk.disk import LOCK
from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.slab import Space
from mlx_server.kv_disk.store import RecordStore

TIERS = '[server]\napi_key_tier = "gold"\n[tiers.gold]\n[tiers.free]\n'


class Keys:
    """Runs `mlx-serve keys` with a file and tiers of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = folder / "deep" / "keys.sqlite"
        self._config = folder / "tiers.toml"
        self._config.write_text(TIERS)
        self._capsys = capsys
        self.errors = ""

    def run(self, command: str, *arguments: str, status: int = 0) -> str:
        argv = ["keys", command, *arguments, "--config", str(self._config), "--key-file", str(self.path)]
        assert main(argv) == status
        out, self.errors = self._capsys.readouterr()
        return out

    def create(self, *arguments: str) -> str:
        return self.run("create", *arguments).strip()


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Keys:
    return Keys(tmp_path, capsys)


def matches(keys: Keys, text: str) -> bool:
    key = parse_key(text)
    assert key is not None
    with KeyFile(keys.path) as file:
        secret = file.secret(key.key_id)
    return secret is not None and secret.matches(key.secret) and not secret.is_revoked


def id_of(text: str) -> str:
    return text.split("_")[1]


def test_a_key_is_printed_once_and_alone(keys):
    text = keys.create("--tier", "free", "--label", "Ada's laptop")
    assert matches(keys, text)
    assert keys.errors == (f"Key {id_of(text)} of the tier free. It is shown only now: store it.\n")
    listed = keys.run("list")
    assert text not in listed
    assert text.split("_")[2] not in listed


def test_keys_are_of_the_tier_of_the_shared_one_unless_told(keys):
    assert json.loads(keys.run("list", "--json") if keys.create() else "")[0]["tier"] == "gold"


def test_a_tier_that_is_not_declared_makes_no_key_and_no_file(keys):
    assert keys.run("create", "--tier", "fre", status=2) == ""
    assert keys.errors == (
        "mlx-serve: error: --tier: there is no tier 'fre' in the configuration (--config FILE); did you mean free?\n"
    )
    assert not keys.path.exists()


def test_the_list_is_a_table(keys):
    first, second = keys.create("--label", "one"), keys.create("--tier", "free")
    keys.run("revoke", id_of(second))
    header, *rows = keys.run("list").splitlines()
    assert header.split() == ["id", "tier", "created", "last", "used", "requests", "prompt", "output", "label"]
    assert [row.split()[:2] for row in rows] == [[id_of(first), "gold"], [id_of(second), "free"]]
    assert [row.split()[3:] for row in rows] == [["never", "0", "0", "0", "one"], ["never", "0", "0", "0", "REVOKED"]]
    assert all(len(line) <= 80 for line in (header, *rows))


@pytest.mark.parametrize(
    ("seconds", "shown"), [(5, "just now"), (300, "5 min ago"), (7500, "2 h ago"), (200_000, "2 d ago")]
)
def test_the_list_tells_how_long_ago_a_key_was_used(keys, seconds, shown):
    key_id = id_of(keys.create())
    with KeyFile(keys.path) as file:
        file.add_usage({key_id: Usage(last_used_s=time.time() - seconds, num_requests=1)})
    assert f"  {shown}  " in keys.run("list")


def test_revoking_and_rotating(keys):
    first, second = keys.create(), keys.create()
    assert keys.run("revoke", id_of(first)) == f"The key {id_of(first)} is revoked.\n"
    rotated = keys.run("rotate", id_of(second)).strip()
    assert id_of(rotated) == id_of(second)
    assert [matches(keys, text) for text in (first, second, rotated)] == [False, False, True]
    keys.run("rotate", id_of(first), status=1)
    assert "revoked for good" in keys.errors


def test_a_revoked_key_s_prefixes_on_disk_are_purged(keys: Keys, tmp_path: Path) -> None:
    """Not while a server writes; and the key is refused all the same."""
    ids = [id_of(keys.create()) for _ in "ab"]
    files = Files(tmp_path / "kv")
    space = Space(bytes(16), "a", 1000)
    store = RecordStore(files, 2**20)
    for number, owner in enumerate([(), *((f"key:{key_id}", "salt") for key_id in ids)]):
        assert store.put(space, number.to_bytes(16, "big"), owner_tag(owner), memoryview(bytes(1000)))
    more = "--purge", "--kv-disk-dir", str(files.folder)
    lock = files.lock(LOCK)
    assert lock is not None
    assert "is revoked" in keys.run("revoke", ids[0], *more, status=1)
    assert "stop it first" in keys.errors
    os.close(lock)
    purged = keys.run("revoke", ids[1], *more).splitlines()[1]
    assert purged == f"1 blocks that only this key could hit are deleted from {files.folder}."
    left = RecordStore(files, 2**20)
    left.scan()
    assert len(left) == 2
    none = str(tmp_path / "none")
    assert "is revoked" in keys.run("revoke", id_of(keys.create()), "--purge", "--kv-disk-dir", none, status=1)
    assert f"There is no folder {none}" in keys.errors
    assert "name it with --kv-disk-dir" in keys.errors


@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_an_id_that_is_unknown_is_reported(keys, command):
    keys.create()
    keys.run(command, "0123", status=1)
    assert keys.errors == "mlx-serve: error: There is no key with the id '0123'; `mlx-serve keys list` shows all.\n"


@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_an_empty_id_or_tier_is_shown_as_one(keys: Keys, command: str) -> None:
    """As a script gives it whose variable is not set."""
    keys.create()
    keys.run(command, "", status=1)
    assert "There is no key with the id ''" in keys.errors
    keys.run("create", "--tier", "", status=2)
    assert "there is no tier '' in the configuration" in keys.errors
    assert len(json.loads(keys.run("list", "--json"))) == 1


class FullOnce(io.StringIO):
    """Standard output on a disk that was full."""

    flushes = 0

    def flush(self) -> None:
        self.flushes += 1
        if self.flushes == 1:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("command", ["create", "rotate"])
def test_a_key_that_cannot_be_printed_changes_nothing(
    keys: Keys, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = keys.create()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", FullOnce())
        keys.run(command, *([id_of(text)] if command == "rotate" else []), status=1)
    assert "cannot be printed: No space left on device. Nothing is changed; call this again" in keys.errors
    assert matches(keys, text)
    assert len(json.loads(keys.run("list", "--json"))) == 1


@pytest.mark.parametrize("command", ["create", "rotate"])
def test_a_key_for_a_closed_output_changes_nothing(keys: Keys, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = keys.create()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "__stdout__", None)  # as Python starts with `>&-`
        keys.run(command, *([id_of(text)] if command == "rotate" else []), status=1)
    assert "cannot be printed: standard output is closed. Nothing is changed; call this again" in keys.errors
    assert matches(keys, text)
    assert len(json.loads(keys.run("list", "--json"))) == 1


@pytest.mark.parametrize("arguments", [("list",), ("revoke", "x"), ("rotate", "x")])
def test_without_a_file_the_first_step_is_named(keys, arguments):
    keys.run(*arguments, status=1)
    assert "There are no keys yet" in keys.errors
    assert "`mlx-serve keys create` creates one" in keys.errors
    assert not keys.path.exists()


def test_a_file_that_cannot_be_made_is_reported(keys):
    keys.path.parent.write_text("a file where a folder should be")
    keys.run("create", status=1)
    assert keys.errors == (
        f"mlx-serve: error: The keys in {keys.path} cannot be changed: File exists. Check the file and its folder, or "
        "name another file with --key-file.\n"
    )


def test_on_a_full_disk_no_file_is_left(keys: Keys) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert keys.run("create", status=1) == ""
        full = shutil._ntuple_diskusage(2**30, 2**30, 0)  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: full)
            keys.run("create", status=1)
        assert f"The disk of {keys.path.parent} is full: make room on it" in keys.errors
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"The keys in {keys.path} cannot be changed: " in keys.errors
    keys.run("list", status=1)
    assert "There are no keys yet" in keys.errors
    assert keys.create()


def test_in_a_folder_that_cannot_be_written_the_remedy_is_named(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only file system: SQLite cannot make its files there."""
    keys.create()
    keys.path.with_name("keys.sqlite-wal").mkdir()
    keys.run("list", status=2)
    assert f"{keys.path} cannot be read as a file of keys: unable to open database file." in keys.errors
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK)
    keys.run("list", status=2)
    assert f"SQLite has to write beside it, and {keys.path.parent} is not writable" in keys.errors
    assert "--key-file" in keys.errors


@pytest.mark.parametrize("label", ["two\nlines", "\x1b[31mred", "\udcff"])
def test_a_label_that_would_spoil_the_list_is_refused(keys: Keys, label: str) -> None:
    keys.run("create", "--label", label, status=2)
    assert "--label" in keys.errors
    assert "control characters" in keys.errors
    assert not keys.path.exists()
    keys.create("--label", "Zoë’s\u3000👩\u200d💻")


@pytest.mark.parametrize("verb", ["revoke", "rotate"])
def test_an_id_that_is_no_text_is_refused(keys: Keys, verb: str) -> None:
    keys.create()
    keys.run(verb, "\udcff", status=2)
    assert "argument id: it must be UTF-8 text" in keys.errors


def test_a_folder_without_a_purge_is_refused_and_nothing_revoked(keys: Keys) -> None:
    key_id = id_of(keys.create())
    keys.run("revoke", key_id, "--kv-disk-dir", "there", status=2)
    assert "--kv-disk-dir has no effect without --purge" in keys.errors
    assert "REVOKED" not in keys.run("list")


def test_the_file_is_at_home_unless_it_is_set(monkeypatch, tmp_path, capsys):
    assert main(["keys", "create"]) == 0
    assert key_file_path(ServerConfig()).exists()
    monkeypatch.setenv("MLX_SERVE_SERVER_KEY_FILE", str(tmp_path / "other.sqlite"))
    assert main(["keys", "create"]) == 0
    assert (tmp_path / "other.sqlite").exists()


@pytest.mark.parametrize("flag", ["--api-key", "--admin-key"])
def test_an_empty_key_on_the_command_line_opens_no_server(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", flag, ""]) == 2
    assert f"error: {flag} is empty, and that is no key" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["api-key", "admin-key", "key", "tls-cert"])
def test_an_empty_file_name_on_the_command_line_opens_no_server(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlx_server.cli.serve.listen_all", lambda server: pytest.fail("It listens."))
    flag = f"--{name}" if name == "tls-cert" else f"--{name}-file"
    for command in (["serve"], ["service", "install", "--output", os.devnull, "--"]):
        assert main([*command, flag, ""]) == 2
        assert f"error: {flag} is empty, and that is no file" in capsys.readouterr().err


def test_a_path_that_no_file_can_have_gets_the_remedy(keys: Keys) -> None:
    keys.path = keys.path.parent.parent / ("k" * 300)
    keys.run("create", status=1)
    assert "cannot be changed: File name too long. Check the file and its folder, or name another" in keys.errors


@pytest.mark.parametrize("name", ["api_key", "admin_key", "discovery_key", "shared_store"])
def test_a_secret_on_the_command_line_is_warned_of_and_one_in_the_environment_is_not(monkeypatch, capsys, name):
    served = []
    monkeypatch.setattr("mlx_server.api.server.serve", lambda config, listeners, make_pool: served.append(config) or 0)
    monkeypatch.setattr("mlx_server.cli.serve.listen_all", lambda server: [contextlib.nullcontext()])
    monkeypatch.setattr("mlx_server.cli.serve.survive_lost_streams", lambda: None)
    flag, value = "--" + name.replace("_", "-"), "redis://:sesame@localhost" if name == "shared_store" else "sesame"
    section = "fleet" if name in ("discovery_key", "shared_store") else "server"
    variable = f"MLX_SERVE_{section}_{name}".upper()
    assert main(["serve", flag, value]) == 0
    warning = capsys.readouterr().err
    assert f"can see {flag} in the process list; set {variable} or put it into a --config file instead" in warning
    assert "sesame" not in warning
    monkeypatch.setenv(variable, value)
    assert main(["serve"]) == 0
    assert capsys.readouterr().err == ""
    assert [getattr(getattr(config, section), name) for config in served] == [value, value]
