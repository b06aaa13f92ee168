"""Image files to pixels: formats, orientation and bounds."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from mlx_server.engine.vision import decoding
from mlx_server.engine.vision.decoding import UnreadableImageError, as_file, decode, read_base64
from tests.picture_worlds import encoded, picture


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF", "JPEG"])
def test_each_format_is_read_as_rgb(form: str):
    image = picture().convert("P" if form == "GIF" else "RGB")
    options = {"lossless": True} if form == "WEBP" else {}
    found = decode(encoded(image, form, **options))
    assert (found.mode, found.size) == ("RGB", (56, 84))
    if form != "JPEG":
        assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


def test_the_first_frame_of_a_film_is_read():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    found = decode(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert found.getpixel((0, 0)) == (255, 0, 0)


def test_a_photo_stands_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert decode(encoded(picture(), "JPEG", exif=exif)).size == (84, 56)


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "I;16", "P", "RGBA", "YCbCr"])
def test_a_picture_of_pillow_is_read_as_its_file_is(mode: str):
    image = picture().convert("L").convert(mode) if mode == "I;16" else picture().convert(mode)
    assert decode(as_file(image, 10_000)).size == (56, 84)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(picture(), "PNG", exif=exif)
    assert np.array_equal(decode(as_file(Image.open(io.BytesIO(turned)), 10_000)), decode(turned))
    small = decode(as_file(image, 1000))
    assert small.width * small.height <= 1000


def closed() -> Image.Image:
    image = Image.open(io.BytesIO(encoded(picture())))
    image.close()
    return image


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (picture().convert("I"), r'has Pillow\'s mode "I", whose values have no known range.*convert\("L"\)'),
        (Image.fromarray(np.full((8, 8), np.nan, dtype=np.float32)), 'has Pillow\'s mode "F"'),
        (Image.new("RGB", (0, 5)), "has 0 x 5 pixels"),
        (Image.open(io.BytesIO(encoded(picture())[:2000])), "cannot be read: image file is truncated"),
        (closed(), "cannot be read: Operation on closed image"),
    ],
    ids=["I", "F", "empty", "cut", "closed"],
)
def test_a_picture_of_pillow_without_sure_pixels_is_refused(image: Image.Image, words: str):
    with pytest.raises(UnreadableImageError, match=words):
        as_file(image, 10_000)


def test_transparency_of_a_palette_is_no_warning():
    image = Image.new("P", (4, 4))
    image.putpalette([255, 0, 0, 0, 255, 0])
    assert decode(encoded(image, "PNG", transparency=b"\x00\xff")).mode == "RGB"


def test_grey_of_sixteen_bits_is_not_white():
    grey = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    found = np.asarray(decode(encoded(Image.fromarray(grey))))
    assert np.array_equal(found, np.repeat((grey // 257)[:, :, None], 3, axis=2))


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims so many pixels, and has none."""
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT"]
    written = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def test_too_many_pixels_are_refused_before_they_are_decoded():
    with pytest.raises(UnreadableImageError, match=r"has 8000 x 8000 pixels; at most 50,000,000 are allowed"):
        decode(bomb(8000, 8000))
    with pytest.raises(UnreadableImageError, match=r"has more than 50,000,000 pixels, the most allowed"):
        decode(bomb(19_000, 19_000))


@pytest.mark.parametrize(("form", "turned"), [("PNG", 1), ("JPEG", 1), ("JPEG", 6)])
@pytest.mark.parametrize("size", [(640, 160), (160, 640)])
def test_more_pixels_than_wanted_are_made_fewer(form: str, turned: int, size: tuple[int, int]):
    exif = Image.Exif()
    exif[0x0112] = turned
    data = encoded(Image.radial_gradient("L").resize(size).convert("RGB"), form, exif=exif)
    found, whole = decode(data, 40_000), decode(data)
    assert found.size in ([(400, 100), (100, 400)][(size[0] < size[1]) != (turned == 6)],)
    assert abs(np.asarray(found, float) - np.asarray(whole.resize(found.size), float)).max() < 12


@pytest.mark.parametrize("size", [(3000, 1), (1, 3000), (101, 100)])
def test_odd_proportions_stay_within_the_pixels(size: tuple[int, int]):
    width, height = decode(encoded(Image.new("RGB", size)), 2000).size
    assert 0.95 * 2000 < width * height <= 2000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"%PDF-1.7",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        encoded(picture())[:200],
        encoded(picture(), "BMP"),
    ],
    ids=["empty", "pdf", "svg", "cut", "bmp"],
)
def test_what_is_no_image_is_reported_with_what_is_read(data: bytes):
    with pytest.raises(UnreadableImageError, match=r"cannot be decoded .* PNG, JPEG, WEBP, GIF are supported"):
        decode(data)


def test_base64_is_bounded_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "MAX_BYTES", 3000)
    assert read_base64("A" * 8096) == bytes(6072)
    with pytest.raises(UnreadableImageError, match="has 8,100 characters of base64; a file may have 3,000 bytes"):
        read_base64("A" * 8100)


@pytest.mark.parametrize("source", ["data:image/png;base64", "data:image/png,AAAA", "data:AAAA", "DATA:;base32,AAAA"])
def test_a_data_url_is_of_base64(source: str):
    with pytest.raises(UnreadableImageError, match="is a data URL without base64"):
        read_base64(source)
    assert read_base64("Data:image/png;BASE64,AAAA") == bytes(3)


def test_base64_of_urls_and_without_padding_is_read():
    data = bytes(range(256)) * 2
    for form in (base64.b64encode(data), base64.urlsafe_b64encode(data), base64.encodebytes(data)):
        text = form.decode()
        assert (
            read_base64(text) == read_base64(text.rstrip("=\n")) == read_base64(f"data:image/png;base64,{text}") == data
        )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("AAAA" * 20 + "%2BAAA", "is base64 with percent-encoded characters. Send . / = as they are"),
        ("%2BAA", "is base64 with percent-encoded characters"),
        ("AAAA" * 20 + "A", "is damaged base64 of 81 characters .* Send the whole file again"),
        ("AAAA" * 20 + "\N{SNOWMAN}", "is damaged base64 of 81 characters .*ASCII"),
        ("\N{SNOWMAN}", "is neither a URL nor base64: it begins with"),
    ],
)
def test_what_is_wrong_with_base64_is_named(source: str, reason: str):
    with pytest.raises(UnreadableImageError, match=reason):
        read_base64(source)
