"""`mlx-serve cache warm`: has a running server compute prefixes ahead of their use."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_server.cli.remote import RemoteServer, add_remote_flags
from mlx_server.errors import ServeError

_HEADS = ("system", "developer")
_FOLLOWERS = ("1", "2", "3")
"""What follows a chat that has no turn of a user yet. They differ, so that what all of them have in common is known as
a place where prompts part: models with sliding windows or recurrent states can be gone on from at such places only."""

_NOT_SENT = (
    "stream",
    "stream_options",
    "max_completion_tokens",
    "n",
    "best_of",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
)
"""Fields that would not change what is computed of a prompt, or that would keep it from being hit."""


class WarmError(ServeError):
    """A file that cannot be used, or a server that keeps nothing."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The requests that compute what an entry of the file says, and at last one that hits it."""

    path: str
    bodies: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, entry: Any, number: int, model: str | None) -> Prefix:
        """Raises `WarmError` for what is neither a prompt nor a request."""
        body = {"prompt": entry} if isinstance(entry, str) else entry
        if not isinstance(body, Mapping) or ("messages" in body) == ("prompt" in body):
            raise WarmError(
                f"Entry {number} is neither a string nor an object with `messages` or `prompt`; "
                'write "a prompt", {"messages": [...], "tools": [...]} or {"prompt": "..."}.'
            )
        if isinstance(body.get("prompt"), list) and any(isinstance(part, (str, list)) for part in body["prompt"]):
            raise WarmError(f"Entry {number} has several prompts; make each an entry of its own.")
        kept = {name: value for name, value in body.items() if name not in _NOT_SENT}
        one = {**({} if model is None else {"model": model}), **kept, "max_tokens": 1}
        if "prompt" in one:
            return cls("/v1/completions", (one, one))
        messages: Any = one["messages"]
        last = messages[-1] if isinstance(messages, list) and messages else None
        if not isinstance(last, Mapping) or last.get("role") not in _HEADS:
            return cls("/v1/chat/completions", (one, one))
        turns = [[*messages, {"role": "user", "content": text}] for text in _FOLLOWERS]
        return cls("/v1/chat/completions", tuple([{**one, "messages": turn} for turn in turns]))

    def compute(self, server: RemoteServer) -> tuple[int, int]:
        """How many tokens the first prompt has, and how many were not cached yet."""
        num_tokens, num_cached = _usage(server.request("POST", self.path, self.bodies[0]))
        for body in self.bodies[1:-1]:
            server.request("POST", self.path, body)
        return num_tokens, num_tokens - num_cached

    def num_kept(self, server: RemoteServer) -> int:
        """How many tokens a further prompt hits."""
        return _usage(server.request("POST", self.path, self.bodies[-1]))[1]


def add_warm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="prompts or chat requests, as JSON or JSONL; - for standard input")
    parser.add_argument("--model", help="model of entries that name none; default: the server's own")
    add_remote_flags(parser)


def run_warm(args: argparse.Namespace) -> int:
    """Has a running server compute prefixes ahead of their use, and tells how much of each it keeps. An entry is a
    prompt, or a request as clients send it: `messages` with their `tools`, or `prompt`. Of messages that end with the
    system's, what all chats with them have in common is kept. With `serve --kv-disk`, it is written to disk, too, once
    nobody has run for a second.

    examples:
      mlx-serve cache warm agents.jsonl
      echo '{"messages": [{"role": "system", "content": "You review code."}]}' | mlx-serve cache warm -
    """
    entries = _entries(_text(args.file))
    prefixes = [Prefix.of(entry, number, args.model) for number, entry in enumerate(entries, 1)]
    with contextlib.closing(RemoteServer(args.url)) as server:
        for number, prefix in enumerate(prefixes, 1):
            began_s = time.monotonic()
            num_tokens, num_computed = prefix.compute(server)
            took_s = time.monotonic() - began_s
            print(f"{number}: {num_tokens:,} tokens, {num_computed:,} computed, {took_s:.1f} s", flush=True)
        kept = [prefix.num_kept(server) for prefix in prefixes]  # when all are there: the last may displace the first
    print(f"{sum(kept):,} tokens are kept: {', '.join(f'{num_tokens:,}' for num_tokens in kept)}.")
    lost = [str(number) for number, num_tokens in enumerate(kept, 1) if not num_tokens]
    if lost:
        raise WarmError(
            f"Nothing is kept of {'entries' if lost[1:] else 'entry'} {', '.join(lost)}: "
            "shorter than a block of 32 tokens, more than the KV pool holds, or the model runs without prefix caching."
        )
    return 0


def _text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).expanduser().read_text("utf-8")
    except OSError as error:
        raise WarmError(f"{name} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise WarmError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}.") from error


def _entries(text: str) -> list[Any]:
    """Those of a JSON list, one JSON value, or a JSON value a line."""
    try:
        whole = json.loads(text)
        entries = whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("["):
            raise WarmError(f"The file is not JSON: {error.msg} in line {error.lineno}.") from error
        entries = [_value(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not entries:
        raise WarmError("The file has no entries.")
    return entries


def _value(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise WarmError(f"Line {number} is not JSON: {error.msg} in column {error.colno}.") from error


def _usage(answer: Any) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were cached."""
    usage = answer["usage"]
    return int(usage["prompt_tokens"]), int(usage["prompt_tokens_details"]["cached_tokens"])
