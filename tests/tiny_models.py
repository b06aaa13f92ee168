"""Tiny float32 mlx-lm models with random weights for equality tests, and plain mlx-lm's answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_server.runtime.models.random_models import Config, build_random

VOCAB_SIZE = 320
EOS_TOKEN_ID = 257
CONTEXT_LENGTH = 4096
SLIDING_WINDOW = 24
"""Tokens of sliding windows; neither a multiple nor a divisor of the block size."""

_COMMON = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": CONTEXT_LENGTH,
        "torch_dtype": "float32",
        "eos_token_id": EOS_TOKEN_ID,
    }
)
_CONFIGS: MappingProxyType[str, Config] = MappingProxyType(
    {
        "qwen3": {"num_hidden_layers": 3, "head_dim": 32, "tie_word_embeddings": True},
        "llama": {"num_hidden_layers": 3, "tie_word_embeddings": False},
        "qwen3_moe": {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        "gemma3_text": {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": SLIDING_WINDOW,
            "sliding_window_pattern": 2,
        },
        "gpt_oss": {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    }
)
ARCHITECTURES = tuple(_CONFIGS)


class TinyModel(NamedTuple):
    """A model and the content of its `config.json`."""

    model: nn.Module
    config: Config


class Reference(NamedTuple):
    """`logits` is `[len(token_ids), vocabulary]` in float32; `token_ids[i]` is the arg max of row i."""

    token_ids: list[int]
    logits: mx.array


def tiny_model(architecture: str, seed: int = 0) -> TinyModel:
    """A model of one of `ARCHITECTURES` (by mlx-lm's names), with 2 to 4 layers and random weights by `seed`."""
    config = {"model_type": architecture, **_COMMON, **_CONFIGS[architecture]}
    return TinyModel(build_random(config, seed), config)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, with ids 0 to 255, three special tokens, and a ChatML template; fits `VOCAB_SIZE`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: rank for rank, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT_LENGTH,
        chat_template=(
            "{% for message in messages %}"
            "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
            "{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )


def save_model_folder(model: nn.Module, config: Config, path: Path, tokenizer: Any | None = None) -> Path:
    """Writes a folder for mlx-lm: `config.json`, `model.safetensors` and, if given, the tokenizer's files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def reference_generate(model: nn.Module, prompt_ids: Sequence[int], max_tokens: int) -> Reference:
    """Greedy token ids of plain mlx-lm with its caches: the prompt in one call, then one token in each. No stop
    token."""
    cache = make_prompt_cache(model)
    token_ids: list[int] = []
    rows: list[mx.array] = []
    next_input = list(prompt_ids)
    for _ in range(max_tokens):
        logits = model(mx.array([next_input]), cache=cache)[0, -1].astype(mx.float32)
        next_input = [int(mx.argmax(logits))]
        token_ids += next_input
        rows.append(logits)
    return Reference(token_ids, mx.stack(rows))


def describe_model_folder(config: Config, path: Path) -> Path:
    """Writes a model's folder without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    mx.save_safetensors(str(path / "model.safetensors"), {})
    return path
