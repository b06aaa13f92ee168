"""What the commands for the models of a running server share."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from mlx_server.cli.remote import RemoteServer, add_remote_flags
from mlx_server.cli.table import table

_HEADER = ("name", "state", "memory", "requests", "idle", "loads", "kept", "adapters", "")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and the server."""
    parser.add_argument("model", help="name, alias or folder's name, as the server's clients write it")
    add_remote_flags(parser)


def ask(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """One request to the server. Raises `RemoteError`."""
    with contextlib.closing(RemoteServer(url)) as server:
        return server.request(method, path, body)


def show(models: list[dict[str, Any]], memory: dict[str, int] | None = None) -> None:
    """A table of models as the server describes them."""
    print(table([_HEADER, *map(_row, models)], right={2, 3, 4, 5}))
    if memory is not None:
        held, limit, free = (_mib(memory[name]) for name in ("held_bytes", "limit_bytes", "free_bytes"))
        print(f"\n{held} of {limit} held, {free} may be taken")


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    progress, idle_s, ttl_s = model["load_progress"], model["idle_s"], model["idle_ttl_s"]
    return (
        model["id"],
        model["state"] if progress is None else f"{model['state']} {progress:.0%}",
        _mib(model["held_bytes"]) if model["held_bytes"] else "-",
        str(model["num_requests"]),
        "-" if idle_s is None else f"{idle_s:.0f} s",
        str(model["num_loads"]),
        "pinned" if model["pinned"] else f"{ttl_s:.0f} s" if ttl_s else "",
        ", ".join(model["adapters"]),
        model["reason"] or "",
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
