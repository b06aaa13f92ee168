"""`bench kv-disk`: a table of streams beside a tiny model's saves and loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_server.bench.lab import kv_disk
from mlx_server.cli.main import main
from tests.engine_worlds import make_folder, on_the_cpu


@on_the_cpu
def test_streams_are_measured_beside_nothing_saving_and_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_disk, "_STREAM_TOKENS", 300)
    monkeypatch.setattr(kv_disk, "_TURNS_TOKENS", 600)
    monkeypatch.setattr(kv_disk, "_TURN_S", 0.02)
    monkeypatch.setattr("mlx_server.batching.blocks.disk_tier.DiskTier._pays", lambda self, first, end: end > first)
    folder = make_folder(tmp_path / "model")
    small = ["--num-tokens", "640", "--rounds", "1", "--kv-cache-memory", "8MB"]
    path = tmp_path / "found.json"
    assert main(["bench", "kv-disk", "--model", str(folder), *small, "--num-streams", "2", "--json", str(path)]) == 0
    assert "beside the streams" in capsys.readouterr().out
    phases = json.loads(path.read_text())["streams"]
    assert [phase["kind"] for phase in phases] == ["nothing", "saving", "nothing", "loading"]
    assert [phase["num_bytes"] > 0 for phase in phases[1:]] == [True, False, True]
    assert phases[3]["ttft_s"] > 0
