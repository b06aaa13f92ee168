"""mlx-vlm's vision towers on mlx-lm's text models: their files, positions in three axes, and what beside images works
as without them. That answers are mlx-vlm's is tested with all families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import initialize_rope

from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.model_entries import Adapter
from mlx_server.runtime.attention.cache_views import UnpageableError
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.models import vision_towers, vlm
from mlx_server.runtime.models.loader import load, make_runner
from mlx_server.runtime.models.resolve import find_folder
from mlx_server.runtime.models.vision_towers import AxisRope, TowerModel
from mlx_server.runtime.models.vlm import vlm_module
from mlx_server.runtime.vision import ImagePieces
from tests.adapter_files import write_adapter
from tests.homes import with_kernels
from tests.tiny_models import byte_tokenizer, save_model_folder
from tests.vision_configs import CONFIGS
from tests.vision_worlds import build_tiny, picture, placeholders, tiny_vlm

Weights = dict[str, mx.array]


def published(model_type: str) -> Weights:
    """The weights as the makers of a model publish them: other names, PyTorch's order of dimensions, Qwen's norms less
    one, and towers for sound."""
    weights = {}
    for name, array in tree_flatten(tiny_vlm(model_type).loaded.model.parameters()):
        if model_type == "gemma3n" and array.ndim == 4:
            array = array.transpose(0, 3, 1, 2)
        if name.endswith("patch_embed.proj.weight"):
            array = array.transpose(0, 4, 1, 2, 3)
        if name.endswith("conv1d.weight"):
            array = array.swapaxes(1, 2)
        is_text = "language_model." in name
        if is_text and model_type == "qwen3_5" and "norm" in name and not name.endswith("linear_attn.norm.weight"):
            array = array - 1
        name = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        if not is_text:
            tower = "visual" if model_type == "qwen3_5" else "vision_tower"
            name = f"model.{name}".replace("vision_tower", tower)
        weights[name] = array
    if model_type != "qwen3_5":
        weights |= {
            "model.audio_tower.layers.0.weight": mx.ones((64, 64)),
            "model.embed_audio.weight": mx.ones((64, 64)),
        }
    return weights


def folder_of(model_type: str, path: Path) -> Path:
    loaded = tiny_vlm(model_type).loaded
    return save_model_folder(loaded.model, loaded.config, path, byte_tokenizer())


def by_mlx_vlm(weights: Weights) -> Weights:
    """The names of Gemma 3n's weights after a conversion by mlx-vlm; mlx-lm does not read them."""
    return {
        name.removeprefix("model.").replace("language_model.", "language_model.model."): array.transpose(0, 2, 3, 1)
        if array.ndim == 4
        else array
        for name, array in weights.items()
    }


@pytest.mark.parametrize("is_installed", [True, False], ids=["with mlx-vlm", "without"])
def test_files_of_gemma_3n_that_mlx_vlm_has_converted_are_loaded(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without mlx-vlm their text, which needs none of it."""
    folder, wanted = folder_of("gemma3n", tmp_path), dict(tree_flatten(tiny_vlm("gemma3n").loaded.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), by_mlx_vlm(published("gemma3n")))
    if not is_installed:
        monkeypatch.setattr(vlm, "is_installed", lambda: False)
        wanted = {name: array for name, array in wanted.items() if name.startswith("model.language_model.")}
    found = dict(tree_flatten(load(str(folder)).model.parameters()))
    assert wanted
    assert found.keys() == wanted.keys()
    num_bytes = sum(array.nbytes for array in found.values())
    assert estimate_need(Config(model=ModelConfig(model=str(folder)))).weights_bytes == num_bytes
    assert all(mx.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3n", "gemma4", "gemma4_unified"])
def test_files_as_published_are_loaded_whole_but_for_sound_and_booked(model_type: str, tmp_path: Path) -> None:
    folder, wanted = folder_of(model_type, tmp_path), dict(tree_flatten(tiny_vlm(model_type).loaded.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), published(model_type))
    model = load(str(folder)).model
    assert isinstance(model, TowerModel)
    found = dict(tree_flatten(model.parameters()))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not mx.allclose(found[name], wanted[name], atol=1e-6)] == []
    num_bytes = sum(array.nbytes for array in found.values())
    assert estimate_need(Config(model=ModelConfig(model=str(folder)))).weights_bytes == num_bytes


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("qwen3_5", tmp_path_factory.mktemp("qwen"))


def blindness(folder: Path, **loading: Any) -> str:
    """Why a folder's model takes no images."""
    loaded = load(str(folder), **loading)
    runner, info = exhaust(
        make_runner(
            loaded,
            Config(
                model=ModelConfig(attention_backend="auto"),
                cache=CacheConfig(num_kv_blocks=16),
                scheduler=SchedulerConfig(max_num_seqs=2, speculate="off"),
            ),
            PoolRoom(256, 2**28, 2**28),
        )
    )
    runner.close()
    return info.no_vision


def test_adapters_of_the_text_leave_images(qwen: Path, tmp_path: Path) -> None:
    """The check at load finds their layers, too."""
    adapter = write_adapter(qwen, tmp_path / "adapter", num_layers=2)
    assert blindness(qwen, adapters=[Adapter("a", str(adapter))]) == ""


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_embeddings_in_bfloat16_do_not_round_an_images_twice(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of mxfp4 are in it, in a model that is in float32."""
    monkeypatch.setenv("MLX_SERVE_HOME", str(with_kernels(tmp_path / "home")))
    quantized = find_folder(str(folder_of(model_type, tmp_path / "model")), quantize="mxfp4")
    assert quantized is not None
    assert blindness(quantized) == ""


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3n", "gemma4", "gemma4_unified"])
def test_towers_compute_in_the_type_of_their_weights(model_type: str) -> None:
    """Pixels in float32 would turn whole matrices into it, which is not booked."""
    model, image = build_tiny({"model_type": model_type, **CONFIGS[model_type]}), picture(model_type, 1)
    model.set_dtype(mx.bfloat16)
    assert ImagePieces(model, placeholders(image), image.inputs).encoded.embeddings.dtype == mx.bfloat16


def test_turning_by_wrong_axes_is_found_at_load(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_towers, "_interleaved", lambda sections, count: np.arange(count) * 3 // count)
    assert "with an image its logits differ by" in blindness(qwen)


def test_a_layer_that_mlx_vlm_computes_otherwise_is_found_at_load(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = vlm_module("models.qwen3_5.language").Qwen3_5MLP
    original = layer.__call__
    monkeypatch.setattr(layer, "__call__", lambda mlp, x: 1.5 * original(mlp, x))
    assert "with an image its logits differ by" in blindness(qwen)


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3n", "gemma4", "gemma4_moe", "gemma4_unified"])
def test_encoding_does_not_wait_for_the_device(model_type: str) -> None:
    """A step is running meanwhile, and the next one could not be launched. What waits cannot be compiled."""
    model, image = tiny_vlm(model_type).loaded.model, picture(model_type, 1)
    ids, inputs = mx.array([placeholders(image)]), image.inputs
    pixels = mx.array(inputs["pixel_values"])
    others = {name: mx.array(array) for name, array in inputs.items() if name != "pixel_values"}

    def embed(pixels: mx.array) -> mx.array:
        made: mx.array = model.family.embed(model, ids, {"pixel_values": pixels, **others})
        return made

    found = mx.compile(embed)(pixels)
    assert mx.allclose(found, embed(pixels), atol=1e-4)


def test_folders_without_the_extra_are_served_as_text(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm, "is_installed", lambda: False)
    assert type(load(str(qwen)).model).__module__ == "mlx_lm.models.qwen3_5"


class Layer(nn.Module):
    """Has a rotary embedding of 16 of 20 dimensions."""

    def __init__(self, **scaling: Any) -> None:
        super().__init__()
        self.rope = initialize_rope(16, 10_000.0, False, {"type": "default", **scaling}, 4096)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 2.0}
POSITIONS = np.array([[0, 1, 2, 2, 2, 2, 5], [0, 1, 2, 2, 3, 3, 5], [0, 1, 2, 3, 2, 3, 5]], np.int32)


@pytest.mark.parametrize("scaling", [{}, YARN])
def test_frequencies_turn_by_the_position_in_their_axis(scaling: dict[str, Any]) -> None:
    layer, axes = Layer(**scaling), vision_towers._Axes()
    stand_in = AxisRope(layer, [3, 3, 2], axes)
    x = mx.random.normal((7, 2, 1, 20), key=mx.random.key(1))
    axes.set(POSITIONS)
    found = stand_in(x, offset=mx.zeros(7, mx.int32))
    by_axis = [layer.rope(x + 0, offset=mx.array(axis)) for axis in POSITIONS]
    for frequency, axis in enumerate([0, 1, 2, 0, 1, 2, 0, 1]):
        for dim in (frequency, frequency + 8):
            assert mx.array_equal(found[..., dim], by_axis[axis][..., dim])
    assert mx.array_equal(found[..., 16:], by_axis[0][..., 16:])
    chunk = stand_in(x[None, :, :, 0].swapaxes(1, 2))
    assert mx.array_equal(chunk[0].swapaxes(0, 1), found[:, :, 0]), "a batch of one request has the same rows"


def test_text_beside_images_has_the_bits_that_it_has_alone() -> None:
    layer, axes = Layer(), vision_towers._Axes()
    stand_in, x = AxisRope(layer, [3, 3, 2], axes), mx.random.normal((7, 2, 1, 20), key=mx.random.key(1))
    text = mx.array([0, 1, 6])
    axes.set(POSITIONS)
    beside = stand_in(x)[text]
    axes.set(None)
    alone = stand_in(x[text], offset=mx.array([0, 1, 5]))
    assert mx.array_equal(beside, alone)
    assert mx.array_equal(alone, layer.rope(x[text], offset=mx.array([0, 1, 5])))


def test_rows_of_a_group_are_refused() -> None:
    """Their positions are those of the whole step."""
    axes = vision_towers._Axes()
    axes.set(POSITIONS)
    with pytest.raises(UnpageableError, match="positions in three axes, in modules that run by group"):
        AxisRope(Layer(), [3, 3, 2], axes)(mx.zeros((3, 2, 1, 20)))


@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[:1].repeat(3, 0)])
def test_rows_are_turned_once_where_the_axes_are_equal(positions: np.ndarray) -> None:
    layer, axes = Layer(), vision_towers._Axes()
    stand_in, calls = AxisRope(layer, [3, 3, 2], axes), 0
    rope = layer.rope

    class Counting(nn.Module):
        def __call__(self, x: mx.array, offset: Any) -> mx.array:
            nonlocal calls
            calls += 1
            turned: mx.array = rope(x, offset=offset)
            return turned

    layer.rope = Counting()
    axes.set(positions)
    stand_in(mx.zeros((7, 2, 1, 20)))
    assert calls == (3 if positions is POSITIONS else 1)


def test_a_wrong_config_leaves_the_text(qwen: Path, tmp_path: Path) -> None:
    """mlx-vlm wants values that the text part has defaults for."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in qwen.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load(str(folder))
    assert not isinstance(loaded.model, TowerModel)
    assert "its vision encoder cannot be loaded" in loaded.no_vision
