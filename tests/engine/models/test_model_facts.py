"""Files of models that anybody may have written: whatever they hold, listing models and sizing them fails in words."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from mlx_server.config import Config, ModelConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.engine.models.facts import read_facts
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.folder import read_headers

LLAMA = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1}
TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DEEP = "[" * 100_000


def folder_of(path: Path, config: str, header: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    return path


@pytest.mark.parametrize("config", ["[]", "null", "3", DEEP, "{", '{"text_config": [1]}', '{"quantization": [1]}'])
def test_a_config_that_is_none_is_no_model_or_says_nothing(config: str, tmp_path: Path) -> None:
    facts = read_facts(str(folder_of(tmp_path / "m", config, {"x": TENSOR})))
    assert facts is None or (facts.family, facts.context_length, facts.quantization) == ("", 0, "F32")


@pytest.mark.parametrize("inner", ["abc", [1], -1, True])
def test_a_text_part_that_is_none_is_named(inner: object, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", json.dumps({**LLAMA, "text_config": inner}), {"x": TENSOR})
    with pytest.raises(ModelLoadError, match=r"lacks an object as text_config in config\.json"):
        estimate_need(Config(model=ModelConfig(model=str(folder))))


@pytest.mark.parametrize("length", ["8192", -5, 0, True, 2**31, 10**30, [1]])
def test_a_context_that_is_no_length_is_none(length: object, tmp_path: Path) -> None:
    config = json.dumps({**LLAMA, "max_position_embeddings": length})
    facts = read_facts(str(folder_of(tmp_path / "m", config, {"x": TENSOR})))
    assert facts is not None
    assert facts.context_length == 0


@pytest.mark.parametrize(
    "header",
    [
        *(b"", DEEP.encode(), [1], {"x": "y"}, {"x": {"dtype": "F32"}}),
        *({"x": {**TENSOR, **wrong}} for wrong in ({"shape": [-1]}, {"shape": ["a"]}, {"shape": 3}, {"dtype": 5})),
        *({"x": {**TENSOR, "data_offsets": wrong}} for wrong in ("ab", [0], [0, None], [0, 1.5], [-4, 0])),
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_header_that_describes_no_tensors_is_a_broken_file(header: object, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", json.dumps(LLAMA), header)
    with pytest.raises(ModelLoadError, match="is not a safetensors file, or is broken"):
        read_headers(folder / "model.safetensors")
    facts = read_facts(str(folder))
    assert facts is not None
    assert facts.num_parameters == 0
    with pytest.raises(ModelLoadError):
        estimate_need(Config(model=ModelConfig(model=str(folder))))
