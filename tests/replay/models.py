"""Models of real sizes, quantized to 4 bits unless asked otherwise, whose weights take no memory."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.runtime.drafts.assistant import AssistantModel, build_assistant
from mlx_server.runtime.drafts.eagle import EagleBody, EagleModel, EagleShape
from mlx_server.runtime.drafts.heads import FAMILIES, HeadBody, HeadFiles, HeadModel, link_to, text_part
from mlx_server.runtime.models.blueprint import build_blank
from mlx_server.runtime.models.loader import LoadedModel

_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131072}

CONFIGS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "llama-3-8b": {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
        },
        "llama-3.2-1b": {
            "model_type": "llama",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        "qwen3-30b-a3b": {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        "qwen3.5-35b-a3b": {
            "model_type": "qwen3_5_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "intermediate_size": 512,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "vocab_size": 248320,
            "tie_word_embeddings": False,
        },
        "gemma-3-12b": {
            "model_type": "gemma3_text",
            "hidden_size": 3840,
            "num_hidden_layers": 48,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "sliding_window": 1024,
            "vocab_size": 262208,
        },
        "gemma-4-e2b": {  # mlx-lm's default sizes
            "model_type": "gemma4_text",
            "hidden_size": 1536,
            "num_hidden_layers": 35,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_kv_shared_layers": 20,
            "sliding_window": 512,
            "vocab_size": 262144,
        },
    }
)


def config_of(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """What `config.json` of the model would say, with fewer layers if asked for. Layers that share others' K/V stay in
    proportion."""
    config = {**_COMMON, **CONFIGS[name]}
    if num_layers is not None:
        shared = config.get("num_kv_shared_layers", 0) * num_layers // config["num_hidden_layers"]
        config["num_hidden_layers"] = num_layers
        if "num_kv_shared_layers" in config:
            config["num_kv_shared_layers"] = shared
    return config


def build(config: dict[str, Any], bits: int | None = 4, *, sees: bool = False) -> nn.Module:
    """The model with `bits` for each weight in groups of 64, or not quantised, and activations in bfloat16. Every
    weight is a single evaluated zero that is broadcast to the right shape. With its vision encoder if it `sees`."""
    return _packed(build_blank(config, mx.bfloat16, sees=sees), bits)


def build_head(config: dict[str, Any], model: nn.Module) -> HeadModel:
    """The multi-token-prediction head of `model`, built like `build(config)`."""
    files = HeadFiles(FAMILIES[config["model_type"]], config, {})
    template, owner = build_blank(files.one_layer, mx.bfloat16), text_part(model)
    size, eps = owner.model.norm.weight.shape[0], owner.model.norm.eps
    body = HeadBody(files.family, list(template.layers), size, eps, link_to(owner))
    head = HeadModel(body, make_prompt_cache(template), config["model_type"])
    head.set_dtype(mx.bfloat16)
    packed: HeadModel = _packed(head, 4)
    return packed


def build_assistant_of(config: dict[str, Any], model: nn.Module) -> AssistantModel:
    """An assistant of `model` with the sizes of Google's for the small ones, built like `build(config)`."""
    text = {
        **config,
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "use_double_wide_mlp": False,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    }
    described = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": config["hidden_size"],
        "use_ordered_embeddings": True,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "text_config": text,
    }
    assistant = build_assistant(described, LoadedModel("model", model, config, None))
    assistant.set_dtype(mx.bfloat16)
    packed: AssistantModel = _packed(assistant, None)
    return packed


def build_eagle_of(config: dict[str, Any], model: nn.Module) -> EagleModel:
    """An EAGLE-3 drafter of `model` with one layer like its own, built like `build(config)`."""
    shape = EagleShape.of({**config, "num_hidden_layers": 1, "draft_vocab_size": 32000})
    size = config["hidden_size"]
    body = EagleBody(shape, size, link_to(text_part(model)), {})
    eagle = EagleModel(body, "eagle3", size, config["vocab_size"])
    eagle.take_output({"lm_head.weight": mx.array(0)}, 32000, is_tied=False)  # it has one, made here
    eagle.set_dtype(mx.bfloat16)
    packed: EagleModel = _packed(eagle, 4)
    return packed


def _packed(model: Any, bits: int | None) -> Any:
    if bits is not None:
        nn.quantize(
            model,
            group_size=64,
            bits=bits,
            class_predicate=lambda _, module: hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0,
        )
    model.update(tree_map(lambda weight: zeros(weight.shape, weight.dtype), model.parameters()))
    return model.eval()


def zeros(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    """An evaluated array of one zero in its own buffer."""
    array = mx.broadcast_to(mx.array(0, dtype), shape)
    mx.eval(array)
    return array
