"""How long command buffers become, by the machine's memory."""

from __future__ import annotations

import os

import pytest

from mlx_server.runtime.memory import max_elements, set_limits

GIB = 2**30
NAMES = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(("gib", "millions"), [(4, 40), (8, 48), (16, 96), (32, 192), (64, 384), (512, 400)])
def test_a_mac_with_more_memory_gets_longer_ones(gib: int, millions: int) -> None:
    set_limits(gib * GIB, is_metal=True)
    assert [os.environ.get(name) for name in NAMES] == ["1000", str(millions)]
    assert max_elements() == millions * 2**20


@pytest.mark.usefixtures("environment")
def test_elsewhere_elements_do_not_count() -> None:
    set_limits(16 * GIB, is_metal=False)
    assert [os.environ.get(name) for name in NAMES] == [None, "1000000"]
    assert max_elements() == 400 * 2**20


@pytest.mark.usefixtures("environment")
def test_what_the_user_sets_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("50", "70")):
        monkeypatch.setenv(name, value)
    set_limits(16 * GIB, is_metal=True)
    assert [os.environ.get(name) for name in NAMES] == ["50", "70"]
    assert max_elements() == 70 * 2**20


def test_mlx_finds_them_when_it_is_loaded() -> None:
    import mlx_server.runtime  # noqa: F401

    assert int(os.environ["MLX_MAX_MB_PER_BUFFER"]) > 0
