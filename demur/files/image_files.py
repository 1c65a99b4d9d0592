"""Image files: formats, decoding, resizing, for training as for prediction.

Files are untrusted: the format and the number of pixels are checked before anything is decoded.
This module imports no torch, since the service decodes in processes that must start quickly.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.errors import BadInput, bad_input, import_optional, shorten

Pixels = NDArray[np.uint8]  # H, W, C

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
DAMAGED = "{} is damaged or not an image; give one of " + ", ".join(FORMATS)
MAX_FILE = 256 << 20  # bytes
MAX_PIXELS = 64 * 10**6  # of one image before it is resized
MODES = {1: "L", 3: "RGB"}  # of Pillow, by number of channels
BAND = 1 << 20  # pixels that are converted at a time


def import_pillow() -> Any:
    """Return Pillow's Image module; raise BadInput if it is not installed."""
    return import_optional("PIL.Image", "images need Pillow", "'demur[images]'")


def decode_image(source: Any, channels: int, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return the pixels of an image, uint8 H, W, C, upright as its EXIF orientation says.

    The source is a Pillow image, or the path or the bytes of a file. BadInput is raised if it is
    damaged, too large, or of a format that is not supported.
    """
    if channels not in MODES:
        raise BadInput(
            f"image files have 1 or 3 channels, and the net takes {channels}; give arrays"
        )
    name = shorten(str(source)) if isinstance(source, str | Path) else "the image"
    if isinstance(source, str | Path):
        from demur.files.checked_files import read_regular_file  # imports torch

        source = read_regular_file(Path(source), MAX_FILE, "name an image file")
    with bad_input(DAMAGED.format(name)):  # decoders of damaged files raise nearly anything
        return _pixels_of(_opened(source, name, max_pixels), channels)


def count_pixels(content: bytes, max_pixels: int = MAX_PIXELS) -> int:
    """Number of pixels that the header of an image file states; raises as `decode_image` does."""
    with bad_input(DAMAGED.format("the image")):
        width, height = _opened(content, "the image", max_pixels).size
        return int(width * height)


def load_pixels(
    source: Any, shape: tuple[int, int, int], resize: bool, max_pixels: int = MAX_PIXELS
) -> tuple[Pixels, str]:
    """Return an image in the size of a net (C, H, W), and what `describe_resize` says."""
    pixels = decode_image(source, shape[0], max_pixels)
    note = describe_resize(pixels.shape[:2], shape, resize)
    return resize_pixels(pixels, *shape[1:]), note


def describe_resize(found: Sequence[int], shape: Sequence[int], resize: bool) -> str:
    """Say how an image (H, W) gets a net's size (C, H, W), or ""; BadInput without `resize`."""
    (height, width), size = found, f"{shape[2]} x {shape[1]}"
    if (height, width) == tuple(shape[1:]):
        return ""
    if not resize:
        raise BadInput(
            f"the net takes images of {size} pixels, not {width} x {height}, and this guard "
            "does not resize; resize them as its training images were"
        )
    return f"resized from {width} x {height} to {size}"


def _opened(source: Any, name: str, max_pixels: int) -> Any:
    """The Pillow image, of which only the header has been read."""
    image = import_pillow()
    is_file = isinstance(source, bytes)
    opened = image.open(io.BytesIO(source), formats=FORMATS) if is_file else source
    width, height = opened.size
    if width * height == 0:
        raise BadInput(f"{name} has no pixels; give another one")
    if width * height > max_pixels:
        raise BadInput(
            f"{name} has {width} x {height} pixels and may have at most {max_pixels:,}; "
            "give a smaller one"
        )
    return opened


def _pixels_of(opened: Any, channels: int) -> Pixels:
    from PIL import ImageOps

    if opened.mode.startswith(("I", "F")):
        raise BadInput(
            "the image has more than 8 bits per channel; convert it to 8 bits, or give an array"
        )
    opened = ImageOps.exif_transpose(opened)  # upright; what the decoder held is freed
    width, height = opened.size
    pixels = np.empty((height, width, channels), dtype=np.uint8)
    rows = max(1, BAND // max(1, width))
    for top in range(0, height, rows):  # in bands: a conversion needs up to 12 bytes per pixel
        band = opened.crop((0, top, width, min(top + rows, height)))
        if band.mode in ("RGBA", "LA", "PA") or "transparency" in band.info:  # becomes white
            white = import_pillow().new("RGBA", band.size, "white")
            band = import_pillow().alpha_composite(white, band.convert("RGBA"))
        flat = np.asarray(band.convert(MODES[channels]), dtype=np.uint8)
        pixels[top : top + rows] = flat.reshape(*flat.shape[:2], channels)
    return pixels


def resize_pixels(pixels: Pixels, height: int, width: int) -> Pixels:
    """Return the whole image in another size, bilinear with antialiasing, H, W, C."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = import_pillow()
    resized = [
        image.fromarray(pixels[:, :, c]).resize((width, height), image.Resampling.BILINEAR)
        for c in range(pixels.shape[2])
    ]
    return np.stack([np.asarray(one, dtype=np.uint8) for one in resized], axis=2)
