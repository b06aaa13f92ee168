"""Vision-language models, of which mlx-lm loads the text part: that is served, whatever lies beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_server.config import Config, ModelConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.runtime.models import vlm
from mlx_server.runtime.models.loader import load
from mlx_server.runtime.models.random_models import build_random
from tests.architectures import config_of
from tests.tiny_models import byte_tokenizer, reference_generate

VISION_WEIGHTS = {
    "gemma3": ("vision_tower.patch.weight", "multi_modal_projector.linear.weight"),
    "kimi_vl": ("vision_tower.patch.weight", "multi_modal_projector.linear.weight"),
    "lfm2-vl": ("vision_tower.patch.weight", "multi_modal_projector.linear.weight"),
    "llama4": ("vision_model.patch.weight", "multi_modal_projector.linear.weight"),
    "mistral3": ("vision_tower.patch.weight", "multi_modal_projector.linear.weight"),
    "pixtral": ("vision_tower.patch.weight", "multi_modal_projector.linear.weight"),
    "qwen2_5_vl": ("visual.patch.weight",),
    "qwen2_vl": ("visual.patch.weight",),
    "qwen3_vl": ("vision_tower.patch.weight",),
    "qwen3_5": ("vision_tower.patch.weight",),
}
"""What stands in a model's files beside its text part, by the name in `config.json`."""

PROCESSOR_FILES: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "AProcessor"},
    "processor_config.json": {"processor_class": "AProcessor", "image_seq_length": 256},
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"},
}
NUM_VISION_ITEMS = 4096
PROMPT = list(range(40, 80))


@pytest.fixture(autouse=True)
def no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mlx-vlm, which would load such folders whole."""
    monkeypatch.setattr(vlm, "is_installed", lambda: False)


NEITHER_PIL_NOR_TORCH = """
import json, sys
for name in ("PIL", "torch", "torchvision"):
    sys.modules[name] = None
from mlx_server import LLM, SamplingParams
prompt = json.loads(sys.argv[1])
answers = {}
for folder in sys.argv[2:]:
    with LLM(folder, num_kv_blocks=16, max_model_len=256) as llm:
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        answers[folder] = llm.generate([prompt], sampling, use_tqdm=False)[0].token_ids
print(json.dumps(answers))
"""


FILES_OF_MLX_LM = {"qwen2_5_vl": "qwen2_vl"}
"""Where they are called otherwise than in `config.json`."""


def text_model(model_type: str) -> tuple[Any, dict[str, Any]]:
    architecture = FILES_OF_MLX_LM.get(model_type, model_type)
    config = config_of(architecture)
    if architecture == "qwen2_vl":
        config["text_config"]["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    vision = {"model_type": model_type, "vision_config": {"hidden_size": 32, "model_type": model_type}}
    return build_random(config, 0), {**config, **vision}


def make_vision_folder(path: Path, model_type: str) -> Path:
    """A folder as such models come: weights of both towers, and their template with the processor's files."""
    model, config = text_model(model_type)
    tokenizer = byte_tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(path)
    weights = dict(tree_flatten(model.parameters()))
    weights |= {name: mx.zeros((NUM_VISION_ITEMS,)) for name in VISION_WEIGHTS[model_type]}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    files = {**PROCESSOR_FILES, "config.json": config, "chat_template.json": {"chat_template": template}}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {model_type: make_vision_folder(root / model_type, model_type) for model_type in VISION_WEIGHTS}


def test_text_is_answered_as_by_mlx_lm_and_neither_pil_nor_torch_is_imported(folders: dict[str, Path]) -> None:
    paths = [str(folder) for folder in folders.values()]
    command = [sys.executable, "-c", NEITHER_PIL_NOR_TORCH, json.dumps(PROMPT), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for model_type, folder in folders.items():
        model, _ = text_model(model_type)
        assert answers[str(folder)] == reference_generate(model, PROMPT, 6).token_ids, model_type


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # as models have it that are out there
def test_the_template_of_the_processor_writes_the_prompt(folders: dict[str, Path]) -> None:
    chat = ChatFormatter(Tokenizer.from_folder(folders["qwen3_vl"]))
    assert (
        chat.format([{"role": "user", "content": "Hi"}]).text
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_context_length_is_the_text_models(tmp_path: Path) -> None:
    folder = make_vision_folder(tmp_path / "m", "gemma3")
    config = json.loads((folder / "config.json").read_text())
    for name in ("max_position_embeddings", "num_attention_heads"):
        config.pop(name)
    assert load(str(folder)).max_model_len == 512
    del config["text_config"]["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load(str(folder)).max_model_len == 32768, "what mlx-lm's text model assumes"


@pytest.mark.parametrize("model_type", VISION_WEIGHTS)
def test_what_is_not_loaded_is_not_counted(folders: dict[str, Path], model_type: str) -> None:
    folder = str(folders[model_type])
    assert estimate_need(Config(model=ModelConfig(model=folder))).weights_bytes == load(folder).weight_bytes


def test_kimi_vl_is_loaded_as_its_makers_publish_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """Each head's projections of keys and values are one matrix there; mlx-lm has two, and splits it for others."""
    for path in folders["kimi_vl"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / "model.safetensors"
    weights = dict(mx.load(str(file)))
    for name in [name for name in weights if name.endswith("embed_q.weight")]:
        keys, values = weights.pop(name), weights.pop(name.replace("embed_q", "unembed_out"))
        joined = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
        weights[name.replace("embed_q", "kv_b_proj")] = joined.reshape(-1, joined.shape[-1])
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    wanted = dict(tree_flatten(load(str(folders["kimi_vl"])).model.parameters()))
    found = dict(tree_flatten(load(str(tmp_path)).model.parameters()))
    assert any(name.endswith("embed_q.weight") for name in wanted)
    assert found.keys() == wanted.keys()
    assert all(mx.array_equal(found[name], wanted[name]) for name in wanted)
