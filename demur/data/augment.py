"""Random crop and flip, on the device, one draw per image, seeded.

CropFlip(pad=4)(x, seed, index, stream)     # the paper's CIFAR augmentation
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from demur import noise
from demur.errors import BadInput
from demur.field_types import NonNegativeInt
from demur.fused import fused
from demur.noise import Stream
from demur.spec import Spec


@dataclass(frozen=True)
class Augment(Spec, ABC):
    """A random change of a training image that keeps its label."""

    @abstractmethod
    def __call__(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """The changed images."""


@dataclass(frozen=True)
class NoAugment(Augment):
    """No augmentation."""

    def __call__(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """The images themselves."""
        return x


@dataclass(frozen=True)
class CropFlip(Augment):
    """A crop of the padded image at a random place, then perhaps a mirror image."""

    pad: NonNegativeInt = 4
    flip: bool = True
    fill: Literal["zero", "reflect"] = "zero"

    def __call__(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """The cropped and perhaps mirrored images."""
        return self._moved(x, noise.uniform(seed, index, stream, (3,)))

    @fused
    def _moved(self, x: Tensor, draw: Tensor) -> Tensor:
        """Images moved down and across and mirrored as drawn."""
        if self.pad:
            x = self._cropped(x, (draw[:, :2] * (2 * self.pad + 1)).long())
        if self.flip:
            x = torch.where((draw[:, 2] < 0.5)[:, None, None, None], x.flip(-1), x)
        return x

    def _cropped(self, x: Tensor, corner: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if self.fill == "reflect" and self.pad >= min(height, width):
            raise BadInput(f"reflect padding of {self.pad} needs images larger than that")
        wide = padded(x, [self.pad] * 4, mode="constant" if self.fill == "zero" else "reflect")
        rows = corner[:, :1] + torch.arange(height, device=x.device)  # N, H
        columns = corner[:, 1:] + torch.arange(width, device=x.device)  # N, W
        image = torch.arange(len(x), device=x.device)[:, None, None]
        cut = wide.movedim(1, -1)[image, rows[:, :, None], columns[:, None, :]]  # N, H, W, C
        return cut.movedim(-1, 1)
