"""llama.cpp as a peer: its server, built for this machine's CPU, and GGUF files of the bundled model.

`llama-server` is taken from the PATH, or else built once from the sources in PyPI's `llama-cpp-python`, because its
wheels use only a minimal instruction set. Its settings are its defaults (K/V in 16 bits), except for the number of
requests at a time and their context.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tarfile
from pathlib import Path

import gguf

from mlx_server import config
from mlx_server.bench.servers import Unavailable, run_to_end
from mlx_server.bench.tables import print_progress
from mlx_server.runtime.models.bundled import SMOLLM2
from mlx_server.runtime.models.gguf import WeightFormat

NAME = "llama.cpp"
_SOURCES = "llama-cpp-python"
_BUILD_OPTIONS = ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF")
_LEFT_OUT = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI")
_SLOTS, _SLOT_TOKENS = 16, 4864
"""Requests at a time, and the context of each: enough for the long prompt of `long-prompt-intruder` and its answer."""


def find_server(folder: Path) -> Path:
    """`llama-server` of the PATH, or the one in `folder`, which is built the first time. Raises `Unavailable`."""
    if found := shutil.which("llama-server"):
        return Path(found)
    stamp, source, build = folder / "installed", folder / "source", folder / "build"
    if not stamp.exists():
        if shutil.which("cmake") is None:
            raise Unavailable("there is no llama-server on the PATH, and no cmake to build it")
        print_progress(f"building llama.cpp in {folder}, which takes minutes ...")
        shutil.rmtree(folder, ignore_errors=True)
        _fetch_sources(folder, source)
        options = [f"-D{option}" for option in (*_BUILD_OPTIONS, *(f"{name}=OFF" for name in _LEFT_OUT))]
        run_to_end(["cmake", "-S", str(source), "-B", str(build), *options])
        run_to_end(
            ["cmake", "--build", str(build), "--target", "llama-server", f"--parallel={os.cpu_count()}"], timeout_s=None
        )
        stamp.touch()
    return build / "bin" / "llama-server"


def _fetch_sources(folder: Path, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run_to_end([*pip, "--no-binary", _SOURCES, "--dest", str(folder), _SOURCES], timeout_s=None)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(folder, filter="data")
    (vendored,) = folder.glob("*/vendor/llama.cpp")
    vendored.rename(target)


def command(server: Path, model: Path, folder: Path) -> str:
    """The command for `bench compare` that serves the weights of the model's folder. Raises `Unavailable`."""
    run_to_end([str(server), "--version"])
    words = [server, "--model", gguf_of(model, folder), "--parallel", _SLOTS, "--ctx-size", _SLOTS * _SLOT_TOKENS]
    return f"{shlex.join(map(str, words))} --threads {{threads}} --host 127.0.0.1 --port {{port}}"


def gguf_of(model: Path, folder: Path) -> Path:
    """A GGUF file with the weights of `model`, a folder of the bundled model: the file that it was converted from, or,
    for float32, that file with all weights expanded, which is written to `folder` once. Raises `Unavailable` for any
    other model."""
    origin = model / "origin.json"
    facts = json.loads(origin.read_text(encoding="utf-8")) if origin.exists() else {}
    if facts.get("sha256") != SMOLLM2.sha256:
        raise Unavailable(
            f"{model} is not the bundled model; use --model smollm2-packed or smollm2-float32, or start llama-server "
            "with another GGUF file by --server"
        )
    source = config.home() / "downloads" / SMOLLM2.file_name
    if facts["weight_format"] == WeightFormat.PACKED:
        return source
    target = folder / f"{source.stem}-float32.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        _write_expanded(source, partial)
        partial.rename(target)
    return target


def _write_expanded(source: Path, target: Path) -> None:
    """Copies a GGUF file, with all weights expanded to float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    left_out = (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE)
    for name, value in reader.fields.items():
        if name not in left_out and not name.startswith("GGUF."):
            items = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
