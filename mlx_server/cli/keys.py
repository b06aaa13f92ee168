"""What the commands for keys share: their flags, the file, and how a new key is handed over."""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_server.api.auth.key_file import KeyFile, NewKey
from mlx_server.api.auth.keys import key_file_path
from mlx_server.cli.settings_flags import add_config_flag
from mlx_server.config import Config
from mlx_server.errors import ServeError


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """`--config` and `--key-file`."""
    add_config_flag(parser)
    parser.add_argument("--key-file", metavar="FILE", help="the file of keys; default: that of the configuration")


def add_id_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="the key's id: the part between its first and second underscore, as `list` shows it")


@contextmanager
def open_keys(config: Config, *, creates: bool = False) -> Iterator[KeyFile]:
    """The configured file; made if need be, when it `creates`. Raises `ServeError`."""
    path = key_file_path(config.server)
    if not creates and not path.exists():
        raise ServeError(f"There are no keys yet ({path} does not exist); `mlx-serve keys create` makes one.")
    try:
        with KeyFile.create(path) if creates else KeyFile(path) as file:
            yield file
    except (OSError, sqlite3.Error) as error:
        raise ServeError(f"The keys in {path} cannot be changed: {error}.") from error


def hand_over(key: NewKey, tier: str) -> None:
    """The key alone on standard output, for a pipe; what a person should know beside it."""
    print(f"Key {key.key_id} of the tier {tier}. It is shown only now, and kept nowhere: store it.", file=sys.stderr)
    print(key.text)
