"""What encoding an image takes is booked before a model is loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server import LLM
from mlx_server.config import Config, ModelConfig, SchedulerConfig, ServerConfig
from mlx_server.engine.memory import need
from mlx_server.engine.memory.need import estimate_need, vision_bytes
from mlx_server.runtime.models.random_models import build_random
from mlx_server.runtime.vision import ImagePieces
from tests.tiny_models import byte_tokenizer, save_model_folder
from tests.vision_configs import CONFIGS, IMAGE
from tests.vision_worlds import patches, tiny_vlm

SIDE, PATCH = 40, 14
"""Patches along a side of an image, and pixels along a patch's."""


def larger(model_type: str) -> dict[str, Any]:
    """A tower of more than a few numbers, for images of SIDE x SIDE patches."""
    config = copy.deepcopy(CONFIGS[model_type])
    vision = config["vision_config"]
    sizes = {"embed_dim": 128, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "num_attention_heads": 4}
    vision.update({name: size for name, size in sizes.items() if name in vision and name != "hidden_size"})
    if "embed_dim" not in vision:
        vision["hidden_size"] = 128
    if "image_size" in vision:
        vision["image_size"] = SIDE * PATCH
    if model_type == "kimi_vl":
        vision["hidden_size"] = vision["embed_dim"]
    if model_type == "lfm2_vl":
        vision |= {"patch_size": PATCH, "num_patches": SIDE * SIDE}
    if model_type == "gemma4":
        vision |= {"patch_size": PATCH, "num_key_value_heads": 4, "head_dim": 32, "position_embedding_size": 1024}
    if model_type == "gemma4_unified":
        vision |= {"patch_size": PATCH, "model_patch_size": 3 * PATCH, "mm_embed_dim": 512, "output_proj_dims": 512}
    return {"model_type": model_type, **config}


def image_of(config: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    vision, num_patches = config["vision_config"], SIDE * SIDE
    ids = [IMAGE] * (num_patches // 4)
    if config["model_type"] == "gemma3":
        return [IMAGE] * 16, {"pixel_values": np.ones((1, 3, SIDE * PATCH, SIDE * PATCH), np.float32)}
    if config["model_type"].startswith("gemma4"):
        side = SIDE - 1 if config["model_type"] == "gemma4" else SIDE // 3
        patch = vision.get("model_patch_size", PATCH)
        places = np.stack(np.meshgrid(np.arange(side), np.arange(side)), axis=-1).reshape(1, -1, 2)
        return ids, {"pixel_values": np.ones((1, side**2, 3 * patch**2), np.float32), "image_position_ids": places}
    if config["model_type"] in ("idefics3", "internvl"):
        return ids, {"pixel_values": np.ones((1, 1, 3, SIDE * PATCH, SIDE * PATCH), np.float32)}
    return ids, patches(config["model_type"], np.ones((num_patches, 3, PATCH, PATCH), np.float32), SIDE)


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "idefics3", "gemma3", "gemma4", "gemma4_unified"),
        *("glm4v", "glm_ocr", "paddleocr_vl", "dots_ocr", "kimi_vl", "lfm2_vl", "internvl"),
    ],
)
@pytest.mark.parametrize("num_outputs", [1, 10**6])
def test_the_encoder_takes_what_is_booked_and_not_far_less(model_type: str, num_outputs: int) -> None:
    """In pieces, and as a whole."""
    config = larger(model_type)
    model = build_random(config, 7, sees=True)
    mx.eval(model.parameters())
    mx.clear_cache()
    held_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    pieces = ImagePieces(model, *image_of(config))
    while pieces.num_left:
        pieces.submit(num_outputs).item()
    taken_bytes = mx.get_peak_memory() - held_bytes
    booked_bytes = vision_bytes(config, max_pixels=(SIDE * PATCH) ** 2, item_bytes=4)
    assert booked_bytes / 4 < taken_bytes <= booked_bytes


@pytest.mark.parametrize("metal", [False, True])
def test_sizes_that_are_left_out_are_pixtral_s(metal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in its config.json on the hub; mlx-vlm fills them in."""
    monkeypatch.setattr(need, "is_metal", lambda: metal)
    vision = {"model_type": "pixtral", "head_dim": 64, "image_size": 1024, "patch_size": 16}
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "num_attention_heads": 16}
    described = {"model_type": "pixtral", "text_config": {"hidden_size": 5120}}
    short, whole = (
        vision_bytes({**described, "vision_config": one}, max_pixels=1_500_000, item_bytes=2)
        for one in (vision, {**vision, **sizes})
    )
    assert short == whole > 2**27


def test_sizes_that_are_left_out_are_gemma_4_unified_s() -> None:
    """transformers saves no `model_patch_size`, which follows from two others."""
    large, small = {"model_patch_size": 40}, {"patch_size": 20, "pooling_kernel_size": 2}
    whole, saved, usual, nothing = (
        vision_bytes(
            {"model_type": "gemma4_unified", "text_config": {"hidden_size": 3840}, "vision_config": one},
            max_pixels=645_120,
            item_bytes=2,
        )
        for one in ({"mm_embed_dim": 3840, **large}, {"mm_embed_dim": 3840, **small}, {"model_patch_size": 48}, {})
    )
    assert whole == saved != usual == nothing < 2**30


@pytest.mark.parametrize("head_dim", [72, 80, 96, 128])
def test_logits_of_fused_attention_are_not_booked(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Metal, of any of MLX's own sizes: SigLIP's, and so Gemma 3's, is 72."""
    monkeypatch.setattr(need, "is_metal", lambda: True)

    def booked(dim: int) -> int:
        vision = {"hidden_size": 5760, "num_attention_heads": 5760 // dim, "num_hidden_layers": 27, "patch_size": 14}
        described = {"model_type": "pixtral", "text_config": {"hidden_size": 2560}, "vision_config": vision}
        return vision_bytes(described, max_pixels=1_500_000, item_bytes=2)

    assert booked(head_dim) == booked(64) < booked(36)


@pytest.mark.parametrize("layers", [[], [1, 2]])
def test_each_of_the_encoder_s_outputs_is_booked(layers: list[int]) -> None:
    vision = {"hidden_size": 64, "depth": 2, "num_heads": 4, "patch_size": 10, "spatial_merge_size": 2}
    described = {"model_type": "qwen3_vl", "vision_config": {**vision, "deepstack_visual_indexes": layers}}
    narrow, wide = (
        vision_bytes({**described, "text_config": {"hidden_size": size}}, max_pixels=400_000, item_bytes=4)
        for size in (1000, 1001)
    )
    assert wide - narrow == (4000 // 4) * (1 + len(layers)) * 4


def test_it_is_booked_with_the_model(tmp_path: Path) -> None:
    loaded = tiny_vlm("qwen3_vl").loaded
    folder = save_model_folder(loaded.model, loaded.config, tmp_path, byte_tokenizer())

    def activation_bytes(max_pixels: int) -> int:
        server = ServerConfig(max_image_pixels=max_pixels)
        return estimate_need(Config(model=ModelConfig(model=str(folder)), server=server)).activation_bytes

    small, large = activation_bytes(100_000), activation_bytes(1_000_000)
    estimated = [vision_bytes(loaded.config, max_pixels=size, item_bytes=4) for size in (100_000, 1_000_000)]
    assert large - small == estimated[1] - estimated[0] > 0


def test_a_draft_model_is_loaded_without_its_encoder(tmp_path: Path) -> None:
    loaded = tiny_vlm("qwen3_vl").loaded
    folder = str(save_model_folder(loaded.model, loaded.config, tmp_path, byte_tokenizer()))
    settings = ModelConfig(model=folder, draft_model=folder)
    alone = estimate_need(Config(model=ModelConfig(model=folder)))
    need = estimate_need(Config(model=settings, scheduler=SchedulerConfig(speculate="model")))
    assert need.encoder_bytes == alone.encoder_bytes > 0
    assert alone.weights_bytes < need.weights_bytes < 2 * alone.weights_bytes
    with LLM(folder, draft_model=folder, speculate="model", max_model_len=256, num_kv_blocks=16) as llm:
        assert not llm.info.no_vision
        assert llm.stats().weight_bytes == need.weights_bytes


def test_an_image_of_gemma_4_has_at_most_its_processor_s_tokens(tmp_path: Path) -> None:
    loaded = tiny_vlm("gemma4").loaded
    folder = save_model_folder(loaded.model, loaded.config, tmp_path, byte_tokenizer())

    def booked() -> int:
        return estimate_need(Config(model=ModelConfig(model=str(folder)))).activation_bytes

    sizes = []
    for name, content in (
        ("preprocessor_config.json", '{"max_soft_tokens": 1120}'),
        ("preprocessor_config.json", '{"max_soft_tokens": 280}'),
        ("preprocessor_config.json", "{}"),
        ("processor_config.json", '{"image_processor": {"max_soft_tokens": 280}}'),
    ):
        (folder / name).write_text(content)
        sizes.append(booked())
        (folder / name).unlink()
    most, less = (vision_bytes(loaded.config, max_pixels=count * 12**2, item_bytes=4) for count in (1120, 280))
    assert sizes[0] - sizes[1] == most - less > 0
    assert sizes[1:] == [sizes[1]] * 3
