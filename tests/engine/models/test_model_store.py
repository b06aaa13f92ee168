"""The models on this machine are found by their names, and by nothing else."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_server.engine.models import store
from mlx_server.engine.models.store import (
    Fetches,
    StoredModel,
    can_be_fetched,
    find_in,
    find_pulled,
    models_in,
    remove_stored,
    stored_models,
)
from mlx_server.errors import ModelLoadError

BUNDLED = store.SMOLLM2.name


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    scan = store.huggingface_hub.scan_cache_dir
    monkeypatch.setattr(store.huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "hub"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    return tmp_path / "home"


def put_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def put_hub_model(hub: Path, name: str) -> Path:
    repo = hub / f"models--{name.replace('/', '--')}"
    folder = put_model(repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    return folder


@pytest.mark.parametrize("name", ["owner/name", "https://huggingface.co/owner/name"])
def test_a_model_of_the_hub_is_found_by_its_id_and_its_page(home: Path, tmp_path: Path, name: str) -> None:
    assert find_pulled(name) is None
    folder = put_hub_model(tmp_path / "hub", "owner/name")
    assert find_pulled(name) == folder
    assert find_pulled("owner/other") is None


def test_an_adapter_of_the_hub_is_no_model(home: Path, tmp_path: Path) -> None:
    folder = put_hub_model(tmp_path / "hub", "owner/name")
    (folder / "config.json").rename(folder / "adapter_config.json")
    assert find_pulled("owner/name") is None


def test_a_model_at_home_is_found_by_the_name_of_its_folder(home: Path) -> None:
    mine = put_model(home / "models" / "mine")
    (home / "models" / "empty").mkdir()
    assert find_pulled("mine") == mine
    assert [find_pulled(name) for name in ("empty", "other", "../models/mine", "")] == [None] * 4


@pytest.mark.parametrize("native", ["float32", "packed"])
def test_of_the_bundled_model_s_formats_the_machine_s_own_is_taken(
    home: Path, monkeypatch: pytest.MonkeyPatch, native: str
) -> None:
    monkeypatch.setattr(store, "native_weight_format", lambda: native)
    kept = put_model(home / "models" / f"{BUNDLED}-float32")
    assert find_pulled(BUNDLED) is None, "without its origin it is a folder of somebody's"
    assert find_pulled(kept.name) == kept
    (kept / "origin.json").write_text("{}")
    assert (find_pulled(BUNDLED), find_pulled(kept.name)) == (kept, None)
    for form in ("bfloat16", "packed"):
        (put_model(home / "models" / f"{BUNDLED}-{form}") / "origin.json").write_text("{}")
    assert find_pulled(BUNDLED) == home / "models" / f"{BUNDLED}-{native}"


def test_a_folder_s_models_are_those_with_a_configuration(tmp_path: Path) -> None:
    folders = [put_model(tmp_path / name) for name in ("b", "a")]
    (tmp_path / "none").mkdir()
    (tmp_path / "file").write_text("")
    assert models_in(tmp_path) == ["a", "b"]
    assert [find_in(tmp_path, name) for name in ("b", "a")] == folders
    assert [find_in(tmp_path, name) for name in ("none", "file", "c", "..", "b/../a")] == [None] * 5
    assert (models_in(tmp_path / "nowhere"), find_in(tmp_path / "nowhere", "a")) == ([], None)


def test_what_is_deleted_is_counted_and_a_link_s_target_stays(home: Path, tmp_path: Path) -> None:
    elsewhere = put_model(tmp_path / "elsewhere")
    link, other = home / "models" / "link", put_model(home / "models" / "other")
    link.symlink_to(elsewhere)
    assert remove_stored("nobody") == remove_stored(BUNDLED) == 0
    assert remove_stored("link") == 2
    assert (link.exists(), (elsewhere / "config.json").exists()) == (False, True)
    download = home / "downloads" / store.SMOLLM2.file_name
    download.parent.mkdir()
    download.write_bytes(bytes(10))
    assert remove_stored("other") == 2
    assert (other.exists(), download.exists()) == (False, True)
    assert remove_stored(BUNDLED) == 10
    assert not download.exists()


def test_names_that_can_be_fetched() -> None:
    assert [can_be_fetched(name) for name in (BUNDLED, "owner/name", "https://hf.co/owner/name", "other", "a/b/c")] == [
        *(True, True, True),
        *(False, False),
    ]


async def test_a_fetch_is_joined_under_each_of_its_names_and_ends_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def refuse(name: str) -> Path:
        asked.append(name)
        raise ModelLoadError("It is not there.")

    monkeypatch.setattr(store, "resolve_model", refuse)
    fetches = Fetches()
    fetch = fetches.join("https://huggingface.co/owner/name")
    assert fetches.join("owner/name") is fetch
    assert fetches.join(BUNDLED) is not fetch
    assert [running.name for running in fetches.running()] == ["owner/name", BUNDLED]
    reading = fetch.reading()
    assert (reading["model"], reading["stage"], reading["done_bytes"]) == ("owner/name", "fetching", 0)
    with pytest.raises(ModelLoadError, match="not there"):
        await fetch.done
    await asyncio.gather(*(running.done for running in fetches.running()), return_exceptions=True)
    assert sorted(asked) == ["owner/name", BUNDLED]
    assert list(fetches.running()) == []
    assert fetches.join("owner/name") is not fetch
    await asyncio.gather(*(running.done for running in fetches.running()), return_exceptions=True)


async def test_a_fetch_that_nobody_waits_for_fails_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    monkeypatch.setattr(store, "resolve_model", lambda name: 1 // 0)
    fetches = Fetches()
    fetches.join("owner/name")
    await asyncio.wait([running.done for running in fetches.running()])
    gc.collect()
    assert reports == []


def test_all_models_are_listed_by_name_with_their_place_and_size(home: Path, tmp_path: Path) -> None:
    mine = put_model(home / "models" / "mine")
    assert stored_models() == [StoredModel("mine", "home", mine, 2)]
    put_hub_model(tmp_path / "hub", "owner/name")
    (put_hub_model(tmp_path / "hub", "a/data").parents[1]).rename(tmp_path / "hub" / "datasets--a--data")
    (mine / "weights").mkdir()
    (mine / "weights" / "more").write_bytes(bytes(5))
    hub = tmp_path / "hub" / "models--owner--name"
    assert stored_models() == [StoredModel("mine", "home", mine, 7), StoredModel("owner/name", "hub", hub, 2)]
    assert remove_stored("owner/name") == 2
    assert not hub.exists()
