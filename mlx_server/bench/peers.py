"""Installs other servers that run on this machine, each into its own environment, and compares with them.

The command begins with that, for all of them without --peers. Each is installed once under ~/.cache/mlx-serve/peers (or
MLX_SERVE_HOME), from PyPI's wheels (llama.cpp from its sources), and tried; a server that cannot be installed is
reported with the reason. Then `mlx-serve bench compare` measures all of them in turns. The default endpoint is chat,
because not all of them complete plain text.

--model takes random:mini (the default), random:qwen3-0.6b, smollm2-packed (4 bits), smollm2-float32, or a folder.
llama.cpp is compared with the two smollm2 models.

examples:
  mlx-serve bench peers --peers mlx_lm vllm-mlx --workload uniform mixed one-chat --threads 1 2
  mlx-serve bench peers --peers llama.cpp --model smollm2-packed --workload one-chat
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import gguf

from mlx_server.bench import compare, random_folder
from mlx_server.bench.serve.client import CHAT
from mlx_server.bench.serve.command import INTRUDER, check_options
from mlx_server.bench.tables import print_progress
from mlx_server.config import home
from mlx_server.errors import ConfigError
from mlx_server.runtime.models import random_models
from mlx_server.runtime.models.bundled import SMOLLM2, pull_bundled
from mlx_server.runtime.models.gguf import WeightFormat

OURS = "mlx-serve={python} -m mlx_server serve --model {model} --port {port}"
LLAMA_CPP = "llama.cpp"
WORKLOADS = ("uniform", "one-chat", "shared-prefix", "shared-prefix-warm", "mixed", INTRUDER)
_BUNDLED = MappingProxyType({f"{SMOLLM2.name}-{weight_format}": weight_format for weight_format in WeightFormat})
_PROBE_TIMEOUT_S = 300.0
_STAMP = "installed"


class Unavailable(Exception):
    """A server cannot be installed or started here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How a server is installed and started. `requirement` is None for one that is installed with this package.
    `program` is a script of its environment with its first arguments; it must succeed with `--help`."""

    requirement: str | None
    program: str
    arguments: str


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "mlx_lm": Peer(None, "python -m mlx_lm server", "--model {model} --host 127.0.0.1 --port {port}"),
        "rapid-mlx": Peer("rapid-mlx", "rapid-mlx serve", "{model} --host 127.0.0.1 --port {port}"),
        "vllm-mlx": Peer("vllm-mlx", "vllm-mlx serve", "{model} --continuous-batching --host 127.0.0.1 --port {port}"),
        "mlx-openai-server": Peer(
            "mlx-openai-server",
            "mlx-openai-server launch",
            "--model-type lm --model-path {model} --no-log-file --host 127.0.0.1 --port {port}",
        ),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench peers`, which are `compare`'s and one more."""
    names, about = [*PEERS, LLAMA_CPP], "servers to compare with; default: all"
    parser.add_argument("--peers", nargs="+", choices=names, default=names, help=about)
    compare.add_arguments(parser)
    parser.set_defaults(endpoint=CHAT, workload=list(WORKLOADS), model="random:mini")


def run(args: argparse.Namespace) -> int:
    """Prints which peers are available, then what `compare` prints. Raises `ServeError` and its kinds."""
    check_options(args, *args.workload)
    folder = home() / "peers"
    model = model_folder(args.model, folder / "models")
    servers = [OURS]
    for name in args.peers:
        try:
            servers.append(f"{name}={_command(name, model, folder / name)}")
            print(f"{name}: available", flush=True)
        except Unavailable as reason:
            print(f"{name}: unavailable: {reason}", flush=True)
    if len(servers) == 1 and not (args.server or args.url):
        raise ConfigError("No peer is available to compare with; the reasons are above.")
    settings = vars(args) | {"model": str(model), "server": [*servers, *args.server]}
    return compare.run(argparse.Namespace(**settings))


def model_folder(name: str, folder: Path) -> Path:
    """The folder of the model of this name. A random model is written into `folder` the first time, the bundled one is
    pulled and converted; any other name is a folder already."""
    if name in _BUNDLED:
        return pull_bundled(weight_format=_BUNDLED[name])
    if not random_models.is_random(name):
        return Path(name)
    made = folder / name.replace(":", "-")
    if not (made / "config.json").exists():
        random_folder.run(argparse.Namespace(name=name, folder=made))
    return made


def _command(name: str, model: Path, folder: Path) -> str:
    if name != LLAMA_CPP:
        return prepare(PEERS[name], folder)
    return llama_command(find_llama_server(folder), model, folder.parent / "models")


def prepare(peer: Peer, folder: Path) -> str:
    """The command that starts the peer, which is installed into `folder` the first time. Raises `Unavailable`."""
    programs = Path(sys.executable).parent
    if peer.requirement is not None:
        programs = folder / "bin"
        requirement = peer.requirement
        _once(folder, f"installing {requirement} into {folder}", lambda: _install(requirement, folder))
    name, *words = peer.program.split()
    command = [str(programs / name), *words]
    run_to_end([*command, "--help"])
    return f"{shlex.join(command)} {peer.arguments}"


def _once(folder: Path, what: str, install: Callable[[], None]) -> None:
    """Installs into `folder`, unless that has succeeded before."""
    stamp = folder / _STAMP
    if not stamp.exists():
        print_progress(f"{what} ...")
        shutil.rmtree(folder, ignore_errors=True)
        install()
        stamp.touch()


def _pip() -> list[str]:
    """This environment's pip, which is put into it if uv has made it without."""
    if importlib.util.find_spec("pip") is None:
        run_to_end([sys.executable, "-m", "ensurepip"])
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def _install(requirement: str, folder: Path) -> None:
    pip = [*_pip(), "--python", str(folder / "bin" / "python")]
    run_to_end([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    run_to_end([*pip, "install", "--only-binary", ":all:", requirement], timeout_s=None)
    if sys.platform == "linux" and any(folder.glob("lib/*/site-packages/mlx-*")):
        # On Linux, the requirement `mlx` alone installs no backend, or CUDA's.
        version = metadata.version("mlx")
        run_to_end([*pip, "uninstall", "--yes", "mlx-cuda-12", "mlx-cuda-13"])
        run_to_end([*pip, "install", "--no-deps", "--force-reinstall", f"mlx=={version}", f"mlx-cpu=={version}"])


def run_to_end(command: Sequence[str], timeout_s: float | None = _PROBE_TIMEOUT_S) -> None:
    """Runs a command. Raises `Unavailable` with the last line of its output if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
        )
    except OSError as error:
        raise Unavailable(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{shlex.join(command)} did not end within {timeout_s:g} s") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
        raise Unavailable(lines[-1] if lines else f"{shlex.join(command)} ended with status {done.returncode}")


# ---- llama.cpp: its server, built for this machine's CPU, and GGUF files of the bundled model

_SOURCES = "llama-cpp-python"
"""PyPI's sources. The wheels use only a minimal instruction set."""

_BUILD_OPTIONS = ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF")
_LEFT_OUT = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI")
_SLOTS, _SLOT_TOKENS = 16, 4864
"""Requests at a time, and the context of each: enough for the long prompt of `long-prompt-intruder` and its answer.
Its other settings are llama.cpp's defaults, with K/V in 16 bits."""


def find_llama_server(folder: Path) -> Path:
    """`llama-server` of the PATH, or the one in `folder`, which is built the first time. Raises `Unavailable`."""
    if found := shutil.which("llama-server"):
        return Path(found)
    if shutil.which("cmake") is None and not (folder / _STAMP).exists():
        raise Unavailable("there is no llama-server on the PATH, and no cmake to build it")
    _once(folder, f"building llama.cpp in {folder}, which takes minutes", lambda: _build_llama_server(folder))
    return folder / "build" / "bin" / "llama-server"


def _build_llama_server(folder: Path) -> None:
    source, build = folder / "source", folder / "build"
    download = [*_pip(), "download", "--no-deps", "--no-binary", _SOURCES, "--dest", str(folder), _SOURCES]
    run_to_end(download, timeout_s=None)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(folder, filter="data")
    (vendored,) = folder.glob("*/vendor/llama.cpp")
    vendored.rename(source)
    options = [f"-D{option}" for option in (*_BUILD_OPTIONS, *(f"{name}=OFF" for name in _LEFT_OUT))]
    run_to_end(["cmake", "-S", str(source), "-B", str(build), *options])
    compiling = ["cmake", "--build", str(build), "--target", "llama-server", f"--parallel={os.cpu_count()}"]
    run_to_end(compiling, timeout_s=None)


def llama_command(server: Path, model: Path, folder: Path) -> str:
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
    source = home() / "downloads" / SMOLLM2.file_name
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
