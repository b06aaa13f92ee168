"""Measures what a step costs the host: the scheduler and the batch planner alone, without a model.

A full batch decodes while other requests wait; each step is scheduled before the result of the one before is known.
Times are medians of single steps and hold for this machine at this moment. Calls are calls of Python and C functions,
as the interpreter counts them; they are the same in every run with one version of Python. With `--speculate`, the
scheduler also looks for drafts in each step and finds none. With `--streams`, a whole server is measured instead of the
scheduler: the CPU time of its event loop for each streamed token.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from types import FrameType
from typing import Any, NamedTuple

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.layer_groups import num_blocks_for
from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.batching.speculation.drafting import Speculation
from mlx_server.batching.speculation.lookup import NgramDrafter
from mlx_server.bench.arguments import add_json_argument, from_0, from_1, refuse_options
from mlx_server.bench.instruments import write_figures
from mlx_server.bench.lab.stream_cost import measure_streams, render_streams
from mlx_server.bench.tables import render_items
from mlx_server.outputs import ModelRunnerOutput, SampledToken, SchedulerOutput
from mlx_server.request import Priority, Request
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.sampling_params import SamplingParams

_NUM_PROMPT_TOKENS = 100
_NUM_WARM_UP_STEPS = 40
_STEP_S = 0.05
_STEP_MS = 20


@dataclass(frozen=True, slots=True)
class HostCost:
    """The cost of one step in steady state: median microseconds, and mean numbers of function calls."""

    num_running: int
    num_waiting: int
    schedule_us: float
    update_us: float
    plan_us: float
    schedule_calls: float
    update_calls: float

    @property
    def total_us(self) -> float:
        return self.schedule_us + self.update_us + self.plan_us


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench host-cost`."""
    add = parser.add_argument
    add("--num-running", nargs="+", type=from_1, metavar="N", help="requests that decode; default: 1 16 64")
    add("--num-waiting", nargs="+", type=from_0, metavar="N", help="requests that wait; default: 0 10000")
    add("--num-steps", type=from_1, default=500, metavar="N", help="steps that are measured")
    add("--streams", nargs="+", type=from_1, default=[], metavar="N", help="chats that a server streams")
    step_ms = f"time of a step of streams; 0 is as fast as may be; default: {_STEP_MS}"
    add("--step-ms", type=from_0, metavar="MS", help=step_ms)
    add("--speculate", action="store_const", const=True, help="look for drafts in each step, and find none")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, and prints one table. Raises `ConfigError` for options without effect on what is measured."""
    if args.streams:
        refuse_options(args, ("num_running", "num_waiting", "speculate"), "--streams")
        step_ms = _STEP_MS if args.step_ms is None else args.step_ms
        streams = [measure_streams(num_streams, step_ms, args.num_steps) for num_streams in args.streams]
        print(render_streams(streams))
        write_figures(args.json, "host-cost", results=[asdict(cost) for cost in streams])
        return 0
    refuse_options(args, ("step_ms",), "the scheduler alone")
    costs = [
        measure(num_running, num_waiting, args.num_steps, speculates=bool(args.speculate))
        for num_waiting in args.num_waiting or (0, 10_000)
        for num_running in args.num_running or (1, 16, 64)
    ]
    print(render(costs))
    results = [{**asdict(cost), "total_us": cost.total_us} for cost in costs]
    write_figures(args.json, "host-cost", results=results)
    return 0


def render(costs: list[HostCost]) -> str:
    """A Markdown table with a row for each measurement."""
    return render_items(
        costs,
        {
            "running": lambda cost: f"{cost.num_running:,}",
            "waiting": lambda cost: f"{cost.num_waiting:,}",
            "schedule us": lambda cost: f"{cost.schedule_us:.0f}",
            "update us": lambda cost: f"{cost.update_us:.0f}",
            "plan us": lambda cost: f"{cost.plan_us:.0f}",
            "sum us": lambda cost: f"{cost.total_us:.0f}",
            "schedule calls": lambda cost: f"{cost.schedule_calls:,.0f}",
            "update calls": lambda cost: f"{cost.update_calls:,.0f}",
        },
    )


def measure(num_running: int, num_waiting: int, num_steps: int, *, speculates: bool = False) -> HostCost:
    """Times `num_steps` steps, then counts the calls of as many other steps, because counting slows a step down."""
    bench = _SteadyState(num_running, num_waiting, _NUM_WARM_UP_STEPS + 2 * num_steps, speculates)
    for _ in range(_NUM_WARM_UP_STEPS):
        bench.step(_timed)
    gc.collect()
    timings = [bench.step(_timed) for _ in range(num_steps)]
    calls = [bench.step(_counted) for _ in range(num_steps)]
    us = _StepCost(*(1e6 * statistics.median(column) for column in zip(*timings)))
    mean = _StepCost(*(statistics.fmean(column) for column in zip(*calls)))
    return HostCost(
        num_running,
        num_waiting,
        us.schedule,
        us.update,
        us.plan,
        schedule_calls=mean.schedule,
        update_calls=mean.update,
    )


class _StepCost(NamedTuple):
    """The cost of each part of a step, in seconds or in calls."""

    schedule: float
    update: float
    plan: float


class _SteadyState:
    """A full batch of requests that decode for at least `num_steps` steps, and requests that wait."""

    def __init__(self, num_running: int, num_waiting: int, num_steps: int, speculates: bool) -> None:
        num_tokens = _NUM_PROMPT_TOKENS + num_running + num_steps + 2
        num_blocks = num_running * num_blocks_for(num_tokens) + num_running
        limits = SchedulerLimits(
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running * _NUM_PROMPT_TOKENS,
            queue=QueueLimits(max_num_waiting=10**9, max_queued_tokens=10**12),
            bound_stalls=False,
        )
        speculation = Speculation(NgramDrafter(), max_draft_tokens=8) if speculates else None
        self._scheduler = ContinuousBatchingScheduler(PagedBlockManager(num_blocks), limits, speculation=speculation)
        self._fresh_ids = count()
        self._tables = BlockTables()
        self._submitted: deque[SchedulerOutput] = deque()
        self._now = 0.0
        for index in range(num_running + num_waiting):
            self._scheduler.add_request(_request(index, num_tokens))
        while self._scheduler.num_running < num_running:
            self.step(_timed)

    def step(self, observe: _Observe) -> _StepCost:
        """Schedules and plans a step and takes the result of the one before. Returns what `observe` measured."""
        self._now += _STEP_S
        output, schedule_cost = observe(self._schedule)
        assert output is not None
        for data in output.new_requests:
            self._tables.add(data.request_id)
        _, plan_cost = observe(lambda: self._tables.plan(output.chunks))
        self._submitted.append(output)
        if len(self._submitted) < 2:
            return _StepCost(schedule_cost, 0.0, plan_cost)
        oldest = self._submitted.popleft()
        sampled = {chunk.request_id: self._token() for chunk in oldest.chunks if chunk.is_sampling}
        result = ModelRunnerOutput(oldest.step_id, sampled, step_time_s=_STEP_S)
        _, update_cost = observe(lambda: self._scheduler.update(result))
        return _StepCost(schedule_cost, update_cost, plan_cost)

    def _schedule(self) -> SchedulerOutput | None:
        """Schedules the next step, before the result of the one before is known."""
        return self._scheduler.schedule(self._now)

    def _token(self) -> SampledToken:
        """A token that has not occurred before, so that no draft is found for what follows it."""
        return SampledToken(1000 + next(self._fresh_ids))


def _request(index: int, max_total_tokens: int) -> Request:
    token_ids = [(31 * index + position) % 1000 for position in range(_NUM_PROMPT_TOKENS)]
    return Request(
        f"request-{index}",
        token_ids,
        SamplingParams(),
        arrival_s=0.001 * index,
        max_total_tokens=max_total_tokens,
        priority=Priority.NORMAL,
    )


_Observe = Callable[[Callable[[], Any]], tuple[Any, float]]


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def _counted(function: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of `function`, and the number of calls: its own and those that it makes."""
    num_calls = 0

    def on_call(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(on_call)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, num_calls - 1  # without the call that ends the counting
