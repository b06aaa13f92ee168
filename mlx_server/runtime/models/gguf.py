"""Converts a GGUF checkpoint of the Llama architecture to a folder in mlx-lm format.

MLX reads GGUF itself and keeps the blocks of Q4_0, Q4_1 and Q8_0 as affine quantization of group 32 with
float16 scales and biases, which are the file's own numbers: nothing is rounded. The rest is done here: mlx-lm's names
for the tensors, mlx-lm's row order for rotary embeddings, and the configuration and the tokenizer's files from the
metadata. A GGUF file names its rule for splitting text (`tokenizer.ggml.pre`) but does not contain it; only that of
the bundled model is known here: each digit alone, then GPT-2's pattern.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from mlx_server.errors import ModelLoadError


class _TokenType(enum.IntEnum):
    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja into `folder`.

    `metadata` is what MLX reads from a GGUF file: strings, lists of strings, and arrays. Raises
    `ModelLoadError` for another kind of vocabulary.
    """
    _check_kind(metadata)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id.item()]
    document = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(document + "\n", encoding="utf-8")
    if "tokenizer.chat_template" in metadata:
        (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def _check_kind(metadata: Mapping[str, Any]) -> None:
    kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ModelLoadError(
            f"The GGUF file's vocabulary is of kind {kind[0]}, split by {kind[1]}; "
            "only gpt2, split by smollm, is known."
        )
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if adds_bos is not None and adds_bos.item():
        raise ModelLoadError("The GGUF file wants a token before every prompt, which is not done here.")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer itself; token ids are the positions in the file's list."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelLoadError("The GGUF file's vocabulary holds a token twice.")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    tokenizer.add_special_tokens(_added(tokens, types, _TokenType.CONTROL))
    tokenizer.add_tokens(_added(tokens, types, _TokenType.USER_DEFINED))
    return tokenizer


def _added(tokens: list[str], types: list[int], wanted: _TokenType) -> list[AddedToken]:
    is_special = wanted is _TokenType.CONTROL
    return [
        AddedToken(token, special=is_special, normalized=False)
        for token, type_ in zip(tokens, types)
        if type_ == wanted
    ]


GROUP_SIZE = 32
"""Values that share a scale in every GGUF type that MLX keeps packed."""

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class WeightFormat(enum.StrEnum):
    """How converted weights are stored."""

    PACKED = "packed"
    """As in the file: 4 or 8 bits in groups of 32, the rest float16."""

    FLOAT32 = "float32"
    """Expanded. On a CPU, MLX multiplies float32 some 20 times faster than anything else."""


def native_weight_format() -> WeightFormat:
    """The format that suits the device in use: packed on Metal, float32 elsewhere."""
    is_metal = mx.default_device() != mx.cpu and mx.metal.is_available()
    return WeightFormat.PACKED if is_metal else WeightFormat.FLOAT32


def convert_gguf(source: Path, folder: Path, weight_format: WeightFormat) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files into `folder`, which must exist.

    Raises `ModelLoadError` when the file is no GGUF, or has an architecture, tensor or vocabulary that is not
    known here. Needs memory for all weights in the chosen format.
    """
    tensors, metadata = _read(source)
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(f"{source} has the architecture {architecture!r}; only 'llama' is converted here.")
    config = _config(tensors, metadata)
    weights = _weights(tensors, config)
    if weight_format is WeightFormat.FLOAT32:
        weights = _expand(weights)
    else:
        config["quantization"] = _quantization(weights)
        weights = {name: w if w.dtype == mx.uint32 else w.astype(mx.float16) for name, w in weights.items()}
    config["torch_dtype"] = "float32" if weight_format is WeightFormat.FLOAT32 else "float16"
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(metadata, folder)


def _read(source: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Tensors and metadata; a packed tensor comes as its weight, scales and biases."""
    try:
        loaded = mx.load(str(source), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{source} is not a readable GGUF file: {error}") from error
    return cast("tuple[dict[str, mx.array], dict[str, Any]]", loaded)


def _config(tensors: Mapping[str, mx.array], metadata: Mapping[str, Any]) -> dict[str, Any]:
    def number(name: str) -> Any:
        value = metadata.get(name)
        if value is None:
            raise ModelLoadError(f"The GGUF file has no {name}.")
        return value.item()

    hidden_size, num_heads = number("llama.embedding_length"), number("llama.attention.head_count")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "head_dim": hidden_size // num_heads,
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "rms_norm_eps": _shortest(number("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(number("llama.rope.freq_base")),
        "max_position_embeddings": number("llama.context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
    }


def _shortest(value: float) -> float:
    """1e-05 for the 9.999999747378752e-06 that a float32 reads as."""
    return float(str(np.float32(value)))


def _weights(tensors: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """The tensors under mlx-lm's names, as stored otherwise."""
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        part = module.rpartition(".")[2]
        if part in num_heads:
            tensor = _undo_rotary_order(tensor, num_heads[part])
        weights[f"{_module_name(module)}.{kind}"] = tensor
    return weights


def _module_name(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}"
    if module not in _TOP_NAMES:
        raise ModelLoadError(f"The GGUF file holds {module}, which is not known for the llama architecture.")
    return _TOP_NAMES[module]


def _undo_rotary_order(rows: mx.array, num_heads: int) -> mx.array:
    """GGUF interleaves the two halves of each head, `[heads, dim / 2, 2]`; mlx-lm has `[heads, 2, dim / 2]`."""
    split = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return split.swapaxes(1, 2).reshape(rows.shape)


def _quantization(weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's description: 4 bits, and by name the modules that differ."""
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4}
    for module in _packed_modules(weights):
        bits = _bits(weights, module)
        if bits != 4:
            quantization[module] = {"group_size": GROUP_SIZE, "bits": bits}
    return quantization


def _packed_modules(weights: Mapping[str, mx.array]) -> list[str]:
    return [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]


def _bits(weights: Mapping[str, mx.array], module: str) -> int:
    num_words, num_groups = weights[f"{module}.weight"].shape[-1], weights[f"{module}.scales"].shape[-1]
    return int(num_words * 32 // (num_groups * GROUP_SIZE))


def _expand(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Every weight as float32. Scales are widened first: the products then are exact, as GGUF defines them."""
    expanded = {name: w.astype(mx.float32) for name, w in weights.items() if w.dtype != mx.uint32}
    for module in tqdm(_packed_modules(weights), desc="Expanding weights", leave=False, disable=None):
        weight = mx.dequantize(
            weights[f"{module}.weight"],
            expanded.pop(f"{module}.scales"),
            expanded.pop(f"{module}.biases"),
            group_size=GROUP_SIZE,
            bits=_bits(weights, module),
        )
        mx.eval(weight)
        expanded[f"{module}.weight"] = weight
    return expanded
