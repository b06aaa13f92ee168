"""A tiny configuration of every model file of mlx-lm: the values of `config.json` that differ from `COMMON`.

Every value that shapes the computation is set, so that a tiny model takes the same code paths as real models: windows
are shorter than the tests' prompts, there are more experts than are chosen, and every kind of layer occurs.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

VOCAB_SIZE = 320
WINDOW = 24
"""Tokens of sliding windows; neither a multiple nor a divisor of the block size."""

COMMON: MappingProxyType[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "use_qk_norm": True,
        "sliding_window": WINDOW,
        "hidden_act": "silu",
        # experts
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "shared_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "decoder_sparse_step": 1,
        "moe_layer_freq": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        # latent attention
        "kv_lora_rank": 24,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "partial_rotary_factor": 0.5,
        # recurrent layers
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": 8,
        # scalings
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
    }
)

_TEXT_ONLY = {"text_config": {}}
_HYBRID_QWEN = {"num_hidden_layers": 4, "full_attention_interval": 2, "partial_rotary_factor": 0.5}
_QWEN3_5_TEXT = {
    **_HYBRID_QWEN,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_GEMMA4_TEXT = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_LFM2 = {
    "num_hidden_layers": 4,
    "full_attn_idxs": [1, 3],
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_KIMI_LINEAR = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
    "model_max_length": 512,
    "num_experts_per_token": 2,
}
_ROPE_PER_TYPE = {
    kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in ("full_attention", "sliding_attention")
}
_PACKED = {
    "schema_version": 1,
    "tensor_namespace": "mlx-lm-text",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": [
        {"path": path, "block": block, "embedding": False, "dtype": "float16"}
        for path, block in (
            *((f"model.layers.{layer}.mlp.gate_proj", 0) for layer in range(4)),
            *((f"model.layers.{layer}.mlp.down_proj", 512) for layer in range(4)),
        )
    ]
    + [{"path": "model.embed_tokens", "block": 0, "embedding": True, "dtype": "float16"}],
    "text_config": {**_QWEN3_5_TEXT, "num_experts": 0, "hidden_size": 128, "intermediate_size": 512},
}
_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 20, "num_key_value_heads": 4}

_OWN: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "Klear": {},
        "afm7": {
            "hidden_dim": 64,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "afmoe": {**_LAYERS, "num_dense_layers": 1},
        "apertus": {"post_norm": False, "qk_norm": True},
        "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
        "bailing_hybrid": {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layer_group_size": 2,
            "group_norm_size": 2,
        },
        "bailing_moe": {"partial_rotary_factor": 1.0},
        "bailing_moe_linear": {"num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2},
        "bailing_moe_v3": {
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "num_key_value_heads": 4,
            "moe_shared_expert_intermediate_size": 32,
        },
        "cohere": {},
        "cohere2": {"sliding_window_pattern": 2},
        "dbrx": {
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
        "deepseek": {},
        "deepseek_v2": {
            "topk_method": "greedy",
            "num_key_value_heads": 4,
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 256,
            },
        },
        "deepseek_v3": {},
        "deepseek_v32": _INDEXER,
        "deepseek_v41": {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "compress_ratios": (0, 4),
            "kv_source_layer_ids": (0, 1),
            "index_source_layer_ids": (0, 1),
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
            "scoring_func": "sqrtsoftplus",
        },
        "dots1": {"scoring_func": "sigmoid"},
        "ernie4_5": {},
        "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
        "exaone": {"num_layers": 3},
        "exaone4": {"sliding_window_pattern": "LLG"},
        "exaone_moe": {**_LAYERS, "is_moe_layer": [False, True]},
        "falcon_h1": {
            "mamba_d_ssm": 64,
            "mamba_d_head": 16,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
        "gear": {"layer_types": ["conv_mixer", "sliding_attention", "full_attention"]},
        "gemma": {},
        "gemma2": {"query_pre_attn_scalar": 16.0},
        "gemma3": {"text_config": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16}},
        "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
        "gemma3n": {
            "text_config": {
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB_SIZE,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_local_base_freq": 10000.0,
                "final_logit_softcapping": 30.0,
                "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
                "hidden_size_per_layer_input": 16,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
            }
        },
        "gemma4": {"text_config": _GEMMA4_TEXT},
        "gemma4_text": _GEMMA4_TEXT,
        "glm": {},
        "glm4": {},
        "glm4_moe": {},
        "glm4_moe_lite": {"num_key_value_heads": 4},
        "glm_moe_dsa": {**_INDEXER, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        "gpt2": {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512},
        "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512, "n_inner": 96},
        "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
        "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
        "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512, "rotary_dim": 8},
        "granite": {},
        "granitemoe": {},
        "granitemoehybrid": {
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_proj_bias": False,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
        },
        "helium": {},
        "hunyuan": {
            "moe_topk": 2,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_cla": True,
            "cla_share_factor": 2,
            "num_hidden_layers": 4,
            "rope_scaling": {"alpha": 10.0, "factor": 1.0, "type": "dynamic"},
        },
        "hunyuan_v1_dense": {"rope_scaling": {"alpha": 10.0, "factor": 1.0, "type": "dynamic"}},
        "internlm2": {},
        "internlm3": {},
        "iquestloopcoder": {"num_hidden_layers": 2, "loop_window_size": WINDOW},
        "jamba": {
            "num_hidden_layers": 4,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
        },
        "kimi_k25": {"text_config": {}},
        "kimi_k3": {
            "text_config": {
                **_KIMI_LINEAR,
                "hidden_act": "situ",
                "activation_situ_beta": 1.0,
                "attn_res_block_size": 2,
                "routed_expert_hidden_size": 32,
            }
        },
        "kimi_linear": _KIMI_LINEAR,
        "kimi_vl": _TEXT_ONLY,
        "laguna": {
            **_LAYERS,
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": _ROPE_PER_TYPE,
        },
        "lfm2-vl": {"text_config": _LFM2},
        "lfm2": _LFM2,
        "lfm2_moe": {
            "num_hidden_layers": 4,
            "full_attn_idxs": [1, 3],
            "conv_bias": False,
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            "use_expert_bias": True,
        },
        "lille-130m": {"block_size": 512, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 3},
        "llama": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        "llama4": {
            "text_config": {
                "num_hidden_layers": 4,
                "attention_chunk_size": WINDOW,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 64,
                "num_experts_per_tok": 1,
            }
        },
        "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 0]},
        "longcat_flash": {
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "ffn_hidden_size": 96,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
            "zero_expert_num": 2,
            "num_layers": 2,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
        "longcat_flash_ngram": {
            "ffn_hidden_size": 96,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
            "zero_expert_num": 2,
            "num_layers": 2,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "ngram_vocab_size_ratio": 4,
        },
        "mamba": {"state_size": 8, "intermediate_size": 128},
        "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "intermediate_size": 128},
        "mellum": {
            **_LAYERS,
            "rope_parameters": _ROPE_PER_TYPE,
        },
        "mimo": {},
        "mimo_v2_flash": {
            "num_hidden_layers": 2,
            "hybrid_layer_pattern": [1, 0],
            "moe_layer_freq": [0, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 10000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "swa_v_head_dim": 12,
        },
        "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2},
        "minicpm3": {
            "dim_model_base": 32,
            "scale_depth": 1.4,
            "scale_emb": 2,
            "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
        },
        "minimax": {"rotary_dim": 8},
        "minimax_m3_vl": {
            "text_config": {
                **_LAYERS,
                "layer_types": ["full_attention", "minimax_m3_sparse"],
                "mlp_layer_types": ["dense", "sparse"],
                "dense_intermediate_size": 96,
                "index_n_heads": 2,
                "index_head_dim": 16,
                "index_block_size": 8,
                "index_topk_blocks": 2,
            }
        },
        "ministral3": {
            **_LAYERS,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
            },
        },
        "mistral3": {"text_config": {"num_hidden_layers": 2}},
        "mistral4": {
            "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
            },
        },
        "mixtral": {},
        "muse_glimmer": {**_LAYERS, "layer_rope_theta": [10000.0, 0]},
        "nanbeige": {"num_loops": 2},
        "nanochat": {},
        "nemotron-nas": {
            "num_hidden_layers": 3,
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
                {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            ],
        },
        "nemotron": {"hidden_act": "relu2"},
        "nemotron_h": {
            "hybrid_override_pattern": ["M", "*", "M", "-", "E"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "n_groups": 2,
            "moe_shared_expert_intermediate_size": 32,
        },
        "olmo2": {},
        "olmo3": _LAYERS,
        "olmo_hybrid": {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_allow_neg_eigval": True,
        },
        "olmoe": {},
        "openelm": {
            "num_transformer_layers": 2,
            "model_dim": 64,
            "ffn_dim_divisor": 8,
            "num_query_heads": [4, 4],
            "num_kv_heads": [2, 2],
            "ffn_multipliers": [1.5, 2.0],
        },
        "phi": {"partial_rotary_factor": 0.5},
        "phi3": {},
        "phi3small": {
            "vocab_size": 100352,
            "dense_attention_every_n_layers": 2,
            "ff_intermediate_size": 96,
            "gegelu_limit": 20.0,
            "blocksparse_block_size": 32,
            "blocksparse_num_local_blocks": 1,
            "blocksparse_vert_stride": 2,
        },
        "phimoe": {
            "rope_scaling": {
                "long_factor": [1.0] * 8,
                "short_factor": [1.0] * 8,
                "long_mscale": 1.2,
                "short_mscale": 1.1,
                "type": "longrope",
            }
        },
        "phixtral": {"num_vocab": VOCAB_SIZE, "model_dim": 64, "num_heads": 4, "num_layers": 2, "rotary_dim": 8},
        "pixtral": _TEXT_ONLY,
        "plamo": {"n_shared_head": 2},
        "plamo2": {
            "num_hidden_layers": 4,
            "hidden_size_per_head": 16,
            "mamba_d_state": 16,
            "mamba_num_heads": 4,
            "mamba_step": 2,
            "attention_window_size": WINDOW,
        },
        "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
        "prism_hadamard_qwen35": _PACKED,
        "qwen": {"kv_channels": 16},
        "qwen2": {},
        "qwen2_moe": {},
        "qwen2_vl": {"text_config": {"num_hidden_layers": 2}},
        "qwen3": {},
        "qwen3_5": {"text_config": {**_QWEN3_5_TEXT, "num_experts": 0}},
        "qwen3_5_moe": {"text_config": _QWEN3_5_TEXT},
        "qwen3_moe": {},
        "qwen3_next": _HYBRID_QWEN,
        "qwen3_vl": {"text_config": {"num_hidden_layers": 2}},
        "qwen3_vl_moe": {"text_config": {"num_hidden_layers": 2}},
        "recurrent_gemma": {
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"],
            "num_key_value_heads": 1,
        },
        "rwkv7": {
            "a_low_rank_dim": 16,
            "v_low_rank_dim": 16,
            "gate_low_rank_dim": 16,
            "decay_low_rank_dim": 16,
            "head_dim": 32,
        },
        "seed_oss": {},
        "smollm3": {"no_rope_layer_interval": 2},
        "solar_open": {},
        "spark2_5": {**_LAYERS, "hidden_act": "gelu", "rope_parameters": _ROPE_PER_TYPE},
        "stablelm": {"use_qkv_bias": True},
        "starcoder2": {},
        "step3p5": {**_LAYERS, "num_attention_groups": 2},
        "talkie": {},
        "telechat3": {},
        "youtu_llm": {"num_key_value_heads": 4},
    }
)

ARCHITECTURES = tuple(_OWN)


SEEDS: MappingProxyType[str, int] = MappingProxyType({})
"""Seeds for models whose two best tokens are too close to each other with seed 0."""

LEVELS: MappingProxyType[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("baichuan_m1", "bailing_moe_linear", "falcon_h1", "gear", "granitemoehybrid", "jamba", "lfm2"),
                *("lfm2-vl", "lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "prism_hadamard_qwen35"),
                *("qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv7"),
            ),
            "recurrent mixers",
        ),
        **dict.fromkeys(
            (
                *("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
                *("kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl", "longcat_flash", "minimax_m3_vl", "plamo2"),
            ),
            "mixers",
        ),
        "gemma2": "mixers, one request at a time",
        **dict.fromkeys(("longcat_flash_ngram", "mistral4", "plamo"), "whole model"),
        **dict.fromkeys(("afm7", "gpt_bigcode", "llama4"), "whole model, one request at a time"),
    }
)
"""The parts of a model that run group by group instead of once a step. Other models have none."""

RECURRENT = (
    *(name for name, level in LEVELS.items() if level == "recurrent mixers"),
    *("bailing_hybrid", "bailing_moe_v3", "kimi_k3", "kimi_linear", "longcat_flash_ngram", "plamo2"),
)
"""Architectures with layers that keep a recurrent state."""

REFUSED: MappingProxyType[str, str] = MappingProxyType(
    {
        "deepseek_v41": "Layer 0 keeps its state in a LayerCache",
        "phi3small": "its logits differ",
        "plamo3": "a window of 25 tokens where its cache keeps 24",
    }
)
"""Architectures that are refused, and a part of the error. Two of them are inconsistent in mlx-lm: phi3small adds its
mask to the scores as a number, and places its sparse blocks by the length of the call; plamo3 decodes with a window
that is one token shorter than in prompts."""

NEEDS_METAL = ("bitnet", "muse_spark")
"""Architectures whose layers are Metal kernels: refused on other machines, decided by the probe at load on a Mac."""

BROKEN = ("olmo",)
"""Architectures that fail in mlx-lm itself, and are refused."""

_NOT_SERVED: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "bitnet": {},
        "muse_spark": {
            "text_config": {
                **_LAYERS,
                "post_norm_eps": 1e-5,
                "rope_parameters": {"rope_theta": 10000.0},
                "layer_rope_theta": [10000.0, 0],
                "final_logit_softcapping": 30.0,
                "output_multiplier": 1.0,
                "moe_hidden_size": 32,
                "num_shared_experts": 0,
            }
        },
        "olmo": {"d_model": 64, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 96, "embedding_size": VOCAB_SIZE},
    }
)


def config_of(architecture: str) -> dict[str, Any]:
    """The configuration of an architecture, by the name of mlx-lm's file."""
    own = dict(_OWN.get(architecture) or _NOT_SERVED.get(architecture) or {})
    if "text_config" in own:
        own["text_config"] = {**COMMON, "model_type": architecture, **own["text_config"]}
    return {"model_type": architecture, **COMMON, **own}
