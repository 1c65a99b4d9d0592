"""What a batch of images must be, said once: N, C, H, W floats in [0, 1] with whole labels."""

from typing import NamedTuple

import torch
from torch import Tensor

from demur.errors import BadInput


class Domain(NamedTuple):
    """The kind of images a net is made for."""

    classes: int
    shape: tuple[int, int, int]  # C, H, W
    mean: tuple[float, ...]  # per channel
    std: tuple[float, ...]


def check_batch(x: Tensor, y: Tensor, classes: int | None = None) -> None:
    """Refuse a batch that no attack or net could treat correctly, and say how to mend it."""
    check_images(x)
    if y.ndim != 1 or len(y) != len(x):
        raise BadInput(
            f"labels must be one whole number per image ({len(x)}), not shape {tuple(y.shape)}"
        )
    if y.dtype != torch.int64:
        raise BadInput(f"labels must be int64, not {y.dtype}; use y.long()")
    if classes is not None and classes < 2:
        raise BadInput("the classifier knows one class only; there is nothing to tell apart")
    low, high = int(y.min()), int(y.max())
    if low < 0 or (classes is not None and high >= classes):
        top = "up" if classes is None else f"to {classes - 1}"
        raise BadInput(f"labels must run from 0 {top}, but {low} to {high} came")


def check_images(x: Tensor) -> None:
    """Refuse images that are not N, C, H, W floats in [0, 1]."""
    if x.ndim != 4:
        raise BadInput(f"images must have shape N, C, H, W, not {tuple(x.shape)}")
    if len(x) == 0:
        raise BadInput("the batch is empty; give at least one image")
    if not x.is_floating_point():
        raise BadInput(f"images must be floats in [0, 1], not {x.dtype}; use x.float() / 255")
    low, high = float(x.min()), float(x.max())
    if not (low >= 0 and high <= 1):
        raise BadInput(
            f"pixels must lie in [0, 1], but run from {low:.3g} to {high:.3g}; "
            "scale them and leave normalisation to the net's first layer"
        )


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """One value per image, shaped to broadcast over its pixels."""
    return values.view(-1, *([1] * (x.ndim - 1)))
