"""The share of seats, blocks and prompt tokens for requests that have aged past better tiers (rule 4)."""

from __future__ import annotations

import math
from collections import Counter

from mlx_server.batching.request_table import RequestTable, Step
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Priority, Request, RequestStatus

SHARE = 8
"""One in this many seats, blocks and prompt tokens is for aged requests. With a fourth, an eighth and a sixteenth,
under a flood of HIGH, the slowest hundredth of LOW's first tokens came after 43, 46 and 57 s, that of NORMAL's after
33, 36 and 43 s, and HIGH's median was 1.1, 1.2 and 0.9 s. On a slow machine below saturation (`m2-max`) LOW's took 116,
226 and 308 s, NORMAL's 91, 64 and 44 s."""

_CREDIT = 4 * BLOCK_SIZE
"""How many tokens an aged request must be due before a better prompt gives some up: twice this for HIGH's prompts, once
for NORMAL's. Steps of worse prompts make up for it. Without this credit, one in three HIGH prompts of 256 tokens took a
ninth or a fifth longer; with half of it, some of 512 tokens still did. LOW's share is the same with and without."""


class AgedShare:
    """An aged request is older than all requests of better tiers by so much that it is more urgent: 20 s between LOW
    and HIGH at the default aging rate. Without a share it would still wait until no better tier has work.

    Seats and blocks: a waiting aged request is promoted if the promoted ones then hold no more than the share. Better
    tiers cannot take a promoted request's seat.

    Tokens: while better tiers get prompt tokens, the aged prompt is due one for every seven of theirs. It gets
    what it is due in pieces of a block, since a chunk of a few tokens costs nearly as much as one of 32.

        HIGH gets 444 tokens a step, an aged LOW prompt waits; HIGH's credit is 256 tokens
        step      1     2     3     4     5     6     7
        due       0    62   125   189   252   316   310   before the step
        LOW       1     0     0     0     0    60    54   1 to start it; then what is due beyond 256
        HIGH    443   444   444   444   444   384   390
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._blocks = table.blocks
        self._waiting = table.waiting
        self._limits = table.limits
        self._due = 0.0  # prompt tokens
        self._started = Counter({Priority.HIGH: SHARE})  # starts by tier since the last promotion

    def on_start(self, request: Request) -> None:
        """A request has started, promoted or not."""
        if request.is_promoted:
            self._started.clear()
        else:
            self._started[request.priority] += 1

    def promote(self, request: Request) -> None:
        """Promotes a running request: it keeps its seat."""
        self._table.promote(request)
        self._started.clear()

    def promoted(self) -> Request | None:
        """The next request of the tier with the most urgent one, if that is not the best tier that waits, and the share
        has room for the request."""
        heads = self._waiting.heads()
        if len(heads) < 2:
            return None
        first = min(heads, key=lambda head: self._waiting.oldest_age(head.priority))
        return None if first is heads[0] or not self.may_promote(first) else first

    def may_promote(self, request: Request) -> bool:
        """Whether the share of seats and blocks has room for one more request.

        A request that needs n shares by itself is promoted after n - 1 starts of better tiers, if no promoted request
        runs. With 8 seats a share is one seat: the oldest LOW request is promoted at once. With 4 seats a seat is two
        shares: it waits for one start of a better tier first.
        """
        blocks = self._blocks
        beside = [other for other in self._table.running if other.is_promoted]
        num_blocks = sum([blocks.groups.num_needed(other.num_tokens) for other in [*beside, request]])
        num_shares = SHARE * max((len(beside) + 1) / self._limits.max_num_seqs, num_blocks / blocks.num_blocks)
        num_better = sum([count for priority, count in self._started.items() if priority < request.priority])
        return num_shares <= 1.0 or (not beside and num_better >= min(math.ceil(num_shares), SHARE) - 1)

    def most_urgent(self, prefilling: list[Request], first: Request) -> Request | None:
        """The most urgent prompt by age, if it is of a worse tier than `first`; else None. One that goes before older
        requests of other clients is as urgent as those."""
        promoted = self.promoted()
        able = prefilling if promoted is None else [*prefilling, promoted]

        def urgency(request: Request) -> float:
            return self._waiting.oldest_age(request.priority)[0] if request is promoted else request.urgent_key

        oldest = min(able, key=urgency, default=first)
        return oldest if oldest.priority > first.priority else None

    def num_kept(self, aged: Request, wanted: int, first: Request, num_tokens: int) -> int:
        """How many of a step's `num_tokens` are kept for the aged prompt, which can use `wanted`: what it is due beyond
        the credit of the `first` prompt, once that makes a block, and half of the step at most. A waiting one starts
        with a single token."""
        due = int(self._due) - _CREDIT * (Priority.LOW - first.priority)
        if due < min(wanted, BLOCK_SIZE):
            return int(aged.status is RequestStatus.WAITING)
        return min(due, wanted, max(num_tokens // 2, 1))

    def settle(self, step: Step, aged: Request | None) -> None:
        """Books what the aged prompt is due after a step. While a promoted request decodes the next one cannot start,
        and what is due is kept for it."""
        if aged is None:
            if not any(request.is_promoted for request in self._table.running):
                self._due = 0.0
            return
        num_better = sum([count for request, count in step.given.items() if request.priority < aged.priority])
        due = self._due + num_better / (SHARE - 1) - (step.given.total() - num_better)
        most = self._limits.max_num_batched_tokens
        credit = _CREDIT * Priority.LOW  # with less, small steps would never pay beyond it
        self._due = float(min(max(due, -most), credit + most))
