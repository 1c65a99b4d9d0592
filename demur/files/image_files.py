"""Decode image files and resize them, the same way for training and for prediction.

    pixels = decode_image(Path("cat.png"), channels=3)     # uint8, H, W, C
    pixels = resize_pixels(pixels, 32, 32)

Files are untrusted: the format and the number of pixels are checked before anything is decoded.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.errors import BadInput, shorten
from demur.files.atomic import MEGABYTE, read_regular_file

Pixels = NDArray[np.uint8]  # H, W, C

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm",
)  # fmt: skip
MAX_FILE = 256 * MEGABYTE
MAX_PIXELS = 64 * 10**6  # of one image before it is resized
MODES = {1: "L", 3: "RGB"}  # of Pillow, by number of channels


def import_pillow() -> Any:
    """Return Pillow's Image module; raise BadInput if it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise BadInput("images need Pillow; install it with pip install 'demur[images]'") from None
    return Image


def decode_image(source: Any, channels: int, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return the pixels of an image, uint8 H, W, C, upright as its EXIF orientation says.

    Args:
        source: A Pillow image, the path of a file, or the bytes of a file.
        channels: 3 converts to RGB, 1 to grey.
        max_pixels: The largest number of pixels that is decoded.

    Raises:
        BadInput: The image is damaged, too large, or of a format that is not supported.
    """
    image = import_pillow()
    if channels not in MODES:
        raise BadInput(
            f"image files have 1 or 3 channels, and the net takes {channels}; give arrays"
        )
    name = shorten(str(source)) if isinstance(source, str | Path) else "the image"
    if isinstance(source, str | Path):
        source = read_regular_file(Path(source), MAX_FILE, "name an image file")
    try:
        opened = (
            image.open(io.BytesIO(source), formats=FORMATS) if isinstance(source, bytes) else source
        )
        width, height = opened.size
        if width * height > max_pixels:
            raise BadInput(
                f"{name} has {width} x {height} pixels and may have at most {max_pixels:,}; "
                "give a smaller one"
            )
        return _pixels_of(opened, channels)
    except BadInput:
        raise
    except MemoryError:
        raise BadInput(f"{name} needs more memory than there is; give a smaller one") from None
    except Exception:  # decoders of damaged files raise nearly anything
        kinds = ", ".join(FORMATS)
        raise BadInput(f"{name} is damaged or not an image; give one of {kinds}") from None


def _pixels_of(opened: Any, channels: int) -> Pixels:
    from PIL import ImageOps

    if opened.mode.startswith(("I", "F")):
        raise BadInput(
            "the image has more than 8 bits per channel; convert it to 8 bits, or give an array"
        )
    upright = ImageOps.exif_transpose(opened)
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:  # becomes white
        white = import_pillow().new("RGBA", upright.size, "white")
        upright = import_pillow().alpha_composite(white, upright.convert("RGBA"))
    pixels = np.array(upright.convert(MODES[channels]), dtype=np.uint8)
    return pixels.reshape(pixels.shape[0], pixels.shape[1], channels)


def resize_pixels(pixels: Pixels, height: int, width: int) -> Pixels:
    """Return the whole image in another size, bilinear with antialiasing, H, W, C."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = import_pillow()
    channels = [image.fromarray(pixels[:, :, c]) for c in range(pixels.shape[2])]
    resized = [one.resize((width, height), image.Resampling.BILINEAR) for one in channels]
    return np.stack([np.asarray(one, dtype=np.uint8) for one in resized], axis=2)
