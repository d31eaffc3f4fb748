"""Images from outside, opened within limits: a file of a dataset or of a user, or bytes that came with a request."""

from __future__ import annotations

import base64
import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

# Of Pillow's decoders, those of images that people have; others (EPS, PSD, FITS ...) are rejected.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_THUMBNAIL = 160  # pixels of the longer side
# Modes with a meaning in RGB; of 16-bit and float ones Pillow makes something else.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


@dataclass(frozen=True)
class ImageLimits:
    """How large an image may be.

    Attributes:
        nbytes: of the file.
        pixels: width x height; looked at before anything is decoded.
    """

    nbytes: int = 32 * 2**20
    pixels: int = 64_000_000


def read_image(source: bytes | str | os.PathLike[str], limits: ImageLimits | None = None) -> Image:
    """An image, decoded as a whole, as its RGB pixels.

    Args:
        source: the bytes of a file, or where it is; nothing is fetched.
        limits: by default 32 MiB and 64 million pixels.

    Raises:
        ValueError: it is none of `FORMATS`, damaged, animated, larger than the limits, or not of 8 bits; says which.
        OSError: the file cannot be read.
    """
    from PIL import Image

    limits = limits or ImageLimits()
    data = source if isinstance(source, bytes) else _content(Path(source), limits)
    if len(data) > limits.nbytes:
        raise ValueError(f"it has {len(data)} bytes, more than {limits.nbytes}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > limits.pixels:
                    raise ValueError(f"it has {width} x {height} pixels, more than {limits.pixels}")
                if getattr(image, "is_animated", False):
                    raise ValueError("it is animated")
                if image.mode not in _MODES:
                    raise ValueError(f"its pixels are of mode {image.mode}, not of 8 bits a channel")
                return image.convert("RGB")
        except ValueError:
            raise
        except Image.DecompressionBombError as error:
            raise ValueError(f"it is too large: {error}") from error
        except Image.UnidentifiedImageError as error:
            raise ValueError(f"it is no image ({', '.join(FORMATS)})") from error
        except Exception as error:  # Pillow's decoders have many
            raise ValueError(f"it is damaged: {error}") from error


def as_thumbnails(prompt: Any) -> Any:
    """A prompt for JSON: images that are parts of its messages become small JPEGs, as data URLs."""
    if not isinstance(prompt, list):
        return prompt
    return [
        {**message, "content": [_small(part) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in prompt
    ]


def without_images(prompt: Any) -> Any:
    """A prompt whose messages keep the places of their images, and no image."""
    if not isinstance(prompt, list):
        return prompt
    return [
        {**message, "content": [{"type": "image"} if _is_image(part) else part for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in prompt
    ]


def _small(part: Any) -> Any:
    if not _is_image(part) or not hasattr(part.get("image"), "convert"):
        return part
    small = part["image"].convert("RGB")
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=80)
    return {"type": "image", "image": f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _content(path: Path, limits: ImageLimits) -> bytes:
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError("it is no file")
    if size > limits.nbytes:
        raise ValueError(f"it has {size} bytes, more than {limits.nbytes}")
    return path.read_bytes()
