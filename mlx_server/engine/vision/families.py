"""How each family of models takes images: the arrays and placeholder tokens of an image, and its text in a prompt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_server.engine.vision.encoders import max_slice_pixels, square_side
from mlx_server.engine.vision.processors import (
    DeepSeekOcrProcessor,
    KimiProcessor,
    MiniCpmProcessor,
    gemma_4_processor,
    intern_vl_processor,
    lfm_2_processor,
)
from mlx_server.request import DIGEST_BYTES

if TYPE_CHECKING:
    from mlx_server.engine.vision.seeing import SeeingModel

_Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ImagePiece:
    """A run of placeholder tokens, nearly all of them the image token. The other fields are those of `PromptImage`."""

    token_ids: tuple[int, ...]
    digest: bytes
    inputs: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())


NUMBER = "\ue000"
"""Of private use, so it is in no text of a family."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """`text` represents the image in a prompt's text, with one image token for each piece, and `NUMBER` for the image's
    number in the prompt."""

    text: str
    pieces: tuple[ImagePiece, ...]

    @property
    def num_tokens(self) -> int:
        """The number of placeholder tokens."""
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Family:
    """How a model family takes images. `placeholder` is what the chat templates write for an image (None: the image
    token); `around` are the texts before and after it if a template has no place for images; `is_bidirectional` is that
    of `PromptImage`, by the config.json."""

    lay_out: Callable[[SeeingModel, _Arrays], PreparedImage]
    placeholder: str | None = None
    around: tuple[str, str] = ("", "")
    options: Callable[[SeeingModel, int], dict[str, Any]] = lambda model, max_pixels: {}
    """The arguments of the processor's call, for images of at most so many pixels."""
    is_bidirectional: Callable[[Mapping[str, Any]], bool] = lambda config: False
    load_processor: Callable[[Path, Mapping[str, Any]], Any] | None = None
    """Reads the processor of a folder with this config.json; None for the one that transformers chooses."""


def piece(token_ids: Sequence[int], inputs: _Arrays) -> ImagePiece:
    """The digest covers all arrays with their names, types and shapes."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, array in sorted(inputs.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(memoryview(array).cast("B") if array.flags.c_contiguous else array.tobytes())
    return ImagePiece(tuple(token_ids), digest.digest(), inputs)


def _lay_out_grid(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """Qwen-VL and others: one token for each square of merged patches. A grid of 1 x 22 x 28 patches, merged 2 x 2, has
    154."""
    inputs = {name: arrays[name] for name in ("pixel_values", "image_grid_thw", "image_grid_hws") if name in arrays}
    sides = inputs.get("image_grid_thw", inputs.get("image_grid_hws"))
    if model.model_type == "paddleocr_vl":
        inputs["pixel_values"] = inputs["pixel_values"][None]
    num_tokens = int(math.prod(np.asarray(sides)[0].tolist())) // model.processor.merge_size**2
    return PreparedImage(model.image_token, (piece([model.image_token_id] * num_tokens, inputs),))


def _lay_out_square(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """Gemma 3: one square, always with the same number of tokens."""
    num_tokens = int(model.config.get("mm_tokens_per_image", 256))
    text = f"\n\n<start_of_image>{model.image_token}<end_of_image>\n\n"
    inputs = {"pixel_values": arrays["pixel_values"]}
    return PreparedImage(text, (piece([model.image_token_id] * num_tokens, inputs),))


def _lay_out_ended_square(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """Gemma 3n: the same; the token behind the square belongs to the run, because its embedding is the encoder's."""
    run = [model.image_token_id] * int(model.config.get("vision_soft_tokens_per_image", 256))
    run.append(int(model.config.get("eoi_token_id", 262144)))
    inputs = {"pixel_values": arrays["pixel_values"]}
    return PreparedImage(f"\n\n<start_of_image>{model.image_token}\n\n", (piece(run, inputs),))


def _lay_out_tiles(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """Idefics 3: rows of tiles, then the whole image scaled down; or only the latter. Each is a piece of its own.

    1 row of 2 tiles: `<fake><row_1_col_1><image><fake><row_1_col_2><image>\\n\\n<fake><global-img><image><fake>`, with
    `<fake>` for `<fake_token_around_image>`.
    """
    num_rows, num_columns = arrays["rows"][0][0], arrays["cols"][0][0]
    image, fake = model.image_token, "<fake_token_around_image>"
    rows = [
        "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{image}" for column in range(num_columns)) + "\n"
        for row in range(num_rows)
    ]
    text = "".join(rows) + ("\n" if rows else "") + f"{fake}<global-img>{image}{fake}"
    vision = model.config["vision_config"]
    num_patches = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2
    num_tokens = num_patches // int(model.config.get("scale_factor", 2)) ** 2
    names = ("pixel_values", "pixel_attention_mask")
    tiles = range(arrays["pixel_values"].shape[1])
    run = [model.image_token_id] * num_tokens
    pieces = (piece(run, {name: arrays[name][:, tile : tile + 1] for name in names}) for tile in tiles)
    return PreparedImage(text, tuple(pieces))


def _lay_out_views(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """LFM2-VL: rows of tiles, then the whole image scaled down; or only the latter. Each is a piece of its own, without
    the processor's padding.

    1 row of 2 tiles: `<|image_start|><|img_row_1_col_1|><image><|img_row_1_col_2|><image><|img_thumbnail|><image>
    <|image_end|>`, in one line.
    """
    num_rows, num_columns = int(arrays["image_rows"][0]), int(arrays["image_cols"][0])
    factor, pieces, words = model.processor.downsample_factor, [], []
    for row, sides in enumerate(arrays["spatial_shapes"]):
        height, width = sides.tolist()
        if height * width > arrays["pixel_values"].shape[1]:
            raise ValueError(f"it becomes {width} x {height} patches, more than the encoder takes")
        view = {
            name: arrays[name][row : row + 1, : height * width] for name in ("pixel_values", "pixel_attention_mask")
        }
        num_tokens = math.ceil(height / factor) * math.ceil(width / factor)
        pieces.append(piece([model.image_token_id] * num_tokens, {**view, "spatial_shapes": sides[None]}))
        is_tile = row < num_rows * num_columns
        words.append(f"<|img_row_{row // num_columns + 1}_col_{row % num_columns + 1}|>" if is_tile else _THUMBNAIL)
    shown = "".join(f"{word * (len(words) > 1)}{model.image_token}" for word in words)
    return PreparedImage(f"<|image_start|>{shown}<|image_end|>", tuple(pieces))


def _lay_out_ended_views(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """DeepSeek-OCR: all tiles as one piece, with a token behind each row, or as pieces of their own (the second). Then
    the whole image, likewise, with a token behind it."""
    is_second, tiles, grid = model.processor.is_second, arrays["tiles"], arrays["grid"]
    groups = [[tile] for tile in tiles] if is_second or not tiles else [tiles]
    pieces: list[ImagePiece] = []
    for views in [*groups, [arrays["whole"]]]:
        side = views[0].shape[1] // 64
        columns, rows = grid if len(views) > 1 else (1, 1)
        num_tokens = (columns * side + (not is_second)) * rows * side + (len(pieces) == len(groups))
        inputs = {"pixel_values": np.stack(views), "images_spatial_crop": np.array([[columns, rows]], np.int32)}
        pieces.append(piece([model.image_token_id] * num_tokens, inputs))
    return PreparedImage(model.image_token * len(pieces), tuple(pieces))


def _lay_out_slices(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """MiniCPM-V 4.6: the whole image scaled down; if it is large, also rows of tiles. Each is a piece of its own.

    1 row of 2 tiles of the first image: `<image_id>0</image_id><image>@</image><slice>@</slice><slice>@</slice>`, with
    `@` for the image token.
    """
    own, (columns, rows) = model.processor.own, arrays["grids"][0]
    each, most = 4 if own.downsample_mode == "4x" else 16, max_slice_pixels({"scale_resolution": own.scale_resolution})
    pieces = []
    for pixels, sizes in zip(arrays["pixel_values"], arrays["tgt_sizes"], strict=True):
        height, width = sizes.tolist()
        if height * width * own.patch_size**2 > most:
            raise ValueError(f"it becomes {width} x {height} patches, more than the encoder takes")
        run = [model.image_token_id] * (height * width // each)
        pieces.append(piece(run, {"pixel_values": pixels, "tgt_sizes": sizes[None]}))
    tiles = "\n".join([f"<slice>{model.image_token}</slice>" * columns] * rows)
    number = f"<image_id>{NUMBER}</image_id>" if own.use_image_id else ""
    return PreparedImage(f"{number}<image>{model.image_token}</image>{tiles}", tuple(pieces))


_THUMBNAIL = "<|img_thumbnail|>"


def _lay_out_squares(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """InternVL: rows of square tiles and the whole image scaled down, each a piece of its own, without marks
    between."""
    side = square_side(model.config) // _first(model.config["vision_config"]["patch_size"])
    run = [model.image_token_id] * int((side * model.config.get("downsample_ratio", 0.5)) ** 2)
    pieces = tuple(piece(run, {"pixel_values": tile[None, None]}) for tile in arrays["pixel_values"])
    return PreparedImage(f"<img>{model.image_token * len(pieces)}</img>", pieces)


def _first(size: Any) -> int:
    return int(size[0] if isinstance(size, Sequence) else size)


def _lay_out_rows(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """Pixtral: one token for each square of merged patches, and one between rows, which belongs to the run.

    2 rows of 3: `[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG]`, then `[IMG_END]`.
    """
    unit = _merged_patch(model.config)
    num_rows, num_columns = (int(side) // unit for side in arrays["image_sizes"][0])
    between = model.tokenizer.token_to_id("[IMG_BREAK]")
    row = [model.image_token_id] * num_columns
    run = [*row, *([] if between is None else [between])] * num_rows
    inputs = {name: arrays[name] for name in ("pixel_values", "image_sizes")}
    return PreparedImage(f"{model.image_token}[IMG_END]", (piece(run[: len(run) - (between is not None)], inputs),))


def _lay_out_pooled(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """Gemma 4: one token for each square of patches, 3 x 3. The processor pads all images to the most patches; the
    encoder gets the patches of this one only.

    An image of 48 x 96 pixels in patches of 16 x 16: 3 x 6 patches, 2 tokens.
    """
    is_patch = (arrays["image_position_ids"][0] >= 0).all(axis=-1)
    inputs = {name: arrays[name][:, is_patch] for name in ("pixel_values", "image_position_ids")}
    return _pooled(model, inputs, int(is_patch.sum()) // model.processor.pooling_kernel_size**2)


def _lay_out_merged(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """Gemma 4 Unified: as Gemma 4, but each square of patches becomes one large patch for the model."""
    patches, places = (arrays[name][0] for name in ("pixel_values", "image_position_ids"))
    unit, size = model.processor.pooling_kernel_size, model.processor.patch_size
    width, height = (places.max(axis=0) + 1).tolist()
    squares = patches[: width * height].reshape(height // unit, unit, width // unit, unit, size, size, 3)
    merged = squares.transpose(0, 2, 1, 4, 3, 5, 6).reshape(1, -1, 3 * (unit * size) ** 2)
    grid = np.stack(np.meshgrid(np.arange(width // unit), np.arange(height // unit)), axis=-1)
    return _pooled(model, {"pixel_values": merged, "image_position_ids": grid.reshape(1, -1, 2)}, merged.shape[1])


def _pooled(model: SeeingModel, inputs: _Arrays, num_tokens: int) -> PreparedImage:
    ids = [int(model.config.get(name, own)) for name, own in (("boi_token_id", 255999), ("eoi_token_id", 258882))]
    start, end = model.tokenizer.convert_ids_to_tokens(ids)
    text = f"{start}{model.image_token}{end}"
    return PreparedImage(text, (piece([model.image_token_id] * num_tokens, inputs),))


def _merged_patch(config: Mapping[str, Any]) -> int:
    return int(config["vision_config"]["patch_size"]) * int(config.get("spatial_merge_size", 1))


def _rows_unit(model: SeeingModel, max_pixels: int) -> dict[str, Any]:
    """Pixtral's processor makes sides that are multiples of this."""
    return {"patch_size": _merged_patch(model.config)}


def _grid_size(model: SeeingModel, max_pixels: int) -> dict[str, Any]:
    """Qwen-VL's limits on pixels, which its processor calls edges; far enough apart for rounding."""
    own = model.processor.size
    longest = min(own["longest_edge"], max_pixels)
    return {"size": {"shortest_edge": min(own["shortest_edge"], longest // 2), "longest_edge": longest}}


def _frames_size(model: SeeingModel, max_pixels: int) -> dict[str, Any]:
    """The same for GLM, which counts each pixel as often as it stands in a patch."""
    return _grid_size(model, max_pixels * model.processor.temporal_patch_size)


def _soft_tokens(model: SeeingModel, max_pixels: int) -> dict[str, Any]:
    """Gemma 4's limit on an image's tokens, one of five; the smallest may exceed `max_pixels`."""
    processor = model.processor
    most = min(processor.max_soft_tokens, max_pixels // (processor.pooling_kernel_size * processor.patch_size) ** 2)
    return {"max_soft_tokens": max(count for count in (70, 140, 280, 560, 1120) if count <= max(most, 70))}


def _says_vision(config: Mapping[str, Any]) -> bool:
    default = "vision" if config["model_type"] == "gemma4_unified" else None
    return (config.get("text_config") or {}).get("use_bidirectional_attention", default) == "vision"


_QWEN = Family(_lay_out_grid, around=("<|vision_start|>", "<|vision_end|>"), options=_grid_size)
_GEMMA_3 = Family(
    _lay_out_square,
    "<start_of_image>",
    options=lambda model, max_pixels: {"do_pan_and_scan": False},
    is_bidirectional=lambda config: True,
)
_GEMMA_4 = Family(
    _lay_out_pooled,
    options=_soft_tokens,
    is_bidirectional=_says_vision,
    load_processor=gemma_4_processor,
)
_GLM = Family(_lay_out_grid, around=("<|begin_of_image|>", "<|end_of_image|>"), options=_frames_size)
_INTERN_VL = Family(
    _lay_out_squares,
    options=lambda model, max_pixels: {"crop_to_patches": True},
    load_processor=intern_vl_processor,
)
_LFM_2 = Family(_lay_out_views, load_processor=lfm_2_processor)
_IDEFICS_3 = Family(_lay_out_tiles, options=lambda model, max_pixels: {"return_row_col_info": True})
_DEEPSEEK_OCR = Family(_lay_out_ended_views, load_processor=DeepSeekOcrProcessor)
_PIXTRAL = Family(_lay_out_rows, options=_rows_unit)

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm_ocr": _GLM,
    "paddleocr_vl": replace(_QWEN, around=("<|IMAGE_START|>", "<|IMAGE_END|>")),
    "dots_ocr": replace(_QWEN, around=("<|img|>", "<|endofimg|>")),
    "kimi_vl": Family(
        _lay_out_grid,
        around=("<|media_start|>image<|media_content|>", "<|media_end|>"),
        options=lambda model, max_pixels: {"max_pixels": max_pixels},
        load_processor=KimiProcessor,
    ),
    "lfm2_vl": _LFM_2,
    "lfm2-vl": _LFM_2,
    "internvl": _INTERN_VL,
    "internvl_chat": _INTERN_VL,
    "gemma3": _GEMMA_3,
    "gemma3n": Family(_lay_out_ended_square),
    "gemma4": _GEMMA_4,
    "gemma4_unified": replace(_GEMMA_4, lay_out=_lay_out_merged),
    "deepseekocr": _DEEPSEEK_OCR,
    "deepseekocr_2": _DEEPSEEK_OCR,
    "minicpmv4_6": Family(_lay_out_slices, load_processor=MiniCpmProcessor),
    "idefics3": _IDEFICS_3,
    "smolvlm": _IDEFICS_3,
    "pixtral": _PIXTRAL,
    "mistral3": _PIXTRAL,
}
"""By `model_type` in config.json."""
