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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_server.api.http.listener import listen_all
from mlx_server.cli.config import add_setting_flags, config_from
from mlx_server.cli.main import Parser
from mlx_server.config import DEFAULT_MODEL, Config, home, settings
from mlx_server.environment import expanded
from mlx_server.errors import ConfigError, ServeError
from mlx_server.observability.logs import leave, survive_lost_streams

if TYPE_CHECKING:
    from mlx_server.pool.model_pool import ModelPool

logger = logging.getLogger(__name__)

LABEL = "io.mlx-serve.server"

_POLL_S = 0.2
_RESTART_PAUSE_S = 10
_FLUSH_S = 30
"""What a server may need after its drain: prefixes go to the disk, threads and connections end."""
_KILL_S = 5
"""What launchd may need to kill a server."""
_KEYS = ("api_key", "admin_key")
_FILES = ("api_key_file", "admin_key_file", "key_file", "tls_cert", "tls_key")
"""Without them, a server needs no key, or sends keys that can be read on the way."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_OTHER_VARIABLES = (
    *("MLX_SERVE_CPU_THREADS", "MLX_SERVE_CPU_ISA"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
    *(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT" for kind in ("", "TRACES_", "METRICS_")),
    *("XDG_CACHE_HOME", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", *_PROXIES, *map(str.upper, _PROXIES)),
)
"""Of the environment, beside settings: what the server and its libraries read."""
_PROTECTED = ("~/Documents", "~/Desktop", "~/Downloads", "~/Library/Mobile Documents")
"""Where macOS lets no service read, unless the user has allowed its interpreter to."""


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
    _check_models(config)
    from mlx_server.runtime.kernels.cpu import native

    native.prepare()  # a first start compiles while the rest is imported
    from mlx_server.pool.model_pool import build_pool
    from mlx_server.runtime.machine import SLOW_BLAS, is_blas_slow

    if is_blas_slow():
        logger.warning("%s.", SLOW_BLAS)
    return build_pool(config)


def _check_models(config: Config) -> None:
    """Raises `ModelLoadError` if what is loaded at start is nowhere, before the imports that loading needs."""
    from mlx_server.runtime.models.places import RANDOM_PREFIX, find_place

    names = [entry.model for entry in config.models if entry.pinned] if config.models else [config.model.model]
    for name in names:
        if name != DEFAULT_MODEL and not name.startswith(RANDOM_PREFIX):
            find_place(name)


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
    if args.output is None:
        _check_places(agent, config)
        _check_models(config)
        domain, agent["LimitLoadToSessionType"] = _session()
        end_agent()  # a previous installation
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(plistlib.dumps(agent))
    print(f"{path} is written.")
    if args.output is None:
        if subprocess.run(["launchctl", "bootstrap", domain, str(path)], check=False).returncode:
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


def end_agent() -> None:
    """Stops the agent if it is running. launchd only asks it to stop, and starts no new one until the old one has
    ended, so this waits for that, or until launchd has killed it."""
    for domain in _domains():
        target = f"{domain}/{LABEL}"
        subprocess.run(["launchctl", "bootout", target], check=False, capture_output=True)
        if _is_known(target):
            timeout_s = _exit_timeout_s() + _KILL_S
            print(f"The running server ends its open streams, which takes up to {timeout_s} s.")
            deadline = time.monotonic() + timeout_s
            while _is_known(target) and time.monotonic() < deadline:
                time.sleep(_POLL_S)


def _exit_timeout_s() -> int:
    """How long launchd lets the agent live that is installed."""
    try:
        return int(plistlib.loads(agent_path().read_bytes())["ExitTimeOut"])
    except (OSError, ValueError, KeyError, TypeError, plistlib.InvalidFileException):
        return _FLUSH_S


def _domains() -> tuple[str, str]:
    """launchd's domains of the user: of a session at the desktop, and of what runs without one."""
    return f"gui/{os.getuid()}", f"user/{os.getuid()}"


def _session() -> tuple[str, str]:
    """The domain in which the agent is to run, and its type of session; without a login at the desktop, over SSH for
    example, there is only the user's background."""
    desktop, background = _domains()
    return (desktop, "Aqua") if _is_known(desktop) else (background, "Background")


def _is_known(target: str) -> bool:
    return subprocess.run(["launchctl", "print", target], check=False, capture_output=True).returncode == 0


def _check_places(agent: Mapping[str, Any], config: Config) -> None:
    """Raises `ServeError` if the agent would need anything that macOS does not let it read: launchd would start it
    again and again."""
    variables = {name: value for name, value in agent["EnvironmentVariables"].items() if name != "PATH"}
    given = [getattr(getattr(config, setting.section), setting.name) for setting in settings()]
    named = [*agent["ProgramArguments"], *variables.values(), *given, *(entry.model for entry in config.models)]
    words = [word for text in named if isinstance(text, str) for word in re.split("[:=]", text)]
    protected = [expanded(folder).resolve() for folder in _PROTECTED]
    for place in (agent["WorkingDirectory"], __file__, *words):
        path = Path(os.path.abspath(os.path.expanduser(place)))
        for folder in protected:
            if any(each.is_relative_to(folder) for each in (path, path.resolve())):
                raise ServeError(
                    f"macOS lets no service read {path.resolve()}, which is in {folder}. Move it to another folder, "
                    "and install the service from there; `uv tool install .` in the checkout does so with the command."
                )


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
