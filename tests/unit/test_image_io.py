"""Images from outside: what is taken, and what is rejected before it costs anything."""

import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from qlora_rl.image_io import ImageLimits, read_image


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(mode="RGB", size=(20, 10)):
    shape = (size[1], size[0], len(mode)) if len(mode) > 1 else (size[1], size[0])
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def png_header(width, height):
    """A PNG that says how large it is, and ends."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP", "JPEG"])
def test_usual_files_become_rgb_pixels(kind, tmp_path):
    image = noise()
    data = encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    found = read_image(data)
    assert (found.mode, found.size) == ("RGB", image.size)
    if kind not in ("GIF", "JPEG"):  # which lose something
        assert found.tobytes() == image.tobytes()
    (tmp_path / "a").write_bytes(data)
    assert read_image(tmp_path / "a").tobytes() == found.tobytes()
    assert read_image(str(tmp_path / "a")).tobytes() == found.tobytes()


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "1", "P", "CMYK"])
def test_any_mode_of_8_bits_is_taken(mode):
    image = noise("RGB").convert(mode)
    found = read_image(encoded(image, "TIFF" if mode == "CMYK" else "PNG"))
    assert found.tobytes() == image.convert("RGB").tobytes()


def hostile():
    whole = encoded(noise(size=(200, 200)))
    animated = io.BytesIO()
    noise().save(animated, "GIF", save_all=True, append_images=[Image.new("RGB", (20, 10))])
    long = PngImagePlugin.PngInfo()
    long.add_text("a", "x" * 40_000_000, zip=True)
    return {
        "truncated": (whole[: len(whole) // 2], "it is damaged"),
        "truncated jpeg": (encoded(noise(size=(200, 200)), "JPEG")[:-2000], "it is damaged"),
        "a flipped byte": (whole[:500] + bytes([whole[500] ^ 255]) + whole[501:], "it is damaged"),
        "a gigapixel": (png_header(32_768, 32_768), "pixels, more than|it is too large"),
        "beyond Pillow's limit": (png_header(2**30, 2**30), "pixels, more than|it is too large"),
        "no pixels": (png_header(0, 10), "it is no image|it is damaged"),
        "not an image": (b"#!/bin/sh\necho", "it is no image"),
        "nothing": (b"", "it is no image"),
        "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "it is no image"),
        "animated": (animated.getvalue(), "it is animated"),
        "16 bits": (encoded(Image.fromarray(np.zeros((4, 4), np.uint16))), "of mode I;16"),
        "a bomb of text": (encoded(noise(), pnginfo=long), "."),
    }  # fmt: skip


@pytest.mark.parametrize("name", hostile())
def test_what_is_hostile_is_a_value_error_at_once(name):
    data, said = hostile()[name]
    started = time.monotonic()
    with pytest.raises(ValueError, match=said):
        read_image(data)
    assert time.monotonic() - started < 1


def test_limits_are_kept_before_anything_is_decoded(tmp_path):
    data = encoded(noise(size=(100, 100)))
    assert read_image(data, ImageLimits(len(data), 10_000)).size == (100, 100)
    with pytest.raises(ValueError, match=f"it has {len(data)} bytes, more than {len(data) - 1}"):
        read_image(data, ImageLimits(nbytes=len(data) - 1))
    with pytest.raises(ValueError, match="9999"):
        read_image(data, ImageLimits(pixels=9_999))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10 * 2**30)  # a hole: it would take memory only if it were read
    with pytest.raises(ValueError, match="10737418240"):
        read_image(tmp_path / "large")
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "none")
    with pytest.raises(ValueError, match="file"):
        read_image(tmp_path)
