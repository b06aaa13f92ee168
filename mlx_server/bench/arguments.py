"""Arguments that several benchmarks share, and types of arguments: bounded numbers, URLs, files."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from mlx_server.errors import ConfigError
from mlx_server.setting import parse_size

_KEY_VARIABLE = "BENCH_API_KEY"


_Number = TypeVar("_Number", int, float)


def _bounded(
    kind: Callable[[str], _Number], is_inside: Callable[[_Number], bool], what: str
) -> Callable[[str], _Number]:
    def convert(text: str) -> _Number:
        with contextlib.suppress(ValueError):
            if is_inside(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return convert


def _whole_number_from(least: int) -> Callable[[str], int]:
    return _bounded(int, lambda value: value >= least, f"a whole number of at least {least}")


above_0 = _bounded(float, lambda value: 0 < value < math.inf, "a finite number above 0")
at_least_0 = _bounded(float, lambda value: 0 <= value < math.inf, "a finite number of at least 0")
from_0, from_1, from_2 = _whole_number_from(0), _whole_number_from(1), _whole_number_from(2)
"""Types of arguments."""


def byte_size(text: str) -> int:
    """Bytes of a size like `10GB`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def server_url(text: str) -> str:
    """A server's URL, with `/v1` or without. Returns it without, and without spaces and line breaks around it."""
    url = text.strip().rstrip("/").removesuffix("/v1")
    with contextlib.suppress(ValueError):  # of a port that is none, half an IPv6 address, or a part of a name too long
        parts = urlsplit(url)
        is_one_word = url.isprintable() and " " not in url
        if is_one_word and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            parts.hostname.encode("idna")
            return url
    raise argparse.ArgumentTypeError(f"{text} is not a URL; write one like http://127.0.0.1:8000")


def output_file(text: str) -> Path:
    """A file that can be written, checked before a measurement that may take an hour."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}: its folder does not exist, or is not writable")
    return path


def add_json_argument(parser: argparse.ArgumentParser, what: str = "all figures") -> None:
    """Declares `--json`, for `tables.write_json`."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help=f"write {what} as JSON")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the server to measure and its model."""
    add = parser.add_argument
    add("--url", type=server_url, default="http://127.0.0.1:8000", help="URL of the server, with /v1 or without")
    add("--model", help="model to request; default: the first that the server lists")


def add_key_argument(parser: argparse.ArgumentParser) -> None:
    """Declares `--api-key`, which `api_key` reads."""
    parser.add_argument("--api-key", metavar="KEY", help=f"sent as bearer token; default: the variable {_KEY_VARIABLE}")


def api_key(args: argparse.Namespace) -> str | None:
    """The key to send, or None."""
    return args.api_key or os.environ.get(_KEY_VARIABLE)


def changed_options(
    args: argparse.Namespace, declare: Callable[[argparse.ArgumentParser], object]
) -> argparse.Namespace:
    """The options that `declare` declares whose values are not their defaults."""
    parser = argparse.ArgumentParser()
    declare(parser)
    defaults = vars(parser.parse_args([]))
    changed = {name: value for name, value in vars(args).items() if name in defaults and value != defaults[name]}
    return argparse.Namespace(**changed)


def refuse_options(args: argparse.Namespace, names: Iterable[str], what: str) -> None:
    """Raises `ConfigError` if one of these options is given, since it has no effect on `what`."""
    values = {name: getattr(args, name, None) for name in names}
    given = [
        f"--{name.replace('_', '-')}" for name, value in sorted(values.items()) if value is not None and value != []
    ]
    if given:
        raise ConfigError(f"Without effect on {what}: {', '.join(given)}. Leave out these options.")


def crossed_numbers(text: str, count: int) -> list[int]:
    """The `count` positive whole numbers of a text like `16x8x128`. Raises `ArgumentTypeError`."""
    parts = text.split("x")
    if len(parts) != count or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not {count} positive whole numbers separated by x")
    return [int(part) for part in parts]
