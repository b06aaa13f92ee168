"""The format of Mooncake's public traces: JSON lines with `timestamp` in ms, `input_length`, `output_length`, and
`hash_ids`, of which equal leading ones are an equal prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 512
"""Tokens behind one hash id."""


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One recorded arrival, of this format or of one that says less: in seconds, and lengths in tokens."""

    arrival_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def parse_line(entry: Mapping[str, Any]) -> TraceLine:
    """Raises `KeyError`, `TypeError` or `ValueError` for what is no line of a trace."""
    return TraceLine(
        float(entry["timestamp"]) / 1000.0,
        int(entry["input_length"]),
        int(entry["output_length"]),
        tuple(int(hash_id) for hash_id in entry.get("hash_ids", ())),
    )
