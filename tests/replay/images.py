"""Records steps with images whose embeddings exist already, because a step does not depend on how they were made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlx_server.outputs import NewRequestData, SchedulerOutput
from mlx_server.request import PromptImage
from mlx_server.runtime.models.vlm import vlm_module
from mlx_server.runtime.vision import EncodedImage, ImageEncoder
from replay import models
from replay.graph import Graph
from replay.record import recording
from replay.traffic import Traffic

_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072}

_TOWER = {
    "depth": 1,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 2304,
}

SEEING: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "qwen3-vl-8b": {
            "model_type": "qwen3_vl",
            "image_token_id": 151655,
            "text_config": {
                **_COMMON,
                "model_type": "qwen3_vl_text",
                "hidden_size": 4096,
                "num_hidden_layers": 36,
                "intermediate_size": 12288,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rope_theta": 5e6,
                "rope_scaling": {"type": "default", "mrope_section": [24, 20, 20]},
                "vocab_size": 151936,
                "tie_word_embeddings": False,
            },
            "vision_config": {**_TOWER, "out_hidden_size": 4096, "deepstack_visual_indexes": [0]},
        },
        "qwen3.5-35b-a3b": {
            "model_type": "qwen3_5_moe",
            "image_token_id": 248056,
            "text_config": {
                **_COMMON,
                **models.CONFIGS["qwen3.5-35b-a3b"],
                "model_type": "qwen3_5_moe_text",
                "rope_parameters": {
                    "type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10],
                },
            },
            "vision_config": {**_TOWER, "out_hidden_size": 2048, "deepstack_visual_indexes": []},
        },
        "gemma-4-26b-a4b": {
            "model_type": "gemma4",
            "image_token_id": 258880,
            "text_config": {
                **_COMMON,
                "model_type": "gemma4_text",
                "hidden_size": 2816,
                "num_hidden_layers": 30,
                "intermediate_size": 2112,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "num_global_key_value_heads": 2,
                "head_dim": 256,
                "global_head_dim": 512,
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True,
                "use_bidirectional_attention": "vision",
                "enable_moe_block": True,
                "num_experts": 128,
                "top_k_experts": 8,
                "moe_intermediate_size": 704,
                "sliding_window": 1024,
                "sliding_window_pattern": 6,
                "vocab_size": 262144,
            },
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 1,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "head_dim": 72,
            },
        },
        "gemma-3-4b": {
            "model_type": "gemma3",
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "text_config": {
                **_COMMON,
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "intermediate_size": 10240,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "sliding_window": 1024,
                "sliding_window_pattern": 6,
                "vocab_size": 262208,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 1,
                "image_size": 896,
                "patch_size": 14,
            },
        },
    }
)

_GRID = (1, 32, 32)
_NUM_TOKENS = 256
TRAFFIC = Traffic(decodes=(100,), prompts=((0, 300), (64, 300)), known=True)
"""The first prompt has an image at tokens 20 to 275. The decode and the other prompt are text."""


def record_images(name: str, num_layers: int, num_steps: int = 3, *, traffic: Traffic = TRAFFIC) -> Graph:
    """The graph of steps, the first of which computes an image."""
    config = {**SEEING[name], "text_config": {**SEEING[name]["text_config"], "num_hidden_layers": num_layers}}
    both_ways = config["model_type"] in ("gemma3", "gemma4")
    image = PromptImage(20, _NUM_TOKENS, b"image", {"image_grid_thw": _GRID}, both_ways)
    with recording(lambda: models.build(config, sees=True), config["text_config"]["vocab_size"]) as recorder:
        runner, size = recorder.runner, config["text_config"]["hidden_size"]
        runner.images = ImageEncoder(runner.forward.model, max_bytes=2**40)
        layers = len(config["vision_config"].get("deepstack_visual_indexes", ()))
        made = [models.zeros((_NUM_TOKENS, size), mx.bfloat16) for _ in range(1 + layers)]
        runner.images._encoded[image.digest] = EncodedImage(made[0], tuple(made[1:]))
        steps = [traffic.step(index, len(runner.cache.windows)) for index in range(num_steps)]
        for module in runner.forward.model.modules():
            if getattr(module, "position_selector", None) is not None:
                module.fused_apply, module._compiled_apply = True, {}  # as on Metal
        with (
            patch.object(vlm_module("models.rope_utils"), "_HAS_METAL", new=True),
            patch.object(mx, "custom_function", _Untrained),
        ):
            return recorder.graph([_with_image(steps[0], image), *steps[1:]])


class _Untrained:
    """Replaces `mx.custom_function`, which adds operations only to gradients."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def vjp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def _with_image(step: SchedulerOutput, image: PromptImage) -> SchedulerOutput:
    def seen(data: NewRequestData) -> NewRequestData:
        return replace(data, prompt_token_ids=(1,) * 4096, images=(image,))

    prompts = {chunk.request_id for chunk in step.chunks if chunk.start == 0}
    new = tuple(seen(data) if data.request_id in prompts else data for data in step.new_requests)
    return replace(step, new_requests=new)
