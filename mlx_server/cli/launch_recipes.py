"""What each client needs to use a server: environment, files and arguments. docs/clients.md has the same by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_KEY_VARIABLE = "MLX_SERVE_LAUNCH_KEY"
"""Where clients that read their key from a variable of any name find it."""

_FAR_OFF_MS = "3000000"
_LEAST_OUTPUT = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """A server and one of its models. `key` is what clients send, some text where the server asks for none;
    `max_model_len` None is unknown, since the model is not loaded."""

    url: str
    model: str
    key: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Setup:
    """What one start of a client gets. `environment` has None for variables that must not be set. `files` lie in a
    folder of their own, whose path stands for `{folder}` in values and arguments."""

    environment: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """A client by the `program` that starts it; `install` is a command that installs it."""

    program: str
    install: str
    setup: Callable[[Target], Setup]


def _claude(target: Target) -> Setup:
    """The settings file goes before the user's own, whose `env` would else win over the environment."""
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
        {**environment, "ANTHROPIC_API_KEY": None},  # it would go before the token
        {"settings.json": _json({"env": environment})},
        ("--settings", "{folder}/settings.json"),
    )


def _codex(target: Target) -> Setup:
    provider = "model_providers.mlx-serve"
    settings: dict[str, Any] = {
        "model": target.model,
        "model_provider": "mlx-serve",
        f"{provider}.name": "mlx-serve",
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": _KEY_VARIABLE,
        "web_search": "disabled",
    }
    if target.max_model_len is not None:
        settings["model_context_window"] = target.max_model_len
    # TOML's strings and numbers are JSON's.
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Setup({_KEY_VARIABLE: target.key}, arguments=tuple(arguments))


def _opencode(target: Target) -> Setup:
    model: dict[str, Any] = {"name": target.model}
    if target.max_model_len is not None:
        model["limit"] = {"context": target.max_model_len, "output": _output_limit(target.max_model_len)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-serve",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{_KEY_VARIABLE}}}"},
        "models": {target.model: model},
    }
    name = f"mlx-serve/{target.model}"
    config = {"provider": {"mlx-serve": provider}, "model": name, "small_model": name}
    return Setup(
        {"OPENCODE_CONFIG": "{folder}/opencode.json", _KEY_VARIABLE: target.key}, {"opencode.json": _json(config)}
    )


def _aider(target: Target) -> Setup:
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
            *("--model-metadata-file", "{folder}/models.json", "--no-show-model-warnings"),
        ),
    )


def _output_limit(max_model_len: int) -> int:
    """What clients set aside of the context for an answer."""
    return min(max(max_model_len // 4, _LEAST_OUTPUT), max_model_len)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


CLIENTS: Mapping[str, Client] = {
    "claude": Client("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Client("codex", "npm install -g @openai/codex", _codex),
    "opencode": Client("opencode", "npm install -g opencode-ai", _opencode),
    "aider": Client("aider", "uv tool install aider-chat", _aider),
}
"""By the names in which `mlx-serve launch` knows them."""
