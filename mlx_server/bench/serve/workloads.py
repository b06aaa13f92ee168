"""Workloads: conversations of one or more turns, generated from a seed, or read from a file of prompts or a trace of
arrivals. Files are recognized by their field names:

JSON lines   `prompt` or `messages`, and maybe `output_tokens`   prompts (vLLM's custom dataset)
JSON lines   `timestamp` (ms), `input_length`, `output_length`,
             `hash_ids` (one for each 512 tokens)                Mooncake's trace
CSV          `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`     Azure's trace
CSV          `Timestamp` (s), `Request tokens`,
             `Response tokens` (0: failed, left out)             BurstGPT's trace
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_server.bench.serve.client import DEFAULT_TIER, Message, StreamClient, Tier
from mlx_server.environment import read_file
from mlx_server.errors import ConfigError, ServeError

WORDS = ("time", "river", "stone", "cloud", "green", "table", "seven", "light", "north", "paper", "quiet", "field")
BLOCK_TOKENS = 512
"""Tokens that one hash id of a trace stands for."""

_CALIBRATION_WORDS = (100, 300)
_MAX_BYTES = 2**30


class Prompts:
    """Random text of a given length in the server's own tokens."""

    def __init__(self, tokens_per_word: float, seed: int | str) -> None:
        self._tokens_per_word = tokens_per_word
        self._seed = seed
        self._rng = random.Random(seed)

    @classmethod
    async def calibrate(cls, client: StreamClient, seed: int | str, tier: Tier = DEFAULT_TIER) -> Prompts:
        """Measures the tokens of a word by two requests; the tokens of a chat template cancel out. Raises `ServeError`
        if the server does not count tokens."""
        rng = random.Random("calibration")
        counts = []
        for num_words in _CALIBRATION_WORDS:
            text = " ".join(rng.choices(WORDS, k=num_words))
            record = await client.stream([user_message(text)], 8, tier)  # a single token may have no text
            if record.error is not None or record.num_prompt_tokens == 0:
                raise ServeError(f"it did not count a prompt's tokens: {record.error or 'no usage in the stream'}")
            counts.append(record.num_prompt_tokens)
        num_tokens, num_words = counts[1] - counts[0], _CALIBRATION_WORDS[1] - _CALIBRATION_WORDS[0]
        if num_tokens <= 0:
            raise ServeError(f"a prompt with {num_words} more words has {num_tokens} more tokens")
        return cls(num_tokens / num_words, seed)

    def text(self, num_tokens: int) -> str:
        """About `num_tokens` tokens of new random text."""
        return self.words(self._count(num_tokens))

    def words(self, count: int) -> str:
        """`count` new random words."""
        return " ".join(self._rng.choices(WORDS, k=count))

    def named_text(self, name: object, num_tokens: int) -> str:
        """The same text for the same name and seed; a shorter text is a prefix of a longer one."""
        rng = random.Random(f"{self._seed}:{name}")
        return " ".join(rng.choices(WORDS, k=self._count(num_tokens)))

    def _count(self, num_tokens: int) -> int:
        return max(1, round(num_tokens / self._tokens_per_word))


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@dataclass(frozen=True, slots=True)
class Turn:
    """The new messages of a client, and the length of the answer. Requests also contain all earlier messages."""

    messages: tuple[Message, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one client, each sent after the answer to the previous one. `arrival_s` counts from the start of the
    run; None leaves it to the load."""

    turns: tuple[Turn, ...]
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The sessions that are measured, and those of the `prelude` that are sent first, one by one."""

    sessions: tuple[Session, ...]
    prelude: tuple[Session, ...] = ()

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


@dataclass(frozen=True, slots=True)
class Span:
    """A length in tokens, uniform from `low` to `high`."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Shape:
    """A generated workload: `num_prompts` conversations of `turns` turns. Each turn adds `input_len` tokens and asks
    for `output_len`. All begin with a common prefix; with `is_warm` it is sent once before."""

    num_prompts: int
    prefix_len: int
    input_len: Span
    output_len: Span
    turns: int = 1
    is_warm: bool = False


def fixed_shape(num_prompts: int, input_len: int, output_len: int, *, prefix_len: int = 0, turns: int = 1) -> Shape:
    """Lengths in tokens, the same for all turns."""
    return Shape(num_prompts, prefix_len, Span(input_len, input_len), Span(output_len, output_len), turns)


_SHARED_PREFIX = fixed_shape(16, 32, 32, prefix_len=1024)

SHAPES: MappingProxyType[str, Shape] = MappingProxyType(
    {
        "random": fixed_shape(32, 256, 64),
        "uniform": fixed_shape(16, 128, 128),
        "one-chat": fixed_shape(1, 128, 128, turns=2),
        "shared-prefix": _SHARED_PREFIX,
        "shared-prefix-warm": replace(_SHARED_PREFIX, is_warm=True),
        "mixed": Shape(32, 0, Span(16, 2048), Span(8, 256)),
        "multi-turn": fixed_shape(8, 64, 64, turns=4),
        "agent": fixed_shape(8, 512, 64, prefix_len=4096, turns=4),
    }
)
"""agent: long common instructions, then tool results as input and short calls as output."""


def make_plan(shape: Shape, prompts: Prompts, seed: object) -> Plan:
    """A workload of this shape, reproducible by `seed` and the seed of `prompts`."""
    rng = random.Random(f"workload:{seed}")
    head = f"{prompts.text(shape.prefix_len)} " if shape.prefix_len else ""

    def turn(number: int) -> Turn:
        lead = " " if number else head
        return Turn((user_message(lead + prompts.text(shape.input_len.draw(rng))),), shape.output_len.draw(rng))

    sessions = tuple(Session(tuple(turn(number) for number in range(shape.turns))) for _ in range(shape.num_prompts))
    prelude = (Session((Turn((user_message(head + prompts.text(8)),), 1),)),) if shape.is_warm else ()
    return Plan(sessions, prelude)


def warm_up_sessions(plan: Plan, prompts: Prompts, count: int) -> list[Session]:
    """`count` requests as long as the plan's first but with other words, so that they do not warm the prefix cache."""
    first = plan.sessions[0].turns[0]
    num_words = sum(len(str(message["content"]).split()) for message in first.messages)
    return [Session((Turn((user_message(prompts.words(num_words)),), first.max_tokens),)) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace: its arrival in seconds, and lengths in tokens. Equal leading hash ids are an equal
    prefix."""

    arrival_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()

    def scaled(self, speed: float, shrink: int) -> TraceLine:
        """The line as it is replayed: `speed` times as fast, with lengths divided by `shrink`."""
        input_len, output_len = (max(length // shrink, 1) for length in (self.input_len, self.output_len))
        return TraceLine(self.arrival_s / speed, input_len, output_len, self.hash_ids)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The requests of a file. A trace arrives `speed` times as fast as recorded, with lengths divided by `shrink`."""

    lines: Sequence[Turn] | Sequence[TraceLine]
    speed: float = 1.0
    shrink: int = 1

    def plan(self, prompts: Prompts) -> Plan:
        """Prompts all at once, or generated text with the lengths and arrivals of a trace."""
        return Plan(
            tuple(Session((line,)) if isinstance(line, Turn) else self._of_trace(line, prompts) for line in self.lines)
        )

    def _of_trace(self, line: TraceLine, prompts: Prompts) -> Session:
        """Equal hash ids become equal text."""
        line = line.scaled(self.speed, self.shrink)
        num_tokens = line.input_len
        block_len = BLOCK_TOKENS // self.shrink
        parts = [
            prompts.named_text(hash_id, min(block_len, num_tokens - number * block_len))
            for number, hash_id in enumerate(line.hash_ids)
            if number * block_len < num_tokens
        ]
        own = num_tokens - len(line.hash_ids) * block_len
        if own > 0:
            parts.append(prompts.text(own))
        return Session((Turn((user_message(" ".join(parts)),), line.output_len),), line.arrival_s)


def read_dataset(path: Path, limit: int | None = None, output_len: int = 64) -> list[Turn] | list[TraceLine]:
    """The first `limit` requests of the file. Prompts have answers of `output_len` tokens unless the file says it. A
    trace is sorted by arrival, in seconds since the first. Raises `ConfigError` with the number of a wrong line."""
    try:
        text = read_file(path, _MAX_BYTES, "a dataset or a trace").decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"Cannot read the dataset {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The dataset {path} is not UTF-8 text: {error.reason}.") from error
    try:
        lines = list(islice(_parse_lines(path, text, output_len), limit))
    except csv.Error as error:
        raise ConfigError(f"The dataset {path} is not CSV that can be read: {error}.") from error
    if not lines:
        raise ConfigError(f"The dataset {path} has no requests.")
    prompts = [line for line in lines if isinstance(line, Turn)]
    arrivals = [line for line in lines if isinstance(line, TraceLine)]
    if prompts and arrivals:
        raise ConfigError(f"The dataset {path} mixes prompts with lines of a trace; split it.")
    return prompts or _from_first(arrivals)


def _from_first(arrivals: Iterable[TraceLine]) -> list[TraceLine]:
    ordered = sorted(arrivals, key=lambda line: line.arrival_s)
    return [replace(line, arrival_s=line.arrival_s - ordered[0].arrival_s) for line in ordered]


_FAULTS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""The last two are of infinite and of deeply nested values."""


def _parse_lines(path: Path, text: str, output_len: int) -> Iterator[Turn | TraceLine]:
    is_json = text.lstrip().startswith("{")
    lines = io.StringIO(text, newline=None)  # any line breaks, and only those: not U+2028 in a text
    entries: Iterable[Any] = filter(str.strip, lines) if is_json else csv.DictReader(lines)
    for number, entry in enumerate(entries, start=1):
        try:
            line = _parse_json(json.loads(entry), output_len) if is_json else _parse_csv(entry)
        except _FAULTS as error:
            raise ConfigError(f"{path}, request {number} is not understood: {error!r}. {_FORMATS}") from error
        if isinstance(line, TraceLine) and not (
            math.isfinite(line.arrival_s) and min(line.input_len, line.output_len) >= 0
        ):
            raise ConfigError(f"{path}, request {number}: a time is not finite, or a length is below 0.")
        if line is not None:
            yield line


_FORMATS = (
    "Known are JSON lines with prompt or messages, traces of Mooncake (timestamp, input_length, output_length, "
    "hash_ids), and CSV traces of Azure (TIMESTAMP, ContextTokens, GeneratedTokens) and BurstGPT (Timestamp, "
    "Request tokens, Response tokens)."
)


def _parse_json(entry: Mapping[str, Any], output_len: int) -> Turn | TraceLine:
    if "prompt" in entry or "messages" in entry:
        own_len = entry.get("output_tokens")
        return Turn(_messages(entry), output_len if own_len is None else max(int(own_len), 1))
    return TraceLine(
        float(entry["timestamp"]) / 1000.0,
        int(entry["input_length"]),
        int(entry["output_length"]),
        tuple(int(hash_id) for hash_id in entry.get("hash_ids", ())),
    )


def _messages(entry: Mapping[str, Any]) -> tuple[Message, ...]:
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise TypeError("`prompt` is not text")
        return (user_message(entry["prompt"]),)
    if not entry["messages"] or not all({"role", "content"} <= message.keys() for message in entry["messages"]):
        raise ValueError("`messages` is not a list of messages with role and content")
    return tuple(entry["messages"])


def _parse_csv(entry: Mapping[str, Any]) -> TraceLine | None:
    if "ContextTokens" in entry:
        arrived = datetime.datetime.fromisoformat(entry["TIMESTAMP"])
        utc = arrived if arrived.tzinfo else arrived.replace(tzinfo=datetime.UTC)
        return TraceLine(utc.timestamp(), int(entry["ContextTokens"]), int(entry["GeneratedTokens"]))
    output_len = int(entry["Response tokens"])
    if output_len == 0:
        return None
    return TraceLine(float(entry["Timestamp"]), int(entry["Request tokens"]), output_len)
