"""Replays requests through the real scheduler, on a simulated device and clock.

Traffic is generated from a seed, or read from a trace in any format of `bench serve`. A profile says what steps cost.
All requests run to their end, with integrity checks of blocks, queues and token counts.

examples:
  mlx-serve bench simulate --profile gpu --rate 5 --ablate
  mlx-serve bench simulate --trace mooncake.jsonl --shrink 16 --explain 30
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.bench.arguments import (
    above_0,
    add_json_argument,
    at_least_0,
    byte_size,
    changed_options,
    from_0,
    from_1,
    refuse_options,
)
from mlx_server.bench.lab.simulator.disk import DiskCost
from mlx_server.bench.lab.simulator.engine import (
    PROFILES,
    TARGET_STEP_S,
    Simulation,
    SimulationMetrics,
    TierMetrics,
    percentile,
)
from mlx_server.bench.lab.simulator.traces import (
    FLOOD,
    ClosedLoop,
    DraftMix,
    Flood,
    Mix,
    TracedRequest,
    Traffic,
    read_trace,
    write_trace,
)
from mlx_server.bench.tables import document_of, format_rate, print_progress, render_items, write_json
from mlx_server.errors import ConfigError
from mlx_server.request import Priority


def summarize(metrics: SimulationMetrics) -> str:
    """The totals of one replay."""
    counters = metrics.counters
    lines = [
        f"{metrics.num_finished:,} requests finished and {metrics.num_refused:,} were refused in "
        f"{metrics.elapsed_s:,.0f} simulated seconds ({metrics.host_s:.1f} s here); "
        f"at most {metrics.num_most_waiting:,} waited; {metrics.num_checks:,} integrity checks passed.",
        f"{counters.num_steps:,} steps, device busy {_share(metrics.busy_s, metrics.elapsed_s)}; "
        f"{format_rate(metrics.output_rate)} output tokens/s; "
        f"prefix hits {_rate(metrics.hit_rate)} ({counters.num_prompt_tokens_from_disk:,} tokens from disk), "
        f"{counters.num_prompt_tokens_computed:,} of "
        f"{counters.num_prompt_tokens:,} prompt tokens computed; {counters.num_preemptions:,} preemptions, "
        f"{counters.num_block_evictions:,} evictions.",
    ]
    if counters.num_drafts:
        num_drafted, share = counters.num_draft_tokens, _share(counters.num_accepted_tokens, counters.num_draft_tokens)
        lines.append(f"{num_drafted:,} tokens drafted in {counters.num_drafts:,} chunks, {share} accepted.")
    return "\n".join(lines)


def render_tiers(metrics: SimulationMetrics) -> str:
    """One row for each tier that sent requests, and one for a flood."""
    return render_items(
        [(name, found) for name, found in _by_tier(metrics).items() if found.e2e_s or found.num_refused],
        {
            "tier": lambda item: item[0],
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
        },
    )


def render_variants(found: Mapping[str, SimulationMetrics]) -> str:
    """One row for each variant, over all tiers."""
    return render_items(
        found.items(),
        {
            "scheduler": lambda item: item[0],
            "TTFT mean": lambda item: _seconds(item[1].mean_ttft_s),
            "TTFT p50": lambda item: _seconds(percentile(item[1].all("ttft_s"), 50)),
            "TTFT p99": lambda item: _seconds(percentile(item[1].all("ttft_s"), 99)),
            "ITL p99": lambda item: _seconds(item[1].gap_percentile(99)),
            "ITL max": lambda item: _seconds(item[1].gap_percentile(100)),
            "queue p99 high": lambda item: _seconds(percentile(item[1].tiers[Priority.HIGH].queue_s, 99)),
            "queue p99 low": lambda item: _seconds(percentile(item[1].tiers[Priority.LOW].queue_s, 99)),
            "queue max low": lambda item: _seconds(percentile(item[1].tiers[Priority.LOW].queue_s, 100)),
            "output tok/s": lambda item: format_rate(item[1].output_rate),
            "prefix hits": lambda item: _rate(item[1].hit_rate),
            "computed tokens": lambda item: f"{item[1].counters.num_prompt_tokens_computed:,}",
            "preemptions": lambda item: f"{item[1].counters.num_preemptions:,}",
        },
    )


_COUNTS = ("num_finished", "num_refused", "num_most_waiting", "num_checks")
_TIMES = ("elapsed_s", "host_s", "busy_s", "output_rate", "hit_rate", "mean_ttft_s")


def as_document(found: Mapping[str, SimulationMetrics]) -> list[dict[str, Any]]:
    """The same for JSON, times in seconds."""
    return [
        {
            "scheduler": name,
            **document_of(metrics, *_COUNTS, *_TIMES),
            "counters": asdict(metrics.counters),
            "tiers": {name: _tier_document(one) for name, one in _by_tier(metrics).items()},
        }
        for name, metrics in found.items()
    ]


def _by_tier(metrics: SimulationMetrics) -> dict[str, TierMetrics]:
    flood = {FLOOD: metrics.flood} if metrics.flood.e2e_s else {}
    return {tier.name.lower(): found for tier, found in metrics.tiers.items()} | flood


def _tier_document(tier: TierMetrics) -> dict[str, Any]:
    times = {"queue_s": tier.queue_s, "ttft_s": tier.ttft_s, "e2e_s": tier.e2e_s, "itl_s": tier.gaps_s}
    return {
        "num_finished": len(tier.e2e_s),
        "num_refused": tier.num_refused,
        **{f"{name}_p{percent}": percentile(times[name], percent) for name in times for percent in (50, 95, 99)},
        "itl_s_max": percentile(tier.gaps_s, 100),
    }


def _seconds(value: float) -> str:
    return f"{1000 * value:,.0f} ms" if value < 10 else f"{value:,.1f} s"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


_ENDLESS_QUEUE = QueueLimits(max_num_waiting=10**9, max_queued_tokens=10**12)
_Group = argparse._ArgumentGroup

_TRACE, _CLIENTS, _TURNS = "a trace", "traffic of --clients", "traffic of --turns"
_POISSON, _BURSTS = "traffic of --pattern poisson", "traffic of --pattern bursts"
_LENGTHS = ("own_tokens", "output_tokens", "spread", "prefix_tokens")
_DRAWN = (*_LENGTHS, "shared_share", "num_prefixes")
_OPTIONS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        _TRACE: ("trace", "shrink", "speed_up", "tiers", "write_trace", "flood"),
        _CLIENTS: ("clients", *_DRAWN),
        _TURNS: ("turns", "pause_s", "rate", *_LENGTHS, "tiers", "write_trace", "flood"),
        _POISSON: ("pattern", "rate", *_DRAWN, "tiers", "write_trace", "flood"),
        _BURSTS: ("pattern", "burst_size", "rate", *_DRAWN, "tiers", "write_trace", "flood"),
    }
)
"""The options that change each kind of traffic. Those that are not here change all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench simulate`."""
    _add_traffic(parser.add_argument_group("traffic"))
    _add_device(parser.add_argument_group("device"))
    _add_scheduler(parser.add_argument_group("scheduler"))
    report = parser.add_argument_group("report")
    report.add_argument("--ablate", action="store_true", help="replay again without each mechanism")
    report.add_argument(
        "--explain", type=from_0, metavar="N", help="say for each step why request N, counted from 0, waited"
    )
    add_json_argument(parser)


def _add_traffic(group: _Group) -> None:
    mix = Mix()
    group.add_argument("--trace", type=Path, metavar="FILE", help="replay this trace instead of generated traffic")
    _add(group, "--shrink", from_1, 1, "divide the lengths of a trace by 2, 4, 8 or 16")
    _add(group, "--speed-up", above_0, 1.0, "divide the times between arrivals of a trace")
    _add(group, "--num-requests", from_1, 2000, "requests to generate, or at most of a trace")
    group.add_argument("--pattern", choices=("poisson", "bursts"), default="poisson", help="how requests arrive")
    group.add_argument(
        "--clients",
        nargs=3,
        type=from_0,
        metavar=("HIGH", "NORMAL", "LOW"),
        help="closed loop: number of clients, each of which sends its next request when its answer has ended",
    )
    _add(group, "--rate", above_0, 7.0, "mean requests a second")
    _add(group, "--burst-size", from_1, 32, "requests in a burst")
    _add(group, "--own-tokens", above_0, mix.own_tokens, "mean prompt tokens after a shared prefix")
    _add(group, "--output-tokens", above_0, mix.output_tokens, "mean output tokens")
    _add(group, "--spread", at_least_0, mix.spread, "of the logarithms of both; 0: the same for all requests")
    _add(group, "--shared-share", _from_0_to_1, mix.shared_share, "share of requests that begin with a shared prefix")
    _add(group, "--num-prefixes", from_1, mix.num_prefixes, "number of shared prefixes")
    _add(group, "--prefix-tokens", from_1, mix.prefix_tokens, "tokens of a shared prefix")
    group.add_argument(
        "--tiers",
        nargs=3,
        type=at_least_0,
        default=mix.tiers,
        metavar=("HIGH", "NORMAL", "LOW"),
        help=f"shares; default: {' '.join(map(str, mix.tiers))}",
    )
    _add(group, "--turns", from_1, 1, "above 1: conversations, whose turns add --own-tokens to the prompt")
    _add(group, "--pause-s", above_0, 60.0, "mean seconds between arrivals of turns")
    _add(
        group,
        "--flood",
        from_0,
        0,
        "requests that another key of NORMAL keeps open; also replays as if all had one key",
    )
    group.add_argument("--write-trace", type=Path, metavar="FILE", help="write the traffic for --trace and --shrink 16")
    _add(group, "--seed", int, 0, "of generated traffic and drafts")


def _add_device(group: _Group) -> None:
    group.add_argument(
        "--profile", choices=tuple(PROFILES), default="cpu", help="step costs of a machine; default: cpu"
    )
    group.add_argument("--self-running", action="store_true", help="the device computes asynchronously, as a GPU does")
    _add(group, "--num-blocks", from_1, 4096, "KV blocks of 32 tokens")
    group.add_argument("--kv-disk", type=byte_size, metavar="SIZE", help="keep prefixes on disk; also replay without")
    group.add_argument("--kv-disk-writes-per-day", type=byte_size, default="64GB", metavar="SIZE", help="default: 64GB")
    group.add_argument(
        "--disk-gb-per-s",
        nargs=2,
        type=above_0,
        default=(3.0, 2.0),
        metavar=("READ", "WRITE"),
        help="rates of the disk; default: 3 2",
    )


def _add_scheduler(group: _Group) -> None:
    limits = SchedulerLimits()
    _add(group, "--max-num-seqs", from_1, limits.max_num_seqs, "most running requests")
    _add(group, "--max-num-batched-tokens", from_1, limits.max_num_batched_tokens, "token budget of one step")
    _add(group, "--target-step-ms", above_0, 1000 * TARGET_STEP_S, "target time of a step while requests decode")
    _add(group, "--max-step-ms", above_0, 1000 * limits.max_step_s, "target time of a step without decodes")
    _add(group, "--aging-rate", at_least_0, limits.aging_rate, "priority levels gained per second of waiting")
    _add(group, "--max-num-waiting", from_1, 10**9, "most waiting requests of each tier")
    group.add_argument(
        "--draft-acceptance",
        nargs="+",
        type=_from_0_to_1,
        default=[],
        metavar="SHARE",
        help="drafts of up to 8 tokens, each accepted with this probability; several are dealt to the requests in "
        "turn; also replays without drafts",
    )
    group.add_argument(
        "--draft-share",
        type=_from_0_to_1,
        default=1.0,
        metavar="SHARE",
        help="share of steps that find a draft; default: 1",
    )
    group.add_argument("--queue-timeout-s", type=above_0, metavar="N", help="longest time in the queue; default: none")


def _from_0_to_1(text: str) -> float:
    if (value := at_least_0(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def _add(group: _Group, flag: str, kind: Callable[[str], float], default: float, text: str) -> None:
    group.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text}; default: {default:,}")


def run(args: argparse.Namespace) -> int:
    """Prints totals, a table by tier, and a table of variants if there are several. Raises `ConfigError`."""
    _check_options(args)
    arrivals = [] if args.clients else _arrivals(args)
    num_requests = len(arrivals) or args.num_requests
    if args.explain is not None and args.explain >= num_requests:
        raise ConfigError(f"--explain is {args.explain}, but the requests are only 0 to {num_requests - 1}.")
    found: dict[str, SimulationMetrics] = {}
    if args.write_trace is not None:
        write_trace(args.write_trace, arrivals)
    for name, variant in _variants(args).items():
        print_progress(f"replaying {num_requests:,} requests: {name}")
        found[name] = _replay(variant(), arrivals, args)
    first = next(iter(found.values()))
    print(f"{summarize(first)}\n\n{render_tiers(first)}")
    if len(found) > 1:
        print(f"\n{render_variants(found)}")
    profile = asdict(PROFILES[args.profile])
    document = {"benchmark": "simulate", "settings": vars(args), "profile": profile, "results": as_document(found)}
    write_json(args.json, document)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that change nothing because of others. One that is given its default passes."""
    given, kind = changed_options(args, add_arguments), _kind(args)
    refuse_options(given, {name for names in _OPTIONS.values() for name in names}.difference(_OPTIONS[kind]), kind)
    if args.kv_disk is None:
        refuse_options(given, ("kv_disk_writes_per_day", "disk_gb_per_s"), "a replay without --kv-disk")
    if not args.draft_acceptance:
        refuse_options(given, ("draft_share",), "a replay without --draft-acceptance")
    if args.clients is not None and not any(args.clients):
        raise ConfigError(f"--clients is {' '.join(map(str, args.clients))}; name at least one client.")


def _kind(args: argparse.Namespace) -> str:
    if args.clients is not None:
        return _CLIENTS
    if args.trace is not None:
        return _TRACE
    if args.turns > 1:
        return _TURNS
    return _POISSON if args.pattern == "poisson" else _BURSTS


def _variants(args: argparse.Namespace) -> dict[str, partial[Simulation]]:
    """What is replayed: the scheduler with or without some of its mechanisms."""
    limits = _limits(args)
    plain = partial(
        Simulation,
        limits=limits,
        num_blocks=args.num_blocks,
        cost=replace(PROFILES[args.profile].cost, is_self_running=args.self_running),
        explained=args.explain,
        disk=_disk(args),
    )
    full = plain
    variants = {"all mechanisms": full}
    if args.draft_acceptance:
        mix = DraftMix(acceptances=tuple(args.draft_acceptance), found_share=args.draft_share, seed=args.seed)
        full = partial(plain, drafts=mix)
        variants = {"all mechanisms": full, "no drafts": plain}
    if args.kv_disk is not None:
        variants["no disk"] = partial(full, disk=None)
    if args.flood:
        variants["one key"] = partial(full, is_fair=False)
    if args.ablate:
        variants |= {
            "no stall bound": partial(full, limits=replace(limits, bound_stalls=False)),
            "no prefix deduplication": partial(full, limits=replace(limits, deduplicate_prefixes=False)),
            "no step ahead": partial(full, is_async=False),
            "no aging": partial(full, limits=replace(limits, aging_rate=0.0)),
            "no prefix cache": partial(full, enable_prefix_caching=False, disk=None),
        }
    return variants


def _disk(args: argparse.Namespace) -> DiskCost | None:
    if args.kv_disk is None:
        return None
    block_bytes = PROFILES[args.profile].block_bytes
    if args.kv_disk < block_bytes:
        raise ConfigError(f"--kv-disk is {args.kv_disk} bytes, and a block has {block_bytes}; write a size like 10GB.")
    read, write = (1e9 * rate for rate in args.disk_gb_per_s)
    return DiskCost(
        num_records=args.kv_disk // block_bytes,
        block_bytes=block_bytes,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        bytes_per_day=args.kv_disk_writes_per_day,
    )


def _replay(simulation: Simulation, arrivals: Sequence[TracedRequest], args: argparse.Namespace) -> SimulationMetrics:
    """A flood lasts from the beginning to the last arrival."""
    if args.clients is not None:
        loop = ClosedLoop(Traffic(_mix(args), args.seed), dict(zip(Priority, args.clients)), args.num_requests)
        metrics = simulation.run(loop.first(), loop.next_of)
    elif args.flood:
        traffic = Traffic(_mix(args), args.seed + 1, first_id=2**40)
        until_s = max((traced.arrival_s for traced in arrivals), default=0.0)
        flood = Flood(traffic, Priority.NORMAL, args.flood, until_s)
        metrics = simulation.run([*flood.first(), *arrivals], flood.next_of)
    else:
        metrics = simulation.run(arrivals)
    if simulation.explanation:
        print("\n".join(simulation.explanation), end="\n\n")
    return metrics


def _arrivals(args: argparse.Namespace) -> list[TracedRequest]:
    if not any(args.tiers):
        raise ConfigError(f"--tiers is {' '.join(map(str, args.tiers))}; one share must be above 0.")
    if args.trace is not None:
        options = {"shrink": args.shrink, "speed": args.speed_up, "tiers": args.tiers, "seed": args.seed}
        return read_trace(args.trace, **options)[: args.num_requests]
    traffic = Traffic(_mix(args), args.seed)
    if args.turns > 1:
        return traffic.chats(args.rate, args.turns, args.pause_s, args.num_requests)
    endless = traffic.poisson(args.rate) if args.pattern == "poisson" else traffic.bursts(args.rate, args.burst_size)
    return list(islice(endless, args.num_requests))


def _mix(args: argparse.Namespace) -> Mix:
    return Mix(**{field.name: getattr(args, field.name) for field in fields(Mix)})


def _limits(args: argparse.Namespace) -> SchedulerLimits:
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {args.max_num_batched_tokens}; it must be at least --max-num-seqs, "
            f"{args.max_num_seqs}."
        )
    of_tier = replace(_ENDLESS_QUEUE, max_num_waiting=args.max_num_waiting)
    return SchedulerLimits(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        aging_rate=args.aging_rate,
        target_step_s=args.target_step_ms / 1000,
        max_step_s=args.max_step_ms / 1000,
        context_doubling_tokens=PROFILES[args.profile].cost.context_doubling_tokens,
        queue=_ENDLESS_QUEUE,
        tiers=dict.fromkeys((*(tier.name.lower() for tier in Priority), FLOOD), of_tier),
        queue_timeout_s=args.queue_timeout_s,
    )
