"""Models with random weights, by name, for measurements on different machines without a download.

`random:mini` is small enough for a quick run on any CPU; `random:qwen3-0.6b` has the shape of Qwen3-0.6B, and
`random:llama-3-8b-4bit` the shape of Llama 3 8B in 4 bits, which needs 4.6 GB and a GPU. They have no tokenizer, so
inputs and outputs are token ids.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.blueprint import build_model
from mlx_server.runtime.models.places import RANDOM_PREFIX

Config = dict[str, Any]

_QWEN3 = MappingProxyType(
    {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "torch_dtype": "float32",
    }
)
_SHAPES: MappingProxyType[str, Config] = MappingProxyType(
    {
        "random:mini": {
            "hidden_size": 384,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 1152,
            "vocab_size": 16_384,
            "tie_word_embeddings": False,
        },
        "random:qwen3-0.6b": {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
        "random:llama-3-8b-4bit": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "max_position_embeddings": 8192,
            "torch_dtype": "bfloat16",
            "quantization": {"group_size": 64, "bits": 4},
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 14_336,
            "vocab_size": 128_256,
            "tie_word_embeddings": False,
        },
    }
)
_SEED = 20


def is_random(name: str) -> bool:
    """Whether `name` means random weights; `config_of` has the complete names."""
    return name.startswith(RANDOM_PREFIX)


def config_of(name: str) -> Config:
    """The model's configuration in the form of a `config.json`. Raises `ModelLoadError` for an unknown name."""
    shape = _SHAPES.get(name)
    if shape is None:
        raise ModelLoadError(f"There is no random model `{name}`; known are {', '.join(_SHAPES)}.")
    return {**_QWEN3, **shape}


def build(name: str) -> tuple[nn.Module, Config]:
    """The mlx-lm model with that name, evaluated, in float32 or in the type and bits of its configuration; and its
    configuration.

    The same name gives the same weights on every machine. Raises `ModelLoadError` for an unknown name. MLX thread.
    """
    config = config_of(name)
    model = build_model(config)
    _randomize(model, _SEED)
    if "quantization" in config:
        model.set_dtype(getattr(mx, config["torch_dtype"]))
        nn.quantize(model, **config["quantization"])
    for _, array in tree_flatten(model.parameters()):  # one by one: each float matrix is freed once it is packed
        mx.eval(array)
    return model.eval(), config


def build_random(config: Config, seed: int, *, sees: bool = False) -> nn.Module:
    """A model of any `model_type` from its configuration, with random weights that depend on `seed`; with `sees`,
    including its vision encoder."""
    model = build_model(config, sees=sees)
    _randomize(model, seed)
    mx.eval(model.parameters())
    return model.eval()


def _randomize(model: nn.Module, seed: int) -> None:
    """Replaces every parameter by lazy float32 noise that depends on `seed` and on the parameters' names and shapes,
    and packed parameters, which are unsigned integers, by random bits. Tables of signed integers stay.

    The noise is uniform: scaled and shifted random bits, so all devices agree up to one rounding. Its scales make
    greedy outputs vary: with twice the gain that keeps the variance, a layer's output depends on the whole context, and
    with a smaller embedding a tied head does not repeat its input.
    """
    parameters = sorted(tree_flatten(model.parameters()), key=lambda item: item[0])
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    model.load_weights([(name, _draw(name, old, keys[rank])) for rank, (name, old) in enumerate(parameters)])


def _draw(name: str, old: mx.array, key: mx.array) -> mx.array:
    shape = old.shape
    if mx.issubdtype(old.dtype, mx.signedinteger):
        return old
    if mx.issubdtype(old.dtype, mx.integer):
        return mx.random.randint(0, 2 ** min(8 * old.dtype.size, 31), shape, old.dtype, key)
    if name.endswith("signs"):
        return 1.0 - 2.0 * mx.random.randint(0, 2, shape, key=key)
    mean, deviation = 0.0, 1.0
    if name.endswith(("bias", "scales", "biases")):
        deviation = 0.1
    elif name.endswith("weight") and len(shape) == 1:
        mean, deviation = 1.0, 0.1
    elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
        deviation = 4.0 / math.sqrt(shape[-1])
    elif name.endswith("weight"):
        deviation = 2.0 / math.sqrt(shape[-1])
    reach = deviation * math.sqrt(3.0)
    return mx.random.uniform(mean - reach, mean + reach, shape, key=key)
