"""`mlx-serve cache`: prefixes on disk, and prefixes that a running server computes in advance."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_server.batching.blocks.disk_saves import owner_tag
from mlx_server.cli.config import add_config_flag, config_from
from mlx_server.cli.remote import RemoteError, RemoteServer, add_remote_flags, one_line, size, table
from mlx_server.config import Config
from mlx_server.environment import MAX_INPUT, exists, expanded, read_file, read_stdin
from mlx_server.errors import ServeError
from mlx_server.kv_disk.disk import LOCK, WriteBudget
from mlx_server.kv_disk.files import Files, disk_folder
from mlx_server.kv_disk.slab import SUFFIX, RecordHeader, Space, stored_label
from mlx_server.kv_disk.store import RecordStore
from mlx_server.setting import parse_size

_HEADER = ("model", "caller", "blocks", "size")
_HEADS = ("system", "developer")
_FOLLOWERS = ("1", "2", "3")
"""Turns that follow a chat without a user's turn. They differ, so that the end of their common prefix becomes known as
a branching point: models with sliding windows or recurrent states can continue only from such points."""

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
    "min_tokens",
)
"""Fields that do not change what is computed of a prompt, or that prevent cache hits."""


def add_ls(parser: argparse.ArgumentParser) -> None:
    _add_flags(parser)


def run_ls(args: argparse.Namespace) -> int:
    """Lists the blocks of 32 tokens on disk, by model (its served name) and by the caller who may hit them. Callers are
    shown as digests; `purge --key` finds those of a key. A running server may have more that is not written yet.

    examples:
      mlx-serve cache ls
      mlx-serve cache ls --kv-disk-dir /Volumes/fast/kv
    """
    with _opened(config_from(args)) as files:
        entries = _store(files).entries()
    counts: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for space, record in entries:
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
    """Shows how much is on disk, and how much may be written now.

    example:
      mlx-serve cache stats --json
    """
    config = config_from(args)
    with _opened(config) as files:
        figures: dict[str, str | int] = {
            "folder": str(files.folder),
            "blocks": len(_store(files)),
            "bytes": sum(entry.num_bytes for entry in files.entries(SUFFIX)),
            "free_bytes": files.free_bytes(),
            "writable_bytes": WriteBudget(files, parse_size(config.memory.kv_disk_writes_per_day)).left,
        }
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        rows = [(name.removesuffix("_bytes"), _shown(name, value)) for name, value in figures.items()]
        print(table(rows))
    return 0


def add_purge(parser: argparse.ArgumentParser) -> None:
    about = "only prefixes of this model, by the name that `cache ls` shows"
    parser.add_argument("--model", dest="only_model", metavar="MODEL", help=about)  # not the setting --model
    parser.add_argument("--key", type=one_line, metavar="ID", help="only prefixes that only this key may hit")
    _add_flags(parser)


def run_purge(args: argparse.Namespace) -> int:
    """Deletes prefixes on disk; those in files that remain are overwritten. No server may be using the folder.

    examples:
      mlx-serve cache purge
      mlx-serve cache purge --model smollm2
      mlx-serve cache purge --key 3f9c0a1b2c4d
    """
    config = config_from(args)
    if args.only_model is not None or args.key is not None:
        print(f"{_delete(config, args.only_model, args.key):,} blocks are deleted.")
        return 0
    with _locked(config) as files:
        entries = files.entries(SUFFIX)
        for entry in entries:
            files.remove(entry.name)
    print(f"{size(sum(entry.num_bytes for entry in entries))} in {files.folder} are deleted.")
    return 0


def purge_key(config: Config, key_id: str) -> str:
    """Deletes prefixes that only the key may hit. Returns what was done, for the user. Raises `ServeError` if there is
    no such folder, while a server uses it, and if the disk fails."""
    num_blocks = _delete(config, None, key_id)
    return f"{num_blocks:,} blocks that only this key could hit are deleted from {disk_folder(config.memory)}."


def _delete(config: Config, model: str | None, key_id: str | None) -> int:
    owner = None if key_id is None else owner_tag((f"key:{key_id}",))
    wanted = None if model is None else stored_label(model)

    def is_wanted(space: Space, record: RecordHeader) -> bool:
        return wanted in (None, space.label) and owner in (None, record.owner)

    with _locked(config) as files:
        return _store(files).delete(is_wanted)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    parser.add_argument("--kv-disk-dir", metavar="FOLDER", help="the folder; default: as configured")


@contextlib.contextmanager
def _opened(config: Config) -> Iterator[Files]:
    """The files in the configured folder. Raises `ServeError` if there is no such folder, or if the disk fails."""
    folder = disk_folder(config.memory)
    try:
        if not (exists(folder) and folder.is_dir()):
            raise ServeError(
                f"There is no folder {folder}; `mlx-serve serve --kv-disk` creates it. "
                "If the server uses another folder, name it with --kv-disk-dir."
            )
        yield Files(folder)
    except OSError as error:
        raise ServeError(f"{folder} cannot be used: {error}.") from error


def _store(files: Files) -> RecordStore:
    """Opens the records read-only, with no limit, so that nothing is evicted."""
    store = RecordStore(files, limit_bytes=2**63)
    store.scan(removes_broken=False)
    return store


@contextlib.contextmanager
def _locked(config: Config) -> Iterator[Files]:
    """The same for who alone uses the folder. Raises `ServeError` also while a server uses it."""
    with _opened(config) as files:
        lock = files.lock(LOCK)
        if lock is None:
            raise ServeError(f"A server is using {files.folder}; stop it first.")
        try:
            yield files
        finally:
            os.close(lock)


def _shown(name: str, value: str | int) -> str:
    return size(value) if name.endswith("bytes") and isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The requests that compute the prefix of one entry; the last one hits it. `place` is the entry's file and line."""

    place: str
    path: str
    bodies: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, entry: Any, place: str, model: str | None) -> Prefix:
        """Raises `ServeError` for an entry that is neither a prompt nor a request."""
        body = {"prompt": entry} if isinstance(entry, str) else entry
        if not isinstance(body, Mapping) or ("messages" in body) == ("prompt" in body):
            raise ServeError(
                f"{place}: the entry is neither a string nor an object with either `messages` or `prompt`; "
                'write "a prompt", {"messages": [...], "tools": [...]} or {"prompt": "..."}.'
            )
        if isinstance(body.get("prompt"), list) and any(isinstance(part, (str, list)) for part in body["prompt"]):
            raise ServeError(f"{place}: the entry has several prompts; make each an entry of its own.")
        kept = {name: value for name, value in body.items() if name not in _NOT_SENT}
        one = {**({} if model is None else {"model": model}), **kept, "max_tokens": 1}
        if "prompt" in one:
            return cls(place, "/v1/completions", (one, one))
        messages: Any = one["messages"]
        last = messages[-1] if isinstance(messages, list) and messages else None
        if not isinstance(last, Mapping) or last.get("role") not in _HEADS:
            return cls(place, "/v1/chat/completions", (one, one))
        turns = [[*messages, {"role": "user", "content": text}] for text in _FOLLOWERS]
        return cls(place, "/v1/chat/completions", tuple([{**one, "messages": turn} for turn in turns]))

    def compute(self, server: RemoteServer) -> tuple[int, int]:
        """Returns how many tokens the first prompt has, and how many were not cached. Raises `RemoteError`."""
        try:
            num_tokens, num_cached = server.request("POST", self.path, self.bodies[0], _usage)
            for body in self.bodies[1:-1]:
                server.request("POST", self.path, body)
        except RemoteError as error:
            raise RemoteError(f"{self.place}: {error.message}") from error
        return num_tokens, num_tokens - num_cached

    def num_kept(self, server: RemoteServer) -> int:
        """How many cached tokens a further prompt hits."""
        return int(server.request("POST", self.path, self.bodies[-1], _usage)[1])


def add_warm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="prompts or chat requests, in JSON or JSONL; - for standard input")
    parser.add_argument("--model", help="model of entries that name none; default: the server's default model")
    add_remote_flags(parser)


def run_warm(args: argparse.Namespace) -> int:
    """Has a running server compute prefixes in advance, and shows how much of each it keeps. An entry is a prompt, or a
    request as clients send it: `messages` with their `tools`, or `prompt`. If the messages end with a system message,
    the common prefix of all chats with them is kept. With `serve --kv-disk` it is also written to disk, once the
    server has been idle for a second.

    examples:
      mlx-serve cache warm agents.jsonl
      echo '{"messages": [{"role": "system", "content": "You review code. Name the file and line of each bug,' \\
        'say what goes wrong, and give the smallest fix. Do not praise."}]}' | mlx-serve cache warm -
    """
    prefixes = [Prefix.of(entry, place, args.model) for place, entry in _entries(args.file).items()]
    with contextlib.closing(RemoteServer(args.url)) as server:
        for number, prefix in enumerate(prefixes, 1):
            began_s = time.monotonic()
            num_tokens, num_computed = prefix.compute(server)
            took_s = time.monotonic() - began_s
            print(f"{number}: {num_tokens:,} tokens, {num_computed:,} computed, {took_s:.1f} s", flush=True)
        kept = [prefix.num_kept(server) for prefix in prefixes]  # after all of them: the last may displace the first
    print(f"{sum(kept):,} tokens are kept: {', '.join(f'{num_tokens:,}' for num_tokens in kept)}.")
    lost = [prefix.place for prefix, num_tokens in zip(prefixes, kept) if not num_tokens]
    if lost:
        raise ServeError(
            f"Nothing is kept of {'; '.join(lost)}: "
            "shorter than a block of 32 tokens, more than the KV pool holds, or the model runs without prefix caching."
        )
    return 0


def _entries(file: str) -> dict[str, Any]:
    """The entries by file and line (or number): those of a JSON list, one JSON value, or one JSON value per line.
    Raises `ServeError`."""
    name = "Standard input" if file == "-" else file
    text = _text(file)
    if not text.strip():
        raise ServeError(f"{name} has no entries.")
    try:
        whole = json.loads(text)
    except (RecursionError, ValueError) as error:
        if not (isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"):
            raise _not_json(error, name) from error
        lines = enumerate(text.split("\n"), 1)
        return {f"{name}, line {n}": _value(line, name, n) for n, line in lines if line.strip()}
    if not isinstance(whole, list):
        return {name: whole}
    if not whole:
        raise ServeError(f"{name} has no entries.")
    return {f"{name}, entry {number}": entry for number, entry in enumerate(whole, 1)}


def _value(line: str, name: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (RecursionError, ValueError) as error:
        raise _not_json(error, name, number) from error


def _not_json(error: Exception, name: str, line: int = 0) -> ServeError:
    """Of a `line`, or of the whole file."""
    if isinstance(error, json.JSONDecodeError):
        return ServeError(f"{name}, line {line or error.lineno} is not JSON: {error.msg} in column {error.colno}.")
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else "it has a number of too many digits"
    return ServeError(f"{name}{f', line {line}' if line else ''} cannot be read: {reason}.")


def _text(file: str) -> str:
    try:
        if file == "-":
            return read_stdin().removeprefix("\ufeff")
        return read_file(expanded(file), MAX_INPUT, "a file of prompts").decode("utf-8-sig")
    except OSError as error:
        raise ServeError(f"{file or 'A file without a name'} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ServeError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}.") from error


def _usage(answer: Any) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were cached."""
    usage = answer["usage"]
    return int(usage["prompt_tokens"]), int(usage["prompt_tokens_details"]["cached_tokens"])
