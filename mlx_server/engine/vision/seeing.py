"""Prepares images for a model that can see: an image file becomes the inputs of the encoder and the placeholder tokens
in the prompt, as the model's own processor makes them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_server.engine.recent import Recent
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.vision.decoding import MAX_PIXELS, UnreadableImageError, decode
from mlx_server.engine.vision.families import FAMILIES, PreparedImage
from mlx_server.engine.vision.processors import processor_for_pillow
from mlx_server.environment import install_command
from mlx_server.errors import ModelLoadError
from mlx_server.request import DIGEST_BYTES
from mlx_server.runtime.models.vlm import placeholder_id

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 256 * 2**20
"""For the inputs of recent images: a conversation sends its images again with every turn."""


_Key = tuple[str, int, bytes]
"""The image's owner, the limit on its pixels, and its file's digest."""


class SeeingModel:
    """Prepares images for one loaded model. Any thread.

    `placeholder` is what the model's chat template writes for an image. `snippet` is written instead if a template has
    no place for images. `image_token` is the token whose embeddings are replaced by the image's.
    """

    def __init__(self, config: Mapping[str, Any], tokenizer: Tokenizer, processor: Any) -> None:
        """`config` is the whole config.json; `processor` is one of its family's."""
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self._family = FAMILIES[self.model_type]
        self.image_token_id = placeholder_id(config)
        (self.image_token,) = tokenizer.convert_ids_to_tokens([self.image_token_id])
        self.placeholder = self._family.placeholder or self.image_token
        before, after = self._family.around
        self.snippet = f"{before}{self.placeholder}{after}"
        self._kept = Recent[_Key, PreparedImage](MAX_KEPT_BYTES, lambda key, image: image.num_bytes)

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> SeeingModel | None:
        """Reads the processor's files; returns None for a family whose images are not supported. Takes seconds, since
        transformers is slow to import. Raises `ModelLoadError`, also without Pillow."""
        if config.get("model_type") not in FAMILIES or not isinstance(config.get("vision_config"), Mapping):
            return None
        try:
            read = FAMILIES[config["model_type"]].load_processor or processor_for_pillow
            model = cls(config, tokenizer, read(folder, config))
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
