"""EAGLE-3 drafters: a decoder layer or few, trained for one larger model (Li et al. 2025, arXiv:2503.01840).

Like a head, it reads pairs of a token and what the model has computed at the position before it, and then its own
hidden state. That is not the model's last hidden state, but its *features*: the inputs of three of its layers, one
after the other, projected to one hidden state. The first layer reads both side by side:

    features of i = fc(concatenate(inputs of three layers at position i))
    x = concatenate(norm(embedding of token i + 1), norm(features of i))
    hidden = features + attention(x), then the MLP
    logits of token i + 2 = output matrix(norm(hidden))

For later tokens it reads its own hidden state instead. EAGLE 3.1 normalizes the input of each of the three layers
(`fc_norm`) and the hidden state that it reads (`norm_output`). Layers are those of Llama, or with norms of queries and
keys those of Qwen3. Most drafters have an output matrix of their own for the most frequent tokens only (`OutputModel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from mlx_server.runtime.drafts.drafter import BuiltDrafter, OutputModel, Weights, add_biases, check_sizes, own_weights
from mlx_server.runtime.drafts.heads import HeadLink, layers_of, link_to, text_part
from mlx_server.runtime.drafts.layer_taps import calls_each_once
from mlx_server.runtime.models.folder import SLIDING, eagle_layers
from mlx_server.runtime.models.loader import LoadedModel

_USUAL = 3
"""Layers that are read if a config.json names none."""


@dataclass(frozen=True, slots=True)
class EagleShape:
    """What a drafter's config.json says, in the form of vLLM's speculators or of SGLang. `plain` are the arguments of
    mlx-lm's Llama, whose layers drafters have, perhaps with `has_head_norms`, as in Qwen3. `layer_ids` are the layers
    of the model whose inputs are read, as speculators name them; None for the usual ones. SGLang's `eagle_config` names
    the layers before them, whose outputs these are. `windows` has the window of each layer of the drafter, None for
    all."""

    plain: llama.ModelArgs
    has_head_norms: bool
    windows: tuple[int | None, ...]
    draft_vocab_size: int
    target_hidden_size: int | None
    layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], *, has_head_norms: bool = False) -> EagleShape:
        """Raises `KeyError`, `TypeError` or `ValueError` for a configuration of another kind."""
        layers = eagle_layers(config)
        if (activation := layers.get("hidden_act") or "silu") != "silu":
            raise ValueError(f"its hidden_act is {activation}; only drafters with silu are supported")
        own = config.get("eagle_config") or {}
        more, name = {**config, **own}, "eagle_aux_hidden_state_layer_ids"
        if more.get("parallel_drafting"):
            raise ValueError("it drafts all tokens in parallel (P-EAGLE), which is not supported")
        if not more.get("use_aux_hidden_state", True):
            raise ValueError("it reads only the model's last hidden state, as EAGLE 1 and 2 do; EAGLE-3 is supported")
        plain = llama.ModelArgs.from_dict(layers)
        plain.head_dim = plain.head_dim or plain.hidden_size // plain.num_attention_heads
        if len(plain.layer_types) != plain.num_hidden_layers:
            raise ValueError(
                f"its layer_types has {len(plain.layer_types)} entries for {plain.num_hidden_layers} layers"
            )
        layer_ids = config.get(name) or [int(layer_id) + 1 for layer_id in own.get(name) or ()]
        return cls(
            plain=plain,
            has_head_norms=has_head_norms,
            windows=tuple(plain.sliding_window if kind == SLIDING else None for kind in plain.layer_types),
            draft_vocab_size=int(more.get("draft_vocab_size") or plain.vocab_size),
            target_hidden_size=more.get("target_hidden_size"),
            layer_ids=tuple(int(layer_id) for layer_id in layer_ids) or None,
            norm_before_residual=bool(more.get("norm_before_residual", "transformer_layer_config" in config)),
            norm_before_fc=bool(more.get("norm_before_fc")),
            fc_norm=bool(more.get("fc_norm")),
            norm_output=bool(more.get("norm_output") or more.get("return_hidden_post_norm")),
        )

    @property
    def num_tapped(self) -> int:
        return len(self.layer_ids or ()) or _USUAL

    def tapped(self, num_layers: int) -> list[int]:
        """The layers of a model with `num_layers` whose outputs are read: the inputs of the layers after them."""
        layer_ids = self.layer_ids or (2, num_layers // 2, num_layers - 3)
        return [layer_id - 1 for layer_id in layer_ids]


class EagleBlock(llama.TransformerBlock):  # type: ignore[misc]
    """A layer, whose attention reads rows of `size` numbers."""

    def __init__(self, shape: EagleShape, size: int) -> None:
        plain = shape.plain
        super().__init__(plain)
        if shape.has_head_norms:
            self.self_attn = qwen3.Attention(plain)
        for name in ("q_proj", "k_proj", "v_proj"):
            self.self_attn[name] = nn.Linear(size, self.self_attn[name].weight.shape[0], bias=False)
        if plain.attention_bias:
            add_biases(self.self_attn)


class EagleLayer(EagleBlock):
    """The first layer, whose attention reads embeddings and hidden states side by side."""

    def __init__(self, shape: EagleShape) -> None:
        plain = shape.plain
        super().__init__(shape, 2 * plain.hidden_size)
        self.hidden_norm = nn.RMSNorm(plain.hidden_size, eps=plain.rms_norm_eps)
        self._norm_before_residual = shape.norm_before_residual

    def __call__(self, embedded: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        normed = self.hidden_norm(hidden)
        x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        h = (normed if self._norm_before_residual else hidden) + self.self_attn(x, mask, cache)
        y: mx.array = h + self.mlp(self.post_attention_layernorm(h))
        return y


class EagleBody(nn.Module):  # type: ignore[misc]
    """A drafter before its output matrix."""

    def __init__(self, shape: EagleShape, target_size: int, link: HeadLink, weights: Weights) -> None:
        """With embeddings of its own and a bias of `fc` if they are among the `weights`."""
        super().__init__()
        plain = shape.plain
        size, eps, num_tapped = plain.hidden_size, plain.rms_norm_eps, shape.num_tapped
        self.fc = nn.Linear(num_tapped * target_size, size, bias="model.fc.bias" in weights)
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(num_tapped * target_size, eps=eps)
        if shape.fc_norm:
            self.fc_norm = [nn.RMSNorm(target_size, eps=eps) for _ in range(num_tapped)]
        others = range(1, plain.num_hidden_layers)
        self.layers = [EagleLayer(shape), *[EagleBlock(shape, size) for _ in others]]
        self.norm = nn.RMSNorm(size, eps=eps)
        if "model.embed_tokens.weight" in weights:
            self.embed_tokens = nn.Embedding(plain.vocab_size, size)
        self.link = link
        self.shape = shape

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        link = self.link
        embedded = (self.embed_tokens if "embed_tokens" in self else link.embed)(ids)
        hidden = embedded if link.given is None else link.given.reshape(embedded.shape)
        masks = [
            create_attention_mask(embedded, own, window_size=window, return_array=True)
            for own, window in zip(cache, self.shape.windows, strict=True)
        ]
        first, *others = self.layers
        x = first(embedded, hidden, masks[0], cache[0])
        for layer, mask, own in zip(others, masks[1:], cache[1:], strict=True):
            x = layer(x, mask, own)
        normed: mx.array = self.norm(x)
        if link.given is not None:
            link.carried = (normed if self.shape.norm_output else x).reshape(-1, x.shape[-1])
        return normed

    def features(self, outputs: mx.array) -> mx.array:
        """The features `[R, D]` of rows for which the model's layers gave `outputs` `[R, layers * size]`."""
        outputs = outputs.astype(self.norm.weight.dtype)
        if "input_norm" in self:
            outputs = self.input_norm(outputs)
        if "fc_norm" in self:
            parts = mx.split(outputs, len(self.fc_norm), axis=-1)
            outputs = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts)], axis=-1)
        features: mx.array = self.fc(outputs)
        return features


class EagleModel(OutputModel):
    """A drafter."""

    model: EagleBody

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.spread(self.own_logits(self.model(inputs, cache or self.make_cache())))

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self.layers]  # a layer's window is in its mask


def read_eagle(config: Mapping[str, Any], stored: Weights, target: LoadedModel) -> BuiltDrafter:
    """The drafter that a config.json describes, linked to `target`, with the `stored` weights. Raises `KeyError`,
    `TypeError` or `ValueError` for a configuration of another kind or for another model."""
    weights = own_weights(stored)
    shape = EagleShape.of(config, has_head_norms=any(".q_norm." in name for name in weights))
    target_size = target.setting("hidden_size", "dim", "n_embd")
    _check_fit(shape, target_size, target, weights)
    body = EagleBody(shape, target_size or 0, link_to(text_part(target.model)), weights)
    model = EagleModel(body, "eagle3", shape.plain.hidden_size, target.vocab_size)
    weights = model.take_output(weights, shape.draft_vocab_size, is_tied=bool(config.get("tie_word_embeddings")))
    return BuiltDrafter(model, weights, eagle_layers(config))


def _check_fit(shape: EagleShape, target_size: int | None, target: LoadedModel, weights: Weights) -> None:
    """Raises `ValueError` unless the drafter was made for a model of these sizes, whose layers can be read."""
    layers, embeds = layers_of(target.model), "model.embed_tokens.weight" in weights
    sizes = {
        "target_hidden_size": (shape.target_hidden_size or target_size, target_size),
        "vocab_size": (shape.plain.vocab_size, target.vocab_size),
        "hidden_size without embeddings": (target_size if embeds else shape.plain.hidden_size, target_size),
    }
    check_sizes("drafter", sizes)
    tapped = shape.tapped(len(layers))
    if min(tapped) < 0 or max(tapped) >= len(layers) or len({*tapped}) < len(tapped):
        raise ValueError(f"it reads the inputs of layers {[i + 1 for i in tapped]}, the model has {len(layers)} layers")
    fc, num_given = weights.get("model.fc.weight"), len(tapped) * (target_size or 0)
    if fc is not None and fc.shape[-1] != num_given and "model.fc.scales" not in weights:
        raise ValueError(f"its fc reads {fc.shape[-1]} numbers, {len(tapped)} of the model's layers have {num_given}")
    if not calls_each_once(target.model, [layers[index] for index in tapped]):
        raise ValueError("the model's code does not call each of its layers once, so they have no outputs to read")
