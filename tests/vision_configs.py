"""Configurations of tiny vision-language models, one for each family and form that is served."""

from __future__ import annotations

from typing import Any

IMAGE, START, BREAK = 300, 302, 305
"""Token ids of a placeholder, of the start of an image, and of the break between rows."""

_TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_IDS = {"image_token_id": IMAGE, "video_token_id": 301, "vision_start_token_id": START, "vision_end_token_id": 303}
_GRID = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
_ENCODER = {**_GRID, "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2}
_TILE = {
    "model_type": "idefics3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}

ROWS = {**_TILE, "model_type": "pixtral", "head_dim": 16, "image_size": 168, "patch_size": 14}
"""At most 12 patches along a side."""

_HYBRID = {
    **_TEXT,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {
        "type": "default",
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}
"""The text part of Qwen 3.5: every other layer is recurrent."""

_WINDOWED = {
    **_TEXT,
    "model_type": "gemma4_text",
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
}
"""The text part of Gemma 4. Its embeddings' scale, the root of `hidden_size`, is no power of two, so it rounds."""

_SEES = {"use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_global_key_value_heads": 1}
"""Of the larger ones."""

_POOLED = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 64,
    "default_output_length": 70,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_TEXT,
        **_IDS,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {**_GRID, "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        **_TEXT,
        **_IDS,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {**_ENCODER, "window_size": 56, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        **_IDS,
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "head_dim": 16,
            "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
        },
        "vision_config": {**_ENCODER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_vl_moe": {
        **_IDS,
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_moe_text",
            "head_dim": 16,
            "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        "vision_config": {**_ENCODER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {
        **_IDS,
        "text_config": {**_HYBRID, "model_type": "qwen3_5_text"},
        "vision_config": {**_ENCODER, "num_position_embeddings": 64, "deepstack_visual_indexes": []},
    },
    "qwen3_5_moe": {
        **_IDS,
        "text_config": {
            **_HYBRID,
            "model_type": "qwen3_5_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        "vision_config": {**_ENCODER, "num_position_embeddings": 64, "deepstack_visual_indexes": []},
    },
    "gemma4": {
        "image_token_id": IMAGE,
        "vocab_size": 320,
        "text_config": {
            **_WINDOWED,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
        },
        "vision_config": _POOLED,
    },
    "gemma3": {
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 16,
        "text_config": {
            **{name: value for name, value in _TEXT.items() if name != "tie_word_embeddings"},
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
        },
        "vision_config": {**_TILE, "model_type": "siglip_vision_model", "image_size": 112, "patch_size": 14},
    },
    "idefics3": {
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "vocab_size": 320,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_TILE, "image_size": 56, "patch_size": 14},
    },
    "smolvlm": {
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "vocab_size": 320,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_TILE, "image_size": 56, "patch_size": 14},
    },
    "pixtral": {
        "image_token_id": IMAGE,
        "vocab_size": 320,
        "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 16},
        "vision_config": ROWS,
    },
    "mistral3": {
        "image_token_id": IMAGE,
        "vocab_size": 320,
        "spatial_merge_size": 2,
        "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 16, "rope_parameters": {"rope_theta": 10_000.0}},
        "vision_config": ROWS,
    },
}

CONFIGS["ministral3"] = {
    **CONFIGS["mistral3"],
    "model_type": "mistral3",
    "text_config": {
        **_TEXT,
        "model_type": "ministral3",
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 16,
        },
    },
}
"""A model whose text part scales queries by their positions."""

CONFIGS["gemma4_moe"] = {
    **CONFIGS["gemma4"],
    "model_type": "gemma4",
    "vision_config": {**_POOLED, "standardize": True},
    "text_config": {
        **_WINDOWED,
        **_SEES,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}
"""Gemma 4 with experts; its images are seen both ways, by layers with a window."""

CONFIGS["gemma4_unified"] = {
    **CONFIGS["gemma4"],
    "audio_config": {},
    "text_config": {**_WINDOWED, **_SEES, "use_double_wide_mlp": False},
    "vision_config": {
        "model_type": "gemma4_unified_vision",
        "patch_size": 4,
        "model_patch_size": 12,
        "mm_embed_dim": 32,
        "mm_posemb_size": 64,
        "output_proj_dims": 32,
    },
}
"""An encoder without layers."""

_AXES = {"rope_type": "default", "type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10_000.0}
_WIDE = {**_ENCODER, "num_hidden_layers": 2, "num_attention_heads": 2, "embed_dim": 32}
_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

CONFIGS |= {
    "glm4v": {
        **_IDS,
        "text_config": {
            **_TEXT,
            "model_type": "glm4v_text",
            "attention_bias": True,
            "eos_token_id": [2],
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**_AXES, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_ENCODER, "model_type": "glm4v", "image_size": 112},
    },
    "glm4v_moe": {
        **_IDS,
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "model_type": "glm4v_moe_text",
            "head_dim": 16,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": True,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**_AXES, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_ENCODER, "model_type": "glm4v_moe", "image_size": 112},
    },
    "glm_ocr": {
        "image_token_id": IMAGE,
        "text_config": {
            **{name: value for name, value in _TEXT.items() if name != "rope_theta"},
            "model_type": "glm_ocr_text",
            "head_dim": 16,
            "rope_parameters": {**_AXES, "partial_rotary_factor": 1.0},
        },
        "vision_config": {**_ENCODER, "model_type": "glm_ocr_vision"},
    },
    "paddleocr_vl": {
        **_TEXT,
        **_IDS,
        "hidden_size": 1024,
        "head_dim": 16,
        "use_bias": False,
        "rope_scaling": _AXES,
        "rope_parameters": _AXES,
        "vision_config": {**_TILE, "model_type": "paddleocr_vl", "patch_size": 14, "image_size": 56},
    },
    "dots_ocr": {
        **_TEXT,
        "image_token_id": IMAGE,
        "vision_config": {**_WIDE, "model_type": "dots_vit", "hidden_size": 64, "temporal_patch_size": 1},
    },
    "kimi_vl": {
        "media_placeholder_token_id": IMAGE,
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        "vision_config": {**_WIDE, "model_type": "moonvit", "init_pos_emb_height": 8, "init_pos_emb_width": 8},
    },
    "lfm2_vl": {
        "image_token_id": IMAGE,
        "projector_hidden_size": 32,
        "text_config": {
            **_TEXT,
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "norm_eps": 1e-5,
            "conv_dim": 64,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
        "vision_config": {**_TILE, "model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 16},
    },
    "internvl": {
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
        "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16},
        "vision_config": {**_TILE, "model_type": "internvl_vision", "patch_size": [14, 14], "image_size": [56, 56]},
    },
    "internvl_chat": {
        "image_token_index": IMAGE,
        "downsample_ratio": 0.5,
        "llm_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TILE, "model_type": "intern_vit_6b", "patch_size": 14, "image_size": 56},
    },
}

CONFIGS["gemma3n"] = {
    "image_token_id": IMAGE,
    "vision_soft_tokens_per_image": 4,
    "text_config": {
        **_WINDOWED,
        "model_type": "gemma3n_text",
        "num_hidden_layers": 4,
        "intermediate_size": [128] * 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 299,
        "hidden_size_per_layer_input": 8,
        "rope_local_base_freq": 10_000.0,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "vision_config": {"model_type": "gemma3n_vision", "hidden_size": 32, "vocab_size": 8, "vocab_offset": 299},
    "audio_config": {"hidden_size": 32, "vocab_size": 8, "vocab_offset": 307, "conf_num_hidden_layers": 1},
}
"""Its tower is that of `tests.vision_worlds`: mlx-vlm knows one of 300 million weights."""

_OCR = {
    "image_token_index": IMAGE,
    "language_config": {
        **_TEXT,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "qk_nope_head_dim": 0,
        "topk_method": "greedy",
    },
    "vocab_size": 320,
    "projector_config": {"projector_type": "linear", "input_dim": 64, "n_embed": 64},
}
CONFIGS["deepseekocr"] = {
    **_OCR,
    "vision_config": {
        "model_type": "vision",
        "layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "image_size": 56,
    },
}
DEEPSEEK_OCR_2 = {
    **_OCR,
    "projector_config": {"projector_type": "linear", "input_dim": 32, "n_embed": 64},
    "vision_config": {"model_type": "vision", "width": {"qwen2-0-5b": {"dim": 32}}},
}
"""Not among the others, because its encoder takes no small images. The towers are those of `tests.vision_worlds`."""

CONFIGS["minicpmv4_6"] = {
    "image_token_id": IMAGE,
    "insert_layer_id": 0,
    "text_config": {**_HYBRID, "model_type": "minicpmv4_6"},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    },
}
