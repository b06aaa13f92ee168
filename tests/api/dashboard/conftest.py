"""The live page's figures come more often than once a second, so that tests need not wait for them."""

from __future__ import annotations

import pytest

from mlx_server.api import dashboard


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "PERIOD_S", 0.1)
