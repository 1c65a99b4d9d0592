"""Checks of image batches: N, C, H, W floats in [0, 1] with int64 labels."""

import base64
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from demur.errors import BadInput

ROUNDING = 1e-5  # beyond [0, 1]: what resizing or normalising an image and back may leave
LEVELS = 255  # the pixel value of uint8 images that maps to 1.0


class Domain(NamedTuple):
    """The images that a net classifies: number of classes, shape and normalisation."""

    classes: int
    shape: tuple[int, int, int]  # C, H, W
    mean: tuple[float, ...]  # per channel
    std: tuple[float, ...]


def check_batch(x: Tensor, y: Tensor, classes: int | None = None, first: int = 0) -> None:
    """Raise BadInput unless x is a valid batch of images and y holds valid labels, int64.

    Without the number of classes, labels have no upper bound. `first` is the position of the first
    image, for the message.
    """
    check_images(x, first)
    if not isinstance(y, Tensor):
        raise BadInput(
            f"labels must be a torch tensor, not {type(y).__name__}; use torch.as_tensor(y)"
        )
    if y.ndim != 1 or len(y) != len(x):
        raise BadInput(
            f"labels must be one integer per image ({len(x)}), not shape {tuple(y.shape)}"
        )
    if y.device != x.device:
        raise BadInput(f"labels are on {y.device}, but the images on {x.device}; move one of them")
    if y.dtype != torch.int64:
        raise BadInput(f"labels must be int64, not {y.dtype}; use y.long()")
    if classes is not None and classes < 2:
        raise BadInput("the classifier has one class only; it needs at least two")
    low, high = int(y.min()), int(y.max())
    if low < 0 or (classes is not None and high >= classes):
        allowed = "at least 0" if classes is None else f"from 0 to {classes - 1}"
        raise BadInput(f"labels must be {allowed}, but these range from {low} to {high}")


def check_images(x: Tensor, first: int = 0) -> None:
    """Raise BadInput unless x is a non-empty N, C, H, W float tensor in [0, 1]."""
    if not isinstance(x, Tensor):
        raise BadInput(
            f"images must be a torch tensor, not {type(x).__name__}; use torch.as_tensor(x)"
        )
    if x.ndim != 4:
        raise BadInput(f"images must have shape N, C, H, W, not {tuple(x.shape)}")
    if len(x) == 0:
        raise BadInput("the batch is empty; give at least one image")
    if x.numel() == 0:
        raise BadInput(f"images of shape {tuple(x.shape[1:])} have no pixels; give at least one")
    if not x.is_floating_point():
        raise BadInput(f"images must be floats in [0, 1], not {x.dtype}; use x.float() / 255")
    low, high = (float(end) for end in x.detach().aminmax())
    if not (low >= 0 and high <= 1):  # also true for NaN
        beyond = torch.maximum(-x.detach(), x.detach() - 1).nan_to_num(nan=torch.inf)
        image, channel, row, column = np.unravel_index(int(beyond.argmax()), tuple(x.shape))
        value, at = float(x[image, channel, row, column]), first + int(image)
        raise BadInput(
            f"pixels must lie in [0, 1], but these range from {low:.6g} to {high:.6g}: image "
            f"{at}, channel {channel}, row {row}, column {column} is {value:.8g}; "
            + ("rescale them and normalise in the net" if value * 0 == 0 else "replace that image")
        )


def clip_rounding(x: Any) -> Any:
    """Return the images clipped to [0, 1] if they exceed it by ROUNDING at most."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() == 0:
        return x
    low, high = (float(end) for end in x.detach().aminmax())
    outside = low < 0 or high > 1
    return x.clamp(0, 1) if outside and low >= -ROUNDING and high <= 1 + ROUNDING else x


def pixels_of(x: Any) -> Any:
    """Return uint8 images as floats in [0, 1], and others without rounding noise beyond it."""
    is_uint8 = isinstance(x, Tensor) and x.dtype == torch.uint8
    return x.float() / LEVELS if is_uint8 else clip_rounding(x)


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per image (N) so that it broadcasts over the pixels of x."""
    return values.view(-1, *([1] * (x.ndim - 1)))


def png_url(x: Tensor) -> str:
    """Return an image C, H, W in [0, 1] as a data URL; channels other than RGB become grey."""
    x = x if len(x) in (1, 3) else x.mean(0, keepdim=True)
    pixels = (255 * x).round().byte().permute(1, 2, 0).contiguous().numpy()
    size = struct.pack(">IIBBBBB", x.shape[2], x.shape[1], 8, 2 if len(x) == 3 else 0, 0, 0, 0)
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))
    chunks = ((b"IHDR", size), (b"IDAT", packed), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format of images: channels-last or contiguous, also for other strides."""
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
