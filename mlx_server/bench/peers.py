"""The servers of others that run on this machine, installed into environments of their own, beside this one.

Each is installed once, from built packages only, under ~/.cache/mlx-serve/peers (or MLX_SERVE_HOME), and probed;
those that cannot be had are named with the reason. Then `mlx-serve bench compare` takes turns with all of them.
Not every peer completes plain text, so chats are compared. The model defaults to random:mini as a folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from mlx_server.bench import compare, random_folder
from mlx_server.bench.serve.client import CHAT
from mlx_server.bench.serve.command import INTRUDER
from mlx_server.bench.tables import tell
from mlx_server.errors import ConfigError

OURS = "mlx-serve={python} -m mlx_server serve --model {model} --port {port}"
WORKLOADS = ("uniform", "shared-prefix", "shared-prefix-warm", "mixed", INTRUDER)
_PROBE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Peer:
    """How a server is installed and started. `requirement` of None is one that is installed with us. `program`
    is a script of its environment, and its first argument, that must answer `--help`."""

    requirement: str | None
    program: str
    arguments: str
    needs_mlx: bool = True


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
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "llama.cpp": "PyPI has no built llama-cpp-python, and it reads GGUF only",
        "vllm-metal": "a plugin of vLLM, which has no wheel for macOS on PyPI",
        "oMLX, LM Studio, Ollama": "not on PyPI",
    }
)
"""Others, with the reason why they are not installed here. Start them, and add them with --url NAME=URL."""


class Unavailable(Exception):
    """A peer cannot be had here; the message is the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench peers`: those of `compare`, and which peers."""
    add = parser.add_argument
    add("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS), help="which to compare; default: all")
    add("--install-only", action="store_true", help="install and probe them, and compare nothing")
    compare.add_arguments(parser)
    parser.set_defaults(endpoint=CHAT, workload=list(WORKLOADS))


def run(args: argparse.Namespace) -> int:
    """Prints what is available, then what `compare` prints. Raises `ServeError` and its kinds."""
    folder = peers_folder()
    servers = [OURS]
    for name in args.peers:
        try:
            servers.append(f"{name}={prepare(PEERS[name], folder / name)}")
            print(f"{name}: available", flush=True)
        except Unavailable as reason:
            print(f"{name}: unavailable: {reason}", flush=True)
    for name, why in ELSEWHERE.items():
        print(f"{name}: not installed here: {why}", flush=True)
    if args.install_only:
        return 0
    if len(servers) == 1 and not args.server and not args.url:
        raise ConfigError("No peer is available to compare with; the reasons are above.")
    model = args.model or str(random_model(folder / "models" / "random-mini"))
    settings = vars(args) | {"model": model, "server": [*servers, *args.server]}
    return compare.run(argparse.Namespace(**settings))


def peers_folder() -> Path:
    """Where peers and their model are kept, outside of any repository."""
    return Path(os.environ.get("MLX_SERVE_HOME", "~/.cache/mlx-serve")).expanduser() / "peers"


def random_model(folder: Path) -> Path:
    """random:mini as a folder that each server can load, made the first time."""
    if not (folder / "config.json").exists():
        random_folder.run(argparse.Namespace(name="random:mini", folder=folder))
    return folder


def prepare(peer: Peer, folder: Path) -> str:
    """The command that starts the peer, which is installed into `folder` if it is not. Raises `Unavailable`."""
    programs = Path(sys.executable).parent
    if peer.requirement is not None:
        programs = folder / "bin"
        stamp = folder / "installed"
        if not stamp.exists():
            tell(f"installing {peer.requirement} into {folder} ...")
            shutil.rmtree(folder, ignore_errors=True)
            _install(peer, folder)
            stamp.touch()
    name, *words = peer.program.split()
    command = [str(programs / name), *words]
    _check([*command, "--help"])
    return f"{shlex.join(command)} {peer.arguments}"


def _install(peer: Peer, folder: Path) -> None:
    assert peer.requirement is not None
    if importlib.util.find_spec("pip") is None:
        _check([sys.executable, "-m", "ensurepip"])
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
    _check([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    _check([*pip, "install", "--only-binary", ":all:", peer.requirement], timeout_s=None)
    if peer.needs_mlx and sys.platform == "linux":
        # Peers ask for MLX as on a Mac; on Linux that is a core without a backend, or with one that wants CUDA.
        version = metadata.version("mlx")
        _check([*pip, "uninstall", "--yes", "mlx-cuda-12", "mlx-cuda-13"])
        _check([*pip, "install", "--no-deps", "--force-reinstall", f"mlx=={version}", f"mlx-cpu=={version}"])


def _check(command: Sequence[str], timeout_s: float | None = _PROBE_TIMEOUT_S) -> None:
    """Runs it; raises `Unavailable` with what it said last."""
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
