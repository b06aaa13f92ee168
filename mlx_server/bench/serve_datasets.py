"""Files of prompts and traces of arrivals, recognised by their public field names.

JSON lines   `prompt` or `messages`, and maybe `output_tokens`   prompts (vLLM's custom dataset)
JSON lines   `timestamp` (ms), `input_length`, `output_length`,
             `hash_ids` (one a 512 tokens)                       trace as Mooncake published
CSV          `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`     trace as Azure published
CSV          `Timestamp` (s), `Request tokens`,
             `Response tokens` (0: failed, left out)             trace as BurstGPT published
"""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_server.bench.mooncake import TraceLine, parse_line
from mlx_server.bench.serve_client import Message
from mlx_server.bench.serve_prompts import user_message
from mlx_server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it is to be sent; `output_len` is None where the file leaves it open."""

    messages: tuple[Message, ...]
    output_len: int | None


def read_dataset(path: Path, limit: int | None = None) -> list[Prompt] | list[TraceLine]:
    """The first `limit` requests of the file; those of a trace in order of arrival, in seconds after the first.
    Raises `ConfigError` with the line that is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"Cannot read the dataset {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The dataset {path} is not UTF-8 text: {error.reason}.") from error
    lines = list(islice(_parse_lines(path, text), limit))
    if not lines:
        raise ConfigError(f"The dataset {path} has no requests.")
    prompts = [line for line in lines if isinstance(line, Prompt)]
    arrivals = [line for line in lines if isinstance(line, TraceLine)]
    if prompts and arrivals:
        raise ConfigError(f"The dataset {path} mixes prompts with lines of a trace; split it.")
    return prompts or _from_first(arrivals)


def _from_first(arrivals: Iterable[TraceLine]) -> list[TraceLine]:
    ordered = sorted(arrivals, key=lambda line: line.arrival_s)
    return [replace(line, arrival_s=line.arrival_s - ordered[0].arrival_s) for line in ordered]


def _parse_lines(path: Path, text: str) -> Iterator[Prompt | TraceLine]:
    is_json = text.lstrip().startswith("{")
    entries = _json_entries(text) if is_json else _csv_entries(text)
    number = 0
    while True:
        number += 1
        try:
            entry = next(entries, None)
            if entry is None:
                return
            line = _parse_json(entry) if is_json else _parse_csv(entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, request {number} is not understood: {error!r}. {_FORMATS}") from error
        if line is not None:
            yield line


_FORMATS = (
    "Known are JSON lines with prompt or messages, traces of Mooncake (timestamp, input_length, output_length, "
    "hash_ids), and CSV traces of Azure (TIMESTAMP, ContextTokens, GeneratedTokens) and BurstGPT (Timestamp, "
    "Request tokens, Response tokens)."
)


def _json_entries(text: str) -> Iterator[Mapping[str, Any]]:
    return (json.loads(line) for line in text.splitlines() if line.strip())


def _csv_entries(text: str) -> Iterator[Mapping[str, Any]]:
    return csv.DictReader(io.StringIO(text))


def _parse_json(entry: Mapping[str, Any]) -> Prompt | TraceLine:
    if "prompt" in entry or "messages" in entry:
        output_len = entry.get("output_tokens")
        return Prompt(_messages(entry), None if output_len is None else max(int(output_len), 1))
    return parse_line(entry)


def _messages(entry: Mapping[str, Any]) -> tuple[Message, ...]:
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise TypeError("`prompt` is not text")
        return (user_message(entry["prompt"]),)
    if not entry["messages"] or not all("role" in message for message in entry["messages"]):
        raise ValueError("`messages` is not a list of messages with roles")
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
