"""Sampling that a model's folder asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_worlds import make_folder

from mlx_server.api.app import create_app
from mlx_server.config import CacheConfig, Config, ModelConfig
from mlx_server.engine.text.chat import read_default_sampling
from mlx_server.errors import ModelLoadError
from mlx_server.pool.model_pool import build_pool
from mlx_server.sampling_params import SamplingParams

ASKED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}


def write(folder: Path, content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_what_the_file_says_is_read_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert read_default_sampling(tmp_path) == SamplingParams()
    assert caplog.messages == []
    write(tmp_path, {**ASKED, "do_sample": False, "max_new_tokens": 5, "eos_token_id": [1, 2]})
    assert read_default_sampling(tmp_path) == SamplingParams(**ASKED)
    assert "are temperature 0.6, top_p 0.9, min_p 0.1, repetition_penalty 1.1, top_k 20 (from" in caplog.text
    write(tmp_path, {"temperature": None, "top_p": 1})
    assert read_default_sampling(tmp_path) == SamplingParams()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"top_p": -1}, "top_p must be between 0 and 1, got -1"),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"temperature": "0.5"}, "temperature must be a number, got '0.5'"),
        ({"temperature": True}, "temperature must be a number, got True"),
    ],
)
def test_a_value_that_cannot_be_names_the_file_and_the_remedy(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_default_sampling(write(tmp_path, content))
    assert str(tmp_path / "generation_config.json") in caught.value.message
    assert "--generation-config none" in caught.value.message


@pytest.mark.parametrize("setting", ["auto", "none"])
async def test_a_served_folder_sets_the_defaults_unless_told_not_to(tmp_path: Path, setting: str) -> None:
    folder = write(make_folder(tmp_path / "model"), ASKED)
    config = Config(
        model=ModelConfig(model=str(folder), generation_config=setting), cache=CacheConfig(num_kv_blocks=16)
    )
    pool = build_pool(config)
    await pool.start()
    try:
        transport = httpx.ASGITransport(create_app(pool, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"prompt": "Hi", "temperature": 0.3}
            (rendered,) = (await http.post("/v1/completions/render", json=body)).json()
    finally:
        await pool.stop(0.0)
    sampling = rendered["sampling_params"]
    expected = ASKED if setting == "auto" else {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: sampling[name] for name in ASKED} == {**expected, "temperature": 0.3}
