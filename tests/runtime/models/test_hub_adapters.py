"""Adapters of the hub: fetched like models, without the rest of their repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_server import LLM
from mlx_server.config import Config, ModelConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.engine.models.store import find_pulled
from mlx_server.errors import DownloadError, ModelLoadError, UnknownModelError
from mlx_server.runtime.models import resolve
from tests.adapter_files import plain_model, write_adapter, write_model
from tests.engine_worlds import greedy, random_prompts
from tests.runtime.models import test_hub_fetch
from tests.runtime.models.test_hub_fetch import COMMIT, NAME, Hub, hub
from tests.tiny_models import reference_generate

__all__ = ["hub"]

(PROMPT,) = random_prompts((20,), seed=3)


def offer(hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub has the adapter, its weights among the large files, beside a checkpoint and a tokenizer."""
    files = {path.name: path.read_bytes() for path in adapter.iterdir()}
    hub.files = {**files, "0000100_adapters.safetensors": b"old", "tokenizer.json": b"{}", "README.md": b"Hello"}
    monkeypatch.setattr(test_hub_fetch, "WEIGHTS", ["adapters.safetensors", "adapter_model.safetensors"])


def test_only_its_files_are_fetched_once_and_serve_without_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("llama", tmp_path / "base")
    adapter = write_adapter(folder, tmp_path / "adapter")
    offer(hub, adapter, monkeypatch)
    expected = reference_generate(plain_model(folder, adapter), PROMPT, 5).token_ids

    def answer(given: str, name: str) -> list[int]:
        with LLM(str(folder), adapters=[given], max_model_len=64) as llm:
            assert llm.engine.names.adapters == (name,)
            return list(llm.generate([PROMPT], greedy(5), adapters=name, use_tqdm=False)[0].token_ids)

    assert answer(NAME, "model") == expected
    assert hub.num_sent == len(hub.files["adapters.safetensors"])
    snapshot = next((tmp_path / "cache").rglob(COMMIT))
    assert {path.name for path in snapshot.iterdir()} == {path.name for path in adapter.iterdir()}
    assert find_pulled(NAME) is None, "it is no model"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert answer(f"terse={NAME}", "terse") == expected
    needs = [estimate_need(Config(model=ModelConfig(model=str(folder), adapter=text))) for text in (NAME, str(adapter))]
    assert needs[0] == needs[1]


def test_what_the_hub_does_not_have_is_refused_with_the_remedy(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("llama", tmp_path / "base")
    with pytest.raises(UnknownModelError, match="The adapter no: The hub has no model owner/no, or it is private"):
        LLM(str(folder), adapters=["owner/no"])
    hub.files = {"README.md": b"Hello"}
    with pytest.raises(ModelLoadError, match=r"The adapter owner/model has no adapter_config.json and no adapters"):
        LLM(str(folder), adapters=[NAME])
    monkeypatch.setattr(resolve, "fetch_snapshot", lambda *_: (_ for _ in ()).throw(OSError("no route")))
    with pytest.raises(DownloadError, match=r"Cannot fetch owner/model from the hub, .* Check the connection"):
        LLM(str(folder), adapters=[NAME])


def test_one_that_must_be_alone_is_served_from_its_folder(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the model's name would depend on whether it was fetched before."""
    folder = write_model("llama", tmp_path / "base")
    offer(hub, write_adapter(folder, tmp_path / "dora", "dora"), monkeypatch)
    with pytest.raises(ModelLoadError, match=r"cannot differ by request; serve .* alone, from the folder .*snapshots"):
        LLM(str(folder), adapters=[NAME])
