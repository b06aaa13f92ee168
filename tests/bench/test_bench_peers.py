"""`bench peers`: installs from a folder of wheels, probes, names what cannot be had, and hands over to `compare`.

Then llama.cpp: how its server is found or built, and GGUF files of the bundled model.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import gguf
import mlx.core as mx
import pytest
from gguf_files import write_gguf
from mlx.utils import tree_flatten

from mlx_server.bench import peers
from mlx_server.bench.peers import Peer, Unavailable, prepare
from mlx_server.errors import ConfigError
from mlx_server.runtime.models.bundled import SMOLLM2
from mlx_server.runtime.models.gguf import WeightFormat, convert_gguf
from mlx_server.runtime.models.loader import load

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
    assert peers.run(parsed(*arguments)) == 0
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


# -- llama.cpp


@pytest.fixture
def program_folder(tmp_path, monkeypatch) -> Path:
    """The only folder of the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def offer_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only package that pip finds: sources with llama.cpp's inside."""
    package = folder / "llama_cpp_python-1.0"
    (package / "vendor" / "llama.cpp").mkdir(parents=True)
    (package / "vendor" / "llama.cpp" / "CMakeLists.txt").write_text("of llama.cpp")
    (package / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    metadata = "Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: 1.0\\n"
    (package / "PKG-INFO").write_text(metadata.replace("\\n", "\n"))
    (package / "backend.py").write_text(
        "import os\n"
        "def prepare_metadata_for_build_wheel(folder, config_settings=None):\n"
        "    os.mkdir(os.path.join(folder, 'llama_cpp_python-1.0.dist-info'))\n"
        f"    open(os.path.join(folder, 'llama_cpp_python-1.0.dist-info', 'METADATA'), 'w').write('{metadata}')\n"
        "    return 'llama_cpp_python-1.0.dist-info'\n"
        "def build_wheel(*args, **options): raise SystemExit('nobody builds me')\n"
    )
    with tarfile.open(folder / "llama_cpp_python-1.0.tar.gz", "w:gz") as archive:
        archive.add(package, package.name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_server_on_the_path_is_taken(program_folder, tmp_path):
    write_program(program_folder / "llama-server", "")
    assert peers.find_llama_server(tmp_path / "none") == program_folder / "llama-server"


def test_without_server_and_cmake_it_cannot_be_had(program_folder, tmp_path):
    with pytest.raises(Unavailable, match="no llama-server on the PATH, and no cmake"):
        peers.find_llama_server(tmp_path / "none")


@pytest.fixture
def environment_of_uv(tmp_path, monkeypatch) -> None:
    """This process runs in an environment without pip."""
    venv.create(tmp_path / "environment", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "bin" / "python"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))


@pytest.mark.usefixtures("environment_of_uv")
def test_it_is_built_once_for_this_cpu(program_folder, tmp_path, monkeypatch):
    folder, index = tmp_path / "llama.cpp", tmp_path / "index"
    offer_sources(index, monkeypatch)
    noted = tmp_path / "noted"
    server = folder / "build" / "bin" / "llama-server"
    write_program(
        program_folder / "cmake", f'PATH={os.defpath}; echo "$@" >> {noted}; mkdir -p {server.parent}; >{server}'
    )
    assert peers.find_llama_server(folder) == server
    configured, built = noted.read_text().splitlines()
    assert f"-S {folder / 'source'} -B {folder / 'build'}" in configured
    assert "-DGGML_NATIVE=ON" in configured
    assert f"--target llama-server --parallel={os.cpu_count()}" in built
    assert (folder / "source" / "CMakeLists.txt").read_text() == "of llama.cpp"
    assert peers.find_llama_server(folder) == server
    assert len(noted.read_text().splitlines()) == 2


def test_a_build_that_fails_is_reported_and_tried_again(program_folder, tmp_path, monkeypatch):
    offer_sources(tmp_path / "index", monkeypatch)
    write_program(program_folder / "cmake", "echo there is no compiler; exit 1")
    for _ in range(2):
        with pytest.raises(Unavailable, match="there is no compiler"):
            peers.find_llama_server(tmp_path / "llama.cpp")


def test_other_models_are_refused_with_a_remedy(tmp_path):
    with pytest.raises(Unavailable, match="is not the bundled model; use --model smollm2-packed"):
        peers.gguf_of(tmp_path, tmp_path)


@pytest.fixture
def bundled(tmp_path, monkeypatch) -> Path:
    """The bundled model's file, in small."""
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path))
    file = tmp_path / "downloads" / "tiny.gguf"
    file.parent.mkdir()
    write_gguf(file)
    monkeypatch.setattr(peers, "SMOLLM2", dataclasses.replace(SMOLLM2, file_name=file.name))
    return file


def bundled_folder(file: Path, folder: Path, weight_format: WeightFormat) -> Path:
    folder.mkdir()
    convert_gguf(file, folder, weight_format)
    (folder / "origin.json").write_text(json.dumps(SMOLLM2.origin(weight_format)))
    return folder


def test_the_bundled_models_file_has_the_bits_of_its_packed_folder(bundled, tmp_path):
    folder = bundled_folder(bundled, tmp_path / "smollm2-packed", WeightFormat.PACKED)
    assert peers.gguf_of(folder, tmp_path / "made") == bundled


def test_its_float32_folder_gets_the_same_file_expanded(bundled, tmp_path):
    folder = bundled_folder(bundled, tmp_path / "smollm2-float32", WeightFormat.FLOAT32)
    file = peers.gguf_of(folder, tmp_path / "made")
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors} == {"F32"}
    again = bundled_folder(file, tmp_path / "again", WeightFormat.FLOAT32)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (again / name).read_text() == (folder / name).read_text()
    ours, theirs = (dict(tree_flatten(load(str(one)).model.parameters())) for one in (folder, again))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_command_leaves_port_and_threads_open(bundled, program_folder, tmp_path):
    write_program(program_folder / "llama-server", "exit 0")
    folder = bundled_folder(bundled, tmp_path / "smollm2-packed", WeightFormat.PACKED)
    command = peers.llama_command(program_folder / "llama-server", folder, tmp_path / "made")
    assert command.startswith(f"{program_folder / 'llama-server'} --model {bundled} ")
    assert "--port {port}" in command
    assert "--threads {threads}" in command
