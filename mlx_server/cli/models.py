"""`mlx-serve models` and `mlx-serve pull`: the models on this machine, and those of a running server."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from typing import Any

from mlx_server.cli.remote import RemoteServer, add_remote_flags, size, table
from mlx_server.config import DEFAULT_MODEL
from mlx_server.errors import ServeError

_HEADER = ("name", "state", "memory", "requests", "idle", "loads", "kept", "adapters", "")


def add_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")


def run_ls(args: argparse.Namespace) -> int:
    """Lists the models on this machine: pulled ones in the home folder, and those in the Hugging Face hub's cache.

    examples:
      mlx-serve models ls
      mlx-serve models ls --json
    """
    from mlx_server.engine.model_store import stored_models  # the hub's library, which asking a server does not need

    models = stored_models()
    if args.json:
        fields = [
            {"name": model.name, "place": model.place, "folder": str(model.folder), "num_bytes": model.num_bytes}
            for model in models
        ]
        print(json.dumps(fields, indent=2))
    elif models:
        rows = [(model.name, size(model.num_bytes), model.place, str(model.folder)) for model in models]
        print(table([("name", "size", "place", "folder"), *rows], right={1}))
    else:
        print("None yet; `mlx-serve models pull` fetches the bundled one.")
    return 0


def add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"`{DEFAULT_MODEL}` (the default), or a hub id like owner/name"
    )


def run_pull(args: argparse.Namespace) -> int:
    """Fetches a model, so that it can be served without a network, and prints the folder that it is in.

    examples:
      mlx-serve pull smollm2
      mlx-serve pull mlx-community/Qwen3-0.6B-4bit
    """
    from mlx_server.runtime.models.loader import resolve_model

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(resolve_model(args.model))
    return 0


def add_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="+", help="name as `mlx-serve models ls` shows it")


def run_rm(args: argparse.Namespace) -> int:
    """Deletes pulled models from this machine. A server that has one loaded keeps it until it unloads it.

    examples:
      mlx-serve models rm smollm2
      mlx-serve models rm mlx-community/Qwen3-0.6B-4bit
    """
    from mlx_server.engine.model_store import remove_stored

    for name in args.model:
        try:
            num_bytes = remove_stored(name)
        except OSError as error:
            raise ServeError(f"{name} cannot be deleted: {error.filename}: {error.strerror}.") from error
        if num_bytes == 0:
            raise ServeError(f"There is no pulled model {name}; `mlx-serve models ls` lists what there is.")
        print(f"{name}: {size(num_bytes)} are free again")
    return 0


def add_ps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the server's answer as it is")
    add_remote_flags(parser)


def run_ps(args: argparse.Namespace) -> int:
    """Shows what the models of a running server are doing, and the memory they share.

    examples:
      mlx-serve models ps
      mlx-serve models ps --url http://mac-studio:8000 --json
    """
    answer = _ask(args.url, "GET", "/admin/models")
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    _show(answer["models"])
    held, limit, free = (_mib(answer["memory"][name]) for name in ("held_bytes", "limit_bytes", "free_bytes"))
    print(f"\n{held} of {limit} held, {free} may be taken")
    return 0


def add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="name, alias or folder's name, as the server's clients write it")
    add_remote_flags(parser)


def run_load(args: argparse.Namespace) -> int:
    """Has a running server load a model, and waits until it is ready.

    example:
      mlx-serve models load coder
    """
    _show([_ask(args.url, "POST", "/admin/models/load", {"model": args.model})])
    return 0


def add_unload(parser: argparse.ArgumentParser) -> None:
    add_load(parser)
    parser.add_argument("--drain-timeout-s", type=float, help="longest wait for open requests; default: the server's")


def run_unload(args: argparse.Namespace) -> int:
    """Has a running server unload a model: its open requests finish, then its memory is free. The next request for the
    model loads it again.

    examples:
      mlx-serve models unload coder
      mlx-serve models unload coder --drain-timeout-s 0
    """
    body = {"model": args.model, "drain_timeout_s": args.drain_timeout_s}
    _show([_ask(args.url, "POST", "/admin/models/unload", body)])
    return 0


def _ask(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """One request to the server. Raises `RemoteError`."""
    with contextlib.closing(RemoteServer(url)) as server:
        return server.request(method, path, body)


def _show(models: list[dict[str, Any]]) -> None:
    """A table of models as the server describes them."""
    print(table([_HEADER, *map(_row, models)], right={2, 3, 4, 5}))


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
