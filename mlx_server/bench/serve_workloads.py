"""What is asked of a server: conversations of one or more turns, made up by seed or read from a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mlx_server.bench.mooncake import BLOCK_TOKENS, TraceLine
from mlx_server.bench.serve_client import Message
from mlx_server.bench.serve_datasets import Prompt
from mlx_server.bench.serve_prompts import Prompts, user_message


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client says next, and how much answer it wants. The answers before it are sent along."""

    messages: tuple[Message, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one client, each sent when the one before it was answered. `arrival_s` counts from the run's
    start; None where the load generator decides it."""

    turns: tuple[Turn, ...]
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The sessions that are measured, and those that are sent, one by one, before."""

    sessions: tuple[Session, ...]
    prelude: tuple[Session, ...] = ()

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


@dataclass(frozen=True, slots=True)
class Span:
    """A length in tokens, drawn evenly from `low` to `high`."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Shape:
    """A made-up workload: `num_prompts` conversations of `turns` turns, each turn adding `input_len` tokens
    and asking for `output_len`. All begin with one common prefix; `is_warm` has it sent once beforehand."""

    num_prompts: int
    prefix_len: int
    input_len: Span
    output_len: Span
    turns: int = 1
    is_warm: bool = False


def _fixed(tokens: int) -> Span:
    return Span(tokens, tokens)


SHAPES: MappingProxyType[str, Shape] = MappingProxyType(
    {
        "random": Shape(32, 0, _fixed(256), _fixed(64)),
        "uniform": Shape(16, 0, _fixed(128), _fixed(128)),
        "shared-prefix": Shape(16, 1024, _fixed(32), _fixed(32)),
        "shared-prefix-warm": Shape(16, 1024, _fixed(32), _fixed(32), is_warm=True),
        "mixed": Shape(32, 0, Span(16, 2048), Span(8, 256)),
        "multi-turn": Shape(8, 0, _fixed(64), _fixed(64), turns=4),
        "agent": Shape(8, 4096, _fixed(512), _fixed(64), turns=4),
    }
)
"""uniform, shared-prefix and mixed are those of `bench throughput`. agent: long common instructions, then
results of tools in, short calls out."""


def make_plan(shape: Shape, prompts: Prompts, seed: object) -> Plan:
    """The workload of this shape; the seed and the prompts' own decide all of it."""
    rng = random.Random(f"workload:{seed}")
    head = f"{prompts.text(shape.prefix_len)} " if shape.prefix_len else ""

    def turn(number: int) -> Turn:
        lead = " " if number else head
        return Turn((user_message(lead + prompts.text(shape.input_len.draw(rng))),), shape.output_len.draw(rng))

    sessions = tuple(Session(tuple(turn(number) for number in range(shape.turns))) for _ in range(shape.num_prompts))
    prelude = (Session((Turn((user_message(head + prompts.text(8)),), 1),)),) if shape.is_warm else ()
    return Plan(sessions, prelude)


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace arrives `speed` times as fast as it was recorded, with lengths divided by `shrink`."""

    speed: float = 1.0
    shrink: int = 1


def plan_dataset(lines: Sequence[Prompt | TraceLine], prompts: Prompts, *, output_len: int, replay: Replay) -> Plan:
    """A file's prompts as they are, or text of a trace's lengths at a trace's times. `output_len` is for
    prompts that do not say theirs."""
    return Plan(
        tuple(
            _of_prompt(line, output_len) if isinstance(line, Prompt) else _of_trace(line, prompts, replay)
            for line in lines
        )
    )


def _of_prompt(line: Prompt, output_len: int) -> Session:
    return Session((Turn(line.messages, line.output_len or output_len),))


def _of_trace(line: TraceLine, prompts: Prompts, replay: Replay) -> Session:
    """Equal hash ids become equal text."""
    num_tokens = max(line.input_len // replay.shrink, 1)
    block_len = BLOCK_TOKENS // replay.shrink
    parts = [
        prompts.named_text(hash_id, min(block_len, num_tokens - number * block_len))
        for number, hash_id in enumerate(line.hash_ids)
        if number * block_len < num_tokens
    ]
    own = num_tokens - len(line.hash_ids) * block_len
    if own > 0:
        parts.append(prompts.text(own))
    turn = Turn((user_message(" ".join(parts)),), max(line.output_len // replay.shrink, 1))
    return Session((turn,), line.arrival_s / replay.speed)


def warm_up_sessions(plan: Plan, prompts: Prompts, count: int) -> list[Session]:
    """`count` requests as long as the plan's first, in other words: they warm a server, not its prefix cache."""
    first = plan.sessions[0].turns[0]
    num_words = sum(len(str(message["content"]).split()) for message in first.messages)
    return [Session((Turn((user_message(prompts.words(num_words)),), first.max_tokens),)) for _ in range(count)]
