"""Installs other servers that run on this machine, each into its own environment, and compares with them.

Each is installed once under ~/.cache/mlx-serve/peers (or MLX_SERVE_HOME), from wheels (llama.cpp from its sources), and
tried; a server that cannot be installed is reported with the reason. Then `mlx-serve bench compare` measures all of
them in turns. The default endpoint is chat, because not all of them complete plain text.

--model takes random:mini (the default), random:qwen3-0.6b, smollm2-packed (4 bits), smollm2-float32, or a folder.
llama.cpp is compared with the two smollm2 models.

examples:
  mlx-serve bench peers --peers mlx_lm vllm-mlx --workload uniform mixed one-chat --threads 1 2
  mlx-serve bench peers --peers llama.cpp --model smollm2-packed --workload one-chat
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from mlx_server.bench import compare, llama_cpp, random_folder
from mlx_server.bench.serve.client import CHAT
from mlx_server.bench.serve.command import INTRUDER
from mlx_server.bench.servers import Unavailable, run_to_end
from mlx_server.bench.tables import print_progress
from mlx_server.config import home
from mlx_server.errors import ConfigError
from mlx_server.runtime.models import random_models
from mlx_server.runtime.models.bundled import SMOLLM2, pull_bundled
from mlx_server.runtime.models.gguf import WeightFormat

OURS = "mlx-serve={python} -m mlx_server serve --model {model} --port {port}"
WORKLOADS = ("uniform", "one-chat", "shared-prefix", "shared-prefix-warm", "mixed", INTRUDER)
_BUNDLED = MappingProxyType({f"{SMOLLM2.name}-{weight_format}": weight_format for weight_format in WeightFormat})


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
    """Declares the options of `mlx-serve bench peers`, which are `compare`'s and two more."""
    add = parser.add_argument
    names = [*PEERS, llama_cpp.NAME]
    add("--peers", nargs="+", choices=names, default=names, help="servers to compare with; default: all")
    add("--install-only", action="store_true", help="install and try them, without a comparison")
    compare.add_arguments(parser)
    parser.set_defaults(endpoint=CHAT, workload=list(WORKLOADS), model="random:mini")


def run(args: argparse.Namespace) -> int:
    """Prints which peers are available, then what `compare` prints. Raises `ServeError` and its kinds."""
    folder = home() / "peers"
    model = model_folder(args.model, folder / "models")
    servers = [OURS]
    for name in args.peers:
        try:
            servers.append(f"{name}={_command(name, model, folder / name)}")
            print(f"{name}: available", flush=True)
        except Unavailable as reason:
            print(f"{name}: unavailable: {reason}", flush=True)
    if args.install_only:
        return 0
    if len(servers) == 1 and not args.server and not args.url:
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
    if name != llama_cpp.NAME:
        return prepare(PEERS[name], folder)
    return llama_cpp.command(llama_cpp.find_server(folder), model, folder.parent / "models")


def prepare(peer: Peer, folder: Path) -> str:
    """The command that starts the peer, which is installed into `folder` the first time. Raises `Unavailable`."""
    programs = Path(sys.executable).parent
    if peer.requirement is not None:
        programs = folder / "bin"
        stamp = folder / "installed"
        if not stamp.exists():
            print_progress(f"installing {peer.requirement} into {folder} ...")
            shutil.rmtree(folder, ignore_errors=True)
            _install(peer.requirement, folder)
            stamp.touch()
    name, *words = peer.program.split()
    command = [str(programs / name), *words]
    run_to_end([*command, "--help"])
    return f"{shlex.join(command)} {peer.arguments}"


def _install(requirement: str, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        run_to_end([sys.executable, "-m", "ensurepip"])
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
    run_to_end([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    run_to_end([*pip, "install", "--only-binary", ":all:", requirement], timeout_s=None)
    if sys.platform == "linux" and any(folder.glob("lib/*/site-packages/mlx-*")):
        # On Linux, the requirement `mlx` alone installs no backend, or CUDA's.
        version = metadata.version("mlx")
        run_to_end([*pip, "uninstall", "--yes", "mlx-cuda-12", "mlx-cuda-13"])
        run_to_end([*pip, "install", "--no-deps", "--force-reinstall", f"mlx=={version}", f"mlx-cpu=={version}"])
