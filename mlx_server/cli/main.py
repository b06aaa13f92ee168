"""`mlx-serve`: the tree of commands, how a command line is resolved, and errors in one line.

A module of commands has `add_VERB(parser)` and `run_VERB(args) -> int`, the exit status, for each verb. It is imported
when one of its commands is called, so that `mlx-serve --help` and a mistyped command answer at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import inspect
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlx_server.environment import open_streams, quiet_libraries, version
from mlx_server.errors import ConfigError, ServeError, did_you_mean

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_MAX_USAGE_CHARS = 400
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class UsageError(Exception):
    """The command line is wrong; the message says how."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command: `add_VERB` and `run_VERB` of a module; the docstring of `run_VERB` is the description. Without a verb,
    the module is one command: it has `add_arguments` and `run`, and its docstring is the description."""

    module: str
    summary: str
    verb: str = ""

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        self._offers("add_arguments", f"add_{self.verb}")(parser)
        parser.description = inspect.getdoc(self.act if self.verb else importlib.import_module(self.module))
        parser.usage = _short_usage(parser)

    @property
    def act(self) -> Callable[[argparse.Namespace], int]:
        """Runs the command. Returns the exit status."""
        run: Callable[[argparse.Namespace], int] = self._offers("run", f"run_{self.verb}")
        return run

    def _offers(self, whole: str, one: str) -> Any:
        return getattr(importlib.import_module(self.module), one if self.verb else whole)


@dataclass(frozen=True, slots=True)
class Group:
    """Commands under one name."""

    summary: str
    commands: Mapping[str, Command | Group]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        width = max(map(len, self.commands), default=0)
        lines = [f"  {name:<{width}}  {node.summary}" for name, node in self.commands.items()]
        title = f"{self.summary}\n\ncommands (`{parser.prog} COMMAND --help` describes one):\n"
        parser.usage = f"{parser.prog} COMMAND [options]"
        parser.description = title + "\n".join(lines)
        parser.add_argument("--version", action="version", version=f"mlx-serve {version()}")

    def add_tree_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds the whole tree below, from all modules."""
        self.add_to(parser)
        below = parser.add_subparsers(prog=parser.prog)
        for name, node in self.commands.items():
            child = below.add_parser(name, help=node.summary)
            if isinstance(node, Group):
                node.add_tree_to(child)
            else:
                node.add_to(child)


class Parser(argparse.ArgumentParser):
    """Does not accept abbreviations, and raises `UsageError`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """All words after `--` go to the last positional argument, if it takes any number. (argparse refuses them after
        an option, and drops the next `--` among them.)"""
        words = sys.argv[1:] if args is None else list(args)
        takers = [action for action in self._actions if not action.option_strings and action.nargs == "*"]
        if "--" not in words or not takers:
            return super().parse_known_args(words, namespace)
        place = words.index("--")
        parsed, extra = super().parse_known_args(words[:place], namespace)
        setattr(parsed, takers[-1].dest, [*getattr(parsed, takers[-1].dest), *words[place + 1 :]])
        return parsed, extra

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Names the nearest option for one that is unknown."""
        parsed, extra = self.parse_known_args(args, namespace)
        if extra:
            wrong = extra[0].partition("=")[0]
            known = re.findall(r"--[\w-]+", self.format_help())
            self.error(f"unknown argument {wrong}{did_you_mean(wrong, known)}")
        return parsed

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse drops the errors of writing."""
        print(message, end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def commands() -> Group:
    return Group(
        "a local OpenAI-compatible LLM server on MLX",
        {
            "serve": Command("mlx_server.cli.serve", "serve a model over HTTP", "serve"),
            "chat": Command("mlx_server.cli.chat", "chat with a running server"),
            "launch": Command("mlx_server.cli.launch", "start a client that uses a running server", "launch"),
            "pull": Command("mlx_server.cli.models", "fetch a model without serving it", "pull"),
            "models": _noun(
                "mlx_server.cli.models",
                "models on this machine, and in a running server",
                ls="list what is on this machine",
                pull="fetch a model",
                rm="delete pulled models",
                ps="show the models of a running server",
                load="load a model in a running server",
                unload="unload a model in a running server",
            ),
            "config": _noun(
                "mlx_server.cli.config",
                "show settings and check them",
                check="show the effective settings, or what is wrong",
                default="print a file with every setting",
            ),
            "keys": _noun(
                "mlx_server.cli.keys",
                "API keys and their tiers",
                create="create a key, shown once",
                list="list keys with their usage",
                revoke="revoke a key",
                rotate="give a key a new secret",
            ),
            "cache": _noun(
                "mlx_server.cli.cache",
                "cached prefixes, on disk (`serve --kv-disk`) and in memory",
                ls="list prefixes on disk, by model and caller",
                stats="show the size on disk, and how much may be written today",
                purge="delete prefixes on disk: all, or those of a model or a key",
                warm="have a running server compute prefixes in advance",
            ),
            "service": _noun(
                "mlx_server.cli.serve",
                "run the server as a macOS service",
                install="start the server now and at every login",
                uninstall="stop the server and remove the service",
            ),
            "doctor": Command("mlx_server.cli.doctor", "show what this machine has: memory, MLX, backends, models"),
            "completion": Command("mlx_server.cli.main", "complete commands and options in your shell", "completion"),
            "bench": _benchmarks(),
        },
    )


def _noun(module: str, summary: str, **verbs: str) -> Group:
    """The commands of one module, by verb, with their summaries."""
    return Group(summary, {verb: Command(module, about, verb) for verb, about in verbs.items()})


def _benchmarks() -> Group:
    modules = {
        "throughput": ("throughput", "offline: this engine and mlx-lm's own, on the same prompts"),
        "serve": ("serve.command", "over HTTP: latencies and throughput of any OpenAI-compatible server"),
        "compare": ("compare", "over HTTP: several servers, in turns"),
        "peers": ("peers", "install other servers that run here, and compare with them"),
        "invariance": ("lab.invariance", "over HTTP: whether answers have the same bits alone and in batches"),
        "kernels": ("lab.kernels", "attention and matrix products alone, compared with MLX's own"),
        "simulate": ("lab.simulator.command", "the scheduler alone, on recorded or generated traffic"),
        "host-cost": ("lab.host_cost", "host time to schedule a step"),
        "random-folder": ("random_folder", "write a random model that any mlx-lm server can load"),
    }
    return Group(
        "measure speed and compare servers",
        {name: Command(f"mlx_server.bench.{module}", summary) for name, (module, summary) in modules.items()},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 2 for a wrong command line or setting, or 1 for another error."""
    quiet_libraries()
    open_streams()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of `__main__`
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return _run_and_flush(sys.argv[1:] if argv is None else argv)
    except (UsageError, ConfigError) as error:
        return _fail(error, EXIT_USAGE)
    except ServeError as error:
        return _fail(error, EXIT_ERROR)
    except KeyboardInterrupt:
        _drop_output()
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has left, as `head` does
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # the last resort
        logging.getLogger(__name__).debug("This was not expected", exc_info=error)
        name = error.filename
        if name is None and not _has_folder():
            name = "the current folder"  # it is deleted
        if name is None and error.errno in _UNWRITTEN:
            name = "A file or the output cannot be written"
        reason = error.strerror or error
        return _fail(f"{name}: {reason}." if name is not None else reason, EXIT_ERROR)


def _run_and_flush(argv: Sequence[str]) -> int:
    """Raises what the command raises, and else `OSError` if its output cannot be written."""
    try:
        status = run(commands(), argv)
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return status


def _has_folder() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def _drop_output() -> None:
    """Writes what was printed, and drops it if it cannot be written, or Python would try again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: object, status: int) -> int:
    _drop_output()
    print(f"mlx-serve: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def run(tree: Group, argv: Sequence[str], prog: str = "mlx-serve") -> int:
    """Runs the command that `argv` names. `--help` and `--version` raise `SystemExit`, as argparse does.

    Raises `UsageError`, and what the command raises.
    """
    prog, node, words = find(prog, tree, argv)
    parser = Parser(prog=prog)
    node.add_to(parser)
    if isinstance(node, Group):
        if words:
            parser.parse_args(words)
        parser.print_help()
        return 0
    return int(node.act(parser.parse_args(words)))


def find(prog: str, node: Command | Group, argv: Sequence[str]) -> tuple[str, Command | Group, Sequence[str]]:
    """What `argv` names below `node`: its full name, the node, and the remaining words. Raises `UsageError`."""
    if isinstance(node, Command) or not argv or argv[0].startswith("-"):
        return prog, node, argv
    name = argv[0]
    if name not in node.commands:
        hint = did_you_mean(name, node.commands) or f"; there are {', '.join(node.commands)}"
        raise UsageError(f"unknown command {name}{hint} (see `{prog} --help`)")
    return find(f"{prog} {name}", node.commands[name], argv[1:])


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run_completion(args: argparse.Namespace) -> int:
    """Prints a script that completes commands and options in your shell.

    examples:
      mlx-serve completion bash > ~/.local/share/bash-completion/completions/mlx-serve
      mlx-serve completion zsh > "${fpath[1]}/_mlx-serve"
      mlx-serve completion fish > ~/.config/fish/completions/mlx-serve.fish
    """
    import shtab

    parser = Parser(prog="mlx-serve")
    commands().add_tree_to(parser)
    _offer_files(parser, shtab.FILE)
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _offer_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Completes file names for values that are not numbers or choices, in the parser and all below."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _offer_files(child, files)
        elif action.nargs != 0 and action.choices is None and action.type in (None, Path):
            setattr(action, "complete", files)  # noqa: B010  # what shtab looks for


def _short_usage(parser: argparse.ArgumentParser) -> str | None:
    """One line, instead of a screen full of options; None if they fit."""
    if len(parser.format_usage()) < _MAX_USAGE_CHARS:
        return None
    formatter = parser._get_formatter()
    formatter.add_usage(None, parser._get_positional_actions(), [], prefix="")
    return f"{formatter.format_help().strip()} [options]"
