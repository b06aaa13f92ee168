"""`mlx-serve cache warm`: what its files may hold, and what is said of others before anything is sent."""

from __future__ import annotations

import io

import pytest

from mlx_server.cli.main import main
from mlx_server.cli.remote import URL_VARIABLE


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "has no entries"),
        ("[]", "has no entries"),
        ('["a", ', "is not JSON: Expecting value in line 1"),
        ('"a"\n{"prompt": \n', "Line 2 is not JSON: Expecting value in column 12"),
        ('"a"\n3', "Entry 2 is neither a string nor an object"),
        ('{"input": "a"}', "Entry 1 is neither"),
        ('{"messages": [], "prompt": "a"}', "Entry 1 is neither"),
        ('{"prompt": ["a", "b"]}', "Entry 1 has several prompts"),
        ('"a"', "No server answers at http://127.0.0.1:9"),
        ('{"messages": "a"}', "No server answers"),
    ],
)
def test_what_cannot_be_used_is_named(monkeypatch, capsys, text, wanted):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["cache", "warm", "-"]) == 1
    assert wanted in capsys.readouterr().err


def test_files_that_cannot_be_read_are_named(tmp_path, capsys):
    assert main(["cache", "warm", str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read: No such file or directory." in capsys.readouterr().err
    (tmp_path / "image.json").write_bytes(b"\xff\xfe")
    assert main(["cache", "warm", str(tmp_path / "image.json")]) == 1
    assert "is not UTF-8 text: invalid start byte at byte 0." in capsys.readouterr().err
