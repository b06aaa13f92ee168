"""Assistants: small models trained to draft for one Gemma 4 model, whose K and V they read (Gemma 4's multi-token
prediction).

An assistant keeps nothing of a request. All its layers attend to K/V that the model has stored: of its last layer with
full attention, and of its last layer with a window. Its input is the embedding of the last known token and the model's
hidden state of the token before it; for further drafts, its own drafts and hidden states. The position stays that of
the last known token.

    tokens 0 to 40 are known; the model has computed 0 to 39
    K/V       positions 0 to 39, in the model's blocks
    input     token 40 and the hidden state of 39, at position 40     gives draft 41
              draft 41 and the assistant's hidden state, at 40        gives draft 42

Some assistants score only the tokens of the likeliest clusters (`ClusteredHead`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_server.runtime.attention.cache_views import StepMask
from mlx_server.runtime.attention.interface import StepPlan
from mlx_server.runtime.attention.seam import caches_in_use
from mlx_server.runtime.cache.kv_cache import PagedKVCache, PagedLayerCache
from mlx_server.runtime.drafts.drafter import BuiltDrafter, Weights, check_sizes
from mlx_server.runtime.drafts.heads import (
    DrafterModel,
    HeadLink,
    body_name,
    layers_of,
    link_to,
    scattered,
    text_part,
)
from mlx_server.runtime.models.loader import LoadedModel

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class LentCache:
    """The model's caches for one step of its assistant. Each row sees what `plans` say; it stands at `positions` `[T]`,
    one after that."""

    cache: PagedKVCache
    plans: tuple[StepPlan, ...]
    positions: mx.array


@dataclass(slots=True)
class AssistantLink(HeadLink):
    """What an assistant shares with its model. `lent` is set for each step; without it, rows attend to nothing.
    Embeddings are multiplied by `scale`. `lenders` are the places of the layers that are read, by the type of layer."""

    scale: float = 1.0
    lenders: Mapping[str, int] = field(default_factory=dict)
    lent: LentCache | None = None


class ClusteredHead(nn.Module):  # type: ignore[misc]
    """Scores the tokens of the `top_k` likeliest clusters; all clusters have equally many tokens."""

    def __init__(self, size: int, vocab_size: int, num_centroids: int, top_k: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(size, num_centroids, bias=False)
        self.token_ordering = mx.zeros((vocab_size,), dtype=mx.int32)
        self._top_k = top_k

    def __call__(self, hidden: mx.array, embedding: nn.Embedding) -> mx.array:
        """Logits `[..., V]` for hidden states `[..., D]`; those of all other tokens are less than any of these."""
        scores = self.centroids(hidden)
        chosen = mx.argpartition(scores, -self._top_k, axis=-1)[..., -self._top_k :]
        clusters = self.token_ordering.reshape(scores.shape[-1], -1)
        tokens = clusters[chosen].flatten(-2)
        logits = (embedding(tokens) @ hidden[..., None])[..., 0]
        return scattered(logits, tokens, self.token_ordering.size)


class AssistantBody(nn.Module):  # type: ignore[misc]
    """An assistant before its output matrix."""

    def __init__(self, shape: gemma4_text.ModelArgs, size: int, link: AssistantLink) -> None:
        """`size` is that of the model's hidden states."""
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.pre_projection = nn.Linear(2 * size, shape.hidden_size, bias=False)
        self.layers = [gemma4_text.DecoderLayer(shape, index) for index in range(shape.num_hidden_layers)]
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_projection = nn.Linear(shape.hidden_size, size, bias=False)
        self.window = shape.sliding_window
        self.link = link

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        """Hidden states `[T, 1, D]` for ids `[T, 1]`; `cache` is empty."""
        link = self.link
        embedded = link.embed(ids) * link.scale
        given = embedded if link.given is None else link.given.reshape(embedded.shape)
        x = self.pre_projection(mx.concatenate([embedded, given], axis=-1))
        x = self._attend_to_nothing(x) if link.lent is None else self._attend(x, link.lent)
        hidden: mx.array = self.norm(x)
        if link.given is not None:
            link.carried = self.post_projection(hidden).reshape(-1, embedded.shape[-1])
        return hidden

    def _attend(self, x: mx.array, lent: LentCache) -> mx.array:
        mask = StepMask(self.window - 1, False)
        lent.cache.begin(lent.plans)
        token = caches_in_use.set(lent.cache.paged)
        try:
            stored = {kind: lent.cache.paged[place].lend() for kind, place in self.link.lenders.items()}
            for layer in self.layers:
                kind = layer.layer_type
                own_mask = mask if kind == _SLIDING else None
                x, *_ = layer(x, own_mask, shared_kv=stored[kind], offset=lent.positions)
            return x
        finally:
            caches_in_use.reset(token)
            lent.cache.end()

    def _attend_to_nothing(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            attention = layer.self_attn
            nothing = mx.zeros((x.shape[0], attention.n_heads, 1, attention.head_dim), x.dtype)
            x, *_ = layer(x, shared_kv=(nothing, nothing), offset=0)
        return x


class AssistantModel(DrafterModel):
    """An assistant, which keeps no K/V."""

    model: AssistantBody

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        hidden, body = self.model(inputs, cache), self["model"]
        if "masked_embedding" in body:
            clustered: mx.array = body.masked_embedding(hidden, body.embed_tokens)
            return clustered
        logits: mx.array = body.lm_head(hidden) if "lm_head" in body else body.embed_tokens.as_linear(hidden)
        return logits

    def make_cache(self) -> list[Any]:
        return []


def build_assistant(config: Mapping[str, Any], target: LoadedModel) -> AssistantModel:
    """The assistant that a config.json describes, linked to `target`, with mlx-lm's own initial weights, which are
    lazy. Raises `LookupError`, `TypeError` or `ValueError` for a configuration of another kind or for another model."""
    text = dict(config["text_config"])
    text |= {"num_kv_shared_layers": text["num_hidden_layers"], "hidden_size_per_layer_input": 0}
    shape = gemma4_text.ModelArgs.from_dict(text)
    if len(shape.layer_types) != shape.num_hidden_layers:
        raise ValueError(f"its layer_types has {len(shape.layer_types)} entries for {shape.num_hidden_layers} layers")
    owner = text_part(target.model)
    own = link_to(owner)
    scale = float(getattr(owner[body_name(owner)], "embed_scale", 1.0))
    link = AssistantLink(own.embed, own.output, own.last_norm, scale=scale, lenders=_lenders(shape, target))
    body = AssistantBody(shape, int(config["backbone_hidden_size"]), link)
    _check_fit(shape, body, target)
    if config.get("use_ordered_embeddings"):
        sizes = int(config["num_centroids"]), int(config["centroid_intermediate_top_k"])
        body.masked_embedding = ClusteredHead(shape.hidden_size, shape.vocab_size, *sizes)
    if not config.get("tie_word_embeddings", True):
        body.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
    return AssistantModel(body, str(config["model_type"]))


def read_assistant(config: Mapping[str, Any], stored: Weights, target: LoadedModel) -> BuiltDrafter:
    """As `build_assistant`, with the `stored` weights."""
    model = build_assistant(config, target)
    weights = {f"model.{name.removeprefix('model.')}": array for name, array in stored.items()}
    if (ordering := "model.masked_embedding.token_ordering") in weights:
        weights[ordering] = tokens = weights[ordering].astype(mx.int32)
        if not mx.array_equal(mx.sort(tokens), mx.arange(target.vocab_size)):  # MLX would write beside the logits
            raise ValueError(
                f"its token_ordering does not have each of {target.vocab_size} tokens once; fetch it again"
            )
    if "lm_head" not in model.model:
        weights = {name: array for name, array in weights.items() if not name.startswith("model.lm_head.")}
    return BuiltDrafter(model, weights, {**config["text_config"], "model_type": config["model_type"]})


def _lenders(shape: gemma4_text.ModelArgs, target: LoadedModel) -> dict[str, int]:
    """The places of the model's last layers that store K/V, by type. Raises `ValueError` for types that it lacks."""
    num_stored = len(target.model.make_cache())
    types = [getattr(layer, "layer_type", None) for layer in layers_of(target.model)[:num_stored]]
    lenders = {kind: len(types) - 1 - types[::-1].index(kind) for kind in (_FULL, _SLIDING) if kind in types}
    missing = {*shape.layer_types} - {*lenders}
    if missing:
        raise ValueError(f"it reads layers of the types {sorted(missing)}, which the model does not have")
    return lenders


def _check_fit(shape: gemma4_text.ModelArgs, body: AssistantBody, target: LoadedModel) -> None:
    """Raises `ValueError` unless the assistant was made for a model of these sizes."""
    sizes = {
        "backbone_hidden_size": (body.post_projection.weight.shape[0], target.setting("hidden_size")),
        "vocab_size": (shape.vocab_size, target.vocab_size),
    }
    layers, lenders = layers_of(target.model), body.link.lenders
    for layer in body.layers:
        lender = layers[lenders[layer.layer_type]].self_attn
        sizes[f"head_dim of {layer.layer_type}"] = layer.self_attn.head_dim, lender.head_dim
        num_heads, num_stored = layer.self_attn.n_heads, lender.n_kv_heads
        if num_heads % num_stored:
            raise ValueError(f"its {num_heads} heads cannot share the model's {num_stored}")
    check_sizes("assistant", sizes)


def reads(cache: PagedKVCache, body: AssistantBody) -> list[tuple[PagedLayerCache, int]]:
    """The layers whose K/V the assistant reads, and with how many query heads."""
    return [(cache.paged[body.link.lenders[layer.layer_type]], layer.self_attn.n_heads) for layer in body.layers]
