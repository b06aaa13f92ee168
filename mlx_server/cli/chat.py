"""Chats with a running server in the terminal. With a message or piped text, prints one answer and ends.

examples:
  mlx-serve chat
  mlx-serve chat "What is a KV cache?"
  git diff | mlx-serve chat "Write a commit message for this."
  mlx-serve chat --url http://mac-studio:8000 --model qwen3 --system "Answer in French."

Commands: /clear starts again, /retry repeats the last question, /quit or Ctrl-D ends. Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from mlx_server.cli.main import EXIT_INTERRUPTED
from mlx_server.cli.remote import RemoteError, RemoteServer, add_remote_flags
from mlx_server.environment import read_stdin

_QUIET, _PLAIN = "\x1b[2m", "\x1b[0m"
_HELP = "/clear starts again, /retry repeats the last question, /quit or Ctrl-D ends; Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="*", help="a question; piped text is put before it")
    add_remote_flags(parser)
    parser.add_argument("--model", help="model to ask; default: the server's own")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, help="maximum length of an answer")
    parser.add_argument("--temperature", type=float)


def run(args: argparse.Namespace) -> int:
    sampling = {"max_completion_tokens": args.max_tokens, "temperature": args.temperature, "model": args.model}
    options = {name: value for name, value in sampling.items() if value is not None}
    with contextlib.closing(RemoteServer(args.url)) as server:
        conversation = Conversation(server, options, args.system)
        question = _question(args.message)
        if question is not None:
            return 0 if conversation.ask(question) else EXIT_INTERRUPTED
        print(f"{args.model or next(iter(server.model_cards()))} at {server.url}. {_HELP}")
        return _converse(conversation)


class Conversation:
    """The messages so far; `ask` prints the next answer."""

    def __init__(self, server: RemoteServer, options: dict[str, Any], system: str | None) -> None:
        self._server = server
        self._options = options
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)

    def clear(self) -> None:
        self._messages = list(self._start)

    def take_back(self) -> str | None:
        """Removes the last question and its answer. Returns the question; None if there is none."""
        while self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if self._messages and self._messages[-1]["role"] == "user":
            return self._messages.pop()["content"]
        return None

    def ask(self, question: str) -> bool:
        """Prints the answer as it arrives. Returns whether it is complete: Ctrl-C stops it and keeps the text so far.
        Without text, the question is dropped. Raises `RemoteError`, and drops the question then, too."""
        self._messages.append({"role": "user", "content": question})
        answer, num_tokens, is_complete = Answer(), 0, True
        try:
            for piece in self._pieces():
                num_tokens = piece.num_tokens or num_tokens
                answer.show(piece)
        except KeyboardInterrupt:
            is_complete = False
            print(" [stopped]", end="")
        except RemoteError:
            self._messages.pop()
            if answer.text:
                print(flush=True)  # the error begins a line of its own
            raise
        print(flush=True)
        if answer.text:
            self._messages.append({"role": "assistant", "content": answer.text})
        else:  # many templates refuse two questions in a row
            self._messages.pop()
        if num_tokens and sys.stdout.isatty():
            print(f"{_QUIET}{answer.figures(num_tokens)}{_PLAIN}")
        return is_complete

    def _pieces(self) -> Iterator[Piece]:
        body = {"messages": self._messages, "stream": True, "stream_options": {"include_usage": True}, **self._options}
        return self._server.stream("/v1/chat/completions", body, Piece.of)


class Piece(NamedTuple):
    """What an event adds to an answer. `num_tokens` is the length of the whole answer, in the last event; else 0."""

    thought: str
    text: str
    num_tokens: int

    @classmethod
    def of(cls, event: Any) -> Piece:
        choices = event.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        num_tokens = (event.get("usage") or {}).get("completion_tokens") or 0
        return cls(str(delta.get("reasoning") or ""), str(delta.get("content") or ""), int(num_tokens))


class Answer:
    """An answer as it arrives: its text and its speed."""

    def __init__(self) -> None:
        self.text = ""
        self._is_thinking = False
        self._asked_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._asked_s

    def show(self, piece: Piece) -> None:
        """Prints the text of a piece. Reasoning is printed dimmed, and only on a terminal."""
        thought, text, _ = piece
        if thought or text:
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s
        if thought and sys.stdout.isatty():
            self._is_thinking = True
            print(f"{_QUIET}{thought}{_PLAIN}", end="", flush=True)
        if text and self._is_thinking:
            self._is_thinking = False
            print("\n")
        print(text, end="", flush=True)
        self.text += text

    def figures(self, num_tokens: int) -> str:
        """`120 tokens, the first after 0.2 s, then 55 a second`."""
        if self._first_s is None:
            return f"{num_tokens} tokens"
        first = f"{num_tokens} tokens, the first after {self._first_s - self._asked_s:.1f} s"
        decode_s = self._last_s - self._first_s
        return f"{first}, then {(num_tokens - 1) / decode_s:.0f} a second" if decode_s > 0 else first


def _question(words: list[str]) -> str | None:
    """The one question to ask: piped text, then the words; None for a conversation."""
    piped = "" if sys.stdin.isatty() else read_stdin().strip()
    return "\n\n".join(part for part in (piped, " ".join(words)) if part) or None


def _converse(conversation: Conversation) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and history
    while True:
        try:
            line: str | None = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line == "/quit":
            return 0
        if line == "/help":
            print(_HELP)
            continue
        if line == "/clear":
            conversation.clear()
            continue
        if line == "/retry":
            line = conversation.take_back()
        if not line:
            continue
        if line.startswith("/") and " " not in line:
            print(f"Unknown command {line}. {_HELP}")
            continue
        try:
            conversation.ask(line)
        except RemoteError as error:
            print(f"error: {error}", file=sys.stderr)
