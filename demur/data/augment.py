"""Augmentation of training images: random transformations that preserve the labels.

Each call is a fixed sequence of tensor operations without a host synchronisation, so that a CUDA
graph can capture it. The numbers of an image depend on (seed, index, stream) alone.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import conv2d
from torch.nn.functional import pad as pad_image

from demur import noise
from demur.errors import BadInput
from demur.noise import Stream
from demur.numerics import fused
from demur.spec import Spec
from demur.spec.field_types import NonNegativeInt, UnitInterval

# Colour and shape operations of IDBH, one per image with equal probability.
SATURATION, BRIGHTNESS, CONTRAST, SHARPNESS, AUTOCONTRAST, EQUALISE, SHEAR, ROTATE = range(8)
LOWEST_FACTORS, HIGHEST_FACTOR = (0.1, 0.5, 0.5, 0.1), 1.9  # of the first four
SHEAR_ANGLES = (0.05, 0.15)  # radians
MAX_DEGREES = 10
GREY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue
LEVELS = 255
ERASED_AREA, ERASED_ASPECT = (0.02, 0.33), (0.3, 3.3)  # shares of the image; height / width
ERASE_TRIALS = 10  # rectangles that are drawn until one fits into the image


@dataclass(frozen=True)
class Augment(Spec, ABC):
    """A random transformation of training images that preserves their labels."""

    @abstractmethod
    def __call__(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """Return the transformed images, N, C, H, W.

        The random numbers of an image depend only on `seed`, its `index` and `stream`.
        """


@dataclass(frozen=True)
class NoAugment(Augment):
    """No augmentation."""

    def __call__(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        return x


@dataclass(frozen=True)
class CropFlip(Augment):
    """A random crop of the padded image, then a horizontal flip with probability 1/2."""

    pad: NonNegativeInt = 4  # pixels on each side
    flip: bool = True
    fill: Literal["zero", "reflect"] = "zero"

    def __call__(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        return self._crop_and_flip(x, noise.uniform(seed, index, stream, (3,)))

    @fused
    def _crop_and_flip(self, x: Tensor, draw: Tensor) -> Tensor:
        """Transform x by `draw`: N uniform triples for row offset, column offset and flip."""
        if self.pad:
            x = self._crop(x, (draw[:, :2] * (2 * self.pad + 1)).long())
        if self.flip:
            x = torch.where((draw[:, 2] < 0.5)[:, None, None, None], x.flip(-1), x)
        return x

    def _crop(self, x: Tensor, corner: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if self.fill == "reflect" and self.pad >= min(height, width):
            raise BadInput(
                f"reflect padding of {self.pad} pixels needs larger images than {height}x{width}; "
                "use a smaller pad or fill=zero"
            )
        wide = pad_image(x, [self.pad] * 4, mode="constant" if self.fill == "zero" else "reflect")
        rows = corner[:, :1] + torch.arange(height, device=x.device)  # N, H
        columns = corner[:, 1:] + torch.arange(width, device=x.device)  # N, W
        image = torch.arange(len(x), device=x.device)[:, None, None]
        cropped = wide.movedim(1, -1)[image, rows[:, :, None], columns[:, None, :]]  # N, H, W, C
        return cropped.movedim(-1, 1)


@dataclass(frozen=True)
class IDBH(Augment):
    """Flip, CropShift, one colour or shape operation, random erasing (Li and Spratling 2023).

    Augmentation whose strength is diverse and balanced by hardness, with the authors' settings for
    CIFAR-10. Colours are computed in floats, without the authors' rounding to 8 bits.

    Args:
        erase: Probability of random erasing: 0.5 is the authors' weak form, 1 the strong one.
        shift: Largest number of rows and columns together that CropShift removes.

    Example:
        >>> import torch
        >>> from demur.data import IDBH
        >>> x = IDBH(erase=0.5)(torch.rand(4, 3, 32, 32), 0, torch.arange(4), 0)
    """

    erase: UnitInterval = 1.0
    shift: NonNegativeInt = 10

    def __call__(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        draw = noise.uniform(seed, index, stream, (12 + 4 * ERASE_TRIALS,)).to(x)
        operation = _integer(draw[:, 7], 8)
        x = self._moved(x, draw, operation)
        x = _coloured(x, operation, draw[:, 8])
        return self._erased(x, draw[:, 11], draw[:, 12:].unflatten(1, (4, ERASE_TRIALS)))

    def _moved(self, x: Tensor, draw: Tensor, operation: Tensor) -> Tensor:
        """Return the flipped, shifted and sheared or rotated images; zeros from outside of them."""
        height, width = x.shape[-2:]
        rows, columns = _affine(operation, draw[:, 8], draw[:, 9], draw[:, 10], height, width)
        strength = _integer(draw[:, 1], self.shift + 1)
        cut_columns = _integer(draw[:, 2], strength + 1)
        rows, row_inside = _crop_shift(rows, strength - cut_columns, draw[:, 3], draw[:, 5], height)
        columns, column_inside = _crop_shift(columns, cut_columns, draw[:, 4], draw[:, 6], width)
        flipped = (draw[:, 0] < 0.5)[:, None, None]
        columns = torch.where(flipped, width - 1 - columns, columns)
        inside = (row_inside & column_inside)[:, None]
        source = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)  # N, H, W
        source = source.flatten(1)[:, None].expand(-1, x.shape[1], -1)
        return x.flatten(2).gather(2, source).view_as(x) * inside

    def _erased(self, x: Tensor, chance: Tensor, trials: Tensor) -> Tensor:
        """Set the first rectangle that fits to zero; `trials` is N, 4, ERASE_TRIALS."""
        height, width = x.shape[-2:]
        low, high = ERASED_AREA
        area = (low + (high - low) * trials[:, 0]) * height * width
        low, high = (math.log(value) for value in ERASED_ASPECT)
        aspect = (low + (high - low) * trials[:, 1]).exp()
        size = [(area * aspect).sqrt().round(), (area / aspect).sqrt().round()]
        fits = (size[0] < height) & (size[1] < width)
        first = fits.to(torch.uint8).argmax(1, keepdim=True)
        erased = (chance < self.erase) & fits.any(1)
        inside = []
        for axis, length in enumerate((height, width)):
            extent = size[axis].gather(1, first)  # N, 1
            corner = (trials[:, 2 + axis].gather(1, first) * (length - extent + 1)).floor()
            position = torch.arange(length, device=x.device)
            inside.append((position >= corner) & (position < corner + extent))
        mask = erased[:, None, None] & inside[0][:, :, None] & inside[1][:, None, :]
        return x.masked_fill(mask[:, None], 0)


def _integer(draw: Tensor, count: Tensor | int) -> Tensor:
    """Return integers that are uniform in 0 ... count - 1, from uniform numbers in [0, 1)."""
    return (draw * count).floor().long()


def _crop_shift(
    position: Tensor, cut: Tensor, first: Tensor, second: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Return source positions along one axis and whether each lies inside the cropped window.

    A window that leaves out `cut` pixels is cropped at a random place and put back at another.
    """
    cropped, placed = _integer(first, cut + 1), _integer(second, cut + 1)
    in_window = position + (placed - cut)[:, None, None]
    inside = (in_window >= 0) & (in_window < (length - cut)[:, None, None])
    # an affine position outside of the image is not part of the window
    inside &= (position >= 0) & (position < length)
    return in_window + cropped[:, None, None], inside


def _affine(
    operation: Tensor, magnitude: Tensor, sign: Tensor, axis: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return the nearest source row and column of each pixel, N, H, W, around the centre."""
    side = torch.where(sign < 0.5, -1.0, 1.0).to(magnitude)
    low, high = SHEAR_ANGLES
    shear = ((low + (high - low) * magnitude).tan() * side) * (operation == SHEAR)
    degrees = (1 + _integer(magnitude, MAX_DEGREES)) * side * (operation == ROTATE)
    angle = degrees * (math.pi / 180)
    along_columns = axis < 0.5
    shear_x, shear_y = shear * along_columns, shear * ~along_columns
    y = (torch.arange(height, device=magnitude.device) - (height - 1) / 2)[None, :, None]
    x = (torch.arange(width, device=magnitude.device) - (width - 1) / 2)[None, None, :]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    columns = cos * x + (sin + shear_x[:, None, None]) * y + (width - 1) / 2
    rows = cos * y + (shear_y[:, None, None] - sin) * x + (height - 1) / 2
    return (rows + 0.5).floor().long(), (columns + 0.5).floor().long()


def _coloured(x: Tensor, operation: Tensor, magnitude: Tensor) -> Tensor:
    """Apply the colour operation of each image; a shape operation leaves its colours."""
    which = operation[:, None, None, None]
    lowest = sum((operation == k) * value for k, value in enumerate(LOWEST_FACTORS))
    factor = (lowest + (HIGHEST_FACTOR - lowest) * magnitude)[:, None, None, None]
    grey = _grey(x)
    mean = (grey.mean((2, 3), keepdim=True) * LEVELS + 0.5).floor() / LEVELS  # as in Pillow
    base = torch.where(which == SATURATION, grey, mean)
    base = torch.where(which == BRIGHTNESS, 0, base)
    base = torch.where(which == SHARPNESS, _smoothed(x), base)
    blended = (base + factor * (x - base)).clamp(0, 1)
    x = torch.where(which <= SHARPNESS, blended, x)
    x = torch.where(which == AUTOCONTRAST, _autocontrast(x), x)
    return torch.where(which == EQUALISE, _equalised(x), x)


def _grey(x: Tensor) -> Tensor:
    """Return the luma of colour images, else the mean of the channels, N, 1, H, W."""
    if x.shape[1] != len(GREY_WEIGHTS):
        return x.mean(1, keepdim=True)
    red, green, blue = (weight * x[:, k : k + 1] for k, weight in enumerate(GREY_WEIGHTS))
    return red + green + blue


def _smoothed(x: Tensor) -> Tensor:
    """Return images smoothed by a 3x3 kernel with centre 5/13, borders unchanged."""
    kernel = torch.ones(3, 3, device=x.device, dtype=x.dtype)
    kernel[1:2, 1:2].fill_(5)  # an assignment would copy a number from the host
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 3, 3)
    inner = conv2d(x, kernel, groups=x.shape[1])
    smoothed = x.clone()
    smoothed[:, :, 1:-1, 1:-1] = inner
    return smoothed


def _autocontrast(x: Tensor) -> Tensor:
    """Stretch each channel to the range [0, 1]; a constant channel stays."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp_min(1e-6), x)


def _equalised(x: Tensor) -> Tensor:
    """Equalise the histogram of 256 levels of each channel, as Pillow does."""
    level = (x * LEVELS).round().long().flatten(2)  # N, C, H * W
    ones = torch.ones_like(level)
    counts = level.new_zeros(*level.shape[:2], LEVELS + 1).scatter_add(2, level, ones)
    above = counts.flip(2).cumsum(2).flip(2) - counts  # pixels of higher levels
    last = torch.where((counts > 0) & (above == 0), counts, 0).sum(2, keepdim=True)
    step = (level.shape[2] - last) // LEVELS  # N, C, 1
    below = counts.cumsum(2) - counts
    table = ((step // 2 + below) // step.clamp_min(1)).clamp(max=LEVELS)
    equalised = table.gather(2, level).view_as(x).to(x) / LEVELS
    return torch.where(step[..., None] > 0, equalised, x)
