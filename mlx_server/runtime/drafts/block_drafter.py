"""Block drafters: models trained to draft a whole block of tokens in one pass, from what some layers of another model
computed (DFlash, Chen et al. 2026, arXiv:2602.06036, and DFlash 2).

The model's *features* of a position are the outputs of a few of its layers there, one after the other, projected to one
hidden state. The drafter has K and V of the features of all earlier positions, and computes a block: the last known
token, and a mask in place of each token to draft. All rows of a block see each other, except in layers with a window if
the drafter was trained so.

    tokens 0 to 40 are known; the model has computed 0 to 39
    K/V       features of positions 0 to 39, and the block's own
    block     token 40, mask, mask, mask    at positions 40 to 43
    drafts    41, 42, 43                    from the rows of the masks

Embedding and output matrix are the model's; some drafters have their own (`OutputModel`). In DFlash 2, a convolution
over the earlier rows of a block stands before and after attention and MLP; its kernel depends on the row. And of the
most likely tokens of each row, the one that best follows the draft before it is chosen (`CandidateSelector`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base, qwen3
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_server.runtime.drafts.drafter import BuiltDrafter, OutputModel, Weights, add_biases, check_sizes, own_weights
from mlx_server.runtime.drafts.heads import HeadLink, body_name, layers_of, link_to, text_part
from mlx_server.runtime.drafts.layer_taps import calls_each_once
from mlx_server.runtime.models.folder import SLIDING, block_layers
from mlx_server.runtime.models.loader import LoadedModel

_ONLY = (
    ("hidden_act", "silu"),
    ("rope_is_neox_style", True),
    ("attention_sink_bias", False),
    ("add_swa_attention_sink_bias", False),
    ("use_swa", False),
    ("projector_type", "dflash"),
    ("shift_label", False),
    ("sample_from_anchor", False),
)
"""Settings that would need other code, and the values that do not."""

_CAUSAL = ("is_causal", "causal", "dflash_query_causal")
"""Names of the setting that says of all layers whether a row sees only the rows of its block before it."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a drafter's config.json says. `plain` are the arguments of mlx-lm's Qwen3, whose layers drafters have.
    `windows` has the window of each layer, None for all, and `causal` whether its rows see no later row of their block.
    A kernel or rank of 0 means that there is none."""

    plain: qwen3.ModelArgs
    attention_bias: bool
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    softcap: float | None
    input_scale: float
    output_scale: float
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BlockShape:
        """Raises `KeyError`, `TypeError` or `ValueError` for a configuration of another kind."""
        given = block_layers(config)
        plain = qwen3.ModelArgs.from_dict(given)
        slide = [kind == SLIDING for kind in given.get("layer_types") or [""] * plain.num_hidden_layers]
        for name, known in _ONLY:
            if given.get(name) not in (None, known):
                raise ValueError(f"its {name} is {given[name]}, which is not supported")
        said = next((bool(given[name]) for name in _CAUSAL if given.get(name) is not None), None)
        in_windows = not given.get("sliding_window_non_causal", False)
        return cls(
            plain=plain,
            attention_bias=bool(given.get("attention_bias")),
            target_layer_ids=tuple(int(layer_id) for layer_id in given["target_layer_ids"]),
            windows=tuple(int(given["sliding_window"]) if slides else None for slides in slide),
            causal=tuple(slides and in_windows if said is None else said for slides in slide),
            draft_vocab_size=int(given.get("draft_vocab_size") or plain.vocab_size),
            block_size=int(given["block_size"]),
            mask_token_id=int(given["mask_token_id"]),
            num_target_layers=given.get("num_target_layers"),
            softcap=given.get("final_logit_softcapping"),
            input_scale=float(given.get("input_embedding_scale", 1.0)),
            output_scale=float(given.get("output_multiplier", 1.0)),
            conv_kernel_size=int(given.get("conv_kernel_size", 0)),
            conv_group_size=int(given.get("conv_group_size", 0)),
            selector_rank=int(given.get("selector_rank", 0)),
            selector_top_k=int(given.get("selector_top_k", 0)),
        )


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Which of a step's T rows are features and which belong to blocks.

    blocks   [B]     the rows of blocks
    order    [T]     the place of each row in features and blocks, one after the other
    places   [B]     the place of each of these rows in its block, 0 for the last known token
    anchors  [R]     the last known token of each request with a block
    """

    blocks: mx.array
    order: mx.array
    places: mx.array
    anchors: mx.array

    def join(self, features: mx.array, blocks: mx.array) -> mx.array:
        """`[T, ...]` of `[T - B, ...]` and `[B, ...]`."""
        return mx.concatenate([features, blocks])[self.order]


@dataclass(slots=True)
class BlockLink(HeadLink):
    """What a block drafter shares with its model, and its inputs besides token ids. `given` are the features `[F, D]`
    for the next call, and `rows` says where they are; without `rows`, all rows are a sequence. `carried` are the hidden
    states `[S, 1, D]` of the rows that the last call sampled, before the output matrix. Embeddings are multiplied by
    `scale`."""

    scale: float = 1.0
    rows: BlockRows | None = None


class BlockConvolution(nn.Module):  # type: ignore[misc]
    """Two causal convolutions over the rows of a block, before and after a part of a layer. Row i of a kernel weighs
    the row i places before; it is the same for the channels of a group, up to a fixed part."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        size, self.kernel_size = shape.plain.hidden_size, shape.conv_kernel_size
        self.base_kernel = mx.zeros((2, self.kernel_size, size))
        self.kernel_projection = nn.Linear(size, 2 * self.kernel_size * (size // shape.conv_group_size), bias=False)

    def kernels(self, x: mx.array) -> mx.array:
        """`[..., 2, kernel_size, groups]` for rows `[..., D]`."""
        kernels: mx.array = self.kernel_projection(x)
        return kernels.reshape(*x.shape[:-1], 2, self.kernel_size, -1)

    def apply(self, x: mx.array, kernels: mx.array, which: int, rows: BlockRows | None) -> mx.array:
        """`x` `[..., D]` after convolution 0 or 1."""
        groups = kernels.shape[-1]
        total = mx.zeros_like(x)
        for back in range(self.kernel_size):
            fixed = self.base_kernel[which, back].astype(x.dtype).reshape(groups, -1)
            kernel = (fixed + kernels[..., which, back, :, None]).reshape(x.shape)
            total = total + kernel * _shifted(x, back, rows)
        return total


def _shifted(x: mx.array, back: int, rows: BlockRows | None) -> mx.array:
    """The row `back` places before each row of its block, zeros where there is none."""
    if not back:
        return x
    if rows is None:  # each row is a block of its own
        return mx.zeros_like(x)
    earlier = x[mx.maximum(mx.arange(x.shape[0]) - back, 0)]
    return mx.where((rows.places >= back)[:, None, None], earlier, 0.0)


class BlockLayer(qwen3.TransformerBlock):  # type: ignore[misc]
    """A layer of Qwen3 whose queries are a block's, and whose keys and values are the features' and the block's."""

    def __init__(self, shape: BlockShape, window: int | None) -> None:
        super().__init__(shape.plain)
        if shape.attention_bias:
            add_biases(self.self_attn)
        self.window, self.head_dim = window, shape.plain.head_dim
        if shape.conv_kernel_size:
            self.attention_conv = BlockConvolution(shape)
            self.mlp_conv = BlockConvolution(shape)

    def __call__(self, x: mx.array, features: mx.array | None, rows: BlockRows | None, cache: Any) -> mx.array:
        """`x` `[B, 1, D]` are the blocks and `features` `[F, 1, D]`; without `rows`, `x` is `[N, L, D]`, or `[T, 1, D]`
        in a ragged batch."""

        def attend(y: mx.array) -> mx.array:
            return self._attend(y, features, rows, cache)

        x = x + self._convolved("attention_conv", self.input_layernorm(x), attend, rows)
        return x + self._convolved("mlp_conv", self.post_attention_layernorm(x), self.mlp, rows)

    def _convolved(
        self, name: str, x: mx.array, part: Callable[[mx.array], mx.array], rows: BlockRows | None
    ) -> mx.array:
        if name not in self:
            return part(x)
        convolution = self[name]
        kernels = convolution.kernels(x)
        y: mx.array = convolution.apply(part(convolution.apply(x, kernels, 0, rows)), kernels, 1, rows)
        return y

    def store(self, features: mx.array, cache: Any) -> None:
        """Only stores the keys and values of features `[F, 1, D]`."""
        attention = self.self_attn
        nothing = mx.zeros((*features.shape[:2], attention.n_heads, self.head_dim), features.dtype)
        self._attend_over(nothing, features, cache)

    def _attend(self, x: mx.array, features: mx.array | None, rows: BlockRows | None, cache: Any) -> mx.array:
        attention = self.self_attn
        queries = attention.q_norm(_heads(attention.q_proj(x), attention.n_heads))
        if rows is None or features is None:
            out = self._attend_over(queries, x, cache)
        else:
            nothing = mx.zeros((features.shape[0], *queries.shape[1:]), queries.dtype)
            out = self._attend_over(rows.join(nothing, queries), rows.join(features, x), cache)[rows.blocks]
        y: mx.array = attention.o_proj(out)
        return y

    def _attend_over(self, queries: mx.array, x: mx.array, cache: Any) -> mx.array:
        """Attention `[N, L, H * dim]` of `queries` `[N, L, H, dim]` over the cache, with the keys and values of `x`."""
        attention = self.self_attn
        keys = attention.k_norm(_heads(attention.k_proj(x), attention.n_kv_heads))
        values = _heads(attention.v_proj(x), attention.n_kv_heads)
        queries, keys, values = (part.transpose(0, 2, 1, 3) for part in (queries, keys, values))
        queries, keys = (attention.rope(part, offset=cache.offset) for part in (queries, keys))
        mask = base.create_attention_mask(x, cache, window_size=self.window)
        keys, values = cache.update_and_fetch(keys, values)
        out: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=attention.scale, mask=mask
        )
        return out.transpose(0, 2, 1, 3).flatten(2)


def _heads(x: mx.array, num_heads: int) -> mx.array:
    return x.reshape(*x.shape[:-1], num_heads, -1)


class CandidateSelector(nn.Module):  # type: ignore[misc]
    """Weighs the most likely tokens of a row by the token that was drafted before it."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(shape.plain.vocab_size, shape.selector_rank)
        self.successor_codebook = nn.Embedding(shape.plain.vocab_size, shape.selector_rank)
        self.hidden_projection = nn.Linear(shape.plain.hidden_size, shape.selector_rank, bias=False)
        self.top_k = shape.selector_top_k

    def __call__(self, logits: mx.array, hidden: mx.array, before: mx.array) -> mx.array:
        """`logits` `[R, V]` of rows with `hidden` states `[R, D]` after the tokens `before` `[R]`: those of the
        candidates with their weights added, -inf for all others."""
        candidates = mx.argpartition(logits, -self.top_k, axis=-1)[:, -self.top_k :]
        pair = self.predecessor_codebook(before) * self.hidden_projection(hidden)
        scores = mx.take_along_axis(logits, candidates, axis=-1)
        scores = scores + (pair[:, None] * self.successor_codebook(candidates)).sum(axis=-1)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, scores.dtype), candidates, scores, axis=-1)


class BlockBody(nn.Module):  # type: ignore[misc]
    """A drafter before the output matrix."""

    def __init__(self, shape: BlockShape, link: BlockLink, *, embeds: bool = False) -> None:
        """Without `embeds`, it has the model's embeddings."""
        super().__init__()
        size, eps = shape.plain.hidden_size, shape.plain.rms_norm_eps
        self.fc = nn.Linear(len(shape.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = [BlockLayer(shape, window) for window in shape.windows]
        self.norm = nn.RMSNorm(size, eps=eps)
        if shape.selector_rank:
            self.candidate_selector = CandidateSelector(shape)
        if embeds:
            self.embed_tokens = nn.Embedding(shape.plain.vocab_size, size)
        self.shape = shape
        self.link = link

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        link, rows = self.link, self.link.rows
        features = None if link.given is None else link.given[:, None]
        if rows is not None and features is not None and not rows.blocks.size:
            for layer, own in zip(self.layers, cache, strict=True):
                layer.store(features, own)
            return mx.zeros_like(features)
        embed = self.embed_tokens if "embed_tokens" in self else link.embed
        x = embed(ids if rows is None else ids[rows.blocks]) * link.scale
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, features, rows, own)
        hidden: mx.array = self.norm(x)
        return hidden if rows is None or features is None else rows.join(mx.zeros_like(features), hidden)

    def features(self, outputs: mx.array) -> mx.array:
        """The features `[R, D]` of rows for which the model's layers gave `outputs` `[R, layers * D]`."""
        features: mx.array = self.hidden_norm(self.fc(outputs.astype(self.hidden_norm.weight.dtype)))
        return features


class BlockModel(OutputModel):
    """A drafter."""

    model: BlockBody

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        shape, link = self.model.shape, self.model.link
        hidden = self.model(inputs, cache or self.make_cache())
        link.carried = None if link.rows is None else hidden
        logits = self.own_logits(hidden) * shape.output_scale
        return self.spread(logits if shape.softcap is None else mx.tanh(logits / shape.softcap) * shape.softcap)

    def make_cache(self) -> list[Any]:
        """A layer's window is in its mask. Only if not all layers are causal, those that are have it in their cache,
        too, and so a plan of their own, in which rows do not see later ones."""
        shape = self.model.shape
        is_mixed = len({*shape.causal}) > 1
        return [
            RotatingKVCache(max_size=window) if is_mixed and is_causal else KVCache()
            for window, is_causal in zip(shape.windows, shape.causal, strict=True)
        ]


def read_block_drafter(config: Mapping[str, Any], stored: Weights, target: LoadedModel) -> BuiltDrafter:
    """The drafter that a config.json describes, linked to `target`, with the `stored` weights. Raises `KeyError`,
    `TypeError` or `ValueError` for a configuration of another kind or for another model."""
    weights, shape = own_weights(stored), BlockShape.of(config)
    _check_fit(shape, target)
    owner = text_part(target.model)
    own = link_to(owner)
    embeds = "model.embed_tokens.weight" in weights
    scale = 1.0 if embeds else float(getattr(getattr(owner, body_name(owner)), "embed_scale", 1.0))
    link = BlockLink(own.embed, own.output, own.last_norm, scale=shape.input_scale * scale)
    body = BlockBody(shape, link, embeds=embeds)
    model = BlockModel(body, "qwen3", shape.plain.hidden_size, target.vocab_size)
    weights = model.take_output(weights, shape.draft_vocab_size, is_tied=False)
    return BuiltDrafter(model, weights, block_layers(config))


def _check_fit(shape: BlockShape, target: LoadedModel) -> None:
    """Raises `ValueError` unless the drafter was made for a model of these sizes, whose layers can be read."""
    layers = layers_of(target.model)
    read, num = shape.target_layer_ids, len(layers)
    sizes = {
        "hidden_size": (shape.plain.hidden_size, target.setting("hidden_size", "dim", "n_embd")),
        "num_target_layers": (shape.num_target_layers or num, num),
        "vocab_size": (shape.plain.vocab_size, target.vocab_size),
    }
    check_sizes("drafter", sizes)
    if shape.block_size < 2 or not 0 <= shape.mask_token_id < shape.plain.vocab_size:
        raise ValueError(f"its block_size is {shape.block_size} and its mask_token_id {shape.mask_token_id}")
    if not read or len({*read}) < len(read) or not {*read} <= {*range(num)}:
        raise ValueError(f"it reads layers {list(read)}, the model has {num}; take the drafter made for this model")
    if not calls_each_once(target.model, [layers[layer_id] for layer_id in read]):
        raise ValueError("the model's code does not call each of its layers once, so they have no outputs to read")
