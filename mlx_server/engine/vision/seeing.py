"""Prepares images for a model that can see: an image file becomes the inputs of the encoder and the placeholder tokens
in the prompt, as the model's own processor makes them."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_server.engine.recent import Recent
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.vision.decoding import MAX_PIXELS, UnreadableImageError, decode
from mlx_server.environment import install_command
from mlx_server.errors import ModelLoadError
from mlx_server.request import DIGEST_BYTES
from mlx_server.runtime.models.folder import read_model_json

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 256 * 2**20
"""For the inputs of recent images: a conversation sends its images again with every turn."""


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


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """`text` represents the image in a prompt's text, with one image token for each piece."""

    text: str
    pieces: tuple[ImagePiece, ...]

    @property
    def num_tokens(self) -> int:
        """The number of placeholder tokens."""
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


_Arrays = Mapping[str, Any]
_Key = tuple[str, int, bytes]
"""The image's owner, the limit on its pixels, and its file's digest."""


@dataclass(frozen=True, slots=True)
class _Family:
    """How a model family takes images. `placeholder` is what the chat templates write for an image (None: the image
    token); `around` are the texts before and after it if a template has no place for images; `is_bidirectional` is that
    of `PromptImage`, by the config.json."""

    lay_out: Callable[[SeeingModel, _Arrays], PreparedImage]
    placeholder: str | None = None
    around: tuple[str, str] = ("", "")
    options: Callable[[SeeingModel, int], dict[str, Any]] = lambda model, max_pixels: {}
    """The arguments of the processor's call, for images of at most so many pixels."""
    is_bidirectional: Callable[[Mapping[str, Any]], bool] = lambda config: False
    load_processor: Callable[[str], Any] | None = None
    """Reads the processor of a folder; None for the one that transformers chooses."""


class SeeingModel:
    """Prepares images for one loaded model. Any thread.

    `placeholder` is what the model's chat template writes for an image. `snippet` is written instead if a template has
    no place for images. `image_token` is the token whose embeddings are replaced by the image's.
    """

    def __init__(self, config: Mapping[str, Any], tokenizer: Tokenizer, processor: Any) -> None:
        """`config` is the whole config.json; `processor` is an image processor of transformers."""
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self._family = _FAMILIES[self.model_type]
        self.image_token_id = int(config.get("image_token_id", config.get("image_token_index", -1)))
        (self.image_token,) = tokenizer.convert_ids_to_tokens([self.image_token_id])
        self.placeholder = self._family.placeholder or self.image_token
        before, after = self._family.around
        self.snippet = f"{before}{self.placeholder}{after}"
        self._kept = Recent[_Key, PreparedImage](MAX_KEPT_BYTES, lambda key, image: image.num_bytes)

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> SeeingModel | None:
        """Reads the processor's files; returns None for a family whose images are not supported. Takes seconds, since
        transformers is slow to import. Raises `ModelLoadError`, also without Pillow."""
        if config.get("model_type") not in _FAMILIES or not isinstance(config.get("vision_config"), Mapping):
            return None
        try:
            load = _FAMILIES[config["model_type"]].load_processor or _processor_for_pillow
            model = cls(config, tokenizer, load(str(folder)))
        except Exception as error:  # an incomplete folder can raise anything
            raise ModelLoadError(
                f"Images cannot be prepared for {folder}: {error} Install the extra `vision`: "
                f"{install_command('vision')}. Check that preprocessor_config.json is there, or pull the model again."
            ) from error
        if not model.image_token:
            raise ModelLoadError(
                f"{folder / 'config.json'}: image_token_id is {model.image_token_id}, which the tokenizer does not "
                "know. Pull the model again."
            )
        return model

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def is_bidirectional(self) -> bool:
        """Whether the placeholder tokens of an image attend to each other in both directions."""
        return self._family.is_bidirectional(self.config)

    def prepare(self, data: bytes, max_pixels: int = MAX_PIXELS, owner: str = "") -> PreparedImage:
        """Prepares the image in a file's bytes, scaled down to at most `max_pixels`. Raises `UnreadableImageError`.
        Takes a few milliseconds to a second: the whole file is decoded first, except for a large JPEG. The result is
        cached for this `owner` only, so that the time reveals nothing about what others sent."""
        key = (owner, max_pixels, hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest())
        known = self._kept.get(key)
        if known is not None:
            return known
        image = decode(data, max_pixels)
        try:
            arrays = self.processor(image, return_tensors="np", **self._family.options(self, max_pixels))
            prepared = self._family.lay_out(self, arrays)
        except Exception as error:  # processors raise anything for odd shapes
            size = f"{image.width} x {image.height} pixels"
            raise UnreadableImageError(
                f"cannot be prepared for {self.model_type} ({size}): {str(error).rstrip('.')}. Send it with other "
                "proportions"
            ) from error
        self._kept.put(key, prepared)
        return prepared


def load_if_seeing(
    folder: Path | None, config: Mapping[str, Any], tokenizer: Tokenizer, no_vision: str
) -> SeeingModel | None:
    """The `SeeingModel` of a loaded model, or None. `no_vision` says why its encoder is not loaded; it is empty if it
    is. If images cannot be prepared, this logs why, and the model is served without them. Takes seconds."""
    if folder is None or no_vision:
        return None
    try:
        return SeeingModel.load(folder, config, tokenizer)
    except ModelLoadError as error:
        logger.warning("%s Until then, the model reads text only.", error)
        return None


def _processor_for_pillow(folder: str) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)


def _gemma_4_processor(folder: str) -> Any:
    """For Gemma 4 Unified, too, whose own needs PyTorch."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil.from_pretrained(folder, local_files_only=True)


def most_pixels(folder: Path | None, config: Mapping[str, Any]) -> int | None:
    """How many pixels an image has at most after its processor, by the processor's files; None if only
    `--max-image-pixels` bounds it. Any thread. Raises `ModelLoadError` for unreadable files."""
    family = _FAMILIES.get(str(config.get("model_type")))
    if folder is None or family is None or family.options is not _soft_tokens:
        return None
    files = [read_model_json(folder / name) for name in ("preprocessor_config.json", "processor_config.json")]
    places = [place for file in files for place in (file, file.get("image_processor") or {})]
    most = max(place.get("max_soft_tokens", 0) for place in places) or 280
    vision = config["vision_config"]
    return int(most * (vision.get("pooling_kernel_size", 3) * vision.get("patch_size", 16)) ** 2)


def _piece(token_ids: Sequence[int], inputs: _Arrays) -> ImagePiece:
    """The digest covers all arrays with their names, types and shapes."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, array in sorted(inputs.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(memoryview(array).cast("B") if array.flags.c_contiguous else array.tobytes())
    return ImagePiece(tuple(token_ids), digest.digest(), inputs)


def _lay_out_grid(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """Qwen-VL: one token for each square of merged patches. A grid of 1 x 22 x 28 patches, merged 2 x 2, has 154."""
    inputs = {name: arrays[name] for name in ("pixel_values", "image_grid_thw")}
    num_tokens = int(math.prod(inputs["image_grid_thw"][0].tolist())) // model.processor.merge_size**2
    return PreparedImage(model.image_token, (_piece([model.image_token_id] * num_tokens, inputs),))


def _lay_out_square(model: SeeingModel, arrays: _Arrays) -> PreparedImage:
    """Gemma 3: one square, always with the same number of tokens."""
    num_tokens = int(model.config.get("mm_tokens_per_image", 256))
    text = f"\n\n<start_of_image>{model.image_token}<end_of_image>\n\n"
    inputs = {"pixel_values": arrays["pixel_values"]}
    return PreparedImage(text, (_piece([model.image_token_id] * num_tokens, inputs),))


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
    pieces = (_piece(run, {name: arrays[name][:, tile : tile + 1] for name in names}) for tile in tiles)
    return PreparedImage(text, tuple(pieces))


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
    return PreparedImage(f"{model.image_token}[IMG_END]", (_piece(run[: len(run) - (between is not None)], inputs),))


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
    return PreparedImage(text, (_piece([model.image_token_id] * num_tokens, inputs),))


def _merged_patch(config: Mapping[str, Any]) -> int:
    return int(config["vision_config"]["patch_size"]) * int(config.get("spatial_merge_size", 1))


def _grid_size(model: SeeingModel, max_pixels: int) -> dict[str, Any]:
    """Qwen-VL's limits on pixels, which its processor calls edges; far enough apart for rounding."""
    own = model.processor.size
    longest = min(own["longest_edge"], max_pixels)
    return {"size": {"shortest_edge": min(own["shortest_edge"], longest // 2), "longest_edge": longest}}


def _soft_tokens(model: SeeingModel, max_pixels: int) -> dict[str, Any]:
    """Gemma 4's limit on an image's tokens, one of five; the smallest may exceed `max_pixels`."""
    processor = model.processor
    most = min(processor.max_soft_tokens, max_pixels // (processor.pooling_kernel_size * processor.patch_size) ** 2)
    return {"max_soft_tokens": max(count for count in (70, 140, 280, 560, 1120) if count <= max(most, 70))}


def _says_vision(config: Mapping[str, Any]) -> bool:
    default = "vision" if config["model_type"] == "gemma4_unified" else None
    return (config.get("text_config") or {}).get("use_bidirectional_attention", default) == "vision"


_QWEN = _Family(_lay_out_grid, around=("<|vision_start|>", "<|vision_end|>"), options=_grid_size)
_GEMMA_3 = _Family(
    _lay_out_square,
    "<start_of_image>",
    options=lambda model, max_pixels: {"do_pan_and_scan": False},
    is_bidirectional=lambda config: True,
)
_GEMMA_4 = _Family(
    _lay_out_pooled, options=_soft_tokens, is_bidirectional=_says_vision, load_processor=_gemma_4_processor
)
_IDEFICS_3 = _Family(_lay_out_tiles, options=lambda model, max_pixels: {"return_row_col_info": True})
_PIXTRAL = _Family(_lay_out_rows, options=lambda model, max_pixels: {"patch_size": _merged_patch(model.config)})

_FAMILIES: Mapping[str, _Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": _GEMMA_3,
    "gemma4": _GEMMA_4,
    "gemma4_unified": replace(_GEMMA_4, lay_out=_lay_out_merged),
    "idefics3": _IDEFICS_3,
    "smolvlm": _IDEFICS_3,
    "pixtral": _PIXTRAL,
    "mistral3": _PIXTRAL,
}
"""By `model_type` in config.json."""
