"""What one model's engine counts as it serves, beside the totals of `EngineStats`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count

from mlx_server.observability.histogram import Histogram
from mlx_server.observability.kv_blocks import KVBlockResidency
from mlx_server.observability.request_summary import RequestSummary, summarize
from mlx_server.outputs import EngineStats, ModelRunnerOutput, SchedulerOutput, StepKind
from mlx_server.request import FinishReason, Priority, Request

# Bounds as vLLM has them, so that its dashboards' quantiles mean the same here.
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

_NUM_RECENT = 20
_DECODE_GAIN = 0.1
"""Weight of the newest step in the average of decode-only steps: it remembers about ten."""


class EngineMetrics:
    """Histograms and counts over requests, tokens and steps of one model. Event-loop thread only.

    They outlive the engine that feeds them: one that loads the model again goes on with the same object, so that
    counters never fall. `past` are the totals of earlier loads.

    All times are on the scheduler's clock. `by_name` maps vLLM's names, without prefix, to histograms. `rejected`
    counts refusals by (tier, reason).
    """

    def __init__(self, max_model_len: int, aging_rate: float = 0.0) -> None:
        """`aging_rate` is the scheduler's, in priority levels a second."""
        lengths = _one_two_five(max_model_len)
        self.by_name = {
            "time_to_first_token_seconds": Histogram(_TTFT_S),
            "inter_token_latency_seconds": Histogram(_TOKEN_S),
            "request_time_per_output_token_seconds": Histogram(_TOKEN_S),
            "e2e_request_latency_seconds": Histogram(_REQUEST_S),
            "request_queue_time_seconds": Histogram(_REQUEST_S),
            "request_prefill_time_seconds": Histogram(_REQUEST_S),
            "request_decode_time_seconds": Histogram(_REQUEST_S),
            "request_inference_time_seconds": Histogram(_REQUEST_S),
            "request_prompt_tokens": Histogram(lengths),
            "request_generation_tokens": Histogram(lengths),
            "request_max_num_generation_tokens": Histogram(lengths),
            "request_params_max_tokens": Histogram(lengths),
            "request_params_n": Histogram(_SAMPLES),
            "request_prefill_kv_computed_tokens": Histogram(lengths),
            "request_num_preemptions": Histogram(_PREEMPTIONS),
            "iteration_tokens_total": Histogram(_STEP_TOKENS),
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
        """Those of which a request has ended or was refused."""
        return sorted({*self.queue_time_by_tier, *(tier for tier, _ in self.rejected)})

    def follow_kv_blocks(self, share: float, clock: Callable[[], float]) -> KVBlockResidency:
        """Who is to be told of a share of the KV blocks; what that shows is from now on among the histograms."""
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
        """Its result is here. What a mixed step takes longer than the last decode-only ones did on average is time
        for which prompts held up those who decode."""
        kind, step_s = step.kind, result.step_time_s
        self.step_time_by_kind[kind].observe(step_s)
        usual_s = self._decode_step_s
        if kind is StepKind.DECODE:
            self._decode_step_s = step_s if usual_s is None else usual_s + _DECODE_GAIN * (step_s - usual_s)
        elif kind is StepKind.MIXED and usual_s is not None and step_s > usual_s:
            self.prefill_stall_s += step_s - usual_s

    def on_tokens(self, requests: Sequence[Request], now: float) -> None:
        """A step has given these requests tokens; the event's time becomes their `last_token_s`.

        Whoever decodes gets tokens in every step, so nearly all have waited since the same moment: gaps are
        counted in runs, and a step costs two calls, however many requests it serves.
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
        """A client's prompt waits now, to be answered that many times."""
        self._observe("request_params_n", num_samples)

    def on_rejected(self, tier: str, reason: str) -> None:
        """A request was refused before it could run."""
        self.rejected[tier, reason] += 1

    def on_finished(self, request: Request, reason: FinishReason, now: float) -> RequestSummary:
        """The request has ended, in whatever way and wherever it stood; what remains of it."""
        self.finished[reason] += 1
        self._observe_request(request, now)
        summary = summarize(request, reason, now)
        self.recent.append(summary)
        return summary

    def _observe_request(self, request: Request, now: float) -> None:
        observe = self._observe
        observe("request_num_preemptions", request.num_preemptions)
        observe("e2e_request_latency_seconds", now - request.arrival_s)
        observe("request_prompt_tokens", request.num_prompt_tokens)
        observe("request_generation_tokens", request.num_output_tokens)
        observe("request_max_num_generation_tokens", request.max_total_tokens - request.num_prompt_tokens)
        if request.sampling.max_tokens is not None:
            observe("request_params_max_tokens", request.sampling.max_tokens)
        started = request.first_scheduled_s
        if started is None:
            return
        self._observe_wait(request, started - request.arrival_s)
        observe("request_inference_time_seconds", now - started)
        observe("request_prefill_kv_computed_tokens", request.num_prompt_tokens - (request.num_cached_tokens or 0))
        first = request.first_token_s
        if first is None:
            return
        observe("request_prefill_time_seconds", first - started)
        observe("request_decode_time_seconds", now - first)
        if request.num_output_tokens > 1:
            observe("request_time_per_output_token_seconds", (now - first) / (request.num_output_tokens - 1))

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
    bounds: list[int] = []
    for exponent in count():
        for digit in (1, 2, 5):
            bound = digit * 10**exponent
            if bound > limit:
                return bounds
            bounds.append(bound)
    raise AssertionError("count has no end")
