"""Adapters that PEFT has saved are served like mlx-lm's."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.lora import LoRALinear

from mlx_server import LLM
from mlx_server.config import Config, ModelConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.errors import ModelLoadError
from mlx_server.model_entries import Adapter
from mlx_server.runtime.layers.peft import apply_peft
from mlx_server.runtime.models.loader import load
from tests.adapter_files import plain_model, save_as_peft, write_adapter, write_model
from tests.conformance import CROWDED, NUM_LOGPROBS, Answers, worst_error
from tests.engine_worlds import greedy, random_prompts
from tests.tiny_models import reference_generate

LENGTHS = (60, 5, 70, 33)


def as_transformers(layer: str) -> str:
    return layer.replace("language_model.model.", "model.language_model.")


@pytest.mark.parametrize(
    ("architecture", "keys", "bits"),
    [
        ("llama", None, None),
        ("llama", None, 4),
        ("llama", ["model.embed_tokens", "lm_head", "mlp.up_proj"], None),
        ("qwen3_5", None, None),
    ],
)
def test_a_batch_answers_as_with_mlx_lms_form_of_the_adapter(
    architecture: str, keys: list[str] | None, bits: int | None, tmp_path: Path
) -> None:
    folder = write_model(architecture, tmp_path / "base", bits=bits)
    ours = write_adapter(folder, tmp_path / "ours", rank=6, keys=keys, seed=1)
    other = write_adapter(folder, tmp_path / "other", rank=2, seed=2)
    theirs = save_as_peft(ours, tmp_path / "theirs", as_transformers)
    prompts = random_prompts(LENGTHS)
    adapters = ("theirs", None, "other", "theirs")
    models = {None: plain_model(folder), "theirs": plain_model(folder, ours), "other": plain_model(folder, other)}
    expected = [reference_generate(models[name], prompt, 6) for name, prompt in zip(adapters, prompts, strict=True)]
    with LLM(str(folder), adapters=[str(theirs), str(other)], **CROWDED) as llm:
        params = greedy(6, logprobs=NUM_LOGPROBS)
        answers = llm.generate(prompts, params, adapters=adapters, use_tqdm=False)
    assert worst_error(Answers(answers, 0, 0, 0), expected) < 1e-4


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"lora_alpha": 12}, 12 / 4),
        ({"lora_alpha": 12, "use_rslora": True}, 12 / sqrt(4)),
        ({"alpha_pattern": {"o_proj": 24, "q_proj": 6}}, 6 / 4),
        ({"lora_alpha": 12, "alpha_pattern": {"proj": 24}}, 12 / 4),
        ({"alpha_pattern": {r"layers\.0\.self_attn\..*": 20}}, 20 / 4),
        ({"lora_alpha": 12, "alpha_pattern": {r"layers\.1\.self_attn\..*": 20}, "r": 99}, 12 / 4),
    ],
)
def test_alpha_and_rank_give_the_scale(settings: dict[str, Any], scale: float, tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    ours = write_adapter(folder, tmp_path / "ours", keys=["self_attn.q_proj"])
    model = plain_model(folder)
    apply_peft(model, Adapter("x", str(save_as_peft(ours, tmp_path / "theirs", **settings))))
    assert model.layers[0].self_attn.q_proj.scale == pytest.approx(scale)


class _Seeing(nn.Module):
    """Text and images, with layers of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = nn.Module()
        self.language_model = nn.Module()
        for tower in (self.vision_tower, self.language_model):
            tower.layers = [nn.Sequential(nn.Linear(64, 64))]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("model.language_model.layers.0.layers.0", "language_model.layers.0.layers.0"),
        ("model.vision_tower.encoder.layers.0.layers.0", "vision_tower.layers.0.layers.0"),
    ],
)
def test_layers_of_text_and_images_are_told_apart(path: str, place: str, tmp_path: Path) -> None:
    tensors = {f"{path}.lora_A.weight": mx.zeros((2, 64)), f"{path}.lora_B.weight": mx.zeros((64, 2))}
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 4}')
    model = _Seeing()
    apply_peft(model, Adapter("x", str(tmp_path)))
    assert [name for name, module in model.named_modules() if isinstance(module, LoRALinear)] == [place]


def test_a_layer_that_may_be_several_is_refused(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    path = save_as_peft(write_adapter(folder, tmp_path / "ours"), tmp_path / "theirs", lambda _: "q_proj")
    with pytest.raises(ModelLoadError, match=r"q_proj may be any of \['model"):
        LLM(str(folder), adapters=[str(path)])


def test_its_weights_are_booked_and_counted(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    ours = write_adapter(folder, tmp_path / "ours", keys=["model.embed_tokens", "self_attn.q_proj"])
    path = save_as_peft(ours, tmp_path / "theirs")
    size = sum(array.nbytes for array in mx.load(str(ours / "adapters.safetensors")).values())
    without, with_it = ModelConfig(model=str(folder)), ModelConfig(model=str(folder), adapter=str(path))
    booked = [estimate_need(Config(model=settings)).weights_bytes for settings in (without, with_it)]
    assert booked[1] - booked[0] == size
    held = [load(str(folder), adapters=settings.adapters).weight_bytes for settings in (without, with_it)]
    assert held[1] - held[0] == size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "its peft_type is 'LOHA'; only LORA is supported"),
        ({"use_dora": True}, "use_dora is not supported; merge it into the model with PEFT"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is not supported"),
    ],
)
def test_what_is_more_than_two_matrices_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "base")
    path = save_as_peft(write_adapter(folder, tmp_path / "ours"), tmp_path / "theirs", **settings)
    with pytest.raises(ModelLoadError, match=rf"The adapter {path} does not fit the model, .*ValueError: {message}"):
        LLM(str(folder), adapters=[str(path)])


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model.model.lm_head.weight": (64, 64)}, r"its tensor base_model\.model\.lm_head\.weight is not one of"),
        ({f"{LAYER}.lora_B.bias": (64,)}, r"its tensor .*q_proj\.lora_B\.bias is not one of LoRA's matrices"),
        (
            {f"{LAYER}.lora_A.weight": None},
            r"it has only one of the two matrices of model\.layers\.0\.self_attn\.q_proj",
        ),
        (
            {f"{LAYER}.lora_A.weight": (4, 63)},
            r"matrices of shapes \(4, 63\) and \(\d+, 4\) do not fit .*0\.self_attn\.q_proj",
        ),
        (
            {f"{LAYER}.base_layer.lora_A.weight": (4, 64), f"{LAYER}.base_layer.lora_B.weight": (64, 4)},
            r"the model has no layer model\.layers\.0\.self_attn\.q_proj\.base_layer",
        ),
        (
            {f"{LAYER}s.lora_A.weight": (4, 64), f"{LAYER}s.lora_B.weight": (64, 4)},
            r"the model has no layer model\.layers\.0\.self_attn\.q_projs",
        ),
    ],
)
def test_one_for_another_model_is_refused(
    change: dict[str, tuple[int, ...] | None], message: str, tmp_path: Path
) -> None:
    folder = write_model("llama", tmp_path / "base")
    path = save_as_peft(write_adapter(folder, tmp_path / "ours"), tmp_path / "theirs")
    tensors = mx.load(str(path / "adapter_model.safetensors"))
    tensors.update({name: mx.zeros(shape) for name, shape in change.items() if shape is not None})
    kept = {name: array for name, array in tensors.items() if change.get(name, ()) is not None}
    mx.save_safetensors(str(path / "adapter_model.safetensors"), kept)
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(folder), adapters=[str(path)])
