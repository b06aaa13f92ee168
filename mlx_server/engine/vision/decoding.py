"""Decodes image files, within limits that are checked first."""

from __future__ import annotations

import binascii
import io
import math
import re
from typing import Any

import numpy as np

from mlx_server.environment import install_command
from mlx_server.errors import UnsupportedError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 50_000_000
"""As many as the largest phone cameras have. A pixel takes three bytes, and there are several copies."""

MAX_BYTES = 20 * 1024 * 1024
"""Of a file."""

_BASE64 = re.compile(r"[-\w+/%\r\n]*=*[\r\n]*", re.ASCII)
"""With the alphabet of URLs, and percent-encoded."""


class UnreadableImageError(Exception):
    """What is wrong with an image, as the end of a sentence that begins with the image."""


def read_base64(source: str) -> bytes:
    """Reads the file in a data URL or in plain base64, in the usual alphabet or that of URLs, with or without padding.
    Raises `UnreadableImageError`."""
    if source[:5].lower() == "data:":
        head, comma, source = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise UnreadableImageError("is a data URL without base64. Send data:image/png;base64,...")
    if len(source) > MAX_BYTES * 4 // 3 + 4096:
        raise UnreadableImageError(
            f"has {len(source):,} characters of base64; a file may have {MAX_BYTES:,} bytes. Send a smaller one"
        )
    if not _BASE64.fullmatch(source[:64]):  # the decoder skips later characters that are not base64
        raise UnreadableImageError(
            f"is neither a URL nor base64: it begins with {source[:20]!r}. Send data:image/png;base64,..."
        )
    if "%" in source:
        raise UnreadableImageError("is base64 with percent-encoded characters. Send + / = as they are")
    try:
        return binascii.a2b_base64(source.replace("-", "+").replace("_", "/") + "==")
    except ValueError as error:
        raise UnreadableImageError(
            f"is damaged base64 of {len(source):,} characters ({error}). Send the whole file again"
        ) from error


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Any:
    """Decodes the first frame as an upright `PIL.Image.Image` in RGB, scaled down to at most `max_pixels`. Raises
    `UnreadableImageError`, and `UnsupportedError` without Pillow. Any thread; releases the interpreter lock while it
    decodes."""
    try:
        from PIL import Image, ImageOps  # of the extra `vision`
    except ImportError as error:
        raise UnsupportedError(f"Images need Pillow: {install_command('vision')}.") from error
    try:
        image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise UnreadableImageError(
                f"has {width} x {height} pixels; at most {MAX_PIXELS:,} are allowed. Send a smaller one"
            )
        if width * height > max_pixels:
            image.draft(None, _bounded(width, height, max_pixels))  # decodes a JPEG at 1/2, 1/4 or 1/8 of its size
        return _made_small(_rgb(ImageOps.exif_transpose(image)), max_pixels)
    except UnreadableImageError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit, which is higher
        raise UnreadableImageError(
            f"has more than {MAX_PIXELS:,} pixels, the most allowed. Send a smaller one"
        ) from error
    except Exception as error:  # decoders raise anything for broken files
        names = ", ".join(FORMATS)
        raise UnreadableImageError(
            f"cannot be decoded ({len(data):,} bytes; {names} are supported). Send a whole file in one of these formats"
        ) from error


def as_file(picture: Any, max_pixels: int) -> bytes:
    """Writes a Pillow image as a file from which `decode` makes the same pixels as from the image's own file. Raises
    `UnreadableImageError`."""
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        if picture.mode in ("I", "F"):  # Pillow opens files with 16 bits as "I;16"
            raise UnreadableImageError(
                f'has Pillow\'s mode "{picture.mode}", whose values have no known range. Scale them to 0..255, and '
                'give it as `picture.convert("L")`'
            )
        if not picture.width * picture.height:
            raise UnreadableImageError(f"has {picture.width} x {picture.height} pixels")
        _made_small(_rgb(ImageOps.exif_transpose(picture)), max_pixels).save(file, "PNG", compress_level=1)
    except UnreadableImageError:
        raise
    except Exception as error:  # a file that Pillow reads only now, or that was closed
        raise UnreadableImageError(f"cannot be read: {error}") from error
    return file.getvalue()


def _made_small(image: Any, max_pixels: int) -> Any:
    from PIL import Image

    if image.width * image.height <= max_pixels:
        return image
    size = _bounded(image.width, image.height, max_pixels)
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)


def _rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode == "P":  # Pillow warns if its transparency is bytes
        image = image.convert("RGBA")
    if image.mode.startswith("I;16"):  # grey: Pillow would turn all values above 255 into white
        image = Image.fromarray((np.asarray(image) / 0x101).astype(np.uint8))
    return image.convert("RGB")


def _bounded(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The largest size with the same proportions and at most `max_pixels`; each side is at least 1."""
    share = math.sqrt(max_pixels / (width * height))
    short = max(1, int(min(width, height) * share))
    long = min(int(max(width, height) * share), max_pixels)
    return (long, short) if width >= height else (short, long)
