"""`mlx-serve keys`: changes the file of API keys."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import errno
import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_server.api.auth.key_file import KeyFile, KeyRecord, KeyText, remedy
from mlx_server.api.auth.keys import key_file_path
from mlx_server.cli.cache import purge_key
from mlx_server.cli.config import add_config_flag, config_from
from mlx_server.cli.remote import ago, one_line, table
from mlx_server.config import Config
from mlx_server.environment import exists
from mlx_server.errors import ConfigError, ServeError
from mlx_server.setting import nearest

_HEADER = ("id", "tier", "created", "last used", "requests", "prompt", "output", "label")


def add_create(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", default=None, help="a tier of the configuration; default: `api_key_tier`")
    parser.add_argument("--label", type=one_line, default="", help="text in the list: the key's owner or purpose")
    _add_key_flags(parser)


def run_create(args: argparse.Namespace) -> int:
    """Creates a key and prints it, once. Running servers accept it at once.

    Once there is a key, every request needs one.

    examples:
      mlx-serve keys create --label "Ada's laptop"
      mlx-serve keys create --config my.toml --tier interactive --label editor
    """
    config = config_from(args)
    tier = config.server.api_key_tier if args.tier is None else args.tier
    if tier not in config.tiers:
        raise ConfigError(
            f"--tier: there is no tier {tier!r} in the configuration (--config FILE){nearest(tier, config.tiers)}"
        )
    with _open_keys(config, creates=True) as file:
        file.add(tier, args.label, lambda key: _print_key(key, tier))
    return 0


def add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with times in seconds since 1970")
    _add_key_flags(parser)


def run_list(args: argparse.Namespace) -> int:
    """Lists all keys with their tiers, labels and usage. A server records usage every few seconds.

    examples:
      mlx-serve keys list
      mlx-serve keys list --json
    """
    with _open_keys(config_from(args)) as file:
        records = file.records()
    if args.json:
        print(json.dumps([dataclasses.asdict(record) for record in records], indent=2))
    else:
        print(table([_HEADER, *map(_row, records)], right={4, 5, 6}))
    return 0


def add_revoke(parser: argparse.ArgumentParser) -> None:
    _add_id(parser)
    parser.add_argument(
        "--purge", action="store_true", help="also delete the prefixes on disk that only this key can hit"
    )
    parser.add_argument("--kv-disk-dir", metavar="FOLDER", help="their folder; default: as configured")
    _add_key_flags(parser)


def run_revoke(args: argparse.Namespace) -> int:
    """Revokes a key for good; running servers refuse it at once. Its record and usage stay in the list. To purge its
    prefixes on disk, stop the server first.

    examples:
      mlx-serve keys revoke 3f9c0a1b2c4d
      mlx-serve keys revoke 3f9c0a1b2c4d --purge
    """
    if args.kv_disk_dir is not None and not args.purge:
        raise ConfigError("--kv-disk-dir has no effect without --purge. Leave it out, or add --purge.")
    config = config_from(args)
    with _open_keys(config) as file:
        file.revoke(args.id)
    print(f"The key {args.id} is revoked.")
    if args.purge:
        print(purge_key(config, args.id))
    return 0


def add_rotate(parser: argparse.ArgumentParser) -> None:
    _add_id(parser)
    _add_key_flags(parser)


def run_rotate(args: argparse.Namespace) -> int:
    """Gives a key a new secret and prints it, once. Running servers refuse the old one at once. The key's id, tier,
    limits and usage stay.

    example:
      mlx-serve keys rotate 3f9c0a1b2c4d
    """
    with _open_keys(config_from(args)) as file:
        tier = file.record(args.id).tier
        file.rotate(args.id, lambda key: _print_key(key, tier))
    return 0


def _add_id(parser: argparse.ArgumentParser) -> None:
    about = "the key's id: the part between its first and second underscore, as `list` shows it"
    parser.add_argument("id", type=one_line, help=about)


def _add_key_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    parser.add_argument("--key-file", metavar="FILE", help="the key file; default: as configured")


@contextmanager
def _open_keys(config: Config, *, creates: bool = False) -> Iterator[KeyFile]:
    """Opens the configured key file, which is created if `creates`. Raises `ServeError`."""
    path = key_file_path(config.server)
    if not creates and not exists(path):
        raise ServeError(f"There are no keys yet ({path} does not exist); `mlx-serve keys create` creates one.")
    try:
        with KeyFile.create(path) if creates else KeyFile(path) as file:
            yield file
    except (OSError, sqlite3.Error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        hint = remedy(path) or " Check the file and its folder, or name another file with --key-file."
        raise ServeError(f"The keys in {path} cannot be changed: {reason}.{hint}") from error


def _print_key(key: KeyText, tier: str) -> None:
    """Prints the key alone on standard output, so that it can be piped, and the rest on standard error. Raises
    `ServeError` if nobody can have read it."""
    print(f"Key {key.key_id} of the tier {tier}. It is shown only now: store it.", file=sys.stderr)
    try:
        if sys.__stdout__ is None:  # the stream in its place leads nowhere
            raise OSError(errno.EBADF, "standard output is closed")
        print(key.text, flush=True)
    except OSError as error:
        raise ServeError(
            f"The key {key.key_id} cannot be printed: {error.strerror}. Nothing is changed; call this again with an "
            "output that can be written."
        ) from error


def _row(record: KeyRecord) -> tuple[str, ...]:
    counts = (record.num_requests, record.num_prompt_tokens, record.num_output_tokens)
    return (
        record.key_id,
        record.tier,
        f"{datetime.datetime.fromtimestamp(record.created_s):%Y-%m-%d}",
        "never" if record.last_used_s is None else ago(time.time() - record.last_used_s),
        *(f"{count:,}" for count in counts),
        f"REVOKED {record.label}".strip() if record.revoked_s is not None else record.label,
    )
