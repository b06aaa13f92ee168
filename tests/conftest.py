"""What all tests share: a quiet, offline environment, and the bundled model."""

from __future__ import annotations

import os
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


IN_REAL_TIME = ("api", "bench", "cli", "engine", "observability")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs servers, threads and processes in real time, beside whatever else the machine does, has a second try,
    which the summary names (RERUN). What knows no clock has none: that would hide a fault."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in IN_REAL_TIME:
            item.add_marker(pytest.mark.flaky(reruns=1))


settings.register_profile("any machine", deadline=None)  # speed is measured by benchmarks, and machines are shared
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def no_keys_of_yours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs the tests may have keys at home, and would be asked for them."""
    monkeypatch.setattr("mlx_server.api.auth.keys.home", lambda: tmp_path / "home")


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The folder of the bundled model in float32, which MLX's own products need to be fast on a CPU; pulled when it is
    not there. It is kept between runs: tests only read it."""
    from mlx_server.runtime.models.bundled import pull_bundled
    from mlx_server.runtime.models.gguf import WeightFormat

    return pull_bundled(weight_format=WeightFormat.FLOAT32)
