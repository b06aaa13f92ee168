"""Many simulated servers behind a simulated router: conversations, placed by three policies.

- `round-robin`: one server after the other;
- `sticky`: all turns of a conversation on one server, by a hash;
- `events`: where least is to be computed, by the KV events that the servers publish. They are those of a real server,
  encoded and decoded, and reach the router's index at the end of a tick of 50 ms. A request that is in progress on a
  server counts as 256 tokens to compute there.

A server is the real scheduler on a simulated device (`engine.py`). A turn's prompt is the conversation so far and some
new tokens; the answers in it count as new, too, so hits are somewhat fewer than behind real clients.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, cycle

import msgspec

from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.bench.arguments import above_0, add_json_argument, from_1
from mlx_server.bench.lab.simulator.engine import PROFILES, TARGET_STEP_S, Simulation, block_hashes, percentile
from mlx_server.bench.lab.simulator.traces import TracedRequest
from mlx_server.bench.tables import render_items, tell, write_json
from mlx_server.config import BLOCK_SIZE
from mlx_server.engine.prefixes.kv_events import CacheEvents, ModelEvents, event_hash
from mlx_server.engine.prefixes.mirror import PrefixMirror
from mlx_server.errors import ConfigError
from mlx_server.request import Priority

POLICIES = ("round-robin", "sticky", "events")
TICK_S = 0.05
_TOKENS_OF_A_REQUEST = 256
_RENDER_S = 0.0005
"""Of a core, for a conversation that is known but for its last message (BENCHMARKS.md)."""


@dataclass(frozen=True, slots=True)
class Turn(TracedRequest):
    """One request of a conversation."""

    conversation: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """What conversations look like, and how often one begins at a server on average. Each begins with one of
    `num_systems` prompts, the popular ones more often (Zipf)."""

    num_a_server: int = 8
    num_turns: int = 4
    begin_s: float = 8.0
    think_s: float = 5.0
    num_systems: int = 64
    system_tokens: int = 512
    own_tokens: int = 192
    output_tokens: int = 64


@dataclass(slots=True)
class FleetMetrics:
    """What came of it. Event figures are of the policy that reads events."""

    policy: str
    num_servers: int
    num_requests: int = 0
    elapsed_s: float = 0.0
    host_s: float = 0.0
    hit_rate: float = 0.0
    largest_share: float = 0.0
    """The prompt tokens of the server that has most, over the mean."""
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    num_events: int = 0
    event_bytes: int = 0
    num_index_entries: int = 0
    """Blocks in the router's index, each server's counted."""

    @property
    def render_cores(self) -> float:
        """What share of a core each server spends if the router asks all of them to render all requests."""
        return self.num_requests / self.elapsed_s * _RENDER_S


@dataclass(slots=True)
class _Index:
    """Which servers have a block, as bits, by its hash."""

    servers: dict[int, int] = field(default_factory=dict)
    num_entries: int = 0

    def take(self, payload: bytes, server: int) -> int:
        """Follows one server's batch of events; how many there were."""
        _, events, _ = msgspec.msgpack.decode(payload)
        bit = 1 << server
        for event in events:
            if event["type"] == "BlockStored":
                for block in event["block_hashes"]:
                    known = self.servers.get(block, 0)
                    self.num_entries += not known & bit
                    self.servers[block] = known | bit
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    left = self.servers.pop(block) & ~bit
                    self.num_entries -= 1
                    if left:
                        self.servers[block] = left
        return len(events)

    def hits(self, hashes: Sequence[bytes], num_servers: int) -> list[int]:
        """How many leading blocks each server has."""
        found, left = [0] * num_servers, (1 << num_servers) - 1
        for depth, digest in enumerate([*hashes, b""]):
            have = left & self.servers.get(event_hash(digest), 0) if digest else 0
            ended, left = left & ~have, have
            while depth and ended:
                lowest = ended & -ended
                found[lowest.bit_length() - 1] = depth
                ended ^= lowest
            if not left:
                break
        return found


class Fleet:
    """One run of `num_servers` servers behind one policy."""

    def __init__(self, policy: str, num_servers: int, talk: Talk, profile: str, num_blocks: int, seed: int = 0) -> None:
        self.metrics = FleetMetrics(policy, num_servers)
        self._talk, self._rng = talk, random.Random(seed)
        machine = PROFILES[profile]
        limits = SchedulerLimits(
            target_step_s=TARGET_STEP_S,
            context_doubling_tokens=machine.cost.context_doubling_tokens,
            queue=QueueLimits(max_num_waiting=10**9, max_queued_tokens=10**12),
        )
        self._servers = [Simulation(limits, num_blocks, machine.cost, check_every=0) for _ in range(num_servers)]
        self._told: list[ModelEvents] = []
        for server in self._servers:
            server.next_of = self._on_end
            if policy == "events":
                self._told.append(ModelEvents("", lambda: None))
                self._told[-1].open(CacheEvents(PrefixMirror((None,)), str, lambda keys: keys))
                server.scheduler.blocks.watch_prefixes(self._told[-1].add)
        self._index = _Index()
        self._coming: list[tuple[float, int, Turn]] = []
        self._order, self._fresh_ids = count(), count(10**6)
        self._turns = cycle(range(num_servers))
        self._place: Callable[[Turn], int] = {
            "round-robin": lambda turn: next(self._turns),
            "sticky": lambda turn: random.Random(turn.conversation).randrange(num_servers),
            "events": self._by_events,
        }[policy]

    def run(self) -> FleetMetrics:
        """All conversations to their end. Raises `AssertionError` if any server's books do not agree."""
        start_s, now = time.perf_counter(), 0.0
        self._begin_conversations()
        while self._coming or any(server.num_in_progress for server in self._servers):
            now += TICK_S
            while self._coming and self._coming[0][0] < now:
                turn = heapq.heappop(self._coming)[2]
                server = self._servers[self._place(turn)]
                server.advance(turn.arrival_s)
                server.arrive(turn)
            for server in self._servers:
                if server.num_in_progress:
                    server.advance(now)
            self._read_events(now)
        for server in self._servers:
            server.close()
        self._sum_up(now, time.perf_counter() - start_s)
        return self.metrics

    def _begin_conversations(self) -> None:
        talk, rng = self._talk, self._rng
        per_system, popularity = talk.system_tokens // BLOCK_SIZE, [1 / n for n in range(1, talk.num_systems + 1)]
        now = 0.0
        for conversation in range(talk.num_a_server * len(self._servers)):
            now += rng.expovariate(len(self._servers) / talk.begin_s)
            system = rng.choices(range(talk.num_systems), popularity)[0]
            ids = tuple(range(system * per_system, (system + 1) * per_system))
            self._send(now, conversation, 1, ids)

    def _send(self, arrival_s: float, conversation: int, number: int, ids: tuple[int, ...]) -> None:
        """A turn whose prompt goes on from the blocks `ids`."""
        talk = self._talk
        num_new = talk.own_tokens + (talk.output_tokens if number > 1 else 0)
        ids = (*ids, *(next(self._fresh_ids) for _ in range(num_new // BLOCK_SIZE)))
        num_tokens, tier = len(ids) * BLOCK_SIZE, Priority.NORMAL
        turn = Turn(arrival_s, tier, num_tokens, talk.output_tokens, ids, BLOCK_SIZE, conversation, number)
        heapq.heappush(self._coming, (arrival_s, next(self._order), turn))

    def _on_end(self, ended: TracedRequest, now: float) -> None:
        assert isinstance(ended, Turn)
        if ended.number < self._talk.num_turns:
            think_s = max(TICK_S, self._rng.expovariate(1 / self._talk.think_s))
            self._send(now + think_s, ended.conversation, ended.number + 1, ended.hash_ids)

    def _by_events(self, turn: Turn) -> int:
        hits = self._index.hits(block_hashes(turn), len(self._servers))
        most = (turn.num_prompt_tokens - 1) // BLOCK_SIZE
        costs = [
            _TOKENS_OF_A_REQUEST * server.num_in_progress - BLOCK_SIZE * min(hit, most)
            for server, hit in zip(self._servers, hits)
        ]
        least = min(costs)
        return self._rng.choice([server for server, cost in enumerate(costs) if cost == least])

    def _read_events(self, now: float) -> None:
        for number, told in enumerate(self._told):
            for _, payload in told.batches(now, msgspec.msgpack.encode):
                self.metrics.num_events += self._index.take(payload, number)
                self.metrics.event_bytes += len(payload)
        self.metrics.num_index_entries = max(self.metrics.num_index_entries, self._index.num_entries)

    def _sum_up(self, now: float, host_s: float) -> None:
        found, all_of = self.metrics, [server.metrics for server in self._servers]
        prompts = [one.counters.num_prompt_tokens for one in all_of]
        ttft_s = [value for one in all_of for value in one.tiers[Priority.NORMAL].ttft_s]
        queried = sum(one.counters.num_prefix_query_tokens for one in all_of)
        found.num_requests, found.elapsed_s, found.host_s = len(ttft_s), now, host_s
        found.hit_rate = sum(one.counters.num_prefix_hit_tokens for one in all_of) / queried
        found.largest_share = max(prompts) * len(prompts) / sum(prompts)
        found.ttft_p50_s, found.ttft_p99_s = percentile(ttft_s, 50), percentile(ttft_s, 99)


def render(found: Sequence[FleetMetrics]) -> str:
    """One row a run."""
    return render_items(
        found,
        {
            "servers": lambda one: f"{one.num_servers:,}",
            "policy": lambda one: one.policy,
            "requests": lambda one: f"{one.num_requests:,}",
            "prefix hits": lambda one: f"{one.hit_rate:.1%}",
            "most/mean": lambda one: f"{one.largest_share:.2f}",
            "TTFT p50": lambda one: f"{one.ttft_p50_s:.2f} s",
            "TTFT p99": lambda one: f"{one.ttft_p99_s:.2f} s",
            "events/s": lambda one: f"{one.num_events / one.elapsed_s:,.0f}",
            "kB/s": lambda one: f"{one.event_bytes / one.elapsed_s / 1000:,.1f}",
            "index entries": lambda one: f"{one.num_index_entries:,}",
            "/render, cores": lambda one: f"{one.render_cores:.3f}",
        },
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench fleet`."""
    talk = Talk()
    parser.add_argument("--servers", type=from_1, nargs="+", default=[1, 2, 10, 100], metavar="N", help="how many")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="how requests are placed")
    parser.add_argument("--profile", choices=tuple(PROFILES), default="m2-max", help="what a server's steps cost")
    parser.add_argument("--num-blocks", type=from_1, default=2048, metavar="N", help="KV blocks of a server")
    for name, kind, text in (
        ("num_a_server", from_1, "conversations for each server"),
        ("num_turns", from_1, "turns of a conversation"),
        ("begin_s", above_0, "mean seconds between beginnings of conversations, for each server"),
        ("think_s", above_0, "mean seconds from an answer to the next turn"),
        ("num_systems", from_1, "different prompts that conversations begin with"),
        ("system_tokens", from_1, "tokens of such a prompt"),
        ("own_tokens", from_1, "new prompt tokens of a turn"),
        ("output_tokens", from_1, "tokens of an answer"),
    ):
        flag, default = f"--{name.replace('_', '-')}", getattr(talk, name)
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text}; default: {default}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is made up")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a table of all runs."""
    talk = Talk(**{name: getattr(args, name) for name in asdict(Talk())})
    most = talk.system_tokens + talk.num_turns * (talk.own_tokens + talk.output_tokens)
    if talk.own_tokens < BLOCK_SIZE or most > args.num_blocks * BLOCK_SIZE:
        raise ConfigError(
            f"A turn needs --own-tokens of {BLOCK_SIZE} at least, and a conversation, of {most:,} tokens here, must "
            f"fit into --num-blocks ({args.num_blocks:,} of {BLOCK_SIZE})."
        )
    found = []
    for num_servers in args.servers:
        for policy in args.policies:
            tell(f"{num_servers:,} servers, {policy}")
            found.append(Fleet(policy, num_servers, talk, args.profile, args.num_blocks, args.seed).run())
    print(render(found))
    write_json(args.json, {"benchmark": "fleet", "settings": vars(args), "results": [asdict(one) for one in found]})
    return 0
