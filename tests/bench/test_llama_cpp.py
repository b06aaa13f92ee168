"""llama.cpp as a peer: how its server is found or built, and GGUF files of the bundled model."""

from __future__ import annotations

import dataclasses
import json
import os
import tarfile
from pathlib import Path

import gguf
import mlx.core as mx
import pytest
from gguf_files import write_gguf
from mlx.utils import tree_flatten

from mlx_server.bench import peers
from mlx_server.bench.peers import Unavailable
from mlx_server.runtime.models.bundled import SMOLLM2
from mlx_server.runtime.models.gguf import WeightFormat, convert_gguf
from mlx_server.runtime.models.loader import load


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
