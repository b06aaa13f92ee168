"""An image in a prompt, as every floor below HTTP sees it: arrays for the vision encoder, no file and no address."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image whose placeholders are the prompt's tokens [start, start + num_tokens): as many as its embeddings.

    `digest` (`DIGEST_BYTES` long) is of `inputs`, so that equal digests mean equal embeddings. `inputs` are the NumPy
    arrays that the model's vision encoder takes for this image alone, by their names in the model's own processor
    (`pixel_values`, `image_grid_thw`, ...). In an image that `is_bidirectional` each placeholder sees those behind it,
    too, in the layers of text: all that are not cached are computed in one step.
    """

    start: int
    num_tokens: int
    digest: bytes
    inputs: Mapping[str, Any]
    is_bidirectional: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def images_within(images: Iterable[PromptImage], start: int, end: int) -> list[tuple[bytes, int]]:
    """The digest of each image that has placeholders among tokens [start, end), and the place of `start` in it: below 0
    if it begins later."""
    return [(image.digest, start - image.start) for image in images if image.start < end and start < image.end]
