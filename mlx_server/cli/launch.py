"""`mlx-serve launch`: starts a client that uses a running server. The settings of each client (environment, files,
arguments) are below the command; docs/clients.md describes them for use by hand."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from mlx_server.cli.remote import RemoteServer, add_remote_flags
from mlx_server.clients import LOCAL_HOSTS
from mlx_server.errors import ServeError, did_you_mean

_NO_KEY = "unused"
_HIDDEN = "..."
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
_LAUNCH_KEY_VARIABLE = "MLX_SERVE_LAUNCH_KEY"
"""For clients that read their key from a variable of any name."""

_FAR_OFF_MS = "3000000"
_MIN_OUTPUT = 4096
_MIN_CHAT = 4096


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("client", choices=tuple(CLIENTS), help="which client")
    parser.add_argument("arguments", nargs="*", default=(), metavar="-- ARGUMENT", help="the client's own arguments")
    add_remote_flags(parser)
    parser.add_argument("--model", help="the client's model; default: the server's default model")
    parser.add_argument("--print", action="store_true", help="show what would be set and started, without starting it")


def run_launch(args: argparse.Namespace) -> int:
    """Starts a coding agent or another client that uses a running server. The client's settings for that are in its
    environment and in temporary files; your own settings of the client stay as they are.

    The exit status is the client's. Ctrl-C goes to the client.

    examples:
      mlx-serve launch claude
      mlx-serve launch codex --model qwen3 -- exec "Say hello"
      mlx-serve launch opencode --print
    """
    client = CLIENTS[args.client]
    program = shutil.which(args.client)
    if program is None and not args.print:
        raise ServeError(f"{args.client} is not installed, or not on PATH. Install it: {client.install}")
    target = _target(args.url, args.model)
    _warn_of_short_context(args.client, client, target)
    if args.print:
        setup = _setup(client, target if target.key == _NO_KEY else replace(target, key=_HIDDEN), "{folder}")
        print(_shown(setup, [args.client, *setup.arguments, *args.arguments]))
        return 0
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="mlx-serve-") as folder:
        setup = _setup(client, target, folder)
        for file, text in setup.files.items():
            Path(folder, file).write_text(text, encoding="utf-8")
        return _run([program, *setup.arguments, *args.arguments], _environment(setup.environment))


def _target(url: str, model: str | None) -> Target:
    """Asks the server for its models. Raises `ServeError` if it cannot be reached or does not have the model."""
    with contextlib.closing(RemoteServer(url)) as server:
        cards = server.model_cards()
    chosen = next(iter(cards)) if model is None else model
    if chosen not in cards:
        hint = did_you_mean(chosen, cards) or "."
        raise ServeError(f"{server.url} lists no model {chosen}{hint} It has {', '.join(cards)}.")
    limit = cards[chosen].get("max_model_len")
    return Target(server.url, chosen, server.key or _NO_KEY, limit if isinstance(limit, int) else None)


def _warn_of_short_context(name: str, client: Client, target: Target) -> None:
    """Warns if the client's own prompt and an answer leave hardly anything of the context for a conversation."""
    limit = target.max_model_len
    if not client.num_prompt_tokens or limit is None:
        return
    if limit - _output_limit(limit) >= client.num_prompt_tokens + _MIN_CHAT:
        return
    print(
        f"mlx-serve: warning: {target.model} has a context of {limit} tokens, and the prompt and tools of {name} alone "
        f"have about {client.num_prompt_tokens}. Use a model with a longer context.",
        file=sys.stderr,
    )


def _setup(client: Client, target: Target, folder: str) -> Setup:
    setup = client.setup(target, folder)
    return replace(setup, environment={**setup.environment, **_exceptions_from_proxies(target.url)})


def _exceptions_from_proxies(url: str) -> dict[str, str]:
    """Variables with which clients ask a server on this machine without a web proxy, where there is one."""
    proxies, hosts = getproxies(), [host.strip("[]") for host in LOCAL_HOSTS]
    others = proxies.pop("no", "")
    if not proxies or others == "*" or urlsplit(url).hostname not in hosts:
        return {}
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join([*filter(None, [others]), *hosts]))


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Runs the client. Returns its exit status, or the status that a shell gives for a signal."""
    with subprocess.Popen(command, env=environment) as process, _signals_to(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leaves Ctrl-C to the client, which gets it from the terminal, too. Signals that end this process are passed on,
    so that the files are deleted after the client has ended."""

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


def _shown(setup: Setup, command: list[str]) -> str:
    """A shell script that does the same."""
    lines = [f"unset {name}" for name, value in setup.environment.items() if value is None]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in setup.environment.items() if value is not None]
    for name, text in setup.files.items():
        lines.append(f"# {{folder}}/{name}, in a temporary folder:")
        lines += [f"#   {line}" for line in text.splitlines()]
    lines.append(shlex.join(command))
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Target:
    """A server and one of its models. `key` is what the client sends: any text if the server does not require one.
    `max_model_len` is None while the model is not loaded, and if the server does not give it as a number."""

    url: str
    model: str
    key: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings for one start of a client. `environment` has None for variables that must not be set. `files` are
    written into a temporary folder before the start."""

    environment: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """A client: a command that installs it, and its settings, which get the path of the temporary folder.
    `num_prompt_tokens` is about what its own prompt and tools have; 0 if it is not known."""

    install: str
    setup: Callable[[Target, str], Setup]
    num_prompt_tokens: int = 0


def _claude(target: Target, folder: str) -> Setup:
    """The settings file takes precedence over the user's own, whose `env` would otherwise override the environment."""
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    environment = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        **dict.fromkeys(models, target.model),
        "API_TIMEOUT_MS": _FAR_OFF_MS,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if target.max_model_len is not None:
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.max_model_len)
    return Setup(
        {**environment, "ANTHROPIC_API_KEY": None},  # it would take precedence over the token
        {"settings.json": _json({"env": environment})},
        ("--settings", f"{folder}/settings.json"),
    )


def _codex(target: Target, folder: str) -> Setup:
    provider = "model_providers.mlx-serve"
    settings: dict[str, Any] = {
        "model": target.model,
        "model_provider": "mlx-serve",
        f"{provider}.name": "mlx-serve",
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": _LAUNCH_KEY_VARIABLE,
        "web_search": "disabled",
    }
    if target.max_model_len is not None:
        settings["model_context_window"] = target.max_model_len
    # TOML's strings and numbers are JSON's.
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Setup({_LAUNCH_KEY_VARIABLE: target.key}, arguments=tuple(arguments))


def _opencode(target: Target, folder: str) -> Setup:
    model: dict[str, Any] = {"name": target.model}
    if target.max_model_len is not None:
        model["limit"] = {"context": target.max_model_len, "output": _output_limit(target.max_model_len)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-serve",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{_LAUNCH_KEY_VARIABLE}}}"},
        "models": {target.model: model},
    }
    name = f"mlx-serve/{target.model}"
    config = {"provider": {"mlx-serve": provider}, "model": name, "small_model": name}
    return Setup(
        {"OPENCODE_CONFIG": f"{folder}/opencode.json", _LAUNCH_KEY_VARIABLE: target.key},
        {"opencode.json": _json(config)},
    )


def _aider(target: Target, folder: str) -> Setup:
    name = f"openai/{target.model}"
    facts: dict[str, Any] = {
        "litellm_provider": "openai",
        "mode": "chat",
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    if target.max_model_len is not None:
        facts |= {
            "max_input_tokens": target.max_model_len,
            "max_output_tokens": _output_limit(target.max_model_len),
        }
    return Setup(
        {"OPENAI_API_KEY": target.key, "AIDER_OPENAI_API_KEY": target.key},
        {"models.json": _json({name: facts})},
        (
            *("--model", name, "--weak-model", name, "--openai-api-base", f"{target.url}/v1"),
            *("--model-metadata-file", f"{folder}/models.json", "--no-show-model-warnings"),
        ),
    )


def _qwen(target: Target, folder: str) -> Setup:
    """The system's settings take precedence over the user's own."""
    model: dict[str, Any] = {"name": target.model}
    if target.max_model_len is not None:
        model["generationConfig"] = {"contextWindowSize": target.max_model_len}
    settings = {"security": {"auth": {"selectedType": "openai"}}, "model": model}
    return Setup(
        {
            "OPENAI_BASE_URL": f"{target.url}/v1",
            "OPENAI_API_KEY": target.key,
            "OPENAI_MODEL": target.model,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{folder}/settings.json",
        },
        {"settings.json": _json(settings)},
        ("--auth-type", "openai"),
    )


def _copilot(target: Target, folder: str) -> Setup:
    provider: dict[str, str | None] = {
        "BASE_URL": f"{target.url}/v1",
        "TYPE": "openai",
        "WIRE_API": "completions",
        "API_KEY": target.key,
        # These would take precedence over the key and the model.
        **dict.fromkeys(("API_KEY_COMMAND", "BEARER_TOKEN", "MODEL_ID", "WIRE_MODEL")),
    }
    if target.max_model_len is not None:
        num_output = _output_limit(target.max_model_len)
        provider["MAX_OUTPUT_TOKENS"] = str(num_output)
        provider["MAX_PROMPT_TOKENS"] = str(max(target.max_model_len - num_output, 1))
    named = {f"COPILOT_PROVIDER_{name}": value for name, value in provider.items()}
    return Setup({**named, "COPILOT_MODEL": target.model})


def _pi(target: Target, folder: str) -> Setup:
    model: dict[str, Any] = {"id": target.model, "name": target.model, "reasoning": False, "input": ["text"]}
    model["cost"] = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    if target.max_model_len is not None:
        model |= {"contextWindow": target.max_model_len, "maxTokens": _output_limit(target.max_model_len)}
    provider = _json({"baseUrl": f"{target.url}/v1", "api": "openai-completions", "models": [model]}).strip()
    key = f"apiKey: process.env.{_LAUNCH_KEY_VARIABLE}"
    extension = f'export default (pi) => pi.registerProvider("mlx-serve", {{ ...{provider}, {key} }});\n'
    return Setup(
        {_LAUNCH_KEY_VARIABLE: target.key},
        {"provider.js": extension},
        ("--extension", f"{folder}/provider.js", "--provider", "mlx-serve", "--model", target.model),
    )


def _output_limit(max_model_len: int) -> int:
    """The part of the context that clients reserve for an answer."""
    return min(max(max_model_len // 4, _MIN_OUTPUT), max_model_len)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


CLIENTS: Mapping[str, Client] = {
    "claude": Client("npm install -g @anthropic-ai/claude-code", _claude, 20_000),
    "codex": Client("npm install -g @openai/codex", _codex),
    "opencode": Client("npm install -g opencode-ai", _opencode, 5_000),
    "aider": Client("uv tool install aider-chat", _aider),
    "qwen": Client("npm install -g @qwen-code/qwen-code", _qwen, 19_000),
    "copilot": Client("npm install -g @github/copilot", _copilot, 12_000),
    "pi": Client("npm install -g @earendil-works/pi-coding-agent", _pi, 2_000),
}
"""By the programs that start them, which are their names in `mlx-serve launch`."""
