"""Vision encoders as the estimate of memory sees them: their sizes, and how many pixels they get at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_server.runtime.models.folder import read_model_json


def encoder_pixels(folder: Path | None, config: Mapping[str, Any], max_pixels: int) -> int:
    """How many pixels the encoder gets at a time by the files of a model with this config.json, for images of at most
    `max_pixels`: those of an image, or of a tile that is encoded by itself. Any thread. Raises `ModelLoadError` for
    unreadable files."""
    model_type = config.get("model_type")
    if model_type in _SQUARES and (side := square_side(config)):
        return side**2
    most = _MOST_PIXELS.get(str(model_type))
    if folder is None or most is None:
        return max_pixels
    pixels = most(processor_settings(folder), config)
    return pixels if model_type in _ENLARGED else min(max_pixels, pixels)


def encoder_sizes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its sizes under the names of a `vision_config`, which for some models are known only by their code."""
    sizes: Mapping[str, Any] = {**config["vision_config"], **_SIZES.get(str(config.get("model_type")), {})}
    return sizes


def square_side(config: Mapping[str, Any]) -> int:
    """The side in pixels of the squares to which a family scales every image or tile; 0 if it is not known."""
    if side := _SIDES.get(str(config.get("model_type"))):
        return side
    size = config.get("force_image_size") or config["vision_config"].get("image_size") or 0
    return int(size[0] if isinstance(size, Sequence) else size)


def processor_settings(folder: Path) -> dict[str, Any]:
    """The settings of an image processor, which are in one of two files, or in both."""
    files = [read_model_json(folder / name) for name in ("preprocessor_config.json", "processor_config.json")]
    return {name: value for file in files for name, value in (file.get("image_processor") or file).items()}


def _max_soft_pixels(settings: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    vision = config["vision_config"]
    side = vision.get("pooling_kernel_size", 3) * vision.get("patch_size", 16)
    return int(settings.get("max_soft_tokens", 280) * side**2)


def _max_limited_pixels(settings: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Sides are padded to whole squares of patches, which is most for thin images."""
    return int(settings.get("in_token_limit", 4096) * settings.get("patch_size", 14) ** 2 * 5 // 4)


def _max_view_pixels(settings: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    side = settings.get("encoder_patch_size", 16) * settings.get("downsample_factor", 2)
    return int(max(settings.get("tile_size", 512) ** 2, settings.get("max_image_tokens", 256) * side**2))


_SAM = {"patch_size": 16, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_masks": 12}
"""DeepSeek-OCR's first encoder, which makes a mask for each head: 1.9 GB for 1024 x 1024 pixels on a CPU."""


def max_slice_pixels(settings: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> int:
    """Of MiniCPM-V's whole image or a tile of it. Sides have at least a square of patches, so thin images become more;
    with more than this they are refused."""
    return int(settings.get("scale_resolution", 448) ** 2 * 4)


_SQUARES = ("deepseekocr", "deepseekocr_2", "gemma3", "gemma3n", "idefics3", "smolvlm", "internvl", "internvl_chat")

_SIDES: Mapping[str, int] = {"gemma3n": 768, "deepseekocr": 1024, "deepseekocr_2": 1024}

_MOST_PIXELS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], int]] = {
    "gemma4": _max_soft_pixels,
    "gemma4_unified": _max_soft_pixels,
    "kimi_vl": _max_limited_pixels,
    "lfm2_vl": _max_view_pixels,
    "lfm2-vl": _max_view_pixels,
    "minicpmv4_6": max_slice_pixels,
}
"""By the processor's settings and config.json, where more than `--max-image-pixels` bounds them."""

_ENLARGED = ("lfm2_vl", "lfm2-vl", "minicpmv4_6")
"""Families whose processors make small images larger, up to their own limit."""

_SIZES: Mapping[str, Mapping[str, Any]] = {
    "gemma3n": {"elements_for_a_pixel": 600},
    "deepseekocr": _SAM,
    "deepseekocr_2": _SAM,
}
"""`elements_for_a_pixel` is for encoders of convolutions: the most numbers at a time, as measured on a CPU."""
