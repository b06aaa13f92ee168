"""Drafts for the simulator, whose requests have no text: how often there are some, and how many of them are right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_server.outputs import SampledToken
from mlx_server.request import Request

_TOKEN = SampledToken(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMix:
    """`acceptances` are dealt to requests in turn: how often a draft is what the model says, if all before it were.
    `found_share` is how often looking up finds something, `most` how many tokens then at most."""

    acceptances: tuple[float, ...]
    found_share: float = 1.0
    most: int = 8
    seed: int = 0


class MadeUpDrafts:
    """A drafter, and the model that it drafts for: both know the mix only. Request ids are numbers."""

    def __init__(self, mix: DraftMix) -> None:
        self._mix = mix
        self._rng = random.Random(mix.seed)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return (_TOKEN.token_id,) * most if self._rng.random() < self._mix.found_share else ()

    def forget(self, request: Request) -> None:
        """Nothing is kept of a request."""

    def sampled(self, request_id: str, num_drafts: int) -> SampledToken:
        """What a step gives a request: the drafts that are right, and a token behind them."""
        acceptance, num_right = self._mix.acceptances[int(request_id) % len(self._mix.acceptances)], 0
        while num_right < num_drafts and self._rng.random() < acceptance:
            num_right += 1
        return _TOKEN._replace(accepted=(_TOKEN,) * num_right)
