"""Bytes of an image file to pixels, within bounds that are checked before anything is decoded."""

from __future__ import annotations

import binascii
import contextlib
import io
import math
import re
from typing import Any

import numpy as np

from mlx_server.errors import UnsupportedError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 50_000_000
"""As many as the largest cameras of phones have. Three bytes each, and several copies on the way."""

MAX_BYTES = 20 * 1024 * 1024
"""Of a file."""


_BASE64 = re.compile(r"[A-Za-z0-9+/\r\n]*=*[\r\n]*")


class UnreadableImageError(Exception):
    """Says what is wrong with an image, as the end of a sentence about it."""


def read_base64(source: str) -> bytes:
    """The file in a data URL, or in base64 alone. Raises `UnreadableImageError`."""
    if source[:5].lower() == "data:":
        head, comma, source = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise UnreadableImageError("is a data URL without base64. Send data:image/png;base64,...")
    if len(source) > MAX_BYTES * 4 // 3 + 4096:
        raise UnreadableImageError(
            f"has {len(source):,} characters of base64; files of {MAX_BYTES:,} bytes are read at most. Send it smaller"
        )
    if _BASE64.fullmatch(source[:64]):  # what is none further on is left out by the decoder
        with contextlib.suppress(ValueError):
            return binascii.a2b_base64(source)
    raise UnreadableImageError(
        f"is neither a URL nor base64: it begins with {source[:20]!r}. Send data:image/png;base64,..."
    )


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Any:
    """The first frame as an upright `PIL.Image.Image` in RGB, made smaller where it has more than `max_pixels`. Raises
    `UnreadableImageError`, and `UnsupportedError` without Pillow. Any thread; holds the interpreter only for short."""
    try:
        from PIL import Image, ImageOps  # of the extra `vision`
    except ImportError as error:
        raise UnsupportedError("Images need Pillow: pip install 'mlx-server[vision]'.") from error
    try:
        image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise UnreadableImageError(
                f"has {width} x {height} pixels; at most {MAX_PIXELS:,} are read. Send it smaller"
            )
        if width * height > max_pixels:
            image.draft(None, _bounded(width, height, max_pixels))  # JPEG is decoded at 1/2, 1/4 or 1/8, not below this
        return _made_small(_rgb(ImageOps.exif_transpose(image)), max_pixels)
    except UnreadableImageError:
        raise
    except Exception as error:  # decoders raise whatever a broken file leads them to
        names = ", ".join(FORMATS)
        raise UnreadableImageError(
            f"cannot be decoded ({len(data):,} bytes; {names} are read). Send a whole file in one of these formats"
        ) from error


def as_file(picture: Any, max_pixels: int) -> bytes:
    """A picture of Pillow as a file that `decode` reads as it would have read the picture's own."""
    from PIL import ImageOps

    file = io.BytesIO()
    _made_small(_rgb(ImageOps.exif_transpose(picture)), max_pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _made_small(image: Any, max_pixels: int) -> Any:
    from PIL import Image

    if image.width * image.height <= max_pixels:
        return image
    size = _bounded(image.width, image.height, max_pixels)
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)


def _rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode == "P":  # its transparency may be bytes, which Pillow warns about
        image = image.convert("RGBA")
    if image.mode[0] in "IF":  # grey of 16 bits, of which Pillow would make white all that is above 255
        image = Image.fromarray((np.clip(np.asarray(image), 0, 0xFFFF) / 0x101).astype(np.uint8))
    return image.convert("RGB")


def _bounded(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The largest size of these proportions with at most so many pixels, each side at least one."""
    share = math.sqrt(max_pixels / (width * height))
    short = max(1, int(min(width, height) * share))
    long = min(int(max(width, height) * share), max_pixels // short)
    return (long, short) if width >= height else (short, long)
