"""The histograms and counts of one model's engine, beside the totals of `EngineStats`."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mlx_server.outputs import EngineStats, ModelRunnerOutput, SchedulerOutput, StepKind
from mlx_server.request import FinishReason, Priority, Request

# vLLM's bounds, so that the quantiles of its dashboards mean the same here.
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480),
    *(960, 1920, 7680),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_SAMPLES = (1, 2, 5, 10, 20)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)

_RESIDENCY_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """The help of a histogram at /metrics, and the upper ends of its buckets; None for lengths, up to the model's
    context."""

    help: str
    bounds: Sequence[float] | None = None


HISTOGRAMS = {
    "time_to_first_token_seconds": Shown("Arrival to first token.", _TTFT_S),
    "inter_token_latency_seconds": Shown("Gaps between a request's token events.", _TOKEN_S),
    "request_time_per_output_token_seconds": Shown("Mean time per output token after the first, by request.", _TOKEN_S),
    "e2e_request_latency_seconds": Shown("Arrival to end.", _REQUEST_S),
    "request_queue_time_seconds": Shown("Arrival to first step.", _REQUEST_S),
    "request_prefill_time_seconds": Shown("First step to first token.", _REQUEST_S),
    "request_decode_time_seconds": Shown("First token to end.", _REQUEST_S),
    "request_inference_time_seconds": Shown("First step to end.", _REQUEST_S),
    "request_prompt_tokens": Shown("Prompt tokens, by request."),
    "request_generation_tokens": Shown("Output tokens, by request."),
    "request_max_num_generation_tokens": Shown("Output tokens that a request could have had."),
    "request_params_max_tokens": Shown("max_tokens, where a request has it."),
    "request_params_n": Shown("Answers asked for, by prompt.", _SAMPLES),
    "request_prefill_kv_computed_tokens": Shown("Prompt tokens that the prefix cache did not serve, by request."),
    "request_num_preemptions": Shown("Preemptions, by request.", _PREEMPTIONS),
    "iteration_tokens_total": Shown("Tokens computed, by step.", _STEP_TOKENS),
}
"""vLLM's histograms that every engine has, without the prefix `vllm:`."""

KV_BLOCK_HISTOGRAMS = {
    "kv_block_lifetime_seconds": "From a KV block's first token to its eviction; of a sample of the blocks.",
    "kv_block_idle_before_evict_seconds": "From its last use to its eviction.",
    "kv_block_reuse_gap_seconds": "Between two uses of what is in it.",
}
"""vLLM's histograms of KV blocks, with their help."""

_NUM_RECENT = 20
_DECODE_GAIN = 0.1
"""Weight of the newest step in the average of decode-only steps, which so covers about ten steps."""


class Histogram:
    """Counts observations by bucket as Prometheus does, without its labels and locks, so that an observation costs next
    to nothing. Event-loop thread only."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ends of the buckets, inclusive and ascending; a bucket without an end is added."""
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, num_times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += num_times
        self.total += value * num_times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: (`le`, observations up to it); the last one is `+Inf`."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A finished request. Durations are seconds; None for a stage that was not reached. `tpot_s` is the mean time per
    token after the first."""

    request_id: str
    tier: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float


@dataclass(slots=True)
class _Stay:
    began_s: float
    last_used_s: float


class KVBlockResidency:
    """vLLM's three histograms of KV blocks: from a block's first token to its eviction, from its last use to its
    eviction, and between two uses. A sample of the blocks is followed. Event-loop thread only."""

    def __init__(self, share: float, clock: Callable[[], float], seed: int | None = None) -> None:
        """Follows the `share` of the blocks, 0 to 1. `clock` gives the times."""
        self.by_name = {name: Histogram(_RESIDENCY_S) for name in KV_BLOCK_HISTOGRAMS}
        self._share = share
        self._clock = clock
        self._draw = random.Random(seed).random
        self._stays: dict[Hashable, _Stay] = {}

    def on_taken(self, block: Hashable) -> None:
        """A request took the block for its own tokens; the old content is gone."""
        self.on_evicted(block)
        if self._draw() < self._share:
            now = self._clock()
            self._stays[block] = _Stay(now, now)

    def on_hit(self, block: Hashable) -> None:
        """A request shares the content of the block."""
        stay = self._stays.get(block)
        if stay is not None:
            now = self._clock()
            self.by_name["kv_block_reuse_gap_seconds"].observe(now - stay.last_used_s)
            stay.last_used_s = now

    def on_freed(self, block: Hashable) -> None:
        """No request holds the block any more; its content can be hit until it is evicted."""
        stay = self._stays.get(block)
        if stay is not None:
            stay.last_used_s = self._clock()

    def on_evicted(self, block: Hashable) -> None:
        """The content of the block is lost."""
        stay = self._stays.pop(block, None)
        if stay is not None:
            now = self._clock()
            self.by_name["kv_block_lifetime_seconds"].observe(now - stay.began_s)
            self.by_name["kv_block_idle_before_evict_seconds"].observe(now - stay.last_used_s)

    def forget(self) -> None:
        """The pool is a new one: the followed blocks are gone without an eviction."""
        self._stays.clear()


class EngineMetrics:
    """Histograms and counts over the requests, tokens and steps of one model. Event-loop thread only.

    They outlive the engine: when the model is loaded again, its new engine goes on with the same object, so that
    counters never fall. `past` has the totals of earlier loads. Times are on the scheduler's clock. `by_name` maps
    vLLM's names, without prefix, to histograms. `rejected` counts refusals by (tier, reason).
    """

    def __init__(self, max_model_len: int, aging_rate: float = 0.0) -> None:
        """`aging_rate` is the scheduler's, in priority levels per second."""
        lengths = _one_two_five(max_model_len)
        self.by_name = {
            name: Histogram(lengths if shown.bounds is None else shown.bounds) for name, shown in HISTOGRAMS.items()
        }
        self.kv_blocks: KVBlockResidency | None = None
        self.past = EngineStats()
        self.finished: Counter[FinishReason] = Counter()
        self.recent: deque[RequestSummary] = deque(maxlen=_NUM_RECENT)
        self.rejected: Counter[tuple[str, str]] = Counter()
        self.promoted_by_tier: Counter[str] = Counter()
        self.queue_time_by_tier: dict[str, Histogram] = {}
        self.step_time_by_kind = {kind: Histogram(_STEP_S) for kind in StepKind}
        self.prefill_stall_s = 0.0
        self._aging_rate = aging_rate
        self._decode_step_s: float | None = None
        self._step_tokens = self.by_name["iteration_tokens_total"]
        self._inter_token = self.by_name["inter_token_latency_seconds"]
        self._ttft = self.by_name["time_to_first_token_seconds"]

    @property
    def tiers(self) -> list[str]:
        """Tiers with a request that has run or was refused."""
        return sorted({*self.queue_time_by_tier, *(tier for tier, _ in self.rejected)})

    def follow_kv_blocks(self, share: float, clock: Callable[[], float]) -> KVBlockResidency:
        """Follows a share of the KV blocks; the histograms are in `by_name` from now on. Report blocks to the
        result."""
        if self.kv_blocks is None:
            self.kv_blocks = KVBlockResidency(share, clock)
            self.by_name |= self.kv_blocks.by_name
        self.kv_blocks.forget()
        return self.kv_blocks

    # --- steps ----------------------------------------------------------------------------------------------

    def on_step(self, step: SchedulerOutput) -> None:
        """A step was submitted."""
        self._step_tokens.observe(step.num_tokens)

    def on_step_done(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Its result is here. The time by which a mixed step exceeds the average decode-only step is what
        prompts delayed decoding requests."""
        kind, step_s = step.kind, result.step_time_s
        self.step_time_by_kind[kind].observe(step_s)
        usual_s = self._decode_step_s
        if kind is StepKind.DECODE:
            self._decode_step_s = step_s if usual_s is None else usual_s + _DECODE_GAIN * (step_s - usual_s)
        elif kind is StepKind.MIXED and usual_s is not None and step_s > usual_s:
            self.prefill_stall_s += step_s - usual_s

    def on_tokens(self, requests: Sequence[Request], now: float) -> None:
        """A step has given these requests tokens; the event's time becomes their `last_token_s`.

        A decoding request gets a token in every step, so nearly all have waited since the same moment: gaps are
        counted in runs, and a step costs two calls, however many requests it serves. For example, last tokens at
        7.0, 7.0, 7.5 and now = 8.0 make two observations: 1.0 s twice, then 0.5 s once.
        """
        since, num_equal = None, 0
        for request in requests:
            last_s = request.last_token_s
            request.last_token_s = now
            if last_s is None:
                self._ttft.observe(now - request.arrival_s)
            elif last_s == since:
                num_equal += 1
            else:
                if since is not None:
                    self._inter_token.observe(now - since, num_equal)
                since, num_equal = last_s, 1
        if since is not None:
            self._inter_token.observe(now - since, num_equal)

    # --- requests -------------------------------------------------------------------------------------------

    def on_submitted(self, num_samples: int) -> None:
        """A client's prompt was queued, to be answered `num_samples` times."""
        self._observe("request_params_n", num_samples)

    def on_rejected(self, tier: str, reason: str) -> None:
        """A request was refused before it could run."""
        self.rejected[tier, reason] += 1

    def on_finished(self, request: Request, reason: FinishReason, now: float) -> RequestSummary:
        """The request has ended, for any reason and at any stage. Returns its summary."""
        started_s, first_s = request.first_scheduled_s, request.first_token_s
        num_later = request.num_counted_tokens - 1
        summary = RequestSummary(
            request.request_id,
            request.tier,
            reason,
            request.num_prompt_tokens,
            request.num_cached_tokens or 0,
            request.num_counted_tokens,
            request.num_preemptions,
            None if started_s is None else started_s - request.arrival_s,
            None if first_s is None else first_s - request.arrival_s,
            None if first_s is None or num_later < 1 else (now - first_s) / num_later,
            now - request.arrival_s,
        )
        self.finished[reason] += 1
        self._observe_request(request, summary, now)
        self.recent.append(summary)
        return summary

    def _observe_request(self, request: Request, summary: RequestSummary, now: float) -> None:
        observe = self._observe
        observe("request_num_preemptions", request.num_preemptions)
        observe("e2e_request_latency_seconds", summary.e2e_s)
        observe("request_prompt_tokens", request.num_prompt_tokens)
        observe("request_generation_tokens", request.num_counted_tokens)
        num_dropped = int(request.sampling.is_scoring)
        observe("request_max_num_generation_tokens", request.max_total_tokens - request.num_prompt_tokens - num_dropped)
        if request.sampling.max_tokens is not None:
            observe("request_params_max_tokens", request.sampling.max_tokens - num_dropped)
        started_s, first_s = request.first_scheduled_s, request.first_token_s
        if started_s is not None:
            self._observe_wait(request, started_s - request.arrival_s)
            observe("request_inference_time_seconds", now - started_s)
            observe("request_prefill_kv_computed_tokens", request.num_prompt_tokens - summary.num_cached_tokens)
            if first_s is not None:
                observe("request_prefill_time_seconds", first_s - started_s)
                observe("request_decode_time_seconds", now - first_s)
        if summary.tpot_s is not None:
            observe("request_time_per_output_token_seconds", summary.tpot_s)

    def _observe_wait(self, request: Request, waited_s: float) -> None:
        self._observe("request_queue_time_seconds", waited_s)
        by_tier = self.queue_time_by_tier.setdefault(request.tier, Histogram(_REQUEST_S))
        by_tier.observe(waited_s)
        if request.priority > min(Priority) and waited_s * self._aging_rate >= 1.0:
            self.promoted_by_tier[request.tier] += 1

    def _observe(self, name: str, value: float) -> None:
        self.by_name[name].observe(value)


def _one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 and so on, up to `limit`."""
    bounds = (digit * 10**exponent for exponent in range(len(str(limit))) for digit in (1, 2, 5))
    return [bound for bound in bounds if bound <= limit]
