"""Prints a script that completes commands and options in your shell.

examples:
  mlx-serve completion bash > ~/.local/share/bash-completion/completions/mlx-serve
  mlx-serve completion zsh > "${fpath[1]}/_mlx-serve"
  mlx-serve completion fish > ~/.config/fish/completions/mlx-serve.fish
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator

from mlx_server.cli.command import Command, Group

PROGRAM = "mlx-serve"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(_SCRIPTS))


def run(args: argparse.Namespace) -> int:
    from mlx_server.cli.main import commands  # which knows this module

    print(_SCRIPTS[args.shell](dict(_words("", commands()))), end="")
    return 0


def _words(path: str, node: Command | Group) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """What may follow each command line that begins with `path`: (word, what it is about)."""
    if isinstance(node, Group):
        yield path, [(name, child.summary) for name, child in node.commands.items()]
        for name, child in node.commands.items():
            yield from _words(f"{path} {name}".strip(), child)
        return
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(node.module).add_arguments(parser)
    options = [
        (option, (action.help or "").partition(";")[0])
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    ]
    words = [
        (str(choice), "") for action in parser._actions if not action.option_strings for choice in action.choices or ()
    ]
    yield path, [*words, *options, ("--help", "show what the command does")]


def _bash(words: dict[str, list[tuple[str, str]]]) -> str:
    cases = "\n".join(
        f"    {shlex.quote(path)}) words={shlex.quote(' '.join(word for word, _ in choices))} ;;"
        for path, choices in words.items()
    )
    return f"""# bash completion of {PROGRAM}
_mlx_serve() {{
  local word path="" words=""
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    [[ $word == -* ]] && break
    path="${{path:+$path }}$word"
  done
  case "$path" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
  [[ ${{#COMPREPLY[@]}} -gt 0 ]] || COMPREPLY=($(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -F _mlx_serve {PROGRAM}
"""


def _zsh(words: dict[str, list[tuple[str, str]]]) -> str:
    def described(word: str, about: str) -> str:
        return shlex.quote(f"{word}:{about}")

    cases = "\n".join(
        f"    {shlex.quote(path)}) choices=({' '.join(described(*choice) for choice in choices)}) ;;"
        for path, choices in words.items()
    )
    return f"""#compdef {PROGRAM}
_mlx_serve() {{
  local word taken=""
  local -a choices
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    [[ $word == -* ]] && break
    taken="${{taken:+$taken }}$word"
  done
  case "$taken" in
{cases}
  esac
  _describe {PROGRAM} choices || _files
}}
if [[ $funcstack[1] == _mlx_serve ]]; then _mlx_serve "$@"; else compdef _mlx_serve {PROGRAM}; fi
"""


def _fish(words: dict[str, list[tuple[str, str]]]) -> str:
    lines = [f"# fish completion of {PROGRAM}"]
    for path, choices in words.items():
        depth = len(path.split())
        test = f"test (count (commandline -opc)) -eq {depth + 1}" if depth == 0 else _fish_path(path)
        for word, about in choices:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {shlex.quote(word)}"
            lines.append(f"complete -c {PROGRAM} -n {shlex.quote(test)} {kind} -d {shlex.quote(about)}")
    return "\n".join(lines) + "\n"


def _fish_path(path: str) -> str:
    return f"string match -qr '^{PROGRAM} {path}( |$)' -- (string join ' ' (commandline -opc))"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
