"""`mlx-serve models` and `mlx-serve pull`: the models on this machine, and those of a running server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from mlx_server.bench.arguments import at_least_0
from mlx_server.cli.remote import RemoteServer, add_remote_flags, size, table
from mlx_server.config import DEFAULT_MODEL, load_config
from mlx_server.environment import expanded
from mlx_server.errors import ServeError

_LS_HEADER = ("name", "size", "weights", "context", "needs", "fits", "folder")
_HEADER = ("name", "state", "memory", "requests", "idle", "loads", "kept", "adapters", "")


def add_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")


def run_ls(args: argparse.Namespace) -> int:
    """Lists the models on this machine: pulled ones in the home folder, and those in the cache of the Hugging Face hub.
    Shows the bits of their weights, their context in tokens, the memory they need, and whether it is available.

    examples:
      mlx-serve models ls
      mlx-serve models ls --json
    """
    from mlx_server.engine.models.facts import fits_of  # imports the engine, which other commands do not need
    from mlx_server.engine.models.store import stored_models

    models = stored_models()
    if not models and not args.json:
        print("There are no models yet; `mlx-serve pull` fetches the bundled one.")
        return 0
    fits = list(fits_of(models, load_config()))
    if args.json:
        described = [dataclasses.asdict(model) | dataclasses.asdict(fit) for model, fit in zip(models, fits)]
        print(json.dumps(described, indent=2, default=str))
        return 0
    rows = [
        (
            model.name,
            size(model.num_bytes),
            fit.weights or "-",
            f"{fit.context_length:,}" if fit.context_length else "-",
            "-" if fit.need_bytes is None else size(fit.need_bytes),
            fit.fits,
            str(model.folder),
        )
        for model, fit in zip(models, fits)
    ]
    print(table([_LS_HEADER, *rows], right={1, 3, 4}))
    for model, fit in zip(models, fits):
        if fit.reason:
            print(f"\n{model.name}: {fit.reason}")
    return 0


def add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"`{DEFAULT_MODEL}` (the default), a hub id like owner/name, or a GGUF file of the hub or of this machine "
        "(owner/name/FILE.gguf), which is converted",
    )


def run_pull(args: argparse.Namespace) -> int:
    """Fetches a model, so that it can be served without a network, and prints its folder.

    examples:
      mlx-serve pull smollm2
      mlx-serve pull mlx-community/Qwen3-0.6B-4bit
      mlx-serve pull Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf
    """
    from mlx_server.runtime.models.resolve import resolve_model

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(resolve_model(args.model))
    return 0


def add_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="+", help="name as `mlx-serve models ls` shows it")


def run_rm(args: argparse.Namespace) -> int:
    """Deletes pulled models from this machine. A server that has loaded one keeps it until it unloads it.

    examples:
      mlx-serve models rm smollm2
      mlx-serve models rm mlx-community/Qwen3-0.6B-4bit
    """
    from mlx_server.engine.models.store import remove_stored

    for name in args.model:
        try:
            num_bytes = remove_stored(name)
        except OSError as error:
            raise ServeError(f"{name} cannot be deleted: {error.filename}: {error.strerror}.") from error
        if num_bytes == 0:
            raise ServeError(f"There is no pulled model {name}; `mlx-serve models ls` lists all.")
        print(f"{name}: {size(num_bytes)} freed")
    return 0


def add_ps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the server's answer as it is")
    add_remote_flags(parser)


def run_ps(args: argparse.Namespace) -> int:
    """Shows the models of a running server: their state, requests and memory.

    examples:
      mlx-serve models ps
      mlx-serve models ps --url http://mac-studio:8000 --json
    """
    print(_ask(args.url, "GET", "/admin/models", read=partial(json.dumps, indent=2) if args.json else _all_models))
    return 0


def add_load(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--adapter", metavar="NAME=FOLDER", help="an adapter to load, from a folder of the server's machine or a hub id"
    )
    parser.add_argument("--replace", action="store_true", help="replace an adapter of that name")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the model's name or alias, as clients use it")
    add_remote_flags(parser)


def run_load(args: argparse.Namespace) -> int:
    """Loads a model in a running server, and waits until it is ready; with --adapter, an adapter of it, too.

    examples:
      mlx-serve models load coder
      mlx-serve models load coder --adapter terse=adapters/terse
      mlx-serve models load coder --adapter terse=owner/name --replace
    """
    if args.adapter is not None:
        name, separator, place = args.adapter.partition("=")
        if not separator:
            raise ServeError(f"--adapter is {args.adapter}; write NAME=FOLDER, or NAME=OWNER/NAME for one of the hub.")
        here = expanded(place)
        body = {"lora_path": str(here.absolute()) if here.exists() else place, "load_inplace": args.replace}
        return _adapter_changed(args.url, "load", {"lora_name": f"{args.model}:{name}", **body})
    print(_ask(args.url, "POST", "/admin/models/load", {"model": args.model}))
    return 0


def add_unload(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--adapter", metavar="NAME", help="unload this adapter of the model, and not the model")
    about = "longest wait for open requests; default: the server's"
    parser.add_argument("--drain-timeout-s", type=at_least_0, help=about)


def run_unload(args: argparse.Namespace) -> int:
    """Unloads a model in a running server, after its open requests. The next request for the model loads it again.

    examples:
      mlx-serve models unload coder
      mlx-serve models unload coder --drain-timeout-s 0
      mlx-serve models unload coder --adapter terse
    """
    if args.adapter is not None:
        return _adapter_changed(args.url, "unload", {"lora_name": f"{args.model}:{args.adapter}"})
    body = {"model": args.model, "drain_timeout_s": args.drain_timeout_s}
    print(_ask(args.url, "POST", "/admin/models/unload", body))
    return 0


def _adapter_changed(url: str, verb: str, body: dict[str, Any]) -> int:
    with contextlib.closing(RemoteServer(url)) as server:
        print(server.text(f"/v1/{verb}_lora_adapter", body))
    return 0


def _one_model(model: Any) -> str:
    return _table([model])


def _all_models(answer: Any) -> str:
    """The models and the memory in the answer to `GET /admin/models`."""
    held, limit, free = (_mib(answer["memory"][name]) for name in ("held_bytes", "limit_bytes", "free_bytes"))
    return f"{_table(answer['models'])}\n\n{held} of {limit} in use, {free} available"


def _ask(
    url: str, method: str, path: str, body: dict[str, Any] | None = None, read: Callable[[Any], str] = _one_model
) -> str:
    """What to show of the answer to one request. Raises `RemoteError`."""
    with contextlib.closing(RemoteServer(url)) as server:
        return str(server.request(method, path, body, read))


def _table(models: list[dict[str, Any]]) -> str:
    return table([_HEADER, *map(_row, models)], right={2, 3, 4, 5})


def _state(model: dict[str, Any]) -> str:
    """The state, with the progress of loading the weights or preparing the folder."""
    progress, preparing = model["load_progress"], model.get("preparing")
    if preparing is not None and preparing["total_bytes"]:
        share = f"{preparing['stage']} {preparing['done_bytes'] / preparing['total_bytes']:.0%}"
        left_s = preparing["remaining_s"]
        return share if left_s is None else f"{share}, {left_s:.0f} s left"
    return model["state"] if progress is None else f"{model['state']} {progress:.0%}"


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    idle_s, ttl_s = model["idle_s"], model["idle_ttl_s"]
    return (
        model["id"],
        _state(model),
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
