"""Shows what this machine has: processor, memory, MLX and its devices, BLAS, compiler, attention backends, the port,
who may use the server, and the models. Nothing is changed or fetched, except for the model that --report uses.

examples:
  mlx-serve doctor
  mlx-serve doctor --report
"""

from __future__ import annotations

import argparse
import platform
import shlex
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from mlx_server.api.auth.keys import KeyRing
from mlx_server.api.http.listener import listen
from mlx_server.bench.arguments import above_0
from mlx_server.cli.config import add_config_flag, config_from
from mlx_server.cli.remote import size
from mlx_server.config import Config, MemoryConfig, ServerConfig
from mlx_server.engine.memory.budget import MemoryBudget
from mlx_server.engine.models.store import stored_models
from mlx_server.errors import ConfigError, ServeError
from mlx_server.runtime.attention.backends import available_backends
from mlx_server.runtime.kernels.cpu.build import NativeBuildError, find_compiler
from mlx_server.runtime.layers.cpu import describe_native
from mlx_server.runtime.machine import METAL, SLOW_BLAS, inspect_machine
from mlx_server.runtime.memory import read_memory

_NOT_WIRED = (
    "memory is not wired: macOS may unwire it when idle, and the next step is slower then; --wire-memory keeps it, at "
    "the risk of kernel panics (docs/memory.md)"
)
_WIRED = (
    "memory is wired (--wire-memory): no slower step after idling, but kernel panics of macOS are known with it "
    "(docs/memory.md)"
)


REPORT = Path("mlx-serve-report.md")
_SOAK_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    parser.add_argument(
        "--report",
        nargs="?",
        type=Path,
        const=REPORT,
        metavar="FILE",
        help="also test and time the kernels, query a server and soak an engine, and write a report for an issue; of "
        "the configuration, the server and the engine get the model (of several, the first) and wire_memory, and all "
        f"else is at its default; default: {REPORT}",
    )
    parser.add_argument("--seconds", type=above_0, metavar="N", help=f"length of the soak; default: {_SOAK_S:g}")


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    if args.report is not None:
        return _report(config, args.report, args.seconds or _SOAK_S)
    if args.seconds is not None:
        raise ConfigError("--seconds has no effect without --report. Leave it out, or add --report.")
    for topic, describe in _topics(config).items():
        try:
            lines = describe()
        except (OSError, ServeError) as error:
            lines = [str(error)]
        for index, line in enumerate(lines):
            print(f"{topic if index == 0 else '':<10} {line}", flush=True)
    return 0


def _report(config: Config, path: Path, seconds: float) -> int:
    """Returns 0 if no stage has failed, else 1. Raises `ConfigError` at once if the file cannot be written."""
    from mlx_server.bench.lab.machine_report import make_report  # imports the whole engine

    try:
        path.open("a").close()  # a touch succeeds on folders, and on own files that are read-only
    except OSError as error:
        raise ConfigError(f"--report: cannot write {path}: {error.strerror}.") from error
    text, is_ok = make_report(config, seconds, lambda title: print(f"{title} ...", flush=True))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(text)
        raise ServeError(f"--report: cannot write {path}: {error.strerror}. The report is printed instead.") from error
    print(f"{'No stage has failed' if is_ok else 'Some stages have failed'}: see {path}, and attach it to an issue.")
    return 0 if is_ok else 1


def _topics(config: Config) -> dict[str, Callable[[], list[str]]]:
    return {
        "system": lambda: [platform.platform(terse=True) + f" on {platform.machine()}"],
        "memory": lambda: _memory(config.memory),
        "python": lambda: [f"{platform.python_version()} ({platform.python_implementation()})"],
        "mlx": lambda: _mlx(config.memory),
        "compiler": _compiler,
        "native": lambda: [describe_native()],
        "attention": _attention,
        "port": lambda: [_port(config.server)],
        "admins": lambda: [KeyRing(config).admins()],
        "models": _models,
    }


def _memory(settings: MemoryConfig) -> list[str]:
    memory = read_memory()
    budget = MemoryBudget.of(settings)
    return [
        f"{memory.total_bytes / 2**30:.1f} GiB, {memory.available_bytes / 2**30:.1f} GiB available",
        f"models may hold {budget.limit_bytes / 2**30:.1f} GiB (--memory-limit), {budget.free_bytes / 2**30:.1f} GiB "
        f"now; {budget.reserve_bytes / 2**30:.1f} GiB are kept free",
    ]


def _mlx(settings: MemoryConfig) -> list[str]:
    machine = inspect_machine()
    lines = [
        f"MLX {metadata.version('mlx')}, mlx-lm {metadata.version('mlx-lm')}",
        f"{machine.chip}; devices: {', '.join(machine.devices)}",
        f"{machine.matmul_gflops:.0f} GFLOP/s in float32 products of 512 x 512; BLAS: {machine.blas}",
    ]
    if METAL in machine.devices:
        lines.append(_WIRED if settings.wire_memory else _NOT_WIRED)
    if machine.is_blas_slow:
        lines.append(f"note: {SLOW_BLAS}")
    return lines


def _compiler() -> list[str]:
    try:
        return [shlex.join(find_compiler())]
    except NativeBuildError as error:
        return [f"none: {error}"]


def _attention() -> list[str]:
    return [
        f"{report.name}: {'yes' if report.is_available else f'no, {report.reason}'}" for report in available_backends()
    ]


def _port(server: ServerConfig) -> str:
    listen(server).close()
    return f"{server.host}:{server.port} is free"


def _models() -> list[str]:
    return [f"{model.name}: {size(model.num_bytes)} in {model.folder.parent}" for model in stored_models()] or [
        "none yet; `mlx-serve pull` fetches the bundled one"
    ]
