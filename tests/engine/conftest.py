"""Fixtures of several tests over a whole engine."""

from __future__ import annotations

import pytest

from tests.drafters import draft_always


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs."""
    draft_always(monkeypatch)
