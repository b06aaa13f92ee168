"""`mlx-serve serve`, and `mlx-serve service`: a launchd agent of the user that starts the server and keeps it
running."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import plistlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_server.api.http.listener import listen_all
from mlx_server.cli.config import add_setting_flags, config_from
from mlx_server.cli.main import Parser
from mlx_server.config import Config, home, settings
from mlx_server.environment import expanded
from mlx_server.errors import ConfigError, ServeError
from mlx_server.observability.logs import leave, survive_lost_streams

if TYPE_CHECKING:
    from mlx_server.pool.model_pool import ModelPool

logger = logging.getLogger(__name__)

LABEL = "io.mlx-serve.server"

_END_TIMEOUT_S = 60.0
_POLL_S = 0.2
_RESTART_PAUSE_S = 10
_FLUSH_S = 10
_KEYS = ("api_key", "admin_key")
_FILES = ("api_key_file", "admin_key_file", "key_file", "tls_cert", "tls_key")
"""Without them, a server needs no key, or sends keys that can be read on the way."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_OTHER_VARIABLES = (
    *("MLX_SERVE_CPU_THREADS", "MLX_SERVE_CPU_ISA"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
    *(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT" for kind in ("", "TRACES_", "METRICS_")),
    *("SSL_CERT_FILE", *_PROXIES, *map(str.upper, _PROXIES)),
)
"""Of the environment, beside settings: what the server and its libraries read."""


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("named_model", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    add_setting_flags(parser)


def run_serve(args: argparse.Namespace) -> int:
    """Serves a model over HTTP; without options, the bundled model on http://127.0.0.1:8000.

    examples:
      mlx-serve serve
      mlx-serve serve mlx-community/Qwen3-0.6B-4bit --port 9000
      mlx-serve serve --config my.toml --kv-cache-memory 4GiB --no-prefix-caching
    """
    config = _config(args)
    for secret in settings():
        if secret.is_secret and getattr(args, secret.name) is not None:
            print(
                f"mlx-serve: warning: every user of this machine can see {secret.flag} in the process list; set "
                f"{secret.env} or put it into a --config file instead.",
                file=sys.stderr,
            )
    size, rank = config.fleet.tensor_parallel_size, 0
    if size > 1:
        from mlx_server.engine.distributed.ranks import check_shardable, own_rank

        check_shardable(config)
        rank = own_rank(size)
    survive_lost_streams()
    if rank > 0:
        from mlx_server.engine.distributed.follower import follow

        return follow(config)
    with contextlib.ExitStack() as listening:
        listeners = [listening.enter_context(listener) for listener in listen_all(config.server)]
        from mlx_server.api.server import serve  # after the port is taken: it imports uvicorn and FastAPI

        status = serve(config, listeners, _make_pool)
    if size > 1 and status:
        leave(status)  # MLX may wait for a rank that is gone, and Python waits for MLX
    return status


def _make_pool(config: Config) -> ModelPool:
    """Imports MLX and transformers, which takes seconds. Any thread."""
    from mlx_server.runtime.kernels.cpu import native

    native.prepare()  # a first start compiles while the rest is imported
    from mlx_server.pool.model_pool import build_pool
    from mlx_server.runtime.machine import SLOW_BLAS, is_blas_slow

    if is_blas_slow():
        logger.warning("%s.", SLOW_BLAS)
    return build_pool(config)


def add_install(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, help="write the agent to this file, without starting it")
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="options of `mlx-serve serve`")


def run_install(args: argparse.Namespace) -> int:
    """Installs a launchd agent: macOS starts the server now and at every login, and again whenever it fails.

    Options after `--` are those of `mlx-serve serve`; they are checked now. Do not put a key there, where every user
    can read it: put it into a --config file, as `api_key` in [server].

    examples:
      mlx-serve service install
      mlx-serve service install -- mlx-community/Qwen3-0.6B-4bit --port 9000
      mlx-serve service install --output /tmp/agent.plist
    """
    config = _checked(args.serve_options)
    if args.output is None and sys.platform != "darwin":
        raise ServeError("launchd is part of macOS. Elsewhere, give --output to write the agent's file only.")
    path: Path = args.output or agent_path()
    agent = launch_agent(args.serve_options, config, log_folder=expanded("~/Library/Logs"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(plistlib.dumps(agent))
    print(f"{path} is written.")
    if args.output is None:
        end_agent()  # a previous installation
        if subprocess.run(launchctl("bootstrap"), check=False).returncode:
            raise ServeError(f"launchctl did not accept {path}; see above.")
        print(f"The server starts, on {config.server.host}:{config.server.port}. Its log: {agent['StandardErrorPath']}")
    return 0


def add_uninstall(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run_uninstall(args: argparse.Namespace) -> int:
    """Stops the launchd agent that `mlx-serve service install` has installed, and removes its file."""
    path = agent_path()
    if not path.exists():
        raise ServeError(f"There is no agent at {path}.")
    if sys.platform == "darwin":
        end_agent()
    path.unlink()
    print(f"{path} is removed.")
    return 0


def agent_path() -> Path:
    return expanded(f"~/Library/LaunchAgents/{LABEL}.plist")


def launchctl(action: str) -> list[str]:
    """The command that starts (`bootstrap`), stops (`bootout`) or shows (`print`) the agent in the user's session."""
    domain = f"gui/{os.getuid()}"
    return ["launchctl", action, *([domain, str(agent_path())] if action == "bootstrap" else [f"{domain}/{LABEL}"])]


def end_agent() -> None:
    """Stops the agent if it is running. launchd only asks it to stop, and starts no new one until the old one has
    ended, so this waits for that."""
    subprocess.run(launchctl("bootout"), check=False, capture_output=True)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while _is_known() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _is_known() -> bool:
    return subprocess.run(launchctl("print"), check=False, capture_output=True).returncode == 0


def launch_agent(serve_options: Sequence[str], config: Config, log_folder: Path) -> dict[str, Any]:
    """The property list, see `man launchd.plist`. `config` is the configuration that `serve_options` give."""
    log = str(log_folder / "mlx-serve.log")
    return {
        "Label": LABEL,
        "ProgramArguments": [_lasting_python(), "-P", "-m", "mlx_server", "serve", *serve_options],
        "EnvironmentVariables": _environment(),
        "WorkingDirectory": os.getcwd(),  # relative paths keep their meaning
        "RunAtLoad": True,
        # The server exits with 0 after a signal, and with another status when only a restart helps.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_PAUSE_S,
        # SIGTERM drains open streams; by default, launchd kills after 20 s.
        "ExitTimeOut": int(config.server.drain_timeout_s) + _FLUSH_S,
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def _lasting_python() -> str:
    """This interpreter, at a path that stays when the package is upgraded. Raises `ServeError` for one in uv's cache,
    where `uvx` puts it and from where it may be deleted at any time."""
    cache = re.match(r"(.*)/(archive|environments)-v\d+/", sys.executable)
    if cache is not None and os.path.exists(f"{cache[1]}/CACHEDIR.TAG"):
        raise ServeError(
            f"{sys.executable} is in uv's cache, and the service would end when that is emptied. Install the command "
            "with `uv tool install .` in the checkout, and let that install the service."
        )
    lasting = re.sub(r"/Cellar/([^/]+)/[^/]+/", r"/opt/\1/", sys.executable)  # Homebrew's link to the version in use
    return lasting if os.path.exists(lasting) else sys.executable


def _environment() -> dict[str, str]:
    """The environment for the server: the settings in this shell, and where models, programs and other servers are.
    Raises `ServeError` for keys and passwords, which every user could read in the agent's file."""
    secret = next((s.env for s in settings() if s.is_secret and os.environ.get(s.env)), None)
    if secret is not None:
        raise ServeError(
            f"{secret} is set, and every user could read it in the agent's file; put the key into a "
            "--config file, and unset the variable."
        )
    names = [*(setting.env for setting in settings()), *_OTHER_VARIABLES]
    kept = {name: os.environ[name] for name in names if os.environ.get(name)}
    private = next((name for name, value in kept.items() if re.match(r"(\w+://)?[^/]*@", value)), None)
    if private is not None:
        raise ServeError(
            f"{private} names a user, and every user could read the password in the agent's file; unset the variable, "
            "or give an address without one."
        )
    return {"MLX_SERVE_HOME": str(home()), "PATH": os.environ.get("PATH", os.defpath), **kept}


def _checked(serve_options: Sequence[str]) -> Config:
    """The configuration that these options give. Raises `UsageError` and `ServeError`."""
    parser = Parser(prog="mlx-serve serve")
    add_serve(parser)
    args = parser.parse_args(serve_options)
    secret = next((s.flag for s in settings() if s.is_secret and getattr(args, s.name) is not None), None)
    if secret is not None:
        raise ServeError(f"Every user could read {secret} in the agent's file; put it into a --config file.")
    return _config(args)


def _config(args: argparse.Namespace) -> Config:
    """The configuration. Raises `ConfigError`, also for keys that are empty, as of a script's variable that is not
    set."""
    for name in (*_KEYS, *_FILES):
        if getattr(args, name) == "":
            what = "key" if name in _KEYS else "file"
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is empty, and that is no {what}; give one, or leave the option out.")
    return config_from(args)
