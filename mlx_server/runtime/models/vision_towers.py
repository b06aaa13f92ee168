"""Vision towers of mlx-vlm on text models of mlx-lm.

mlx-lm's model computes the text, as without images, so everything that works for text works beside images, too. The
tower makes the embeddings of an image, and positions in three axes come in through the rotary embedding of each layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_server.runtime.attention.cache_views import UnpageableError
from mlx_server.runtime.attention.interface import IntArray
from mlx_server.runtime.vision import EncodedImage, ImageRows, ReadsImages

SOUND = re.compile(r"(^|\.)(audio_tower|embed_audio)\.")
"""Tensors that are not loaded."""


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """How the towers of some model types are used.

    `parts` are their attributes in mlx-vlm's model, and `names` what marks their tensors in files. `embed` gives the
    embeddings `[n, D]` of an image from its placeholders `[1, n]` and arrays. `arguments` are those of mlx-lm's model
    for ids `[B, L]` with rows of images, whose embeddings are the last argument. `needs_sound`: mlx-vlm's model is only
    built with its tower for sound, which is not loaded. `has_plain`: mlx-vlm's whole model gives right logits.
    """

    parts: tuple[str, ...]
    names: tuple[str, ...]
    embed: Callable[[TowerModel, mx.array, Mapping[str, mx.array]], mx.array]
    arguments: Callable[[TowerModel, mx.array, ImageRows, mx.array], dict[str, Any]]
    spans_in_windows: bool = False
    needs_sound: bool = False
    has_plain: bool = True


def _embed_qwen(model: TowerModel, ids: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    pixels = inputs["pixel_values"].astype(model.vision_tower.patch_embed.proj.weight.dtype)
    embeddings: mx.array = model.vision_tower(pixels, inputs["image_grid_thw"])[0]
    return embeddings


def _qwen_arguments(model: TowerModel, ids: mx.array, rows: ImageRows, images: mx.array) -> dict[str, Any]:
    return {"input_embeddings": rows.put(images, model.language_model.model.embed_tokens(ids))}


def _embed_gemma(model: TowerModel, ids: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    """As the tower's own call, which waits for the device to count the patches without padding: here all are."""
    tower, places = model.vision_tower, inputs["image_position_ids"]
    is_padding = mx.zeros(places.shape[:2], mx.bool_)
    hidden = tower.patch_embedder.embed_patches(inputs["pixel_values"], places, is_padding)
    hidden = tower.encoder(hidden, places, None)
    num_tokens = places.shape[1] // tower.pooling_kernel_size**2
    pooled, _ = tower.pooler(hidden, places, is_padding, output_length=num_tokens)
    if tower.config.standardize:
        pooled = (pooled - tower.std_bias) * tower.std_scale
    embeddings: mx.array = model.embed_vision(pooled)
    return embeddings[0]


def _embed_unified(model: TowerModel, ids: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    """In the type of the weights, as transformers does: pixels in float32 would turn the matrices into it."""
    embedder = model.vision_embedder
    pixels = inputs["pixel_values"].astype(embedder.pos_embedding.dtype)
    embeddings: mx.array = model.embed_vision(embedder(pixels, inputs["image_position_ids"]))
    return embeddings[0]


def _gemma_arguments(model: TowerModel, ids: mx.array, rows: ImageRows, images: mx.array) -> dict[str, Any]:
    """Placeholders have the inputs per layer of token 0."""
    body = model.language_model.model
    arguments = {"input_embeddings": _Unscaled(body.embed_tokens(ids), rows, images)}
    if body.hidden_size_per_layer_input:
        known = rows.put(mx.zeros((len(rows.rows), 1)), ids[..., None])[..., 0]
        arguments["per_layer_inputs"] = body._get_per_layer_inputs(known)
    return arguments


@dataclass(frozen=True, slots=True)
class _Unscaled:
    """Embeddings of `tokens` with those of `images` in their rows, which mlx-lm's model multiplies by its scale. Those
    of images have none; divided by it, they would be rounded twice."""

    tokens: mx.array
    rows: ImageRows
    images: mx.array

    def __mul__(self, scale: float) -> mx.array:
        return self.rows.put(self.images, self.tokens * scale)


def _embed_gemma_3n(model: TowerModel, ids: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    """The square, and the token behind it, which has an embedding among the tower's weights."""
    pixels = inputs["pixel_values"].astype(model.embed_vision.soft_embedding_norm.weight.dtype)
    square = model.module.Model.get_image_features(pixels, model.vision_tower, model.config, model.embed_vision)[0]
    return mx.concatenate([square, model.embed_vision(input_ids=ids[0, len(square) :])])


def _gemma_3n_arguments(model: TowerModel, ids: mx.array, rows: ImageRows, images: mx.array) -> dict[str, Any]:
    body = model.model.language_model
    return {"input_embeddings": rows.put(images, body.embed_tokens(ids) * body.hidden_size**0.5)}


_QWEN = TowerFamily(("vision_tower",), ("visual.", "vision_tower."), _embed_qwen, _qwen_arguments)
_GEMMA = TowerFamily(
    ("vision_tower", "embed_vision"),
    ("vision_tower.", "embed_vision."),
    _embed_gemma,
    _gemma_arguments,
    spans_in_windows=True,
)

TOWER_FAMILIES: Mapping[str, TowerFamily] = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3n": TowerFamily(
        ("vision_tower", "embed_vision"),
        ("vision_tower.", "embed_vision."),
        _embed_gemma_3n,
        _gemma_3n_arguments,
        needs_sound=True,
        has_plain=False,  # its queries of layers that share K/V have wrong positions where there are caches
    ),
    "gemma4": _GEMMA,
    "gemma4_unified": replace(
        _GEMMA,
        parts=("vision_embedder", "embed_vision"),
        names=("vision_embedder.", "embed_vision."),
        embed=_embed_unified,
    ),
}
"""By `model_type`."""


@dataclass(frozen=True, slots=True)
class TowerArguments:
    """The arguments of a text model, and mlx-vlm's configuration of the whole."""

    text: Any
    config: Any


@dataclass(frozen=True)
class _ArgumentsMaker:
    text: Any
    whole: Any
    needs_sound: bool

    def from_dict(self, config: Mapping[str, Any]) -> TowerArguments:
        whole = {**config} if self.needs_sound else {**config, "audio_config": None}
        return TowerArguments(self.text.from_dict(dict(config)), self.whole.from_dict(whole))


def tower_classes(
    text: tuple[type[nn.Module], Any], vlm: tuple[type[ReadsImages], Any], model_type: str
) -> tuple[type[nn.Module], Any]:
    """The classes of a model and of its arguments: mlx-lm's `text` ones with the tower of mlx-vlm's model class."""
    family = TOWER_FAMILIES[model_type]
    members = {"module": vlm[0].module, "family": family, "spans_in_windows": family.spans_in_windows}
    made = type(text[0].__name__, (TowerModel, text[0]), members)
    return made, _ArgumentsMaker(text[1], vlm[1], family.needs_sound)


class TowerModel(ReadsImages):
    """The base of one of mlx-lm's model classes: adds a vision tower, whose embeddings take the place of placeholders,
    and positions in three axes (M-RoPE), if the configuration has sections for them."""

    family: TowerFamily

    def __init__(self, arguments: TowerArguments) -> None:
        super().__init__(arguments.text)
        object.__setattr__(self, "config", arguments.config)
        whole = self.module.Model(arguments.config)
        for name in self.family.parts:
            setattr(self, name, getattr(whole, name))
        object.__setattr__(self, "_axes", _Axes())
        sections = _mrope_sections(arguments.config)
        for layer in self.layers if sections else ():
            attention = layer.children().get("self_attn")
            if attention is not None:
                object.__setattr__(attention, "rope", AxisRope(attention, sections, self._axes))

    @property
    def has_positions(self) -> bool:
        return bool(_mrope_sections(self.config))

    def __call__(self, inputs: mx.array, cache: Any = None, image_rows: ImageRows | None = None, **more: Any) -> Any:
        """Logits `[B, L, vocabulary]` for ids `[B, L]`."""
        if image_rows is None:
            return super().__call__(inputs, cache=cache, **more)
        if image_rows.images is not None:
            more |= self.family.arguments(self, inputs, image_rows, image_rows.images.embeddings)
        self._axes.set(image_rows.positions)
        try:
            return super().__call__(inputs, cache=cache, **more)
        finally:
            self._axes.set(None)

    def embed_image(self, ids: mx.array, inputs: dict[str, mx.array]) -> EncodedImage:
        return EncodedImage(self.family.embed(self, ids, inputs), ())

    def plain(self) -> Any:
        """Its layers with weights are those of this model, as far as their names are equal."""
        if not self.family.has_plain:
            return None
        whole = self.module.Model(self.config)
        ours = {path: module for path, module in self.named_modules() if tree_flatten(module.parameters())}
        leaves = [path for path, module in whole.named_modules() if not module.children() and path in ours]
        whole.update_modules(tree_unflatten([(path, ours[path]) for path in leaves]))
        return whole.update(self.parameters(), strict=False)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The tensors of the text as mlx-lm's model takes them, those of the tower as mlx-vlm's."""
        tower = {name: array for name, array in weights.items() if any(mark in name for mark in self.family.names)}
        others = {name: array for name, array in weights.items() if name not in tower and not SOUND.search(name)}
        text = super().sanitize(others)
        whole = SimpleNamespace(config=self.config, audio_tower=None, embed_audio=None)
        cleaned: dict[str, mx.array] = self.module.Model.sanitize(whole, tower)
        encoder = getattr(self, self.family.parts[0])
        return dict(text) | (encoder.sanitize(cleaned) if hasattr(encoder, "sanitize") else cleaned)


def _mrope_sections(config: Any) -> list[int]:
    """How many frequencies turn with each axis (time, height, width); empty for positions in one axis."""
    return list((getattr(config.text_config, "rope_parameters", None) or {}).get("mrope_section", ()))


class _Axes:
    """The positions of the running call's rows, `[B * L]` for each axis, or one for all axes where they are equal.
    Empty outside of calls with images."""

    def __init__(self) -> None:
        self.positions: Sequence[mx.array] = ()

    def set(self, positions: IntArray | None) -> None:
        if positions is None:
            self.positions = ()
        else:
            is_text = bool((positions == positions[0]).all())
            self.positions = [mx.array(axis) for axis in positions[: 1 if is_text else 3]]


class AxisRope:
    """Stands in for a layer's rotary embedding: turns each frequency by the position in its axis, as Qwen 3.5's
    interleaved M-RoPE does. Rows with equal positions in all axes get the bits of the embedding itself, which computes
    all rows once for each axis.

    Sections 3, 3, 2 of eight frequencies: the axes are t h w t h w t h, that is, after the interleaved h and w of the
    sections, all others belong to time.
    """

    def __init__(self, owner: nn.Module, sections: Sequence[int], axes: _Axes) -> None:
        self._owner = owner
        self._axes = axes
        rope = owner["rope"]
        self._axis_of = _interleaved(sections, rope.dims // 2)

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """`x` `[B, heads, L, dim]`; `offset` counts only outside of calls with images."""
        rope, positions = self._owner["rope"], self._axes.positions
        if not positions:
            y: mx.array = rope(x, offset=offset)
            return y
        batch, heads, length, dim = x.shape
        if batch * length != positions[0].shape[0]:
            raise UnpageableError("positions in three axes, in modules that run by group")
        rows = x.swapaxes(1, 2).reshape(-1, heads, 1, dim)
        turned = [rope(rows[...], offset=axis) for axis in positions]
        y = turned[0]
        if len(turned) > 1:
            axis_of = mx.array(np.resize(self._axis_of, dim))  # what follows the rotated part is equal in all
            y = mx.where(axis_of == 0, y, mx.where(axis_of == 1, turned[1], turned[2]))
        return y.reshape(batch, length, heads, dim).swapaxes(1, 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner["rope"], name)


def _interleaved(sections: Sequence[int], num_frequencies: int) -> IntArray:
    """The axis of each frequency."""
    axis_of = np.zeros(num_frequencies, np.int32)
    for axis in (1, 2):
        axis_of[axis : 3 * sections[axis] : 3] = axis
    return axis_of
