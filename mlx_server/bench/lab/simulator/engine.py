"""The real scheduler on a simulated device and clock, the metrics of a replay, and the step costs of known machines."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.limits import SchedulerLimits
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.batching.speculation.drafting import Speculation
from mlx_server.bench.lab.simulator.disk import DiskCost, SimulatedDisk
from mlx_server.bench.lab.simulator.traces import FLOOD, MAX_DRAFT_TOKENS, TOKEN, DraftMix, MadeUpDrafts, TracedRequest
from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ContextLengthError, OverloadedError
from mlx_server.outputs import (
    BlockCopies,
    EngineCounters,
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
    """Seconds, for each finished request of one tier."""

    queue_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    num_refused: int = 0


@dataclass(slots=True)
class SimulationMetrics:
    """The result of one replay; `tiers` are without the requests of a `flood`. `elapsed_s` is simulated time, `host_s`
    the real time of the replay, and `num_checks` the number of integrity checks of the scheduler."""

    tiers: dict[Priority, TierMetrics] = field(default_factory=lambda: {tier: TierMetrics() for tier in Priority})
    flood: TierMetrics = field(default_factory=TierMetrics)
    counters: EngineCounters = field(default_factory=EngineCounters)
    elapsed_s: float = 0.0
    busy_s: float = 0.0
    host_s: float = 0.0
    num_checks: int = 0
    num_most_waiting: int = 0

    @property
    def num_finished(self) -> int:
        return sum(len(tier.e2e_s) for tier in self.tiers.values())

    @property
    def num_refused(self) -> int:
        return sum(tier.num_refused for tier in self.tiers.values())

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.counters.num_generated_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens over queried tokens; None if nothing was queried."""
        queried = self.counters.num_prefix_query_tokens
        return self.counters.num_prefix_hit_tokens / queried if queried else None

    def all(self, name: str) -> list[float]:
        """One of the lists of `TierMetrics`, joined over all tiers."""
        return [value for tier in self.tiers.values() for value in getattr(tier, name)]

    @property
    def mean_ttft_s(self) -> float:
        """Over all tiers; 0 if no request finished."""
        return statistics.fmean(self.all("ttft_s") or [0.0])

    def gap_percentile(self, percent: float) -> float:
        """The largest of the tiers' percentiles."""
        return max(percentile(tier.gaps_s, percent) for tier in self.tiers.values())


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least `percent` of them do not exceed; 0 without values."""
    if not values:
        return 0.0
    return sorted(values)[max(math.ceil(len(values) * percent / 100.0), 1) - 1]


_MIN_DISK_WAIT_S = 1e-3
_COPY_BYTES_PER_S = 3e9
"""Rate at which the host copies blocks between pool and disk while the device computes."""

_SAMPLING = SamplingParams()
_NUM_LEARNT = 128
"""Prompt tokens of the step whose cost the scheduler learns before the first request arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A step takes the device `base_s + decode_s * decodes + prompt_s * cost` seconds. A draft counts as one more
    decode, and a prompt token at position p costs `1 + p / context_doubling_tokens`. The host takes `host_s` for the
    step: in parallel to the device if the step is submitted ahead, otherwise before it. `is_self_running` is a device
    that computes asynchronously, as a GPU does: the scheduler is told how long submitting a step takes.

    The defaults are fitted to steps of `random:mini` in float32 with OpenBLAS on two cores of an AMD EPYC.
    """

    base_s: float = 0.008
    decode_s: float = 0.00035
    prompt_s: float = 0.00026
    context_doubling_tokens: float = 3265.0
    host_s: float = 0.002
    is_self_running: bool = False

    def seconds(self, step: SchedulerOutput) -> float:
        """Device time of a step. Copies of blocks are work of the host and not counted here."""
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
        """From arrival to end of a request that has the device for itself and no cached prefix."""
        prompt_cost = num_prompt_tokens * (1.0 + 0.5 * num_prompt_tokens / self.context_doubling_tokens)
        return num_output_tokens * self.base_s + (num_output_tokens - 1) * self.decode_s + self.prompt_s * prompt_cost


class Simulation:
    """Replays arrivals. One `run` each."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        cost: CostModel,
        *,
        is_async: bool = True,
        enable_prefix_caching: bool = True,
        check_every: int = 1000,
        explained: int | None = None,
        drafts: DraftMix | None = None,
        disk: DiskCost | None = None,
        is_fair: bool = True,
    ) -> None:
        """`disk` adds the disk tier for prefixes. Without `is_fair`, all requests seem to be of one client.
        `check_every` is the number of steps between integrity checks of the scheduler; 0 checks only at the end.
        `explained` is the number of an arrival, counted from 0 without a flood's; `explanation` then says for each step
        why that request waited."""
        blocks = PagedBlockManager(num_blocks, enable_prefix_caching=enable_prefix_caching)
        self._drafts = None if drafts is None else MadeUpDrafts(drafts)
        speculation = None if self._drafts is None else Speculation(self._drafts, max_draft_tokens=MAX_DRAFT_TOKENS)
        self._disk = None if disk is None else SimulatedDisk(disk)
        self.scheduler = ContinuousBatchingScheduler(
            blocks, limits, is_async=is_async, speculation=speculation, store=self._disk
        )
        prompt_s, decode_s = cost.seconds_alone(_NUM_LEARNT, 1), cost.seconds_alone(1, 2) - cost.seconds_alone(1, 1)
        self.scheduler.learn(_NUM_LEARNT, prompt_s, decode_s)
        self.metrics = SimulationMetrics(counters=self.scheduler.counters)
        self._cost, self._is_fair = cost, is_fair
        self._depth = 2 if is_async else 1
        self._check_every = check_every
        self._now = 0.0
        self._device_free_s = 0.0
        self._began_s = 0.0
        self._submitted: deque[tuple[ModelRunnerOutput, float]] = deque()
        self._in_progress: dict[str, Request] = {}
        self._num_arrived = self._num_flooded = 0
        self._explained = None if explained is None else str(explained)
        self.explanation: list[str] = []

    def run(
        self,
        arrivals: Iterable[TracedRequest],
        next_of: Callable[[Request, float], TracedRequest | None] | None = None,
    ) -> SimulationMetrics:
        """Serves all arrivals to their end. When a request ends, `next_of(request, now)` gives the next one of its
        client. Raises `AssertionError` if an integrity check fails."""
        start_s = time.perf_counter()
        self._next_of = next_of
        for traced in arrivals:
            self._advance(traced.arrival_s)
            self._arrive(traced)
        self._advance(math.inf)
        self._check_end()
        self.metrics.elapsed_s = self._now
        self.metrics.host_s = time.perf_counter() - start_s
        return self.metrics

    def _advance(self, until_s: float) -> None:
        """Runs steps until that time, or to the end of a step that is in progress then."""
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

    def _arrive(self, traced: TracedRequest) -> None:
        """Adds a request at the current time, or counts it as refused."""
        is_flood = traced.client == FLOOD
        request_id = f"-{self._num_flooded + 1}" if is_flood else str(self._num_arrived)
        self._num_flooded += is_flood
        self._num_arrived += not is_flood
        request = Request(
            request_id,
            [TOKEN.token_id] * traced.num_prompt_tokens,
            _SAMPLING,
            arrival_s=traced.arrival_s,
            max_total_tokens=traced.num_prompt_tokens + traced.num_output_tokens,
            priority=traced.tier,
            tier=traced.client or traced.tier.name.lower(),
            client=traced.client if self._is_fair else "",
        )
        request.block_hashes = _block_hashes(traced)
        try:
            displaced = self.scheduler.add_request(request)
        except (ContextLengthError, OverloadedError) as error:
            self._metrics_of(request).num_refused += 1
            if request_id == self._explained:
                self.explanation.append(f"{self._now:10.3f} s  is refused: {error}")
            return
        for output in displaced:
            self._metrics_of(self._in_progress.pop(output.request_id)).num_refused += 1
        self._in_progress[request_id] = request
        self.metrics.num_most_waiting = max(self.metrics.num_most_waiting, self.scheduler.num_waiting)

    def _due_s(self) -> float:
        """When the next step may be composed; not after the current time if it may be composed now."""
        return self.scheduler.next_schedule_s(self._began_s) if self._submitted else self._now

    def _advance_disk(self) -> None:
        if self._disk is not None:
            self._disk.now = self._now
            self._disk.finish_due()

    def _disk_s(self, *, is_over: bool) -> float:
        """When the disk tier has something to do; never if `is_over`."""
        if self._disk is None or self.scheduler.disk is None or is_over:
            return math.inf
        rest_s = None if self._submitted else self.scheduler.disk.rest_s(self._now, is_idle=not self._in_progress)
        return min(self._disk.next_s, math.inf if rest_s is None else self._now + max(rest_s, _MIN_DISK_WAIT_S))

    def _schedule(self) -> SchedulerOutput | None:
        for expired in self.scheduler.expire(self._now):
            self._metrics_of(self._in_progress.pop(expired.request_id)).num_refused += 1
        output = self.scheduler.schedule(self._now)
        if output is None:
            return None
        self._explain(output)
        seconds = self._cost.seconds(output)
        copies = output.copies or BlockCopies()
        num_bytes = 0 if self._disk is None else (len(copies.saved) + len(copies.loaded)) * self._disk.block_bytes
        copy_s = num_bytes / _COPY_BYTES_PER_S
        host_s = self._cost.host_s + copy_s
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
            output.step_id,
            sampled,
            step_time_s=step_time_s,
            launch_time_s=launch_s,
            copy_time_s=copy_s,
            saved_blocks=saved,
        )
        self._submitted.append((result, end_s))
        if self._check_every and output.step_id % self._check_every == 0:
            self.scheduler.check_integrity()
            self.metrics.num_checks += 1
        return output

    def _sample(self, chunk: ScheduledChunk) -> SampledToken:
        return TOKEN if self._drafts is None else self._drafts.sampled(chunk.request_id, chunk.num_drafts)

    def _explain(self, step: SchedulerOutput) -> None:
        request = None if self._explained is None else self._in_progress.get(self._explained)
        if request is not None and request.num_computed_tokens <= request.num_prompt_tokens:
            why = self.scheduler.explain(request)
            self.explanation.append(f"{self._now:10.3f} s  step {step.step_id}: {why}")

    def _finish_step(self) -> None:
        result, end_s = self._submitted.popleft()
        self._now = self._began_s = end_s
        for output in self.scheduler.update(result):
            self._take(output)

    def _take(self, output: RequestOutput) -> None:
        request = self._in_progress[output.request_id]
        now = self._now
        if request.last_token_s is None:
            request.first_token_s = now
        else:
            self._metrics_of(request).gaps_s.append(now - request.last_token_s)
        request.last_token_s = now
        if output.finish_reason is not None:
            del self._in_progress[output.request_id]
            self._finish(request)
            following = self._next_of(request, now) if self._next_of else None
            if following is not None:
                self._arrive(following)

    def _finish(self, request: Request) -> None:
        assert request.first_scheduled_s is not None
        assert request.first_token_s is not None
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        assert num_tokens == request.max_total_tokens, "a token was lost or repeated"
        tier = self._metrics_of(request)
        tier.queue_s.append(request.first_scheduled_s - request.arrival_s)
        tier.ttft_s.append(request.first_token_s - request.arrival_s)
        tier.e2e_s.append(self._now - request.arrival_s)

    def _metrics_of(self, request: Request) -> TierMetrics:
        return self.metrics.flood if request.tier == FLOOD else self.metrics.tiers[request.priority]

    def _check_end(self) -> None:
        assert not self._in_progress, "a request was forgotten"
        self.scheduler.check_integrity()
        blocks = self.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks, "blocks have leaked"
        self.metrics.num_checks += 1


def _block_hashes(traced: TracedRequest) -> list[bytes]:
    """Hashes of the prompt's full blocks, made from its hash ids, since a trace has no token ids."""
    hashes = [
        hash_id.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
        for hash_id in traced.hash_ids
        for index in range(traced.hash_block_tokens // BLOCK_SIZE)
    ]
    return hashes[: traced.num_prompt_tokens // BLOCK_SIZE]


TARGET_STEP_S = 0.1
"""Target time of a step on each of these machines."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine with a model: what steps cost, and the bytes of a block of K/V."""

    cost: CostModel
    block_bytes: int


PROFILES: Mapping[str, Profile] = {
    # `random:mini` in float32 on two cores of an AMD EPYC, fitted to measured steps.
    "cpu": Profile(CostModel(), 256 * 1024),
    # An 8B model in 4 bits. No figures of an M2 Max were found. These are an M1 Max's (500 prompt tokens/s at 512, one
    # stream at 46 tokens/s, normiebench#40) with prompts 38/32 as fast, by the number of GPU cores. The cost of more
    # rows is an M3 Max's, where a product of 4-bit weights takes 2.5 times as long with 8 rows as with one (mlx#3863).
    # The cost of context is the M5 Max's.
    "m2-max": Profile(
        CostModel(base_s=0.0175, decode_s=0.0042, prompt_s=0.0017, context_doubling_tokens=20_000.0, host_s=0.003),
        4 * 2**20,
    ),
    # A dense 27B model in 4 bits: steps of 32.9, 49.2, 86.8 and 112.6 ms at 1, 4, 8 and 16 rows (TensorFold, MLX
    # 0.31.2); prompts of 1k at 894 tokens/s and of 32k at 494 (omlx#2150).
    "m5-max": Profile(
        CostModel(base_s=0.028, decode_s=0.0055, prompt_s=0.0011, context_doubling_tokens=20_000.0, host_s=0.003),
        8 * 2**20,
    ),
    # Roughly an 8B model in 4 bits on an M4 Max: 1,092 prompt tokens/s at 8.6k (mesh-llm#1228); more rows cost almost
    # nothing, as on larger GPUs.
    "gpu": Profile(
        CostModel(base_s=0.02, decode_s=0.0005, prompt_s=0.0008, context_doubling_tokens=16_384.0, host_s=0.003),
        4 * 2**20,
    ),
}
