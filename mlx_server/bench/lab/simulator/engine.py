"""The real scheduler on a simulated device: a replay of arrivals against a clock that costs nothing.

Here is also what steps cost on machines that were measured, and what a replay counts.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.limits import SchedulerCounters, SchedulerLimits
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.batching.speculation.drafting import Speculation, SpeculationCounters
from mlx_server.bench.lab.simulator.disk import DiskCost, SimulatedDisk
from mlx_server.bench.lab.simulator.traces import MOST_DRAFTS, DraftMix, MadeUpDrafts, TracedRequest
from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ContextLengthError, OverloadedError
from mlx_server.outputs import (
    BlockCopies,
    ModelRunnerOutput,
    RequestOutput,
    SampledToken,
    ScheduledChunk,
    SchedulerOutput,
)
from mlx_server.request import Priority, Request
from mlx_server.sampling_params import SamplingParams


@dataclass(slots=True)
class TierMetrics:
    """Seconds of the requests of one tier that finished. `speeds` are the times that they would have taken
    alone over those that they took, so 1 is as if nobody else were there."""

    queue_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    num_good: int = 0
    num_refused: int = 0


@dataclass(slots=True)
class SimulationMetrics:
    """Everything about one replay. `elapsed_s` is simulated time, `host_s` what the replay took here;
    `num_checks` counts the times that all books were checked."""

    tiers: dict[Priority, TierMetrics] = field(default_factory=lambda: {tier: TierMetrics() for tier in Priority})
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    elapsed_s: float = 0.0
    busy_s: float = 0.0
    host_s: float = 0.0
    num_checks: int = 0
    num_evictions: int = 0
    num_most_waiting: int = 0
    drafts: SpeculationCounters = field(default_factory=SpeculationCounters)

    @property
    def num_finished(self) -> int:
        return sum(len(tier.e2e_s) for tier in self.tiers.values())

    @property
    def num_refused(self) -> int:
        return sum(tier.num_refused for tier in self.tiers.values())

    @property
    def goodput(self) -> float:
        """Requests a second that met every SLO."""
        return sum(tier.num_good for tier in self.tiers.values()) / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.counters.num_generated_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens over queried tokens; None if nothing was queried."""
        queried = self.counters.num_prefix_query_tokens
        return self.counters.num_prefix_hit_tokens / queried if queried else None

    def jain(self, tiers: Iterable[Priority] = tuple(Priority)) -> float | None:
        """Jain's index of the speeds of all requests of these tiers; None if there are none."""
        return jain_index([speed for tier in tiers for speed in self.tiers[tier].speeds])

    def all(self, name: str) -> list[float]:
        """A list of `TierMetrics` over all tiers."""
        return [value for tier in self.tiers.values() for value in getattr(tier, name)]

    @property
    def mean_ttft_s(self) -> float:
        """Over all tiers; 0 if none finished."""
        ttft_s = self.all("ttft_s")
        return sum(ttft_s) / len(ttft_s) if ttft_s else 0.0

    @property
    def longest_gap_s(self) -> float:
        return max(max(tier.gaps_s, default=0.0) for tier in self.tiers.values())

    def gap_percentile(self, percent: float) -> float:
        """Of the tier whose percentile is the worst."""
        return max(percentile(tier.gaps_s, percent) for tier in self.tiers.values())


def jain_index(values: Sequence[float]) -> float | None:
    """(sum x)^2 / (n sum x^2): 1 if all are equal, 1 / n if one has everything (Jain, Chiu and Hawe 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` of them do not exceed; 0 of none."""
    if not values:
        return 0.0
    return sorted(values)[max(math.ceil(len(values) * percent / 100.0), 1) - 1]


_TOKEN = SampledToken(40_000)  # with as many digits as most, for whoever counts what events take
_LEAST_REST_S = 1e-3
_COPY_BYTES_PER_S = 3e9
"""How fast the host copies blocks between pool and disk, beside the device's work."""

_SAMPLING = SamplingParams()
_NUM_LEARNT = 128
"""Prompt tokens of the first step, of no request, by which the scheduler knows costs before anyone arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A step takes `base_s + decode_s * decodes + prompt_s * cost` seconds of the device, where a draft is one decode
    more, and a prompt token at position p has the cost `1 + p / context_doubling_tokens`; and `host_s` of the host,
    beside the device if the step is submitted ahead and before it otherwise. A device that `is_self_running` does not
    compute while it is given a step, so the scheduler is told what that takes.

    The defaults are a fit to steps of the `random:mini` model on two cores of an AMD EPYC, in float32, with
    OpenBLAS.
    """

    base_s: float = 0.008
    decode_s: float = 0.00035
    prompt_s: float = 0.00026
    context_doubling_tokens: float = 3265.0
    host_s: float = 0.002
    is_self_running: bool = False

    def seconds(self, step: SchedulerOutput) -> float:
        """Device time of a step. To copy blocks is the host's work."""
        if not step.chunks:
            return 0.0
        num_decodes = 0
        cost = 0.0
        for chunk in step.chunks:
            num_tokens = chunk.num_tokens
            if num_tokens == 1 or chunk.num_drafts:
                num_decodes += num_tokens
            else:
                cost += num_tokens * (1.0 + (chunk.start + 0.5 * num_tokens) / self.context_doubling_tokens)
        return self.base_s + self.decode_s * num_decodes + self.prompt_s * cost

    def seconds_alone(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """From arrival to end of a request that has the device for itself, nothing cached."""
        prompt_cost = num_prompt_tokens * (1.0 + 0.5 * num_prompt_tokens / self.context_doubling_tokens)
        return num_output_tokens * self.base_s + (num_output_tokens - 1) * self.decode_s + self.prompt_s * prompt_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must meet to count as good: TTFT, and the mean time of each further token."""

    ttft_s: float = 5.0
    tpot_s: float = 0.2


@dataclass(slots=True)
class _Progress:
    """A request on its way through the simulator."""

    traced: TracedRequest
    request: Request
    first_token_s: float | None = None
    last_token_s: float = 0.0


class Simulation:
    """Replays arrivals. One `run` each."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        cost: CostModel,
        *,
        slo: Slo = Slo(),
        is_async: bool = True,
        enable_prefix_caching: bool = True,
        check_every: int = 1000,
        explained: int | None = None,
        drafts: DraftMix | None = None,
        disk: DiskCost | None = None,
    ) -> None:
        """With a `disk`, prefixes are kept there, too. `check_every`: steps between checks of all books; 0 is never.
        `explained` is the number of an arrival, from 0 on, of which `explanation` says why it waited."""
        blocks = PagedBlockManager(num_blocks, enable_prefix_caching=enable_prefix_caching)
        self._drafts = None if drafts is None else MadeUpDrafts(drafts)
        speculation = None if self._drafts is None else Speculation(self._drafts, max_draft_tokens=MOST_DRAFTS)
        self._disk = None if disk is None else SimulatedDisk(disk)
        self.scheduler = ContinuousBatchingScheduler(
            blocks, limits, is_async=is_async, speculation=speculation, store=self._disk
        )
        prompt_s, decode_s = cost.seconds_alone(_NUM_LEARNT, 1), cost.seconds_alone(1, 2) - cost.seconds_alone(1, 1)
        self.scheduler.learn(_NUM_LEARNT, prompt_s, decode_s)
        self.metrics = SimulationMetrics(counters=self.scheduler.counters)
        self.metrics.drafts = self.metrics.drafts if speculation is None else speculation.counters
        self._cost = cost
        self._slo = slo
        self._depth = 2 if is_async else 1
        self._check_every = check_every
        self._now = 0.0
        self._device_free_s = 0.0
        self._began_s = 0.0
        self._submitted: deque[tuple[ModelRunnerOutput, float]] = deque()
        self._in_progress: dict[str, _Progress] = {}
        self.next_of: Callable[[TracedRequest, float], TracedRequest | None] = lambda ended, now: None
        self._num_arrived = 0
        self._explained = None if explained is None else str(explained)
        self.explanation: list[str] = []

    def run(
        self,
        arrivals: Iterable[TracedRequest],
        next_of: Callable[[TracedRequest, float], TracedRequest | None] | None = None,
    ) -> SimulationMetrics:
        """Serves all of them to the end, and what `next_of` says that one's client sends when it has ended. Raises
        `AssertionError` if the scheduler's books do not agree."""
        start_s = time.perf_counter()
        self.next_of = next_of or self.next_of
        for traced in arrivals:
            self.advance(traced.arrival_s)
            self.arrive(traced)
        self.advance(math.inf)
        self.close(time.perf_counter() - start_s)
        return self.metrics

    @property
    def num_in_progress(self) -> int:
        return len(self._in_progress)

    def advance(self, until_s: float) -> None:
        """Serves what has arrived until that time, or to the end of a step that goes beyond it."""
        while self._now < until_s:
            self._advance_disk()
            due_s = self._due_s()
            output = self._schedule() if due_s <= self._now else None
            if output is not None and len(self._submitted) < self._depth:
                continue
            next_s = min(until_s, due_s) if due_s > self._now else until_s
            next_s = min(next_s, self._disk_s(is_over=next_s == math.inf and not self._in_progress))
            if self._submitted and (output is not None or next_s >= self._submitted[0][1]):
                self._finish_step()
            elif next_s < math.inf:
                self._now = next_s
            else:
                return

    def arrive(self, traced: TracedRequest) -> None:
        """A request comes, behind all that `advance` has done. Nothing is left of it here if it is refused."""
        request_id = str(self._num_arrived)
        self._num_arrived += 1
        request = Request(
            request_id,
            [_TOKEN.token_id] * traced.num_prompt_tokens,
            _SAMPLING,
            arrival_s=traced.arrival_s,
            max_total_tokens=traced.num_prompt_tokens + traced.num_output_tokens,
            priority=traced.tier,
            tier=traced.tier.name.lower(),
        )
        request.block_hashes = block_hashes(traced)
        try:
            displaced = self.scheduler.add_request(request)
        except (ContextLengthError, OverloadedError):
            self.metrics.tiers[traced.tier].num_refused += 1
            return
        for output in displaced:
            self.metrics.tiers[self._in_progress.pop(output.request_id).traced.tier].num_refused += 1
        self._in_progress[request_id] = _Progress(traced, request)
        self.metrics.num_most_waiting = max(self.metrics.num_most_waiting, self.scheduler.num_waiting)

    def _due_s(self) -> float:
        """When the next step may be composed; now or earlier if nothing speaks against it."""
        if self.scheduler.waits_to_draft:
            return math.inf
        return self.scheduler.next_schedule_s(self._began_s) if self._submitted else self._now

    def _advance_disk(self) -> None:
        if self._disk is not None:
            self._disk.now = self._now
            self._disk.finish_due()

    def _disk_s(self, *, is_over: bool) -> float:
        """When there is something to do for the disk's sake; never once all is over."""
        if self._disk is None or self.scheduler.disk is None or is_over:
            return math.inf
        rest_s = None if self._submitted else self.scheduler.disk.rest_s(self._now, is_idle=not self._in_progress)
        return min(self._disk.next_s, math.inf if rest_s is None else self._now + max(rest_s, _LEAST_REST_S))

    def _schedule(self) -> SchedulerOutput | None:
        for expired in self.scheduler.expire(self._now):
            self.metrics.tiers[self._in_progress.pop(expired.request_id).traced.tier].num_refused += 1
        output = self.scheduler.schedule(self._now)
        if output is None:
            return None
        self._explain(output)
        seconds = self._cost.seconds(output)
        copies = output.copies or BlockCopies()
        host_s = self._cost.host_s
        if self._disk is not None:
            num_bytes = (len(copies.saved) + len(copies.loaded)) * self._disk.block_bytes
            host_s += num_bytes / _COPY_BYTES_PER_S
        start_s = max(self._now + host_s, self._device_free_s)
        end_s = start_s + seconds
        step_time_s = end_s - max(self._now, self._device_free_s)
        self._device_free_s = end_s
        self.metrics.busy_s += seconds
        if not self._submitted:
            self._began_s = self._now
        sampled = {chunk.request_id: self._sample(chunk) for chunk in output.chunks if chunk.is_sampling}
        launch_s = host_s if self._cost.is_self_running else 0.0
        saved = (memoryview(b""),) * len(copies.saved)
        result = ModelRunnerOutput(
            output.step_id, sampled, step_time_s=step_time_s, launch_time_s=launch_s, saved_blocks=saved
        )
        self._submitted.append((result, end_s))
        if self._check_every and output.step_id % self._check_every == 0:
            self.scheduler.check_integrity()
            self.metrics.num_checks += 1
        return output

    def _sample(self, chunk: ScheduledChunk) -> SampledToken:
        return _TOKEN if self._drafts is None else self._drafts.sampled(chunk.request_id, chunk.num_drafts)

    def _explain(self, step: SchedulerOutput) -> None:
        progress = None if self._explained is None else self._in_progress.get(self._explained)
        if progress is not None and progress.request.num_computed_tokens <= progress.traced.num_prompt_tokens:
            why = self.scheduler.explain(progress.request, step)
            self.explanation.append(f"{self._now:10.3f} s  step {step.step_id}: {why}")

    def _finish_step(self) -> None:
        result, end_s = self._submitted.popleft()
        self._now = self._began_s = end_s
        for output in self.scheduler.update(result):
            self._take(output)

    def _take(self, output: RequestOutput) -> None:
        progress = self._in_progress[output.request_id]
        now = self._now
        if progress.first_token_s is None:
            progress.first_token_s = now
        else:
            self.metrics.tiers[progress.traced.tier].gaps_s.append(now - progress.last_token_s)
        progress.last_token_s = now
        if output.finish_reason is not None:
            del self._in_progress[output.request_id]
            self._finish(progress, progress.first_token_s)
            if (sent := self.next_of(progress.traced, now)) is not None:
                self.arrive(sent)

    def _finish(self, progress: _Progress, first_token_s: float) -> None:
        traced, first_scheduled_s = progress.traced, progress.request.first_scheduled_s
        assert first_scheduled_s is not None
        assert progress.request.num_output_tokens == traced.num_output_tokens, "a token was lost or repeated"
        ttft_s = first_token_s - traced.arrival_s
        e2e_s = self._now - traced.arrival_s
        tier = self.metrics.tiers[traced.tier]
        tier.queue_s.append(first_scheduled_s - traced.arrival_s)
        tier.ttft_s.append(ttft_s)
        tier.e2e_s.append(e2e_s)
        tier.speeds.append(self._cost.seconds_alone(traced.num_prompt_tokens, traced.num_output_tokens) / e2e_s)
        tpot_s = (e2e_s - ttft_s) / max(traced.num_output_tokens - 1, 1)
        tier.num_good += ttft_s <= self._slo.ttft_s and tpot_s <= self._slo.tpot_s

    def close(self, host_s: float = 0.0) -> None:
        """At the end of all arrivals. Raises `AssertionError` if the books do not agree."""
        assert not self._in_progress, "a request was forgotten"
        self.scheduler.check_integrity()
        blocks = self.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks, "blocks have leaked"
        self.metrics.num_checks += 1
        self.metrics.elapsed_s = self._now
        self.metrics.host_s = host_s
        self.metrics.num_evictions = blocks.num_evictions


def block_hashes(traced: TracedRequest) -> list[bytes]:
    """Hashes of the prompt's full blocks: taken from its hash ids instead of from token ids, which a trace
    does not have. The output's follow from these, as they always do."""
    withins = [index.to_bytes(8, "little") for index in range(traced.hash_block_tokens // BLOCK_SIZE)]
    hashes: list[bytes] = []
    for hash_id in traced.hash_ids:
        name = hash_id.to_bytes(8, "little", signed=True)  # in the half that KV events tell
        hashes.extend([within + name for within in withins])
    return hashes[: traced.num_prompt_tokens // BLOCK_SIZE]


TARGET_STEP_S = 0.1
"""Aim of a step on each of the machines below."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine with a model: what steps cost, and what the K/V of 32 tokens take."""

    cost: CostModel
    block_bytes: int


PROFILES: Mapping[str, Profile] = {
    # `random:mini`, float32, on two cores of an AMD EPYC: a fit to our own steps.
    "cpu": Profile(CostModel(), 256 * 1024),
    # An 8B in 4 bits. Of an M2 Max no figures were found, so these are an M1 Max's (500 prompt tokens/s at 512, 46 of
    # one stream, normiebench#40) with prompts 38/32 as fast, as it has GPU cores. What more rows cost is of the M3 Max,
    # whose product of 4-bit weights takes 2.5 times as long with 8 rows as with one (mlx#3863); the growth with the
    # context is the M5 Max's.
    "m2-max": Profile(
        CostModel(base_s=0.0175, decode_s=0.0042, prompt_s=0.0017, context_doubling_tokens=20_000.0, host_s=0.003),
        4 * 2**20,
    ),
    # A dense 27B in 4 bits: steps of 32.9, 49.2, 86.8 and 112.6 ms at 1, 4, 8 and 16 rows (TensorFold, MLX 0.31.2);
    # prompts at 894 tokens/s of 1k and 494 of 32k (omlx#2150).
    "m5-max": Profile(
        CostModel(base_s=0.028, decode_s=0.0055, prompt_s=0.0011, context_doubling_tokens=20_000.0, host_s=0.003),
        8 * 2**20,
    ),
    # An 8B in 4 bits on an M4 Max, about: 1,092 prompt tokens/s at 8.6k (mesh-llm#1228), and rows that cost next to
    # nothing, as they do on larger GPUs.
    "gpu": Profile(
        CostModel(base_s=0.02, decode_s=0.0005, prompt_s=0.0008, context_doubling_tokens=16_384.0, host_s=0.003),
        4 * 2**20,
    ),
}
