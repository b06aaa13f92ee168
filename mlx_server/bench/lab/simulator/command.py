"""Replays arrivals through the real scheduler, on a simulated device and clock.

Traffic is made up from a seed, or read from a JSONL trace with prefix hashes in the format of Mooncake's
public traces. A step takes BASE + DECODE * decodes + PROMPT * cost, where a prompt token at position p costs
1 + p / CONTEXT. Every request runs to its end; blocks, queues and token counts are checked on the way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.bench.arguments import above_0, from_0, from_1
from mlx_server.bench.lab.simulator.engine import (
    PROFILES,
    CostModel,
    Simulation,
    SimulationMetrics,
    Slo,
    TierMetrics,
    percentile,
)
from mlx_server.bench.lab.simulator.traces import Mix, TracedRequest, Traffic, read_trace, with_flood
from mlx_server.bench.tables import format_rate, render_table
from mlx_server.errors import ConfigError
from mlx_server.request import Priority

_PERCENTS = (50.0, 99.0)


def summarize(metrics: SimulationMetrics) -> str:
    """A few lines for people."""
    counters = metrics.counters
    return "\n".join(
        [
            f"{metrics.num_finished:,} requests finished and {metrics.num_refused:,} were refused in "
            f"{metrics.elapsed_s:,.0f} simulated seconds ({metrics.host_s:.1f} s here); "
            f"at most {metrics.num_most_waiting:,} waited; all books agreed {metrics.num_checks:,} times.",
            f"{counters.num_steps:,} steps, device busy {_share(metrics.busy_s, metrics.elapsed_s)}; "
            f"{format_rate(metrics.output_rate)} output tokens/s, {format_rate(metrics.goodput)} good requests/s; "
            f"prefix hits {_rate(metrics.hit_rate)}, {counters.num_prompt_tokens_computed:,} of "
            f"{counters.num_prompt_tokens:,} prompt tokens computed; {counters.num_preemptions:,} preemptions, "
            f"{metrics.num_evictions:,} evictions.",
        ]
    )


def render_tiers(metrics: SimulationMetrics) -> str:
    """One row a tier that sent anything."""
    header = (
        "tier",
        "finished",
        "refused",
        "queue p50",
        "queue p99",
        "TTFT p50",
        "TTFT p99",
        "ITL p50",
        "ITL p99",
        "ITL max",
        "good",
        "Jain",
    )
    rows = [
        _tier_cells(tier.name.lower(), found, metrics.jain([tier]))
        for tier, found in metrics.tiers.items()
        if found.e2e_s or found.num_refused
    ]
    return render_table(header, rows)


def _tier_cells(name: str, tier: TierMetrics, jain: float | None) -> tuple[str, ...]:
    return (
        name,
        f"{len(tier.e2e_s):,}",
        f"{tier.num_refused:,}",
        *(_seconds(percentile(tier.queue_s, percent)) for percent in _PERCENTS),
        *(_seconds(percentile(tier.ttft_s, percent)) for percent in _PERCENTS),
        *(_seconds(tier.gaps_s.percentile(percent)) for percent in _PERCENTS),
        _seconds(tier.gaps_s.most),
        _share(tier.num_good, len(tier.e2e_s) + tier.num_refused),
        "none" if jain is None else f"{jain:.3f}",
    )


def render_variants(found: Mapping[str, SimulationMetrics]) -> str:
    """One row a variant, all tiers together; the queue of the worst tier apart."""
    header = (
        "scheduler",
        "TTFT p50",
        "TTFT p99",
        "ITL p99",
        "ITL max",
        "queue p99 high",
        "queue p99 low",
        "queue max low",
        "good req/s",
        "output tok/s",
        "prefix hits",
        "computed tokens",
        "preemptions",
        "Jain",
    )
    return render_table(header, [_variant_cells(name, metrics) for name, metrics in found.items()])


def _variant_cells(name: str, metrics: SimulationMetrics) -> tuple[str, ...]:
    ttft_s = metrics.all("ttft_s")
    low = metrics.tiers[Priority.LOW]
    jain = metrics.jain()
    return (
        name,
        *(_seconds(percentile(ttft_s, percent)) for percent in _PERCENTS),
        _seconds(metrics.gap_percentile(99.0)),
        _seconds(metrics.longest_gap_s),
        _seconds(percentile(metrics.tiers[Priority.HIGH].queue_s, 99.0)),
        _seconds(percentile(low.queue_s, 99.0)),
        _seconds(max(low.queue_s, default=0.0)),
        format_rate(metrics.goodput),
        format_rate(metrics.output_rate),
        _rate(metrics.hit_rate),
        f"{metrics.counters.num_prompt_tokens_computed:,}",
        f"{metrics.counters.num_preemptions:,}",
        "none" if jain is None else f"{jain:.3f}",
    )


def as_document(found: Mapping[str, SimulationMetrics]) -> list[dict[str, Any]]:
    """The same as JSON-ready values, times in seconds."""
    return [{"scheduler": name, **_metrics_document(metrics)} for name, metrics in found.items()]


def _metrics_document(metrics: SimulationMetrics) -> dict[str, Any]:
    return {
        "num_finished": metrics.num_finished,
        "num_refused": metrics.num_refused,
        "elapsed_s": metrics.elapsed_s,
        "host_s": metrics.host_s,
        "busy_s": metrics.busy_s,
        "goodput_requests_per_s": metrics.goodput,
        "output_tokens_per_s": metrics.output_rate,
        "prefix_hit_rate": metrics.hit_rate,
        "jain_index": metrics.jain(),
        "num_evictions": metrics.num_evictions,
        "num_most_waiting": metrics.num_most_waiting,
        "num_checks": metrics.num_checks,
        "counters": asdict(metrics.counters),
        "tiers": {tier.name.lower(): _tier_document(found) for tier, found in metrics.tiers.items()},
    }


def _tier_document(tier: TierMetrics) -> dict[str, Any]:
    return {
        "num_finished": len(tier.e2e_s),
        "num_refused": tier.num_refused,
        "num_good": tier.num_good,
        **{
            f"{name}_p{percent:g}": percentile(getattr(tier, name), percent)
            for name in ("queue_s", "ttft_s", "e2e_s")
            for percent in _PERCENTS
        },
        **{f"itl_s_p{percent:g}": tier.gaps_s.percentile(percent) for percent in _PERCENTS},
        "itl_s_max": tier.gaps_s.most,
    }


def _seconds(value: float) -> str:
    return f"{1000 * value:,.0f} ms" if value < 10 else f"{value:,.1f} s"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


_TIERS = tuple(tier.name.lower() for tier in Priority)
_Group = argparse._ArgumentGroup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench simulate`."""
    _add_traffic(parser.add_argument_group("traffic"))
    _add_device(parser.add_argument_group("device"))
    _add_scheduler(parser.add_argument_group("scheduler"))
    report = parser.add_argument_group("report")
    report.add_argument("--ablate", action="store_true", help="replay again without each mechanism; one table")
    report.add_argument(
        "--explain", type=from_0, metavar="REQUEST", help="say of each step why that arrival, from 0 on, waited"
    )
    _add(report, "--slo-ttft-ms", above_0, 5000.0, "longest TTFT of a good request")
    _add(report, "--slo-tpot-ms", above_0, 200.0, "longest mean time of its further tokens")
    _add(report, "--check-every", from_0, 1000, "steps between checks of all books; 0: only at the end")
    report.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")


def _add_traffic(group: _Group) -> None:
    mix = Mix()
    group.add_argument("--trace", type=Path, metavar="FILE", help="replay this trace instead of made-up traffic")
    _add(group, "--shrink", from_1, 1, "divide the lengths of a trace by 2, 4, 8 or 16")
    _add(group, "--speed-up", above_0, 1.0, "divide the times between arrivals of a trace")
    _add(group, "--num-requests", from_1, 2000, "of made-up traffic, or at most of a trace")
    group.add_argument(
        "--pattern", choices=("poisson", "bursts"), default="poisson", help="how made-up requests arrive"
    )
    _add(group, "--rate", above_0, 7.0, "requests a second on average")
    _add(group, "--burst-size", from_1, 32, "requests of a burst")
    _add(group, "--own-tokens", above_0, mix.own_tokens, "mean prompt tokens of a request's own")
    _add(group, "--output-tokens", above_0, mix.output_tokens, "mean output tokens")
    _add(group, "--shared-share", float, mix.shared_share, "share of requests that begin with a shared prefix")
    _add(group, "--num-prefixes", from_1, mix.num_prefixes, "different shared prefixes")
    _add(group, "--prefix-tokens", from_1, mix.prefix_tokens, "tokens of a shared prefix")
    group.add_argument(
        "--tiers",
        nargs=3,
        type=float,
        default=mix.tiers,
        metavar=("HIGH", "NORMAL", "LOW"),
        help=f"shares; default: {' '.join(map(str, mix.tiers))}",
    )
    group.add_argument("--flood-tier", choices=_TIERS, help="one tier sends more for a while")
    _add(group, "--flood-rate", above_0, 30.0, "requests a second of the flood")
    _add(group, "--flood-start-s", float, 60.0, "when the flood begins")
    _add(group, "--flood-end-s", float, 120.0, "when it ends")
    _add(group, "--seed", int, 0, "of all that is made up")


def _add_device(group: _Group) -> None:
    group.add_argument(
        "--profile", choices=tuple(PROFILES), default="cpu", help="costs and target of a machine; default: cpu"
    )
    _add_of_profile(group, "--base-ms", above_0, "BASE: of every step")
    _add_of_profile(group, "--decode-ms", float, "DECODE: of each request that decodes")
    _add_of_profile(group, "--prompt-ms", float, "PROMPT: of a prompt token")
    _add_of_profile(group, "--context-doubling-tokens", above_0, "CONTEXT")
    _add_of_profile(group, "--host-ms", float, "of the host for a step; hidden by the step ahead")
    group.add_argument(
        "--self-running", action="store_true", help="it computes by itself, as a GPU does, not while it is given a step"
    )
    _add(group, "--num-blocks", from_1, 4096, "KV blocks of 32 tokens")


def _add_scheduler(group: _Group) -> None:
    limits = SchedulerLimits()
    _add(group, "--max-num-seqs", from_1, limits.max_num_seqs, "most requests that run at once")
    _add(group, "--max-num-batched-tokens", from_1, limits.max_num_batched_tokens, "token budget of one step")
    _add_of_profile(group, "--target-step-ms", above_0, "target time of a step while someone decodes")
    _add(group, "--max-step-ms", above_0, 1000 * limits.max_step_s, "target time of a step that delays no peer")
    _add(group, "--aging-rate", float, limits.aging_rate, "priority levels gained per second of waiting")
    _add(group, "--max-num-waiting", from_1, 10**9, "most requests of each tier that may wait")
    group.add_argument(
        "--queue-timeout-s", type=above_0, metavar="N", help="longest wait for a first step; default: none"
    )


def _add(group: _Group, flag: str, kind: Callable[[str], float], default: float, text: str) -> None:
    group.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text}; default: {default:,}")


def _add_of_profile(group: _Group, flag: str, kind: Callable[[str], float], text: str) -> None:
    group.add_argument(flag, type=kind, metavar="N", help=f"{text}; default: the profile's")


def _settle_profile(args: argparse.Namespace) -> None:
    """What is not given is as the profile says."""
    profile = PROFILES[args.profile]
    cost = profile.cost
    of_profile = {
        "base_ms": 1000 * cost.base_s,
        "decode_ms": 1000 * cost.decode_s,
        "prompt_ms": 1000 * cost.prompt_s,
        "context_doubling_tokens": cost.context_doubling_tokens,
        "host_ms": 1000 * cost.host_s,
        "target_step_ms": 1000 * profile.target_step_s,
    }
    for name, value in of_profile.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def run(args: argparse.Namespace) -> int:
    """Prints a summary and a table by tier; with `--ablate` a table of variants. Raises `ConfigError`."""
    _settle_profile(args)
    arrivals = _arrivals(args)
    found: dict[str, SimulationMetrics] = {}
    for name, variant in _variants(_limits(args), args.ablate).items():
        print(f"replaying {len(arrivals):,} requests: {name}", file=sys.stderr, flush=True)
        found[name] = _replay(variant, arrivals, args)
    first = next(iter(found.values()))
    print(f"{summarize(first)}\n\n{render_tiers(first)}")
    if args.ablate:
        print(f"\n{render_variants(found)}")
    if args.json is not None:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        document = {"benchmark": "simulate", "settings": settings, "results": as_document(found)}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


@dataclass(frozen=True, slots=True)
class _Variant:
    """One way to schedule."""

    limits: SchedulerLimits
    is_async: bool = True
    enable_prefix_caching: bool = True


def _variants(limits: SchedulerLimits, with_ablations: bool) -> dict[str, _Variant]:
    variants = {"all mechanisms": _Variant(limits)}
    if with_ablations:
        variants |= {
            "no stall bound": _Variant(replace(limits, bound_stalls=False)),
            "no prefix deduplication": _Variant(replace(limits, deduplicate_prefixes=False)),
            "no step ahead": _Variant(limits, is_async=False),
            "no aging": _Variant(replace(limits, aging_rate=0.0)),
            "no prefix cache": _Variant(limits, enable_prefix_caching=False),
        }
    return variants


def _replay(variant: _Variant, arrivals: Iterable[TracedRequest], args: argparse.Namespace) -> SimulationMetrics:
    cost = CostModel(
        base_s=args.base_ms / 1000,
        decode_s=args.decode_ms / 1000,
        prompt_s=args.prompt_ms / 1000,
        context_doubling_tokens=args.context_doubling_tokens,
        host_s=args.host_ms / 1000,
        is_self_running=args.self_running,
    )
    simulation = Simulation(
        variant.limits,
        args.num_blocks,
        cost,
        slo=Slo(ttft_s=args.slo_ttft_ms / 1000, tpot_s=args.slo_tpot_ms / 1000),
        is_async=variant.is_async,
        enable_prefix_caching=variant.enable_prefix_caching,
        check_every=args.check_every,
        explained=args.explain,
    )
    metrics = simulation.run(arrivals)
    if simulation.explanation:
        print("\n".join(simulation.explanation), end="\n\n")
    return metrics


def _arrivals(args: argparse.Namespace) -> list[TracedRequest]:
    if min(args.tiers) < 0 or sum(args.tiers) <= 0:
        raise ConfigError(f"--tiers is {' '.join(map(str, args.tiers))}; shares are at least 0, and one is more.")
    if args.trace is not None:
        traced = read_trace(args.trace, shrink=args.shrink, tiers=args.tiers, seed=args.seed)
        faster = (replace(request, arrival_s=request.arrival_s / args.speed_up) for request in traced)
        return list(islice(faster, args.num_requests))
    mix = Mix(
        own_tokens=args.own_tokens,
        output_tokens=args.output_tokens,
        shared_share=args.shared_share,
        num_prefixes=args.num_prefixes,
        prefix_tokens=args.prefix_tokens,
        tiers=tuple(args.tiers),
    )
    traffic = Traffic(mix, args.seed)
    base = traffic.poisson(args.rate) if args.pattern == "poisson" else traffic.bursts(args.rate, args.burst_size)
    if args.flood_tier is not None:
        tier = Priority[args.flood_tier.upper()]
        extra = Traffic(mix, args.seed + 1).poisson(args.flood_rate, tier, args.flood_start_s)
        base = with_flood(base, extra, args.flood_end_s)
    return list(islice(base, args.num_requests))


def _limits(args: argparse.Namespace) -> SchedulerLimits:
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {args.max_num_batched_tokens}; it must be at least --max-num-seqs, "
            f"{args.max_num_seqs}."
        )
    return SchedulerLimits(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        aging_rate=args.aging_rate,
        target_step_s=args.target_step_ms / 1000,
        max_step_s=args.max_step_ms / 1000,
        context_doubling_tokens=args.context_doubling_tokens,
        queue=QueueLimits(max_num_waiting=10**9, max_queued_tokens=10**12),
        tiers={tier: QueueLimits(max_num_waiting=args.max_num_waiting, max_queued_tokens=10**12) for tier in _TIERS},
        queue_timeout_s=args.queue_timeout_s,
    )
