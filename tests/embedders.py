"""Folders of tiny embedders with random weights, and sentence-transformers' formulas for their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.text_worlds import make_tokenizer
from tests.tiny_models import tiny_model

Array = npt.NDArray[np.float32]

END = "<|endoftext|>"
PROMPTS = {"query": "Instruct: find it\nQuery: ", "document": ""}


def embedder_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, the words yes and no, and an end token that is appended to each text, as in Qwen3-Embedding."""
    hf = make_tokenizer(words=("yes", "no"), special=("<|im_start|>", "<|im_end|>", END)).hf
    end_id = hf.convert_tokens_to_ids(END)
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, end_id)]
    )
    return hf


@dataclass(frozen=True)
class Dense:
    """A dense layer after the pooling."""

    weight: Array
    bias: Array | None
    activation: str

    @classmethod
    def random(cls, num_in: int, num_out: int, activation: str, *, has_bias: bool, seed: int) -> Dense:
        rng = np.random.default_rng(seed)
        weight = (rng.standard_normal((num_out, num_in)) / np.sqrt(num_in)).astype(np.float32)
        bias = rng.standard_normal(num_out).astype(np.float32) if has_bias else None
        return cls(weight, bias, activation)

    def __call__(self, x: Array) -> Array:
        y = self.weight @ x + (0.0 if self.bias is None else self.bias)
        return np.tanh(y) if self.activation.endswith("Tanh") else y

    def save(self, path: Path) -> None:
        path.mkdir()
        config = {
            "in_features": self.weight.shape[1],
            "out_features": self.weight.shape[0],
            "bias": self.bias is not None,
            "activation_function": self.activation,
        }
        (path / "config.json").write_text(json.dumps(config))
        arrays = {"linear.weight": mx.array(self.weight)}
        if self.bias is not None:
            arrays["linear.bias"] = mx.array(self.bias)
        mx.save_safetensors(str(path / "model.safetensors"), arrays)


@dataclass(frozen=True)
class TinyEmbedder:
    """A folder, and the results of sentence-transformers' formulas with plain mlx-lm."""

    folder: Path
    model: nn.Module
    mode: str
    dense: tuple[Dense, ...]
    is_normalized: bool
    is_bidirectional: bool

    def hidden(self, token_ids: Sequence[int]) -> Array:
        """Hidden states `[N, D]` after the last norm."""
        caches = [_SeesAll() for _ in self.model.layers] if self.is_bidirectional else None
        hidden: Array = np.array(self.model.model(mx.array([list(token_ids)]), caches)[0])
        return hidden

    def expected(self, token_ids: Sequence[int], dimensions: int | None = None) -> Array:
        vector = pooled(self.mode, self.hidden(token_ids))
        for layer in self.dense:
            vector = layer(vector)
        vector = vector[:dimensions]
        return vector / np.linalg.norm(vector) if self.is_normalized else vector


class _SeesAll:
    """A cache for mlx-lm's attention with bidirectional masks: everything, or half a window to each side."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        places = mx.arange(N)
        distance = mx.abs(places[:, None] - places[None])
        return distance <= (window_size // 2 if window_size else N)


def pooled(mode: str, hidden: Array) -> Array:
    """sentence_transformers.models.Pooling for one input without padding."""
    num_tokens = len(hidden)
    positions = np.arange(1, num_tokens + 1, dtype=np.float32)[:, None]
    by_mode = {
        "lasttoken": lambda: hidden[-1],
        "cls_token": lambda: hidden[0],
        "mean_tokens": lambda: hidden.sum(0) / num_tokens,
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / np.sqrt(num_tokens),
        "weightedmean_tokens": lambda: (hidden * positions).sum(0) / positions.sum(),
    }
    found: Array = by_mode[mode]()
    return found


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def save_embedder(
    path: Path,
    architecture: str = "qwen3",
    mode: str = "lasttoken",
    *,
    dense: Sequence[Dense] = (),
    is_normalized: bool = True,
    is_body: bool = True,
    max_seq_length: int | None = None,
    modules: Sequence[str] | None = None,
    **config: Any,
) -> TinyEmbedder:
    """Writes a folder as sentence-transformers does. `is_body` leaves out the head, and the prefix of the weights'
    names in a model with a head. `modules` replaces the content of modules.json, which follows from the other
    arguments."""
    tiny = tiny_model(architecture)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**tiny.config, **config}))
    weights: Mapping[str, mx.array] = dict(tree_flatten((tiny.model.model if is_body else tiny.model).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), dict(weights), metadata={"format": "mlx"})
    embedder_tokenizer().save_pretrained(path)
    kinds = modules or ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * is_normalized]
    listed = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir()
    modes = {
        f"pooling_mode_{name}": name == mode for name in ("lasttoken", "cls_token", "mean_tokens", "max_tokens", mode)
    }
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    for index, layer in enumerate(dense, start=2):
        layer.save(path / f"{index}_Dense")
    settings = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    if max_seq_length is not None:
        (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    is_bidirectional = bool(config.get("use_bidirectional_attention"))
    return TinyEmbedder(path, tiny.model, mode, tuple(dense), is_normalized, is_bidirectional)
