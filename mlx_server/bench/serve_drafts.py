"""What a server tells of its speculative decoding: vLLM's series before and after a run, and its figures of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+)_total(?:\{(.*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Since the server's start, of all its models. `accepted_by_position` counts from 0, a draft's first token."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: Mapping[int, int] = field(default_factory=dict)


def parse_drafts(scrape: str) -> DraftCounts:
    """What the text of `/metrics` says; zeros where it says nothing."""
    totals: Counter[str] = Counter()
    by_position: Counter[int] = Counter()
    for name, labels, value in _SAMPLE.findall(scrape):
        position = _POSITION.search(labels)
        if position is None:
            totals[name] += int(float(value))
        elif name == "accepted_tokens_per_pos":
            by_position[int(position[1])] += int(float(value))
    return DraftCounts(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], by_position)


def describe_drafts(before: DraftCounts, after: DraftCounts) -> dict[str, Any]:
    """Under vLLM's keys; nothing where the run drafted nothing. A draft's length counts the token that the model adds
    itself; the rates by position are shares of the drafts."""
    num_drafts = after.num_drafts - before.num_drafts
    num_tokens = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    if num_drafts <= 0 or num_tokens <= 0:
        return {}
    positions = sorted(after.accepted_by_position)
    accepted = (after.accepted_by_position[at] - before.accepted_by_position.get(at, 0) for at in positions)
    return {
        "spec_decode_acceptance_rate": 100.0 * num_accepted / num_tokens,
        "spec_decode_acceptance_length": 1.0 + num_accepted / num_drafts,
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_draft_tokens": num_tokens,
        "spec_decode_accepted_tokens": num_accepted,
        "spec_decode_per_position_acceptance_rates": [count / num_drafts for count in accepted],
    }


def drafts_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Name and value, for people; none for a result that has no such keys."""
    if "spec_decode_num_drafts" not in result:
        return []
    by_position = result["spec_decode_per_position_acceptance_rates"]
    return [
        ["acceptance rate", f"{result['spec_decode_acceptance_rate']:.1f} %"],
        ["acceptance length", f"{result['spec_decode_acceptance_length']:.2f}"],
        ["drafts", f"{result['spec_decode_num_drafts']:,}"],
        ["drafted tokens", f"{result['spec_decode_draft_tokens']:,}"],
        ["accepted tokens", f"{result['spec_decode_accepted_tokens']:,}"],
        ["accepted by position", ", ".join(f"{100 * rate:.1f} %" for rate in by_position)],
    ]
