"""`mlx-serve launch`: starts a client that uses a running server."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from mlx_server.cli.launch_recipes import CLIENTS, Client, Target
from mlx_server.cli.remote import KEY_VARIABLE, RemoteServer, add_remote_flags
from mlx_server.errors import ServeError, did_you_mean

_NO_KEY = "unused"
_HIDDEN = "..."
_FOLDER = "{folder}"
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("client", choices=tuple(CLIENTS), help="which client")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="the client's own arguments")
    add_remote_flags(parser)
    parser.add_argument("--model", help="model that the client uses; default: the server's own")
    parser.add_argument("--api-key", help=f"the server's key; others can see it here, so better set {KEY_VARIABLE}")
    parser.add_argument("--print", action="store_true", help="show what would be set and started, and start nothing")


def run_launch(args: argparse.Namespace) -> int:
    """Starts a coding agent or another client that uses a running server, with all it needs for that in its environment
    and in files that are deleted afterwards. Your own settings of the client stay as they are.

    Its exit status is the client's. Ctrl-C goes to the client.

    examples:
      mlx-serve launch claude
      mlx-serve launch codex --model qwen3 -- exec "Say hello"
      mlx-serve launch opencode --print
    """
    client = CLIENTS[args.client]
    program = shutil.which(client.program)
    if program is None and not args.print:
        raise ServeError(f"{client.program} is not installed, or not on PATH. Install it: {client.install}")
    target = _target(args.url, args.model, args.api_key)
    if args.print:
        print(_shown(client, target, args.arguments))
        return 0
    setup = client.setup(target)
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="mlx-serve-") as name:
        folder = Path(name)
        for file, text in setup.files.items():
            (folder / file).write_text(text, encoding="utf-8")
        command = [program, *(_filled(word, folder) for word in setup.arguments), *args.arguments]
        return _run(command, _environment(setup.environment, folder))


def _target(url: str, model: str | None, api_key: str | None) -> Target:
    """Asks the server for its models. Raises `ServeError` if it cannot be reached, or has no such model."""
    key = api_key or os.environ.get(KEY_VARIABLE)
    with contextlib.closing(RemoteServer(url, key)) as server:
        cards: list[dict[str, Any]] = server.request("GET", "/v1/models")["data"]
    if not cards:
        raise ServeError(f"{server.url} has no model that may be asked.")
    names = [str(card["id"]) for card in cards]
    chosen = names[0] if model is None else model
    if chosen not in names:
        hint = did_you_mean(chosen, names) or "."
        raise ServeError(f"{server.url} lists no model {chosen}{hint} It has {', '.join(names)}.")
    limit = cards[names.index(chosen)].get("max_model_len")
    return Target(server.url, chosen, key or _NO_KEY, limit)


def _filled(text: str, folder: Path) -> str:
    return text.replace(_FOLDER, str(folder))


def _environment(changes: Mapping[str, str | None], folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in changes}
    return kept | {name: _filled(value, folder) for name, value in changes.items() if value is not None}


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Runs the client to its end; its exit status, or what a shell makes of the signal that has ended it."""
    with subprocess.Popen(command, env=environment) as process, _signals_to(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """The terminal sends Ctrl-C to the client, too, and it is for the client to say what that means. What ends us is
    passed on, so that the files are deleted after the client's end."""

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shown(client: Client, target: Target, arguments: list[str]) -> str:
    """A script for the shell that does the same, but for the key."""
    setup = client.setup(target if target.key == _NO_KEY else replace(target, key=_HIDDEN))
    lines = [f"unset {name}" for name, value in setup.environment.items() if value is None]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in setup.environment.items() if value is not None]
    for name, text in setup.files.items():
        lines.append(f"# {_FOLDER}/{name}, in a folder that is deleted afterwards:")
        lines += [f"#   {line}" for line in text.splitlines()]
    lines.append(shlex.join([client.program, *setup.arguments, *arguments]))
    return "\n".join(lines)
