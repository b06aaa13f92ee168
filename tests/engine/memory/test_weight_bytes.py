"""What a model's weights take in memory is computed from its files, to the byte."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_server.config import Config, ModelConfig
from mlx_server.engine.memory import need
from mlx_server.engine.memory.need import estimate_need
from mlx_server.runtime.models import blueprint
from mlx_server.runtime.models.loader import load
from tests.architectures import config_of
from tests.conformance import Subject
from tests.device_memory import active_bytes
from tests.engine_worlds import on_the_cpu
from tests.tiny_models import byte_tokenizer, describe_model_folder, save_model_folder, tiny_model


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "quantised"])
def test_weights_take_what_was_estimated(tmp_path: Path, kind: str) -> None:
    model, config = tiny_model("llama", seed=3)
    if kind != "float32":
        model.set_dtype(mx.bfloat16)
    if kind == "quantised":
        nn.quantize(model, group_size=32, bits=4)
        config = {**config, "quantization": {"group_size": 32, "bits": 4}}
    folder = save_model_folder(model, config, tmp_path / "m", byte_tokenizer())
    del model
    estimate = estimate_need(Config(model=ModelConfig(model=str(folder))))
    mx.clear_cache()
    before = active_bytes()
    loaded = load(str(folder))
    assert estimate.weights_bytes == loaded.weight_bytes
    # Each array is rounded up to whole pages or more.
    assert 0 <= active_bytes() - before - estimate.weights_bytes <= 0.1 * estimate.weights_bytes + 2**16


@on_the_cpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt2", "deepseek_v3", "qwen3_5"])
def test_of_bfloat16_weights_those_are_booked_whole_that_are_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Experts lie one by one, as they are published: each has the shape of some linear layer, which stays."""
    model = Subject(architecture).model
    model.set_dtype(mx.bfloat16)
    folder = describe_model_folder(config_of(architecture), tmp_path / "m")
    byte_tokenizer().save_pretrained(folder)
    weights = {}
    for name, weight in tree_flatten(model.parameters()):
        if "switch_mlp" in name:
            experts = enumerate(weight)
            weights |= {name.replace("switch_mlp", f"experts.{expert}"): part for expert, part in experts}
        else:
            weights[name] = weight
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    settings = Config(model=ModelConfig(model=str(folder)))
    stored = sum(weight.size for weight in weights.values())
    assert 2 * stored < estimate_need(settings).weights_bytes == load(str(folder)).weight_bytes < 4 * stored
    with monkeypatch.context() as gpu:
        gpu.setattr(need, "is_gpu", lambda: True)
        assert estimate_need(settings).weights_bytes == 2 * stored, "a GPU computes in bfloat16"
    monkeypatch.setattr(blueprint, "native_library", lambda: None)
    assert estimate_need(settings).weights_bytes == 4 * stored, "all are widened for MLX's products"
