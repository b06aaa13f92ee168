"""EAGLE-3 drafters: a decoder layer or few, trained for one larger model (Li et al. 2025, arXiv:2503.01840).

Like a head, it reads pairs of a token and what the model has computed at the position before it, and then its own
hidden state. That is not the model's last hidden state, but its *features*: the inputs of three of its layers, one
after the other, projected to one hidden state. The first layer reads both side by side:

    features of i = fc(concatenate(inputs of three layers at position i))
    x = concatenate(norm(embedding of token i + 1), norm(features of i))
    hidden = features + attention(x), then the MLP
    logits of token i + 2 = output matrix(norm(hidden))

For later tokens it reads its own hidden state instead, in EAGLE 3.1 (`norm_output`) after the norm. Most drafters have
an output matrix of their own for the most frequent tokens only, `d2t` more than the place of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from mlx_server.runtime.drafts.drafter import BuiltDrafter, Weights, check_sizes
from mlx_server.runtime.drafts.heads import DrafterModel, HeadLink, layers_of, link_to, scattered, text_part
from mlx_server.runtime.drafts.layer_taps import calls_each_once
from mlx_server.runtime.models.folder import eagle_layers
from mlx_server.runtime.models.loader import LoadedModel

_NUM_TAPPED = 3


@dataclass(frozen=True, slots=True)
class EagleShape:
    """What a drafter's config.json says, in the form of vLLM's speculators or of SGLang. `plain` are the arguments of
    mlx-lm's Llama, whose layers drafters have. `layer_ids` are the layers of the model whose inputs are read, as
    speculators name them; None for the usual ones. SGLang's `eagle_config` names the layers before them, whose outputs
    these are."""

    plain: llama.ModelArgs
    draft_vocab_size: int
    target_hidden_size: int | None
    layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    norm_output: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EagleShape:
        """Raises `KeyError`, `TypeError` or `ValueError` for a configuration of another kind."""
        layers = eagle_layers(config)
        if (activation := layers.get("hidden_act") or "silu") != "silu":
            raise ValueError(f"its hidden_act is {activation}; only drafters with silu are supported")
        plain, own = llama.ModelArgs.from_dict(layers), config.get("eagle_config") or {}
        more, name = {**config, **own}, "eagle_aux_hidden_state_layer_ids"
        layer_ids = config.get(name) or [int(layer_id) + 1 for layer_id in own.get(name) or ()]
        if layer_ids and len(layer_ids) != _NUM_TAPPED:
            raise ValueError(f"it reads {len(layer_ids)} layers, not {_NUM_TAPPED}")
        return cls(
            plain=plain,
            draft_vocab_size=int(more.get("draft_vocab_size") or plain.vocab_size),
            target_hidden_size=more.get("target_hidden_size"),
            layer_ids=tuple(int(layer_id) for layer_id in layer_ids) or None,
            norm_before_residual=bool(more.get("norm_before_residual", "transformer_layer_config" in config)),
            norm_before_fc=bool(more.get("norm_before_fc")),
            norm_output=bool(more.get("norm_output") or more.get("return_hidden_post_norm")),
        )

    def tapped(self, num_layers: int) -> list[int]:
        """The layers of a model with `num_layers` whose outputs are read: the inputs of the layers after them."""
        layer_ids = self.layer_ids or (2, num_layers // 2, num_layers - 3)
        return [layer_id - 1 for layer_id in layer_ids]


class EagleLayer(llama.TransformerBlock):  # type: ignore[misc]
    """The first layer, whose attention reads embeddings and hidden states side by side."""

    def __init__(self, shape: EagleShape) -> None:
        plain = shape.plain
        super().__init__(plain)
        for name in ("q_proj", "k_proj", "v_proj"):
            size, bias = self.self_attn[name].weight.shape[0], plain.attention_bias
            self.self_attn[name] = nn.Linear(2 * plain.hidden_size, size, bias=bias)
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

    def __init__(self, shape: EagleShape, target_size: int, link: HeadLink, *, embeds: bool) -> None:
        """Without `embeds`, it has the model's embeddings."""
        super().__init__()
        plain = shape.plain
        self.fc = nn.Linear(_NUM_TAPPED * target_size, plain.hidden_size, bias=False)
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(_NUM_TAPPED * target_size, eps=plain.rms_norm_eps)
        others = range(1, plain.num_hidden_layers)
        self.layers = [EagleLayer(shape), *[llama.TransformerBlock(plain) for _ in others]]
        self.norm = nn.RMSNorm(plain.hidden_size, eps=plain.rms_norm_eps)
        if embeds:
            self.embed_tokens = nn.Embedding(plain.vocab_size, plain.hidden_size)
        self.link = link
        self.shape = shape

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        link = self.link
        embedded = (self.embed_tokens if "embed_tokens" in self else link.embed)(ids)
        hidden = embedded if link.given is None else link.given.reshape(embedded.shape)
        mask = create_attention_mask(embedded, cache[0], return_array=True)
        first, *others = self.layers
        x = first(embedded, hidden, mask, cache[0])
        for layer, own in zip(others, cache[1:], strict=True):
            x = layer(x, mask, own)
        normed: mx.array = self.norm(x)
        if link.given is not None:
            link.carried = (normed if self.shape.norm_output else x).reshape(-1, x.shape[-1])
        return normed

    def features(self, outputs: mx.array) -> mx.array:
        """The features `[R, D]` of rows for which the model's layers gave `outputs` `[R, layers * size]`."""
        outputs = outputs.astype(self.norm.weight.dtype)
        features: mx.array = self.fc(self.input_norm(outputs) if "input_norm" in self else outputs)
        return features


class EagleModel(DrafterModel):
    """A drafter."""

    model: EagleBody

    def __init__(self, body: EagleBody, vocab_size: int, *, has_output: bool) -> None:
        """Without `has_output`, it has the model's output matrix. `vocab_size` is the model's."""
        super().__init__(body, "eagle3")
        shape = body.shape
        if has_output:
            self.lm_head = nn.Linear(shape.plain.hidden_size, shape.draft_vocab_size, bias=False)
        self._vocab_size = vocab_size
        if shape.draft_vocab_size != vocab_size:
            self.d2t = mx.zeros((shape.draft_vocab_size,), mx.int32)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        hidden = self.model(inputs, cache or self.make_cache())
        logits: mx.array = self.lm_head(hidden) if "lm_head" in self else self.model.link.output(hidden)
        if "d2t" not in self:
            return logits
        tokens = mx.arange(self.d2t.size, dtype=mx.int32) + self.d2t
        return scattered(logits, mx.broadcast_to(tokens, logits.shape), self._vocab_size)

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self.layers]


def read_eagle(config: Mapping[str, Any], stored: Weights, target: LoadedModel) -> BuiltDrafter:
    """The drafter that a config.json describes, linked to `target`, with the `stored` weights. Raises `KeyError`,
    `TypeError` or `ValueError` for a configuration of another kind or for another model."""
    shape, target_size = EagleShape.of(config), target.setting("hidden_size", "dim", "n_embd")
    weights = {_own_name(name): array for name, array in stored.items()}
    weights = {name: array for name, array in weights.items() if not name.startswith(("t2d", "verifier_"))}
    embeds = "model.embed_tokens.weight" in weights
    _check_fit(shape, target_size, target, embeds=embeds)
    body = EagleBody(shape, target_size or 0, link_to(text_part(target.model)), embeds=embeds)
    model = EagleModel(body, target.vocab_size, has_output="lm_head.weight" in weights)
    if "d2t" not in model:
        weights.pop("d2t", None)
    elif "lm_head" not in model:
        raise ValueError(
            f"it has no lm_head for its {shape.draft_vocab_size} of the model's {target.vocab_size} tokens"
        )
    elif "d2t" in weights:
        weights["d2t"] = _checked(weights["d2t"].astype(mx.int32), target.vocab_size)
    return BuiltDrafter(model, weights, eagle_layers(config))


def _checked(d2t: mx.array, vocab_size: int) -> mx.array:
    """Raises `ValueError` if it names tokens that the model does not have: MLX would write there."""
    tokens = mx.arange(d2t.size, dtype=mx.int32) + d2t
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocab_size:
        raise ValueError(f"its d2t names tokens {least} to {most}, the model has {vocab_size}; fetch it again")
    return d2t


def _own_name(name: str) -> str:
    """The name in `EagleModel`. SGLang calls the first layer `midlayer`."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return name if name in ("d2t", "t2d") or name.startswith(("lm_head.", "verifier_")) else f"model.{name}"


def _check_fit(shape: EagleShape, target_size: int | None, target: LoadedModel, *, embeds: bool) -> None:
    """Raises `ValueError` unless the drafter was made for a model of these sizes, whose layers can be read."""
    layers = layers_of(target.model)
    sizes = {
        "target_hidden_size": (shape.target_hidden_size or target_size, target_size),
        "vocab_size": (shape.plain.vocab_size, target.vocab_size),
        "hidden_size without embeddings": (target_size if embeds else shape.plain.hidden_size, target_size),
    }
    check_sizes("drafter", sizes)
    tapped = shape.tapped(len(layers))
    if min(tapped) < 0 or max(tapped) >= len(layers) or len({*tapped}) < _NUM_TAPPED:
        raise ValueError(f"it reads the inputs of layers {[i + 1 for i in tapped]}, the model has {len(layers)} layers")
    if not calls_each_once(target.model, [layers[index] for index in tapped]):
        raise ValueError("the model's code does not call each of its layers once, so they have no outputs to read")
