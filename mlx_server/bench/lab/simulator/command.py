"""Replays arrivals through the real scheduler, on a simulated device and clock.

Traffic is made up from a seed, or read from a trace in any format of `bench serve`. What steps cost is a profile's.
Every request runs to its end; blocks, queues and token counts are checked on the way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.bench.arguments import above_0, add_json_argument, from_0, from_1
from mlx_server.bench.lab.simulator.disk import DiskCost
from mlx_server.bench.lab.simulator.engine import (
    PROFILES,
    TARGET_STEP_S,
    Simulation,
    SimulationMetrics,
    Slo,
    TierMetrics,
    percentile,
)
from mlx_server.bench.lab.simulator.traces import (
    Chats,
    ClosedLoop,
    DraftMix,
    Mix,
    TracedRequest,
    Traffic,
    read_trace,
    with_flood,
    write_trace,
)
from mlx_server.bench.tables import document_of, format_rate, render_items, tell, write_json
from mlx_server.errors import ConfigError
from mlx_server.request import Priority
from mlx_server.setting import parse_size


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
            f"prefix hits {_rate(metrics.hit_rate)} ({counters.num_prompt_tokens_from_disk:,} tokens from disk), "
            f"{counters.num_prompt_tokens_computed:,} of "
            f"{counters.num_prompt_tokens:,} prompt tokens computed; {counters.num_preemptions:,} preemptions, "
            f"{metrics.num_evictions:,} evictions.",
            *_drafts(metrics),
        ]
    )


def _drafts(metrics: SimulationMetrics) -> list[str]:
    drafts = metrics.drafts
    if not drafts.num_drafts:
        return []
    share = _share(drafts.num_accepted_tokens, drafts.num_draft_tokens)
    return [f"{drafts.num_draft_tokens:,} tokens drafted in {drafts.num_drafts:,} chunks, {share} of them right."]


def render_tiers(metrics: SimulationMetrics) -> str:
    """One row a tier that sent anything."""
    return render_items(
        [(tier, found) for tier, found in metrics.tiers.items() if found.e2e_s or found.num_refused],
        {
            "tier": lambda item: item[0].name.lower(),
            "finished": lambda item: f"{len(item[1].e2e_s):,}",
            "a second": lambda item: f"{len(item[1].e2e_s) / metrics.elapsed_s:,.2f}",
            "refused": lambda item: f"{item[1].num_refused:,}",
            "queue p50": lambda item: _seconds(percentile(item[1].queue_s, 50)),
            "queue p99": lambda item: _seconds(percentile(item[1].queue_s, 99)),
            "TTFT p50": lambda item: _seconds(percentile(item[1].ttft_s, 50)),
            "TTFT p95": lambda item: _seconds(percentile(item[1].ttft_s, 95)),
            "TTFT p99": lambda item: _seconds(percentile(item[1].ttft_s, 99)),
            "ITL p50": lambda item: _seconds(percentile(item[1].gaps_s, 50)),
            "ITL p99": lambda item: _seconds(percentile(item[1].gaps_s, 99)),
            "ITL max": lambda item: _seconds(percentile(item[1].gaps_s, 100)),
            "good": lambda item: _share(item[1].num_good, len(item[1].e2e_s) + item[1].num_refused),
            "Jain": lambda item: _index(metrics.jain([item[0]])),
        },
    )


def render_variants(found: Mapping[str, SimulationMetrics]) -> str:
    """One row a variant, all tiers together; the queue of the worst tier apart."""
    return render_items(
        found.items(),
        {
            "scheduler": lambda item: item[0],
            "TTFT mean": lambda item: _seconds(item[1].mean_ttft_s),
            "TTFT p50": lambda item: _seconds(percentile(item[1].all("ttft_s"), 50)),
            "TTFT p99": lambda item: _seconds(percentile(item[1].all("ttft_s"), 99)),
            "ITL p99": lambda item: _seconds(item[1].gap_percentile(99)),
            "ITL max": lambda item: _seconds(item[1].longest_gap_s),
            "queue p99 high": lambda item: _seconds(percentile(item[1].tiers[Priority.HIGH].queue_s, 99)),
            "queue p99 low": lambda item: _seconds(percentile(item[1].tiers[Priority.LOW].queue_s, 99)),
            "queue max low": lambda item: _seconds(percentile(item[1].tiers[Priority.LOW].queue_s, 100)),
            "good req/s": lambda item: format_rate(item[1].goodput),
            "output tok/s": lambda item: format_rate(item[1].output_rate),
            "prefix hits": lambda item: _rate(item[1].hit_rate),
            "computed tokens": lambda item: f"{item[1].counters.num_prompt_tokens_computed:,}",
            "preemptions": lambda item: f"{item[1].counters.num_preemptions:,}",
            "Jain": lambda item: _index(item[1].jain()),
        },
    )


_COUNTS = ("num_finished", "num_refused", "num_evictions", "num_most_waiting", "num_checks")
_TIMES = ("elapsed_s", "host_s", "busy_s", "goodput", "output_rate", "hit_rate", "mean_ttft_s")


def as_document(found: Mapping[str, SimulationMetrics]) -> list[dict[str, Any]]:
    """The same as JSON-ready values, times in seconds."""
    return [
        {
            "scheduler": name,
            **document_of(metrics, *_COUNTS, *_TIMES),
            "jain_index": metrics.jain(),
            "counters": asdict(metrics.counters),
            "drafts": asdict(metrics.drafts),
            "tiers": {tier.name.lower(): _tier_document(one) for tier, one in metrics.tiers.items()},
        }
        for name, metrics in found.items()
    ]


def _tier_document(tier: TierMetrics) -> dict[str, Any]:
    times = {"queue_s": tier.queue_s, "ttft_s": tier.ttft_s, "e2e_s": tier.e2e_s, "itl_s": tier.gaps_s}
    return {
        "num_finished": len(tier.e2e_s),
        "num_refused": tier.num_refused,
        "num_good": tier.num_good,
        **{f"{name}_p{percent}": percentile(times[name], percent) for name in times for percent in (50, 95, 99)},
        "itl_s_max": percentile(tier.gaps_s, 100),
    }


def _seconds(value: float) -> str:
    return f"{1000 * value:,.0f} ms" if value < 10 else f"{value:,.1f} s"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def _index(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


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
    add_json_argument(parser)


def _add_traffic(group: _Group) -> None:
    mix = Mix()
    group.add_argument("--trace", type=Path, metavar="FILE", help="replay this trace instead of made-up traffic")
    _add(group, "--shrink", from_1, 1, "divide the lengths of a trace by 2, 4, 8 or 16")
    _add(group, "--speed-up", above_0, 1.0, "divide the times between arrivals of a trace")
    _add(group, "--num-requests", from_1, 2000, "of made-up traffic, or at most of a trace")
    group.add_argument(
        "--pattern", choices=("poisson", "bursts"), default="poisson", help="how made-up requests arrive"
    )
    group.add_argument(
        "--clients",
        nargs=3,
        type=from_0,
        metavar=("HIGH", "NORMAL", "LOW"),
        help="closed loop: so many clients, each of which sends its next request when its answer has ended",
    )
    _add(group, "--rate", above_0, 7.0, "requests a second on average")
    _add(group, "--burst-size", from_1, 32, "requests of a burst")
    _add(group, "--own-tokens", above_0, mix.own_tokens, "mean prompt tokens of a request's own")
    _add(group, "--output-tokens", above_0, mix.output_tokens, "mean output tokens")
    _add(group, "--spread", float, mix.spread, "of the logarithms of both; 0: all requests are alike")
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
    _add(group, "--turns", from_1, 1, "more than 1: conversations, in which --own-tokens come on top of all before")
    _add(group, "--pause-s", above_0, 60.0, "mean time from a turn's arrival to the next one's")
    group.add_argument("--write-trace", type=Path, metavar="FILE", help="write the traffic for --trace and --shrink 16")
    group.add_argument("--flood-tier", choices=_TIERS, help="one tier sends more for a while")
    _add(group, "--flood-rate", above_0, 30.0, "requests a second of the flood")
    _add(group, "--flood-start-s", float, 60.0, "when the flood begins")
    _add(group, "--flood-end-s", float, 120.0, "when it ends")
    _add(group, "--seed", int, 0, "of all that is made up")


def _add_device(group: _Group) -> None:
    group.add_argument("--profile", choices=tuple(PROFILES), default="cpu", help="costs of a machine; default: cpu")
    group.add_argument(
        "--self-running", action="store_true", help="it computes by itself, as a GPU does, not while it is given a step"
    )
    _add(group, "--num-blocks", from_1, 4096, "KV blocks of 32 tokens")
    group.add_argument("--kv-disk", type=parse_size, metavar="SIZE", help="keep prefixes on disk; replay without, too")
    group.add_argument(
        "--kv-disk-writes-per-day", type=parse_size, default="64GB", metavar="SIZE", help="of it; default: 64GB"
    )
    group.add_argument(
        "--disk-gb-per-s",
        nargs=2,
        type=above_0,
        default=(3.0, 2.0),
        metavar=("READ", "WRITE"),
        help="how fast the disk is; default: 3 2",
    )


def _add_scheduler(group: _Group) -> None:
    limits = SchedulerLimits()
    _add(group, "--max-num-seqs", from_1, limits.max_num_seqs, "most requests that run at once")
    _add(group, "--max-num-batched-tokens", from_1, limits.max_num_batched_tokens, "token budget of one step")
    _add(group, "--target-step-ms", above_0, 1000 * TARGET_STEP_S, "target time of a step while someone decodes")
    _add(group, "--max-step-ms", above_0, 1000 * limits.max_step_s, "target time of a step that delays no peer")
    _add(group, "--aging-rate", float, limits.aging_rate, "priority levels gained per second of waiting")
    _add(group, "--max-num-waiting", from_1, 10**9, "most requests of each tier that may wait")
    group.add_argument(
        "--draft-acceptance",
        nargs="+",
        type=_from_0_to_1,
        default=[],
        metavar="SHARE",
        help="drafts of up to 8 tokens: how often each is right, of the requests in turn; default: none are drafted. "
        "The same without drafts is replayed, too",
    )
    group.add_argument(
        "--draft-share",
        type=_from_0_to_1,
        default=1.0,
        metavar="SHARE",
        help="of steps that find one; default: 1",
    )
    group.add_argument(
        "--queue-timeout-s", type=above_0, metavar="N", help="longest wait for a first step; default: none"
    )


def _from_0_to_1(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return float(text)


def _add(group: _Group, flag: str, kind: Callable[[str], float], default: float, text: str) -> None:
    group.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text}; default: {default:,}")


def run(args: argparse.Namespace) -> int:
    """Prints a summary and a table by tier; with `--ablate` a table of variants. Raises `ConfigError`."""
    arrivals = [] if args.clients else _arrivals(args)
    found: dict[str, SimulationMetrics] = {}
    if args.write_trace is not None:
        write_trace(args.write_trace, arrivals)
    for name, variant in _variants(_limits(args), args).items():
        tell(f"replaying {len(arrivals) or args.num_requests:,} requests: {name}")
        found[name] = _replay(variant, arrivals, args)
    first = next(iter(found.values()))
    print(f"{summarize(first)}\n\n{render_tiers(first)}")
    if len(found) > 1:
        print(f"\n{render_variants(found)}")
    profile = asdict(PROFILES[args.profile])
    document = {"benchmark": "simulate", "settings": vars(args), "profile": profile, "results": as_document(found)}
    write_json(args.json, document)
    return 0


@dataclass(frozen=True, slots=True)
class _Variant:
    """One way to schedule."""

    limits: SchedulerLimits
    is_async: bool = True
    enable_prefix_caching: bool = True
    drafts: DraftMix | None = None
    disk: DiskCost | None = None


def _variants(limits: SchedulerLimits, args: argparse.Namespace) -> dict[str, _Variant]:
    disk = _disk(args)
    variants = {"all mechanisms": _Variant(limits, disk=disk)}
    if args.draft_acceptance:
        mix = DraftMix(acceptances=tuple(args.draft_acceptance), found_share=args.draft_share, seed=args.seed)
        variants = {"all mechanisms": _Variant(limits, drafts=mix, disk=disk), "no drafts": _Variant(limits, disk=disk)}
    if disk is not None:
        variants["no disk"] = replace(variants["all mechanisms"], disk=None)
    if args.ablate:
        variants |= {
            "no stall bound": _Variant(replace(limits, bound_stalls=False), disk=disk),
            "no prefix deduplication": _Variant(replace(limits, deduplicate_prefixes=False), disk=disk),
            "no step ahead": _Variant(limits, is_async=False, disk=disk),
            "no aging": _Variant(replace(limits, aging_rate=0.0), disk=disk),
            "no prefix cache": _Variant(limits, enable_prefix_caching=False),
        }
    return variants


def _disk(args: argparse.Namespace) -> DiskCost | None:
    if args.kv_disk is None:
        return None
    block_bytes = PROFILES[args.profile].block_bytes
    read, write = (1e9 * rate for rate in args.disk_gb_per_s)
    return DiskCost(
        num_records=args.kv_disk // block_bytes,
        block_bytes=block_bytes,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        bytes_per_day=args.kv_disk_writes_per_day,
    )


def _replay(variant: _Variant, arrivals: Iterable[TracedRequest], args: argparse.Namespace) -> SimulationMetrics:
    cost = replace(PROFILES[args.profile].cost, is_self_running=args.self_running)
    simulation = Simulation(
        variant.limits,
        args.num_blocks,
        cost,
        slo=Slo(ttft_s=args.slo_ttft_ms / 1000, tpot_s=args.slo_tpot_ms / 1000),
        is_async=variant.is_async,
        enable_prefix_caching=variant.enable_prefix_caching,
        check_every=args.check_every,
        explained=args.explain,
        drafts=variant.drafts,
        disk=variant.disk,
    )
    metrics = simulation.run(arrivals) if args.clients is None else _run_closed(simulation, args)
    if simulation.explanation:
        print("\n".join(simulation.explanation), end="\n\n")
    return metrics


def _run_closed(simulation: Simulation, args: argparse.Namespace) -> SimulationMetrics:
    others = (args.trace, args.flood_tier, args.write_trace)
    if not any(args.clients) or others != (None, None, None) or args.turns > 1:
        clients = " ".join(map(str, args.clients))
        raise ConfigError(
            f"--clients is {clients}; it needs one at least, and no --trace, --flood-tier, --turns or --write-trace "
            "beside."
        )
    loop = ClosedLoop(Traffic(_mix(args), args.seed), dict(zip(Priority, args.clients)), args.num_requests)
    return simulation.run(loop.first(), loop.next_of)


def _arrivals(args: argparse.Namespace) -> list[TracedRequest]:
    if min(args.tiers) < 0 or sum(args.tiers) <= 0:
        raise ConfigError(f"--tiers is {' '.join(map(str, args.tiers))}; shares are at least 0, and one is more.")
    if args.trace is not None:
        traced = read_trace(args.trace, shrink=args.shrink, tiers=args.tiers, seed=args.seed)
        faster = (replace(request, arrival_s=request.arrival_s / args.speed_up) for request in traced)
        return list(islice(faster, args.num_requests))
    mix = _mix(args)
    traffic = Traffic(mix, args.seed)
    if args.turns > 1:
        return traffic.chats(args.rate, Chats(turns=args.turns, pause_s=args.pause_s), args.num_requests)
    base = traffic.poisson(args.rate) if args.pattern == "poisson" else traffic.bursts(args.rate, args.burst_size)
    if args.flood_tier is not None:
        tier = Priority[args.flood_tier.upper()]
        extra = Traffic(mix, args.seed + 1).poisson(args.flood_rate, tier, args.flood_start_s)
        base = with_flood(base, extra, args.flood_end_s)
    return list(islice(base, args.num_requests))


def _mix(args: argparse.Namespace) -> Mix:
    if not args.spread >= 0:
        raise ConfigError(f"--spread is {args.spread}; it must be at least 0.")
    return Mix(
        own_tokens=args.own_tokens,
        output_tokens=args.output_tokens,
        spread=args.spread,
        shared_share=args.shared_share,
        num_prefixes=args.num_prefixes,
        prefix_tokens=args.prefix_tokens,
        tiers=tuple(args.tiers),
    )


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
        context_doubling_tokens=PROFILES[args.profile].cost.context_doubling_tokens,
        queue=QueueLimits(max_num_waiting=10**9, max_queued_tokens=10**12),
        tiers={tier: QueueLimits(max_num_waiting=args.max_num_waiting, max_queued_tokens=10**12) for tier in _TIERS},
        queue_timeout_s=args.queue_timeout_s,
    )
