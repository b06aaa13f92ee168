"""Installs a launchd agent: macOS then starts the server at login, and again whenever it fails.

Options after `--` are those of `mlx-serve serve`; they are checked now, not at the next login. A key does not
belong there, where everyone can read it: put it into a file with `[server] api_key`, and give that as --config.

examples:
  mlx-serve service install
  mlx-serve service install -- mlx-community/Qwen3-0.6B-4bit --port 9000
  mlx-serve service install --output /tmp/agent.plist
"""

from __future__ import annotations

import argparse
import os
import plistlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_server.cli.service import LABEL, agent_path, end_agent, launchctl
from mlx_server.cli.settings_flags import add_serve_arguments, config_from
from mlx_server.config import Config, home, settings
from mlx_server.errors import ServeError

_RESTART_PAUSE_S = 10
_FLUSH_S = 10
_HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, help="write the agent to this file, and start nothing")
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="options of `mlx-serve serve`")


def run(args: argparse.Namespace) -> int:
    config = _checked(args.serve_options)
    if args.output is None and sys.platform != "darwin":
        raise ServeError("launchd is part of macOS. Elsewhere, give --output to write the agent's file only.")
    path: Path = args.output or agent_path()
    agent = launch_agent(args.serve_options, config, log_folder=Path.home() / "Library" / "Logs")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(plistlib.dumps(agent))
    print(f"{path} is written.")
    if args.output is None:
        end_agent()  # one that is there already
        if subprocess.run(launchctl("bootstrap"), check=False).returncode:
            raise ServeError(f"launchctl did not accept {path}; see above.")
        print(f"The server starts, on {config.server.host}:{config.server.port}. Its log: {agent['StandardErrorPath']}")
    return 0


def launch_agent(serve_options: Sequence[str], config: Config, log_folder: Path) -> dict[str, Any]:
    """The property list, as `man launchd.plist` describes it. `config` is what `serve_options` amount to here."""
    log = str(log_folder / "mlx-serve.log")
    return {
        "Label": LABEL,
        "ProgramArguments": [sys.executable, "-P", "-m", "mlx_server", "serve", *serve_options],
        "EnvironmentVariables": _environment(),
        "WorkingDirectory": os.getcwd(),  # relative paths mean what they mean now
        "RunAtLoad": True,
        # The server exits with 0 when it was asked to stop, and with another status when its engine has died.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_PAUSE_S,
        # SIGTERM drains open streams; launchd's own patience ends after 20 s.
        "ExitTimeOut": int(config.server.drain_timeout_s) + _FLUSH_S,
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def _environment() -> dict[str, str]:
    """What the server would be given by this shell: its settings, where models are, and where programs are. Raises
    `ServeError` for keys, which everyone could read in the agent's file."""
    secret = next((s.env for s in settings() if s.is_secret and os.environ.get(s.env)), None)
    if secret is not None:
        raise ServeError(
            f"{secret} is set here, and would be readable for everyone in the agent's file; put the key into a "
            "--config file, and unset the variable."
        )
    names = [*(setting.env for setting in settings()), *_HUB_VARIABLES]
    kept = {name: os.environ[name] for name in names if os.environ.get(name)}
    return {"MLX_SERVE_HOME": str(home()), "PATH": os.environ.get("PATH", os.defpath), **kept}


def _checked(serve_options: Sequence[str]) -> Config:
    parser = argparse.ArgumentParser(prog="mlx-serve serve", add_help=False, allow_abbrev=False, exit_on_error=False)
    add_serve_arguments(parser)
    try:
        args, extra = parser.parse_known_args(serve_options)
    except argparse.ArgumentError as error:
        raise ServeError(f"`mlx-serve serve` would refuse these options: {error}") from error
    if extra:
        raise ServeError(f"`mlx-serve serve` has no option {extra[0]}.")
    secret = next((s.flag for s in settings() if s.is_secret and getattr(args, s.name) is not None), None)
    if secret is not None:
        raise ServeError(f"{secret} would be readable for everyone in the agent's file; put it into a --config file.")
    return config_from(args)
