"""Fixtures of several tests over a whole engine."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mlx_server.batching.speculation import draft_burst
from mlx_server.batching.speculation.draft_burst import Burst
from mlx_server.batching.speculation.draft_costs import StepRoom


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs."""
    monkeypatch.setattr(draft_burst, "choose_burst", _always)
    monkeypatch.setattr("mlx_server.batching.speculation.drafting.choose_depths", lambda proposed, *_: dict(proposed))


def _always(rates: Mapping[str, float], most: int, room: StepRoom, *costs: object, **kind: object) -> Burst:
    names = sorted(rates)[: room.most // most]
    return Burst(most, frozenset(names), 1e9) if names else draft_burst.NO_BURST
