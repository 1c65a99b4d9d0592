"""Images of many forms to one batch of floats in [0, 1].

Arrays have the channels last and tensors first; the other order is recognised by the net's shape.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from demur.errors import BadInput, bad_input
from demur.files.image_files import MAX_PIXELS, describe_resize, load_pixels, resize_pixels

Shape = tuple[int, int, int]  # C, H, W


class Batch(NamedTuple):
    """Images for a net, and what was done to each of them before."""

    x: Tensor  # N, C, H, W, float32 in [0, 1]
    notes: tuple[str, ...]


def read_images(images: Any, shape: Shape, resize: bool, max_pixels: int = MAX_PIXELS) -> Batch:
    """Return images, in any form that `Guard` takes or as the bytes of a file, as a batch.

    BadInput is raised if one is damaged, out of range, or of another size without `resize`.
    """
    is_one = isinstance(images, Tensor | np.ndarray | str | bytes | Path)
    if is_one or hasattr(images, "getbands"):
        return _read_item(images, shape, resize, max_pixels)
    if not isinstance(images, Iterable):
        raise BadInput(
            f"images cannot be read from {type(images).__name__}; give Pillow images, paths, "
            "arrays or tensors"
        )
    parts = []
    for number, image in enumerate(images):
        try:
            parts.append(_read_item(image, shape, resize, max_pixels))
        except BadInput as error:
            raise BadInput(f"image {number}: {error}") from None
    if not parts:
        raise BadInput("there are no images; give at least one")
    notes = tuple(note for part in parts for note in part.notes)
    return Batch(torch.cat([part.x for part in parts]), notes)


def image_digests(x: Tensor) -> Tensor:
    """Eight bytes that identify each image N, C, H, W in [0, 1] to 8 bits per channel: int64, N."""
    rows = (x * 255).round().byte().cpu().contiguous().numpy()
    digests = b"".join(hashlib.sha256(row).digest()[:8] for row in rows)
    return torch.frombuffer(bytearray(digests), dtype=torch.int64)


def _read_item(image: Any, shape: Shape, resize: bool, max_pixels: int) -> Batch:
    if isinstance(image, list):
        with bad_input("the rows have different lengths; give H, W, C numbers", (ValueError,)):
            image = np.asarray(image)
    if isinstance(image, Tensor | np.ndarray):
        return _read_stack(image, shape, resize)
    if not isinstance(image, str | bytes | Path) and not hasattr(image, "getbands"):
        raise BadInput(f"{type(image).__name__} is not an image; give a Pillow image or a path")
    pixels, note = load_pixels(image, shape, resize, max_pixels)
    batch = _finish(torch.from_numpy(pixels).permute(2, 0, 1)[None], shape, resize)
    return Batch(batch.x, (note,))


def _read_stack(images: Any, shape: Shape, resize: bool) -> Batch:
    is_array = isinstance(images, np.ndarray)
    if is_array and images.dtype.kind not in "uif":
        raise BadInput(f"pixels must be uint8 or floats, not {images.dtype}")
    x = torch.from_numpy(_native(images)) if is_array else images.detach()
    if x.ndim == 2 and shape[0] == 1:
        x = x[None, :, :, None] if is_array else x[None, None]
    elif x.ndim == 3:
        x = x[None]
    if x.ndim != 4:
        raise BadInput(
            f"an image has shape H, W, C as an array or C, H, W as a tensor, not "
            f"{tuple(images.shape)}"
        )
    if len(x) == 0:
        raise BadInput("there are no images; give at least one")
    if _has_channels_last(x.shape[1:], shape, is_array):
        x = x.permute(0, 3, 1, 2)
    if x.shape[1] != shape[0]:
        raise BadInput(
            f"the net takes {shape[0]} channels, but the images have shape {tuple(images.shape)}"
        )
    return _finish(x, shape, resize)


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """The array with a type and a layout that torch takes."""
    floats = np.float64 if array.dtype.itemsize > 4 else np.float32
    dtype = floats if array.dtype.kind == "f" else array.dtype.newbyteorder("=")
    return np.require(array, dtype, ["C", "W"])


def _has_channels_last(found: torch.Size, shape: Shape, is_array: bool) -> bool:
    channels, height, width = shape
    last, first = tuple(found) == (height, width, channels), tuple(found) == shape
    if last != first:  # exactly one order has the net's shape
        return last
    return found[2] == channels and (is_array or found[0] != channels)


def _finish(x: Tensor, shape: Shape, resize: bool) -> Batch:
    """Images N, C, H, W in uint8 or floats as a batch of the net's size."""
    if x.numel() == 0:
        raise BadInput(f"images of shape {tuple(x.shape[1:])} have no pixels; give at least one")
    if x.dtype != torch.uint8 and not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise BadInput(f"pixels must be uint8 or floats in [0, 1], not {kind}")
    low, high = (float(end) for end in x.aminmax())
    if x.is_floating_point() and not (low >= 0 and high <= 1):  # also true for NaN
        raise BadInput(
            f"floats must lie in [0, 1], but these range from {low:.3g} to {high:.3g}; rescale "
            "them, or give uint8 values"
        )
    note, size = describe_resize(x.shape[2:], shape, resize), shape[1:]
    if note and x.dtype == torch.uint8:
        images = [resize_pixels(one.permute(1, 2, 0).cpu().numpy(), *size) for one in x]
        x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    elif note:
        x = interpolate(x.float(), size, mode="bilinear", antialias=True).clamp(0, 1)
    x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
    return Batch(x.contiguous(), (note,) * len(x))
