"""The tree of commands, and how a command line walks down it.

A command is a module that offers `add_arguments(parser)` and `run(args) -> int`, the exit status. It is
imported when it is called, so `mlx-serve --help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NoReturn

_MAX_USAGE_CHARS = 400


class UsageError(Exception):
    """The command line is wrong; the message says how."""


@dataclass(frozen=True, slots=True)
class Command:
    """`module` is the full name of the module; its docstring is the command's description."""

    module: str
    summary: str


@dataclass(frozen=True, slots=True)
class Group:
    """Commands under one name."""

    summary: str
    commands: Mapping[str, Command | Group]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def run(prog: str, node: Command | Group, argv: Sequence[str]) -> int:
    """Runs the command that `argv` names below `node`. `--help` and `--version` raise `SystemExit`, as argparse does.

    Raises `UsageError`, and whatever the command raises.
    """
    if isinstance(node, Command):
        return _run_command(prog, node, argv)
    parser = _group_parser(prog, node)
    if not argv:
        parser.print_help()
        return 0
    name = argv[0]
    if name.startswith("-"):
        parser.parse_args(argv)
    if name not in node.commands:
        raise UsageError(f"unknown command {name}{_nearest(name, node.commands)} (see `{prog} --help`)")
    return run(f"{prog} {name}", node.commands[name], argv[1:])


def _run_command(prog: str, command: Command, argv: Sequence[str]) -> int:
    module: Any = importlib.import_module(command.module)
    parser = _Parser(
        prog=prog,
        description=inspect.getdoc(module),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    parser.usage = _usage(parser)
    args, extra = parser.parse_known_args(argv)
    if extra:
        known = re.findall(r"--[\w-]+", parser.format_help())
        wrong = extra[0].partition("=")[0]
        raise UsageError(f"unknown argument {wrong}{_nearest(wrong, known)} (see `{prog} --help`)")
    return int(module.run(args))


def _usage(parser: argparse.ArgumentParser) -> str | None:
    """A line instead of the screen that many options would fill; None where they fit."""
    if len(parser.format_usage()) < _MAX_USAGE_CHARS:
        return None
    positionals = [action for action in parser._actions if not action.option_strings]
    return " ".join([parser.prog, *(_positional(action) for action in positionals), "[options]"])


def _positional(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def _group_parser(prog: str, group: Group) -> argparse.ArgumentParser:
    width = max(map(len, group.commands), default=0)
    lines = [f"  {name:<{width}}  {node.summary}" for name, node in group.commands.items()]
    parser = _Parser(
        prog=prog,
        usage=f"{prog} COMMAND [options]",
        description=f"{group.summary}\n\ncommands (`{prog} COMMAND --help` tells more):\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mlx-serve {_version()}")
    return parser


def _version() -> str:
    try:
        return metadata.version("mlx-server")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _nearest(name: str, known: Iterable[str]) -> str:
    """`, did you mean ...?` for a mistyped name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else ""
