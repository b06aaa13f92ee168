"""The families whose images are served: a sample image for the load-time check, and how many placeholders the arrays of
an image make."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from mlx_server.runtime.vision import ReadsImages

TEXT_ONLY = "it is a text model"

Sample = tuple[list[int], dict[str, Any]]
"""The placeholder token ids of an image and the arguments of the encoder for it."""


def _by_grid(config: Any, rng: np.random.Generator) -> Sample:
    """For models whose processor cuts images into patches: 2 x 3 placeholders."""
    merge = config.vision_config.spatial_merge_size
    height, width = 2 * merge, 3 * merge
    pixels = rng.standard_normal(_patches_shape(config, height * width), dtype=np.float32)
    return [image_token_id(config)] * 6, {"pixel_values": pixels, **_grid_of(config, height, width)}


def _patches_shape(config: Any, num_patches: int) -> tuple[int, ...]:
    """Of the pixels of an image of so many patches."""
    vision = config.vision_config
    channels = vision.in_channels if hasattr(vision, "in_channels") else vision.num_channels
    patch = (channels, vision.patch_size, vision.patch_size)
    if config.model_type == "paddleocr_vl":
        return (1, num_patches, *patch)
    if config.model_type == "kimi_vl":
        return (num_patches, *patch)
    return (num_patches, math.prod(patch) * vision.temporal_patch_size)


def _grid_of(config: Any, height: int, width: int) -> dict[str, Any]:
    """An image's sides in patches, as the encoder takes them."""
    if config.model_type == "kimi_vl":
        return {"image_grid_hws": np.array([[height, width]])}
    return {"image_grid_thw": np.array([[1, height, width]])}


def _by_tile(config: Any, rng: np.random.Generator) -> Sample:
    """For models that encode square tiles separately."""
    vision = config.vision_config
    pixels = rng.standard_normal((1, 1, 3, vision.image_size, vision.image_size), dtype=np.float32)
    return [image_token_id(config)] * _tile_tokens(config), {"pixel_values": pixels}


def _tile_tokens(config: Any) -> int:
    side = config.vision_config.image_size // config.vision_config.patch_size
    if hasattr(config, "downsample_ratio"):
        return int((side * config.downsample_ratio) ** 2)
    return int(side**2 // config.scale_factor**2)


def _by_view(config: Any, rng: np.random.Generator) -> Sample:
    """For models that encode tiles with any proportions separately: 2 x 3 placeholders."""
    height, width = 2 * config.downsample_factor, 3 * config.downsample_factor
    vision = config.vision_config
    shape = (1, height * width, vision.num_channels * vision.patch_size**2)
    return [image_token_id(config)] * 6, {
        "pixel_values": rng.standard_normal(shape, dtype=np.float32),
        "pixel_attention_mask": np.ones(shape[:2], np.int32),
        "spatial_shapes": np.array([[height, width]], np.int32),
    }


def _by_row(config: Any, rng: np.random.Generator) -> Sample:
    """For models that put a token between rows: 2 x 3 placeholders with one text token between the rows."""
    unit = _merged_patch(config)
    pixels = rng.standard_normal((1, config.vision_config.num_channels, 2 * unit, 3 * unit), dtype=np.float32)
    row = [image_token_id(config)] * 3
    return [*row, 1, *row], {"pixel_values": pixels, "image_sizes": np.array([[2 * unit, 3 * unit]])}


def _by_square(config: Any, rng: np.random.Generator) -> Sample:
    """For models that scale every image to one square."""
    side = config.vision_config.image_size
    pixels = rng.standard_normal((1, config.vision_config.num_channels, side, side), dtype=np.float32)
    return [image_token_id(config)] * config.text_config.mm_tokens_per_image, {"pixel_values": pixels}


def _merged_patch(config: Any) -> int:
    """The side of one placeholder in pixels."""
    return int(config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))


def sees_both_ways(config: Any) -> bool:
    """Whether the placeholders of an image attend to each other in both directions, by mlx-vlm's configuration."""
    by_setting = getattr(config.text_config, "use_bidirectional_attention", None) == "vision"
    return bool(config.model_type == "gemma3" or by_setting)


def _by_pooling(config: Any, rng: np.random.Generator) -> Sample:
    """For models with a token for each square of patches: 2 x 3 placeholders."""
    side, unit, _ = _pooled_patches(config.vision_config)
    height, width = 2 * unit, 3 * unit
    pixels = rng.random((1, height * width, 3 * side**2), dtype=np.float32)
    places = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1).reshape(1, -1, 2)
    return [image_token_id(config)] * 6, {"pixel_values": pixels, "image_position_ids": places}


def _placeholders_by_grid(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image))
    merge = config.vision_config.spatial_merge_size
    (name,) = _grid_of(config, 1, 1)
    times, height, width = np.array([1, *np.asarray(inputs[name]).ravel()])[-3:].tolist()
    _check(inputs["pixel_values"].shape == _patches_shape(config, times * height * width))
    _check(height % merge == 0, width % merge == 0)
    return int(times * height * width // merge**2)


def _placeholders_by_tile(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image))
    size = config.vision_config.image_size
    mask = inputs.get("pixel_attention_mask")
    _check(inputs["pixel_values"].shape == (1, 1, 3, size, size), mask is None or mask.shape == (1, 1, size, size))
    _check(bool(np.any(inputs["pixel_values"])))  # a tile of zeros is padding to the encoder
    return _tile_tokens(config)


def _placeholders_by_view(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image))
    vision, factor = config.vision_config, config.downsample_factor
    height, width = np.asarray(inputs["spatial_shapes"]).reshape(2).tolist()
    _check(inputs["pixel_values"].shape == (1, height * width, vision.num_channels * vision.patch_size**2))
    _check(inputs["pixel_attention_mask"].shape == (1, height * width), bool(np.all(inputs["pixel_attention_mask"])))
    return int(-(-height // factor) * -(-width // factor))


def _placeholders_by_square(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image))
    vision = config.vision_config
    _check(inputs["pixel_values"].shape == (1, vision.num_channels, vision.image_size, vision.image_size))
    return int(config.text_config.mm_tokens_per_image)


def _by_ended_square(config: Any, rng: np.random.Generator) -> Sample:
    """For models that put a token of the encoder's behind the square's."""
    image, side = image_token_id(config), 64
    pixels = rng.standard_normal((1, 3, side, side), dtype=np.float32)
    return [*[image] * config.vision_soft_tokens_per_image, config.vision_config.vocab_offset], {"pixel_values": pixels}


def _placeholders_by_ended_square(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image[:-1]), not is_image[-1], inputs["pixel_values"].shape[:2] == (1, 3))
    _check(inputs["pixel_values"].ndim == 4)
    return int(config.vision_soft_tokens_per_image) + 1


def _by_view_with_ends(config: Any, rng: np.random.Generator) -> Sample:
    """For models with a token behind the whole image, and some behind each row: the smallest image that they take."""
    side = 1024 if config.model_type == "deepseekocr_2" else 64
    pixels = rng.standard_normal((1, 3, side, side), dtype=np.float32)
    inputs = {"pixel_values": pixels, "images_spatial_crop": np.ones((1, 2), np.int32)}
    return [image_token_id(config)] * (_view_tokens(config, inputs) + 1), inputs


def _view_tokens(config: Any, inputs: Mapping[str, Any]) -> int:
    """The tokens of tiles, or of a whole image without the one behind it. Encoders have one for 64 x 64 pixels."""
    (number, *_, side), (columns, rows) = inputs["pixel_values"].shape, inputs["images_spatial_crop"][0].tolist()
    _check(inputs["pixel_values"].shape == (columns * rows, 3, side, side), side % 64 == 0, number > 0)
    side //= 64
    if config.model_type == "deepseekocr_2":
        _check(number == 1, side in (12, 16))
        return int(side**2)
    return int((columns * side + 1) * rows * side)


def _placeholders_by_view_with_ends(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    num_tokens = _view_tokens(config, inputs)
    return num_tokens + (all(is_image) and len(is_image) == num_tokens + 1)


def _by_packed_tile(config: Any, rng: np.random.Generator) -> Sample:
    """For models that take patches in a row: 2 x 3 placeholders."""
    each, patch = _merged_side(config), config.vision_config.patch_size
    sides = np.array([[2 * each, 3 * each]], np.int32)
    pixels = rng.standard_normal((3, patch, int(sides.prod()) * patch), dtype=np.float32)
    return [image_token_id(config)] * 6, {"pixel_values": pixels, "tgt_sizes": sides}


def _placeholders_by_packed_tile(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image))
    (height, width), patch = np.asarray(inputs["tgt_sizes"])[0].tolist(), config.vision_config.patch_size
    each = _merged_side(config)
    _check(inputs["pixel_values"].shape == (3, patch, height * width * patch))
    _check(height > 0, width > 0, height % each == width % each == 0)
    return int(height * width // each**2)


def _merged_side(config: Any) -> int:
    """The side of a placeholder in patches."""
    return 2 if config.downsample_mode == "4x" else 4


def _placeholders_by_row(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    unit, vision = _merged_patch(config), config.vision_config
    height, width = np.asarray(inputs["image_sizes"]).reshape(2).tolist()
    _check(inputs["pixel_values"].shape == (1, vision.num_channels, height, width))
    _check(height % unit == width % unit == 0, 0 < height <= vision.image_size, 0 < width <= vision.image_size)
    rows = [[True] * (width // unit)] * (height // unit)
    apart = [*chain.from_iterable([*row, False] for row in rows)][:-1]
    _check(list(is_image) in (apart, [*chain.from_iterable(rows)]))
    return len(is_image)


def _placeholders_by_pooling(config: Any, inputs: Mapping[str, Any], is_image: Sequence[bool]) -> int:
    _check(all(is_image))
    (side, unit, num_places), places = _pooled_patches(config.vision_config), np.asarray(inputs["image_position_ids"])
    num_patches = places.shape[1]
    _check(inputs["pixel_values"].shape == (1, num_patches, 3 * side**2))
    _check(places.shape == (1, num_patches, 2), num_patches % unit**2 == 0)
    _check(bool((places >= 0).all()), bool((places < num_places).all()))
    return int(num_patches // unit**2)


def _pooled_patches(vision: Any) -> tuple[int, int, int]:
    """The side of a patch in pixels, that of a placeholder in patches, and how many places there are along a side."""
    if hasattr(vision, "model_patch_size"):
        return vision.model_patch_size, 1, vision.mm_posemb_size
    return vision.patch_size, vision.pooling_kernel_size, vision.position_embedding_size


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """How to make a sample image, and how to count the placeholders of an image (raises if its arrays do not match)."""

    sample: Callable[[Any, np.random.Generator], Sample]
    count: Callable[[Any, Mapping[str, Any], Sequence[bool]], int]


IMAGE_FAMILIES: Mapping[str, ImageFamily] = {
    **dict.fromkeys(
        (
            *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
            *("glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl", "dots_ocr", "kimi_vl"),
        ),
        ImageFamily(_by_grid, _placeholders_by_grid),
    ),
    "gemma3": ImageFamily(_by_square, _placeholders_by_square),
    **dict.fromkeys(("deepseekocr", "deepseekocr_2"), ImageFamily(_by_view_with_ends, _placeholders_by_view_with_ends)),
    "minicpmv4_6": ImageFamily(_by_packed_tile, _placeholders_by_packed_tile),
    "gemma3n": ImageFamily(_by_ended_square, _placeholders_by_ended_square),
    **dict.fromkeys(("gemma4", "gemma4_unified"), ImageFamily(_by_pooling, _placeholders_by_pooling)),
    **dict.fromkeys(("idefics3", "smolvlm", "internvl", "internvl_chat"), ImageFamily(_by_tile, _placeholders_by_tile)),
    **dict.fromkeys(("lfm2_vl", "lfm2-vl"), ImageFamily(_by_view, _placeholders_by_view)),
    **dict.fromkeys(("pixtral", "mistral3"), ImageFamily(_by_row, _placeholders_by_row)),
}
"""The families whose images are served, by `model_type`."""


def _check(*conditions: bool) -> None:
    if not all(conditions):
        raise ValueError("shapes that do not match")


def count_placeholders(model: ReadsImages, token_ids: Sequence[int], inputs: Mapping[str, Any]) -> int | None:
    """The number of placeholders of an image with these arrays; None if the encoder cannot take the arrays, or if
    `token_ids`, the image's part of the prompt, do not match them. Any thread."""
    placeholder = image_token_id(model.config)
    try:
        is_image = [token_id == placeholder for token_id in token_ids]
        return IMAGE_FAMILIES[model.model_type].count(model.config, inputs, is_image)
    except (ValueError, LookupError, AttributeError, TypeError):
        return None


def image_token_id(config: Any) -> int:
    """The token id of a placeholder in mlx-vlm's configuration."""
    names = ("image_token_index", "image_token_id")
    return int(next(getattr(config, name) for name in names if getattr(config, name, None) is not None))


def not_served(model_type: Any) -> str:
    """The reason why a model of a type that is not in `IMAGE_FAMILIES` takes no images."""
    return f"images are served for models of type {', '.join(IMAGE_FAMILIES)}, and this one is of type {model_type}"
