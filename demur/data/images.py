"""Labelled images held as bytes on a device, and the splits they come in.

    splits = Digits().load()            # fit / val / cal / test
    x, y = splits["test"].batch(chosen) # floats in [0, 1], labels

fit trains, val chooses the epoch and nothing else, cal sets thresholds, test is only measured.
A study compares settings on cal images: thresholds for what it chose need others.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from demur.errors import BadInput

SplitName = Literal["fit", "val", "cal", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


@dataclass(frozen=True)
class Images:
    """One split: byte images, labels, and each image's place in the published data set."""

    pixels: Tensor  # N, C, H, W, uint8
    y: Tensor  # N, int64
    index: Tensor  # N, int64
    levels: int  # the byte that means 1.0

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The chosen images as floats in [0, 1], with their labels."""
        return self.pixels[chosen].float() / self.levels, self.y[chosen]

    def first(self, count: int) -> "Images":
        """The split cut to its first images."""
        if not 1 <= count <= len(self):
            raise BadInput(
                f"asked for {count} images of a split that has {len(self)}; "
                f"ask for 1 to {len(self)}"
            )
        return replace(self, pixels=self.pixels[:count], y=self.y[:count], index=self.index[:count])

    def to(self, device: torch.device) -> "Images":
        """The split on another device."""
        return replace(
            self,
            pixels=self.pixels.to(device),
            y=self.y.to(device),
            index=self.index.to(device),
        )

    def slices(self, batch_size: int) -> Iterator[slice]:
        """The split in order, cut into batches."""
        for begin in range(0, len(self), batch_size):
            yield slice(begin, min(begin + batch_size, len(self)))

    def digest(self) -> str:
        """64 hex digits over pixels, labels and places."""
        whole = hashlib.sha256(f"{tuple(self.pixels.shape)} {self.levels}".encode())
        for part in (self.pixels, self.y, self.index):
            whole.update(part.cpu().contiguous().numpy().tobytes())
        return whole.hexdigest()


Splits = dict[SplitName, Images]
