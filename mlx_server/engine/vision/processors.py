"""Image processors that need no PyTorch: those of transformers, mlx-vlm's, and what these leave out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlx_server.engine.vision.encoders import processor_settings, square_side
from mlx_server.runtime.models.vlm import vlm_module


def _needed_settings(folder: Path) -> dict[str, Any]:
    if settings := processor_settings(folder):
        return settings
    raise FileNotFoundError("it has no settings of an image processor.")


def processor_for_pillow(folder: Path, config: Mapping[str, Any]) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)


def gemma_4_processor(folder: Path, config: Mapping[str, Any]) -> Any:
    """For Gemma 4 Unified, too, whose own needs PyTorch."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil.from_pretrained(str(folder), local_files_only=True)


def lfm_2_processor(folder: Path, config: Mapping[str, Any]) -> Any:
    """mlx-vlm's: that of transformers needs PyTorch. Large images are split even if the files say otherwise, as mlx-vlm
    does: converted folders say so for a processor that could not."""
    theirs = vlm_module("models.lfm2_vl.processing_lfm2_vl")
    settings = _needed_settings(folder)
    known = {name: value for name, value in settings.items() if name not in theirs._OFFICIAL_SPLITTING_DEFAULTS}
    return theirs.Lfm2VlNumpyImageProcessor(**known)


def intern_vl_processor(folder: Path, config: Mapping[str, Any]) -> Any:
    """That of the converted models. The original ones have code of their own, and name its settings in config.json."""
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    side, settings = square_side(config), processor_settings(folder)
    return GotOcr2ImageProcessorPil(
        size={"height": side, "width": side},
        min_patches=config.get("min_dynamic_patch", settings.get("min_patches", 1)),
        max_patches=config.get("max_dynamic_patch", settings.get("max_patches", 12)),
        image_mean=settings.get("image_mean", IMAGENET_DEFAULT_MEAN),
        image_std=settings.get("image_std", IMAGENET_DEFAULT_STD),
    )


class KimiProcessor:
    """Kimi-VL's: sizes as in mlx-vlm's, which makes lists of all pixels, and the folder's own mean and deviation."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        theirs = vlm_module("models.kimi_vl.processing_kimi_vl").KimiVLImageProcessor
        self._sizes = theirs(**_needed_settings(folder))
        self.merge_size = int(self._sizes.merge_kernel_size[0])

    def __call__(self, image: Any, return_tensors: str, max_pixels: int) -> dict[str, Any]:
        sizes, side = copy.copy(self._sizes), self._sizes.patch_size
        sizes.in_token_limit = max(1, min(sizes.in_token_limit, max_pixels // side**2))
        scaled = np.asarray(sizes.rescale(image), np.float32) / 255
        pixels = (scaled - np.float32(sizes.image_mean)) / np.float32(sizes.image_std)
        height, width = pixels.shape[0] // side, pixels.shape[1] // side
        patches = pixels.reshape(height, side, width, side, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)
        return {"pixel_values": patches, "image_grid_hws": np.array([[height, width]])}


class DeepSeekOcrProcessor:
    """DeepSeek-OCR's: the whole image on a gray square, and rows of tiles if it is large; of DeepSeek-OCR-2, always.
    Which tiles is decided by mlx-vlm."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.is_second = config["model_type"] == "deepseekocr_2"
        settings = _needed_settings(folder)
        self._mean, self._std = (
            np.array(settings.get(name, [0.5] * 3), np.float32) for name in ("image_mean", "image_std")
        )
        self._split = vlm_module(f"models.{config['model_type']}.processing_deepseekocr").dynamic_preprocess

    def __call__(self, image: Any, return_tensors: str) -> dict[str, Any]:
        from PIL import ImageOps

        side, tiles, grid = 768 if self.is_second else 640, [], (1, 1)
        if self.is_second or max(image.size) > side:
            fewest, most = (1, 6) if self.is_second else (2, 9)
            tiles, grid = self._split(image, min_num=fewest, max_num=most, image_size=side)
        gray = tuple(int(value * 255) for value in self._mean)
        whole = ImageOps.pad(image, (1024, 1024), color=gray)
        return {"tiles": [self._scaled(tile) for tile in tiles], "whole": self._scaled(whole), "grid": grid}

    def _scaled(self, view: Any) -> Any:
        return ((np.asarray(view, np.float32) / 255 - self._mean) / self._std).transpose(2, 0, 1)


class MiniCpmProcessor:
    """MiniCPM-V's, by mlx-vlm; with sides of 2 patches, as in transformers, where only 2 x 2 become a token. mlx-vlm's
    are always of 4."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        settings = _needed_settings(folder)
        named = {f"norm_{name}": settings[f"image_{name}"] for name in ("mean", "std") if f"image_{name}" in settings}
        theirs = vlm_module("models.minicpmv4_6.processing_minicpmv4_6").MiniCPMVImageProcessor
        self.own = theirs(**{**named, **settings, "downsample_mode": config.get("downsample_mode", "16x")})
        if self.own.downsample_mode == "4x":
            self.own._find_best_resize = lambda size, resolution, patch_size, allow_upscale=False: (
                theirs._find_best_resize(size, resolution, patch_size // 2, allow_upscale)
            )

    def __call__(self, image: Any, return_tensors: str) -> dict[str, Any]:
        return {name: values[0] for name, values in self.own([[image]]).items()}
