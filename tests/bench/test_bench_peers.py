"""`bench peers`: installs from a folder of wheels, probes, names what cannot be had, and hands over to `compare`."""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from pathlib import Path

import pytest

from mlx_server.bench import peers
from mlx_server.bench.peers import Peer, Unavailable, prepare
from mlx_server.errors import ConfigError
from mlx_server.runtime.models.gguf import WeightFormat

FAKE = Path(__file__).parent / "bench_fake_server.py"
PROGRAM = f"""
import runpy, sys
def main():
    if "--help" in sys.argv:
        sys.exit("it wants a GPU" if "broken" in sys.argv else 0)
    sys.argv = sys.argv[1:]
    runpy.run_path({str(FAKE)!r}, run_name="__main__")
"""


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """The only packages that pip finds: fake-peer 1.0."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "fake_peer-1.0.dist-info"
    with zipfile.ZipFile(folder / "fake_peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("fake_peer.py", PROGRAM)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-peer\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\nfake-peer = fake_peer:main\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(peers, "model_folder", lambda name, folder: folder / name)
    return folder


def fake(program: str = "fake-peer serve", requirement: str = "fake-peer") -> Peer:
    return Peer(requirement, program, "{port}")


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    return parser.parse_args(argv)


def test_a_peer_is_installed_once_and_compared(index, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "PEERS", {"good": fake(), "broken": fake("fake-peer broken")})
    monkeypatch.setattr(peers, "OURS", f"ours={sys.executable} {FAKE} {{port}}")
    small = ["--endpoint", "completions", "--workload", "uniform", "--num-prompts", "2", "--output-len", "2"]
    arguments = ["--peers", "good", "--rounds", "1", "--num-warmups", "0", *small]
    assert peers.run(parsed(*arguments)) == 0
    printed = capsys.readouterr()
    assert "good: available" in printed.out
    assert "installing fake-peer" in printed.err
    turns = json.loads(printed.out.splitlines()[-1])["results"][0]["turns"]
    assert {name: [turn["completed"] for turn in taken] for name, taken in turns.items()} == {"ours": [2], "good": [2]}
    for wheel in index.iterdir():
        wheel.unlink()
    assert peers.run(parsed("--peers", "good", "--install-only")) == 0
    assert "installing" not in capsys.readouterr().err
    with pytest.raises(Unavailable, match=r"^it wants a GPU$"):
        prepare(fake("fake-peer broken"), tmp_path / "home" / "peers" / "good")


def test_what_cannot_be_installed_is_named_with_pips_reason(index, monkeypatch, capsys):
    monkeypatch.setattr(peers, "PEERS", {"none": fake(requirement="no-such-peer")})
    with pytest.raises(ConfigError, match="No peer is available"):
        peers.run(parsed("--peers", "none"))
    assert "none: unavailable: ERROR: No matching distribution found for no-such-peer" in capsys.readouterr().out


def test_a_peer_that_is_installed_with_us_needs_no_folder(tmp_path):
    command = prepare(Peer(None, "python -m json.tool", "--port {port}"), tmp_path / "never")
    assert command == f"{Path(sys.executable).parent / 'python'} -m json.tool --port {{port}}"
    assert not (tmp_path / "never").exists()
    assert peers.PEERS["mlx_lm"].requirement is None


def test_a_random_model_is_made_once_and_a_folder_is_taken_as_it_is(tmp_path):
    made = peers.model_folder("random:mini", tmp_path)
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert peers.model_folder("random:mini", tmp_path) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert peers.model_folder("some/folder", tmp_path) == Path("some/folder")


def test_the_bundled_model_is_pulled_in_the_format_that_its_name_says(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "pull_bundled", lambda **options: asked.append(options) or tmp_path)
    assert peers.model_folder("smollm2-packed", tmp_path) == peers.model_folder("smollm2-float32", tmp_path)
    assert asked == [{"weight_format": WeightFormat.PACKED}, {"weight_format": WeightFormat.FLOAT32}]
