"""Encoders of mlx-vlm's models that are called part by part, since mlx-vlm's call for a whole prompt waits for the
device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

Embed = Callable[[Any, mx.array, Mapping[str, mx.array]], mx.array]
"""The embeddings `[n, D]` that a model makes of an image, or of a piece of one, for its placeholders `[1, n]`. Lazy."""


def _embed_deepseek_ocr(model: Any, ids: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    """Tiles as one picture, with a newline behind each of its rows; the whole image likewise, and a separator."""
    crop: Any = inputs["images_spatial_crop"].tolist()
    columns, rows = crop[0]
    views = []
    for pixels in _views(model, inputs):
        shallow = model.sam_model(pixels)
        deep = model.vision_model(pixels, shallow)[:, 1:]
        views.append(model.projector(mx.concatenate([deep, shallow.flatten(1, 2)], axis=-1)))
    side, width = math.isqrt(views[0].shape[1]), views[0].shape[2]
    tiles = mx.concatenate(views).reshape(rows, columns, side, side, width).transpose(0, 2, 1, 3, 4)
    picture = tiles.reshape(rows * side, columns * side, width)
    newlines = mx.broadcast_to(model.image_newline, (rows * side, 1, width))
    return _separated(model, ids, mx.concatenate([picture, newlines], axis=1).reshape(-1, width))


def _embed_deepseek_ocr_2(model: Any, ids: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    """A tile, or the whole image and a separator."""
    (pixels,) = _views(model, inputs)
    return _separated(model, ids, model.projector(model.vision_model(pixels, model.sam_model(pixels)))[0])


def _embed_minicpm(model: Any, ids: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    """A tile, or the whole image scaled down, from its patches in a row `[3, side, n * side]`."""
    sizes: Any = inputs["tgt_sizes"].tolist()
    (height, width), tower, embeddings = sizes[0], model.vision_tower, model.vision_tower.embeddings
    pixels = inputs["pixel_values"].astype(embeddings.position_embedding.weight.dtype).transpose(1, 2, 0)
    side = embeddings._position_grid_size()
    bounds = mx.arange(1 / side, 1.0, 1 / side)
    places = [embeddings._build_position_buckets(count, bounds) for count in (height, width)]
    rows = embeddings.position_embedding((places[0][:, None] * side + places[1]).reshape(-1))
    hidden = embeddings._packed_patch_embedding(pixels[None]) + rows
    for index, layer in enumerate(tower.encoder.layers):
        hidden = layer(hidden, attention_mask=None)
        if index == model.config.insert_layer_id and model.config.downsample_mode != "4x":
            merged, height, width = model.vit_merger(hidden[0], height, width)
            hidden = merged[None]
    made: mx.array = model.merger(tower.post_layernorm(hidden)[0], height, width)[0]
    return made


def _views(model: Any, inputs: Mapping[str, mx.array]) -> list[mx.array]:
    """One by one, which takes less memory at a time."""
    pixels = inputs["pixel_values"].astype(model.view_separator.dtype).transpose(0, 2, 3, 1)
    return [pixels[index : index + 1] for index in range(len(pixels))]


def _separated(model: Any, ids: mx.array, embeddings: mx.array) -> mx.array:
    if len(embeddings) == ids.shape[1]:
        return embeddings
    return mx.concatenate([embeddings, model.view_separator[None]])


BY_PART: Mapping[str, Embed] = {
    "deepseekocr": _embed_deepseek_ocr,
    "deepseekocr_2": _embed_deepseek_ocr_2,
    "minicpmv4_6": _embed_minicpm,
}
"""By `model_type`."""
