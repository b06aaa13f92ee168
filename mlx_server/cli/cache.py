"""`mlx-serve cache`: the prefixes that servers keep on disk."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_server.batching.blocks.disk_saves import owner_tag
from mlx_server.cli.config import add_config_flag, config_from
from mlx_server.cli.remote import size, table
from mlx_server.cli.warm import add_warm as add_warm
from mlx_server.cli.warm import run_warm as run_warm
from mlx_server.config import Config
from mlx_server.engine.prefixes.model_on_disk import disk_folder
from mlx_server.errors import ServeError
from mlx_server.kv_disk.budget import WriteBudget
from mlx_server.kv_disk.disk import LOCK
from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.slab import SUFFIX, RecordHeader, Space
from mlx_server.kv_disk.store import RecordStore
from mlx_server.setting import parse_size

_HEADER = ("model", "caller", "blocks", "size")


def add_ls(parser: argparse.ArgumentParser) -> None:
    _add_flags(parser)


def run_ls(args: argparse.Namespace) -> int:
    """Lists what is on disk: blocks of 32 tokens by model, as it was served, and by who may hit them. Callers are shown
    as digests; `purge --key` finds a key's. Beside a running server, it shows what that has written so far.

    examples:
      mlx-serve cache ls
      mlx-serve cache ls --kv-disk-dir /Volumes/fast/kv
    """
    store = _store(_files(config_from(args)))
    counts: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for space, record in store.entries():
        row = space.label, "everyone" if record.owner == owner_tag(()) else record.owner.hex()
        counts[row] += 1
        num_bytes[row] += space.stride
    rows = [(*row, f"{count:,}", size(num_bytes[row])) for row, count in sorted(counts.items())]
    print(table([_HEADER, *rows], right={2, 3}))
    return 0


def add_stats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    _add_flags(parser)


def run_stats(args: argparse.Namespace) -> int:
    """Shows how much is on disk, and how much may be written there now.

    example:
      mlx-serve cache stats --json
    """
    config = config_from(args)
    files = _files(config)
    budget = WriteBudget(files, parse_size(config.memory.kv_disk_writes_per_day))
    figures: dict[str, str | int] = {
        "folder": str(files.folder),
        "blocks": len(_store(files)),
        "bytes": sum(entry.num_bytes for entry in files.entries(SUFFIX)),
        "free_bytes": files.free_bytes(),
        "writable_bytes": budget.left,
    }
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        rows = [(name.removesuffix("_bytes"), _shown(name, value)) for name, value in figures.items()]
        print(table(rows))
    return 0


def add_purge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="only prefixes of this model, by the name that `cache ls` shows")
    parser.add_argument("--key", metavar="ID", help="only prefixes that this key alone may hit, by its id")
    _add_flags(parser)


def run_purge(args: argparse.Namespace) -> int:
    """Deletes prefixes, overwriting what goes out of a file that stays. No server may use the folder meanwhile.

    examples:
      mlx-serve cache purge
      mlx-serve cache purge --model smollm2
      mlx-serve cache purge --key 3f9c0a1b2c4d
    """
    owner = None if args.key is None else owner_tag((f"key:{args.key}",))

    def is_wanted(space: Space, record: RecordHeader) -> bool:
        return args.model in (None, space.label) and owner in (None, record.owner)

    files = _files(config_from(args))
    with _locked(files):
        if args.model is None and owner is None:
            entries = files.entries(SUFFIX)
            for entry in entries:
                files.remove(entry.name)
            print(f"{size(sum(entry.num_bytes for entry in entries))} in {files.folder} are deleted.")
        else:
            print(f"{_store(files).delete(is_wanted):,} blocks are deleted.")
    return 0


def purge_key(config: Config, key_id: str) -> int:
    """Deletes what only that key may hit; how many blocks. Raises `ServeError` while a server uses the folder."""
    if not disk_folder(config.memory).is_dir():
        return 0
    files, owner = _files(config), owner_tag((f"key:{key_id}",))
    with _locked(files):
        return _store(files).delete(lambda space, record: record.owner == owner)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    parser.add_argument("--kv-disk-dir", metavar="FOLDER", help="the folder; default: that of the configuration")


def _files(config: Config) -> Files:
    """Of the configured folder, which must be there."""
    folder = disk_folder(config.memory)
    if not folder.is_dir():
        raise ServeError(f"Nothing is kept in {folder}: there is no such folder. `mlx-serve serve --kv-disk` makes it.")
    try:
        return Files(folder)
    except OSError as error:
        raise ServeError(f"{folder} cannot be used: {error}.") from error


def _store(files: Files) -> RecordStore:
    """What is there, read only: no limit makes anything go."""
    store = RecordStore(files, limit_bytes=2**63)
    store.scan(removes_broken=False)
    return store


@contextmanager
def _locked(files: Files) -> Iterator[None]:
    lock = files.lock(LOCK)
    if lock is None:
        raise ServeError(f"A server uses {files.folder}; stop it first, since it would write on.")
    try:
        yield
    finally:
        os.close(lock)


def _shown(name: str, value: str | int) -> str:
    return size(value) if name.endswith("bytes") and isinstance(value, int) else str(value)
