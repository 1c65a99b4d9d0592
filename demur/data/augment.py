"""Random crop and flip on the device, with one seeded draw per image.

CropFlip(pad=4)(x, seed, index, stream)     # the paper's CIFAR augmentation
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_image

from demur import noise
from demur.errors import BadInput
from demur.field_types import NonNegativeInt
from demur.fused import fused
from demur.noise import Stream
from demur.spec import Spec


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
