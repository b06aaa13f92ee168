"""The limits of a scheduler and of its queue, and the totals that it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mlx_server.errors import QueueFullError, QuotaExceededError
from mlx_server.outputs import ModelRunnerOutput
from mlx_server.request import Request

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


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start; `EngineStats` says what each means."""

    num_steps: int = 0
    num_model_calls: int = 0
    num_images_encoded: int = 0
    num_prompt_tokens: int = 0
    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_cached: int = 0
    num_prompt_tokens_from_disk: int = 0
    num_generated_tokens: int = 0
    num_tokens_recomputed: int = 0
    preemptions_by_tier: Counter[str] = field(default_factory=Counter)
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    busy_time_s: float = 0.0
    idle_time_s: float = 0.0

    def take(self, output: ModelRunnerOutput) -> None:
        """Adds what the device has done in a step."""
        self.num_model_calls += output.num_model_calls
        self.num_images_encoded += output.num_images
        self.busy_time_s += output.step_time_s
        self.idle_time_s += output.idle_time_s

    def take_hit(self, request: Request) -> None:
        """Adds the cached tokens of a request that may hit the cache and starts for the first time."""
        num_cached = request.num_computed_tokens
        self.num_prefix_query_tokens += request.num_prompt_tokens
        self.num_prefix_hit_tokens += num_cached
        self.num_prompt_tokens_cached += num_cached
        self.num_prompt_tokens_from_disk += min(request.num_loaded_tokens, num_cached)

    @property
    def num_preemptions(self) -> int:
        return self.preemptions_by_tier.total()


def check_queue(request: Request, load: QueueLoad, limits: QueueLimits, tier: str | None = None) -> None:
    """Raises if one more request would exceed a limit: `QuotaExceededError` for a tier's limit, `QueueFullError` for
    the server's."""
    whose = f" of tier {tier}" if tier else ""
    if load.num_waiting >= limits.max_num_waiting:
        reason = "max_num_queued_reqs"
        message = f"{load.num_waiting} requests{whose} wait already; the limit is {limits.max_num_waiting}."
    elif load.num_tokens + request.num_tokens > limits.max_queued_tokens:
        reason = "max_num_queued_tokens"
        message = (
            f"{load.num_tokens} prompt tokens{whose} wait already and this request has {request.num_tokens}; "
            f"the limit is {limits.max_queued_tokens}."
        )
    else:
        return
    message += " Try again later."
    raise QuotaExceededError(message) if tier else QueueFullError(message, reason)


def displaced_by(
    request: Request, waiting: Iterable[Request], load: QueueLoad, limits: QueueLimits
) -> list[Request] | None:
    """Which of the `waiting` requests must go so that one more keeps the server's limits: requests of worse tiers, the
    worst tier first and the latest arrival of a tier first. None if all of them would not be enough."""
    num_excess = load.num_waiting + 1 - limits.max_num_waiting
    num_excess_tokens = load.num_tokens + request.num_tokens - limits.max_queued_tokens
    displaced: list[Request] = []
    if num_excess <= 0 and num_excess_tokens <= 0:
        return displaced
    worse = [other for other in waiting if other.priority > request.priority]
    for other in sorted(worse, key=lambda other: (other.priority, other.arrival_s), reverse=True):
        displaced.append(other)
        num_excess, num_excess_tokens = num_excess - 1, num_excess_tokens - other.num_tokens
        if num_excess <= 0 and num_excess_tokens <= 0:
            return displaced
    return None
