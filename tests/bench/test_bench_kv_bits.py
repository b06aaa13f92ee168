"""`bench kv-bits`: what it tells of a tiny model, and that scaled keys change nothing that is whole."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_server.bench.lab.kv_bits import scale_keys
from mlx_server.cli.main import main
from mlx_server.runtime.models.loader import LoadedModel, load
from tests.engine_worlds import make_folder


def test_a_table_of_a_text(bundled_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("The capital of France is Paris, and that of Italy is Rome. " * 8)
    options = ["--text", str(tmp_path / "text.txt"), "--num-tokens", "80", "--outlying-keys", "8"]
    assert main(["bench", "kv-bits", "--model", str(bundled_model), *options]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:2] for row in cells] == [
        [name, stored]
        for name in ("as it is", "keys x 8")
        for stored in ("whole", "8 bits", "8 and 4 bits", "4 bits", "8 bits on disk")
    ]
    nats = [float(row[3]) for row in cells]
    assert nats[0] == nats[5] == 0.0
    assert max(nats[1], nats[4]) < nats[2] < nats[3]
    assert nats[3] < nats[8]
    assert nats[7] < nats[8]
    assert float(cells[5][2]) == pytest.approx(float(cells[0][2]), rel=1e-3)


def test_scaled_keys_leave_the_model_as_it_is(tmp_path: Path) -> None:
    loaded: LoadedModel = load(str(make_folder(tmp_path / "tiny")))
    tokens = mx.array([[5, 9, 200, 31]])
    wanted = loaded.model(tokens)
    keys = loaded.model.layers[0].self_attn.k_proj.weight
    scale_keys(loaded, 8.0)
    assert not mx.allclose(keys, loaded.model.layers[0].self_attn.k_proj.weight)
    assert mx.allclose(loaded.model(tokens), wanted, atol=1e-3)
