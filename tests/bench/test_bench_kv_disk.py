"""`bench kv-disk`: the index by counts, and a table of streams beside a tiny model's saves and loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_server.bench.lab import kv_disk
from mlx_server.bench.lab.kv_disk import measure_index
from mlx_server.cli.main import main
from mlx_server.kv_disk.slab import RECORD_HEADER_BYTES, SLAB_HEADER_BYTES
from tests.engine_worlds import make_folder, on_the_cpu

KIB = 1024


@pytest.mark.parametrize("record_bytes", [4608 * KIB, 100 * KIB])
def test_a_scan_reads_headers_only_and_a_record_takes_300_bytes_of_memory(tmp_path: Path, record_bytes: int) -> None:
    found = measure_index(tmp_path, 3000, record_bytes)
    num_slabs = len(list(tmp_path.iterdir()))
    assert found.read_bytes == 3000 * RECORD_HEADER_BYTES + num_slabs * SLAB_HEADER_BYTES
    assert found.num_bytes > 3000 * record_bytes
    assert found.index_bytes < 3000 * 300


@on_the_cpu
def test_streams_are_measured_beside_nothing_saving_and_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_disk, "_STREAM_TOKENS", 300)
    monkeypatch.setattr(kv_disk, "_TURNS_TOKENS", 600)
    monkeypatch.setattr(kv_disk, "_TURN_S", 0.02)
    monkeypatch.setattr("mlx_server.batching.blocks.disk_tier.DiskTier._pays", lambda self, first, end: end > first)
    folder = make_folder(tmp_path / "model")
    small = ["--num-records", "10", "--num-tokens", "640", "--rounds", "1", "--kv-cache-memory", "8MB"]
    path = tmp_path / "found.json"
    assert main(["bench", "kv-disk", "--model", str(folder), *small, "--num-streams", "2", "--json", str(path)]) == 0
    assert "10 records" in capsys.readouterr().out
    phases = json.loads(path.read_text())["streams"]
    assert [phase["kind"] for phase in phases] == ["nothing", "saving", "nothing", "loading"]
    assert [phase["num_bytes"] > 0 for phase in phases[1:]] == [True, False, True]
    assert phases[3]["ttft_s"] > 0
