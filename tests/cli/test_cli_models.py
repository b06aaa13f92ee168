"""`mlx-serve models`: what is on this machine, and the models of a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_server.cli import models
from mlx_server.cli.main import main
from mlx_server.cli.remote import RemoteServer
from mlx_server.config import Config, ModelConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.engine.models import store as model_store
from tests.tiny_models import byte_tokenizer, save_model_folder, tiny_model

READY = {
    "id": "coder",
    "state": "ready",
    "adapters": ["terse", "formal"],
    "reason": None,
    "load_progress": None,
    "pinned": False,
    "idle_ttl_s": 300.0,
    "held_bytes": 512 * 2**20,
    "num_requests": 2,
    "num_loads": 3,
    "idle_s": None,
}
LOADING = READY | {"id": "b", "state": "loading", "load_progress": 0.25, "pinned": True, "held_bytes": 0}
LOADING |= {"idle_s": 7.0, "adapters": []}
PREPARING = {"stage": "converting", "done_bytes": 3, "total_bytes": 4, "bytes_per_s": 1, "remaining_s": 1.0}
CONVERTING = LOADING | {"id": "c", "load_progress": 0.0, "preparing": PREPARING}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model_store.huggingface_hub, "scan_cache_dir", scan_of(tmp_path / "hub"))
    return tmp_path / "home"


def scan_of(folder: Path):
    folder.mkdir()
    real = model_store.huggingface_hub.scan_cache_dir
    return lambda: real(folder)


def put_model(folder: Path, num_bytes: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(num_bytes - 2))
    return folder


def put_hub_model(hub: Path, name: str) -> Path:
    repo = hub / f"models--{name.replace('/', '--')}"
    put_model(repo / "snapshots" / "abc", 1000)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    return repo


def test_what_is_here_is_listed_and_deleted(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["models", "ls"]) == 0
    assert "There are no models yet" in capsys.readouterr().out
    mine = put_model(home / "models" / "mine", 20_000_000)
    bundled = put_model(home / "models" / "smollm2-float32", 10_000_000)
    (bundled / "origin.json").write_text("{}")
    (home / "downloads").mkdir()
    download = home / "downloads" / model_store.SMOLLM2.file_name
    download.write_bytes(bytes(10))
    repo = put_hub_model(tmp_path / "hub", "org/small")
    (home / "models" / "no-model").mkdir()
    assert main(["models", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["name", "size", "weights", "context", "needs", "fits", "folder"],
        ["mine", "0.02", "GB", "-", "-", "-", "no", str(mine)],
        ["org/small", "0.00", "GB", "-", "-", "-", "no", str(repo)],
        ["smollm2", "0.01", "GB", "-", "-", "-", "no", str(bundled)],
    ]
    reasons = "\n".join(lines[4:])
    assert f"mine: {mine} is not a complete model in mlx-lm format; it lacks model_type in config.json" in reasons
    assert "org/small: it is incomplete: `mlx-serve pull`" in reasons
    assert main(["models", "ls", "--json"]) == 0
    assert [model["num_bytes"] for model in json.loads(capsys.readouterr().out)] == [20_000_000, 1000, 10_000_002]
    assert main(["models", "rm", "mine", "smollm2", "org/small"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "mine: 0.02 GB freed"
    for path in (mine, bundled, download, repo):
        assert not path.exists()
    assert main(["models", "rm", "../hub"]) == 1
    assert "There is no pulled model ../hub" in capsys.readouterr().err


def test_what_a_model_needs_is_reported_and_whether_it_fits(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The weights are read by nobody: the figures are the ones by which a server books memory."""
    folder = home / "models" / "tiny"
    tiny = tiny_model("llama")
    save_model_folder(tiny.model, {**tiny.config, "max_position_embeddings": 4096}, folder, byte_tokenizer())
    need = estimate_need(Config(model=ModelConfig(model=str(folder)))).total_bytes
    for limit, reserve, fits in ((need, 0, "yes"), (need - 1, 0, "no"), (need, "100%", "not now")):
        monkeypatch.setenv("MLX_SERVE_MEMORY_MEMORY_LIMIT", str(limit))
        monkeypatch.setenv("MLX_SERVE_MEMORY_MEMORY_RESERVE", str(reserve))
        assert main(["models", "ls", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["weights"], found["context_length"], found["need_bytes"]) == ("F32", 4096, need)
        assert (found["fits"], found["reason"]) == (fits, "")
    assert main(["models", "ls"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[3:8] == ["F32", "4,096", f"{need / 1e9:.2f}", "GB", "not"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """What a server was asked: method, path and body."""
    asked: list[tuple[str, str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        asked.append((request.method, request.url.path, body))
        if request.url.path == "/admin/models":
            memory = {"limit_bytes": 2**30, "held_bytes": 2**29, "free_bytes": 2**28}
            return httpx.Response(200, json={"models": [READY, LOADING, CONVERTING], "memory": memory})
        if body["model"] == "nope":
            return httpx.Response(404, json={"error": {"message": "The model `nope` does not exist."}})
        return httpx.Response(200, json=READY)

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(models, "RemoteServer", lambda url: RemoteServer(url, transport=transport))
    return asked


def test_a_servers_models_are_shown(server: list[Any], capsys: pytest.CaptureFixture[str]):
    assert main(["models", "ps"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["name", "state", "memory", "requests", "idle", "loads", "kept", "adapters"],
        ["coder", "ready", "512", "MiB", "2", "-", "3", "300", "s", "terse,", "formal"],
        ["b", "loading", "25%", "-", "2", "7", "s", "3", "pinned"],
        ["c", "converting", "75%,", "1", "s", "left", "-", "2", "7", "s", "3", "pinned"],
        [],
        ["512", "MiB", "of", "1024", "MiB", "in", "use,", "256", "MiB", "available"],
    ]
    assert main(["models", "ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == [READY, LOADING, CONVERTING]


@pytest.mark.parametrize("argv", [["ps"], ["load", "coder"], ["unload", "coder"]], ids=" ".join)
def test_a_server_of_another_kind_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, capsys: Any, argv: list[str]):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"models": [{"name": "a"}]}))
    monkeypatch.setattr(models, "RemoteServer", lambda url: RemoteServer(url, transport=transport))
    assert main(["models", *argv]) == 1
    assert "is it an mlx-serve server?" in capsys.readouterr().err


def test_adapters_of_a_servers_models_are_loaded_and_unloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, text="Success")

    monkeypatch.setattr(models, "RemoteServer", lambda url: RemoteServer(url, transport=httpx.MockTransport(answer)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "terse").mkdir()
    assert main(["models", "load", "coder", "--adapter", "terse=terse"]) == 0
    assert main(["models", "load", "coder", "--adapter", "terse=owner/name", "--replace"]) == 0
    assert main(["models", "unload", "coder", "--adapter", "terse"]) == 0
    name = {"lora_name": "coder:terse"}
    assert asked == [
        ("/v1/load_lora_adapter", {**name, "lora_path": str(tmp_path / "terse"), "load_inplace": False}),
        ("/v1/load_lora_adapter", {**name, "lora_path": "owner/name", "load_inplace": True}),
        ("/v1/unload_lora_adapter", name),
    ]
    assert capsys.readouterr().out == "Success\n" * 3
    assert main(["models", "load", "coder", "--adapter", "terse"]) == 1
    assert "--adapter is terse; write NAME=FOLDER" in capsys.readouterr().err
    assert main(["models", "load", "coder", "--adapter", "terse=~nobody-here/terse"]) == 2
    assert "the home folder ~nobody-here is unknown" in capsys.readouterr().err


def test_a_servers_models_are_loaded_and_unloaded(server: list[Any], capsys: pytest.CaptureFixture[str]):
    assert main(["models", "load", "coder"]) == 0
    assert main(["models", "unload", "coder", "--drain-timeout-s", "0"]) == 0
    assert main(["models", "unload", "coder"]) == 0
    assert server == [
        ("POST", "/admin/models/load", {"model": "coder"}),
        ("POST", "/admin/models/unload", {"model": "coder", "drain_timeout_s": 0.0}),
        ("POST", "/admin/models/unload", {"model": "coder", "drain_timeout_s": None}),
    ]
    assert "coder  ready" in capsys.readouterr().out
    assert main(["models", "load", "nope"]) == 1
    assert capsys.readouterr().err == "mlx-serve: error: The model `nope` does not exist.\n"
