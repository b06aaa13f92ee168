"""`mlx-serve cache` on a folder that servers have written, and what the files of `cache warm` may hold."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest

from mlx_server.batching.blocks.disk_saves import owner_tag
from mlx_server.cli.main import main
from mlx_server.cli.remote import URL_VARIABLE
from mlx_server.kv_disk.disk import open_disk
from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.slab import SUFFIX, Space
from mlx_server.kv_disk.store import RecordStore

CONTENT = memoryview(bytes(range(250)) * 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models' prefixes: a of everyone's and of two keys', b of everyone's."""
    store = RecordStore(Files(tmp_path / "kv"), 2**20)
    for number, (model, owner) in enumerate([("a", ()), ("a", ("key:ada",)), ("a", ("key:bob",)), ("b", ())] * 2):
        space = Space(model.encode() * 16, model, len(CONTENT))
        assert store.put(space, number.to_bytes(16, "big"), owner_tag(owner), CONTENT)
    return tmp_path / "kv"


def run(folder: Path, capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["cache", *words, "--kv-disk-dir", str(folder)]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, ...]]:
    return [tuple(line.split()[:3]) for line in run(folder, capsys, "ls").splitlines()[1:]]


def test_prefixes_are_listed_by_model_and_caller(folder, capsys):
    ada, bob = (owner_tag((f"key:{name}",)).hex() for name in ("ada", "bob"))
    callers = [("a", caller, "2") for caller in sorted([ada, bob])]
    assert listed(folder, capsys) == [*callers, ("a", "everyone", "2"), ("b", "everyone", "2")]


def test_stats_are_those_of_the_files(folder, capsys):
    figures = json.loads(run(folder, capsys, "stats", "--json"))
    assert figures["blocks"] == 8
    assert figures["bytes"] == sum(path.stat().st_size for path in folder.glob("*.kvslab"))
    assert figures["writable_bytes"] == 64 * 10**9
    assert "64.00 GB" in run(folder, capsys, "stats")


def test_a_keys_prefixes_are_purged_and_overwritten(folder, capsys):
    assert run(folder, capsys, "purge", "--key", "ada") == "2 blocks are deleted.\n"
    ada = owner_tag(("key:ada",))
    assert not any(ada.hex() == row[1] for row in listed(folder, capsys))
    assert len(listed(folder, capsys)) == 3
    assert not any(ada in path.read_bytes() for path in folder.glob("*.kvslab"))
    assert run(folder, capsys, "purge", "--key", "nobody") == "0 blocks are deleted.\n"


def test_a_models_prefixes_are_purged_with_their_files(folder, capsys):
    assert run(folder, capsys, "purge", "--model", "b") == "2 blocks are deleted.\n"
    assert {row[0] for row in listed(folder, capsys)} == {"a"}
    assert len(list(folder.glob("*.kvslab"))) == 1


@pytest.mark.parametrize("name", ["m" * 300, "m" * 255 + "ü" + "m" * 50], ids=["ascii", "cut within a character"])
def test_a_model_is_purged_by_its_whole_name_however_long(folder, capsys, name):
    store = RecordStore(Files(folder), 2**20)
    assert store.put(Space(b"l" * 16, name, len(CONTENT)), bytes(16), owner_tag(()), CONTENT)
    (shown,) = [row[0] for row in listed(folder, capsys) if row[0].startswith("mm")]
    assert name.startswith(shown)
    assert run(folder, capsys, "purge", "--model", name) == "1 blocks are deleted.\n"
    assert len(listed(folder, capsys)) == 4


def test_a_models_prefixes_are_purged_with_a_configuration_of_several_models(folder, tmp_path, capsys):
    config = tmp_path / "several.toml"
    config.write_text('[[models]]\nid = "a"\nmodel = "random:mini"\n')
    assert run(folder, capsys, "purge", "--model", "b", "--config", str(config)) == "2 blocks are deleted.\n"


def test_all_is_purged(folder, capsys):
    assert "are deleted" in run(folder, capsys, "purge")
    assert list(folder.glob("*.kvslab")) == []


def test_nothing_is_purged_under_a_server(folder, capsys):
    disk = open_disk(folder, "1MB", 10**9)
    assert disk is not None
    assert "stop it first" in run(folder, capsys, "purge", status=1)
    assert len(listed(folder, capsys)) == 4
    disk.close()


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert str(tmp_path / "none") in run(tmp_path / "none", capsys, "ls", status=1)


def test_a_folder_that_cannot_be_looked_at_is_named(tmp_path, capsys):
    assert "File name too long" in run(tmp_path / ("x" * 300), capsys, "ls", status=1)


def test_only_a_folder_of_prefixes_is_to_be_closed_to_others(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "etc"
    folder.mkdir(mode=0o755)
    wanted = f"{folder} is open to others"
    assert f"{wanted}; name another with --kv-disk-dir, or run chmod 700 on it." in run(folder, capsys, "ls", status=1)
    (folder / "passwd").touch()
    words = f"{wanted} and has files that are no prefixes; name another with --kv-disk-dir."
    assert words in run(folder, capsys, "ls", status=1)
    (folder / f"a{SUFFIX}").touch()
    assert "or run chmod 700 on it." in run(folder, capsys, "ls", status=1)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert f"{folder} belongs to another user; name another with --kv-disk-dir." in run(folder, capsys, "ls", status=1)


@pytest.mark.parametrize("words", [("ls",), ("stats",), ("purge",), ("purge", "--model", "a")])
def test_a_disk_that_fails_is_one_line(folder, capsys, monkeypatch, words):
    def fail(*args: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Files, "lock" if words[0] == "purge" else "entries", fail)
    assert f"{folder} cannot be used: [Errno 30] Read-only file system." in run(folder, capsys, *words, status=1)


@pytest.fixture
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (" \n", "Standard input has no entries"),
        ("[]", "Standard input has no entries"),
        ('["a", ', "Standard input, line 1 is not JSON: Expecting value in column 7"),
        ('{"messages":\n [}', "Standard input, line 2 is not JSON: Expecting value in column 3"),
        ('"a"\n\n{"prompt": \n', "Standard input, line 3 is not JSON: Expecting value in column 12"),
        ("[" * 100_000, "Standard input cannot be read: it is nested too deeply"),
        ('"a"\n' + "[" * 100_000, "Standard input, line 2 cannot be read: it is nested too deeply"),
        ("9" * 5000, "Standard input cannot be read: it has a number of too many digits"),
        ('"a"\n3', "Standard input, line 2: the entry is neither a string nor an object"),
        ('["a", 3]', "Standard input, entry 2: the entry is neither"),
        ('{"input": "a"}', "Standard input: the entry is neither"),
        ('{"messages": [], "prompt": "a"}', "Standard input: the entry is neither"),
        ('{"prompt": ["a", "b"]}', "Standard input: the entry has several prompts"),
        ('"a"\n{"prompt": NaN}', "Standard input, line 1: No server answers"),
        ('"a\u2028b\x85c"\n{"prompt": "b\u2029"}\r\n', "No server answers at http://127.0.0.1:9"),
        ('"a"', "No server answers at http://127.0.0.1:9"),
        ('\ufeff"a"', "Standard input: No server answers"),
        ('{"messages": "a"}', "No server answers"),
    ],
)
@pytest.mark.usefixtures("nobody_listens")
def test_what_cannot_be_warmed_is_named(monkeypatch, capsys, text, wanted):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["cache", "warm", "-"]) == 1
    assert wanted in capsys.readouterr().err


def test_files_to_warm_that_cannot_be_read_are_named(tmp_path, capsys):
    assert main(["cache", "warm", str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read: No such file or directory." in capsys.readouterr().err
    (tmp_path / "image.json").write_bytes(b"\xff\xfe")
    assert main(["cache", "warm", str(tmp_path / "image.json")]) == 1
    assert "is not UTF-8 text: invalid start byte at byte 0." in capsys.readouterr().err
    assert main(["cache", "warm", ""]) == 1
    assert "A file without a name cannot be read: Is a directory." in capsys.readouterr().err


@pytest.mark.usefixtures("nobody_listens")
def test_a_file_to_warm_may_begin_with_a_byte_order_mark(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_bytes(b'\xef\xbb\xbf"a"\n"b"\n')
    assert main(["cache", "warm", str(tmp_path / "prompts.jsonl")]) == 1
    assert "prompts.jsonl, line 1: No server answers" in capsys.readouterr().err


def test_a_key_that_is_no_text_is_refused(capsys):
    assert main(["cache", "purge", "--key", "\udcff"]) == 2
    assert "argument --key: it must be UTF-8 text" in capsys.readouterr().err
