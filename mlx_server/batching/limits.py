"""The limits of a scheduler and of its queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_SAMPLED_ROWS = 16
"""A step may sample as many rows, drafts included, as requests may run, but at least this many. Memory for their logits
is booked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The most requests and prompt tokens that may wait, of one tier or of the server."""

    max_num_waiting: int = 1024
    max_queued_tokens: int = 4_000_000


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """The requests and tokens that wait now, of one tier or of the server."""

    num_waiting: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """All limits of a scheduler.

    - `max_num_seqs` bounds the running requests, `max_num_batched_tokens` the tokens of a step, and `max_chunk_tokens`
      those of one request in it (None: no bound). An image that must be computed whole may exceed them.
    - `target_step_s` is the target time of a step while requests decode; None: the time of `cheap_rows` prompt tokens,
      see `PromptBudget.target_s`. `max_step_s` is the target while only streams of worse tiers decode, or none.
    - A token at position `context_doubling_tokens` costs twice as much as one at position 0.
    - `queue_timeout_s` bounds the wait for the first step (None: no bound). `memory_wait_s` bounds how long a request
      that runs alone waits for memory that the pool cannot get.
    - Without `bound_stalls`, steps are as large as `max_num_batched_tokens` allows. `deduplicate_prefixes` is off if a
      computed prefix cannot be hit at each block.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    aging_rate: float = 0.1
    target_step_s: float | None = 0.2
    cheap_rows: int = 128
    max_step_s: float = 1.0
    context_doubling_tokens: float = 4096.0
    queue: QueueLimits = QueueLimits()
    tiers: Mapping[str, QueueLimits] = field(default_factory=dict)
    queue_timeout_s: float | None = None
    memory_wait_s: float = 10.0
    bound_stalls: bool = True
    deduplicate_prefixes: bool = True

    @property
    def largest_chunk(self) -> int:
        """The most tokens of one request that a step computes."""
        return min(self.max_num_batched_tokens, self.max_chunk_tokens or self.max_num_batched_tokens)
