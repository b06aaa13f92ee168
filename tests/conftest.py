"""Shared by all tests: a quiet, offline environment, and the bundled model."""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Before any library that reads them is imported.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    LOGFIRE_SEND_TO_LOGFIRE="false",
    TOKENIZERS_PARALLELISM="false",
)
import mlx_server.runtime  # noqa: F401 - before any test loads MLX, which reads its limits only then

if os.environ.get("TEST_DEVICE") == "cpu":  # on a Mac, too: most equalities here hold in the CPU's float32 alone
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
for name in [name for name in os.environ if name.startswith("MLX_SERVE_") and name != "MLX_SERVE_HOME"]:
    del os.environ[name]

# A shell that starts the tests behind it has them ignore Ctrl-C, and the commands that they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

IN_REAL_TIME = ("api", "bench", "cli", "engine", "observability")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run servers, threads and processes in real time on a shared machine have a second try, which the
    summary shows (RERUN). Tests without a clock have none, since it would hide faults. Nor has a test that hangs, since
    pytest-timeout does not watch second tries."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in IN_REAL_TIME:
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except="from pytest-timeout"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest ends what hangs below Python by one limit for all tests. Those that may take longer get a later one."""
    own = item.get_closest_marker("timeout")
    if own is not None and own.args[0] > (usual_s := float(item.config.getini("timeout"))):
        more_s = float(item.config.getini("faulthandler_timeout")) - usual_s
        faulthandler.dump_traceback_later(own.args[0] + more_s, exit=True, file=sys.__stderr__)


def pytest_collection_finish() -> None:
    """As a server does: collections, such as at the end of every model, need not look at what has been imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Nor at what a file of tests has imported and kept: a collection would take a tenth of a second in the end."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


settings.register_profile("any machine", deadline=None)  # speed is measured by benchmarks, and machines are shared
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def no_keys_of_yours(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user who runs the tests may have API keys at home, which servers would then require. Few tests look there:
    their folder is not made for the others."""
    folder = functools.cache(lambda: tmp_path_factory.mktemp("home"))
    monkeypatch.setattr("mlx_server.api.auth.keys.home", lambda: folder() / "home")


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A web proxy in the environment that does not answer; its URL."""
    url = "http://127.0.0.1:9"
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return url


@pytest.fixture(scope="session", autouse=True)
def emulator_builds(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What one worker compiles for the emulator, the others use; it goes with pytest's temporary folders."""
    folder = tmp_path_factory.getbasetemp()
    os.environ["EMULATOR_BUILDS"] = str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "emulator")


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The folder of the bundled model in float32, for which MLX's own products are fast on a CPU. It is pulled the
    first time and kept between runs; tests only read it."""
    from mlx_server.runtime.models.bundled import pull_bundled
    from mlx_server.runtime.models.gguf import WeightFormat

    return pull_bundled(weight_format=WeightFormat.FLOAT32)
