"""Images that stay in a file, and batches of them read ahead by worker processes.

    images = images.to(device)              # copied to the device where they fit there
    stream = BatchStream(images)            # if isinstance(images, MappedImages): they do not
    stream.begin(batches)                   # the positions of each batch of an epoch
    batch = stream.next()                   # Images on the device

Training on a stream sees the same images with the same augmentation and noise, bit for bit.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from demur.data.dataset import Images

RESIDENT_LIMIT = 4 << 30  # bytes of a split; a larger one is streamed
MEMORY_SHARE = 0.25  # of the free memory of the device that a split may take
WORKERS, PREFETCH = 2, 4


@dataclass(frozen=True)
class MappedImages(Images):
    """One split in a file of uint8 pixels; `to` copies it to a device if it is small enough."""

    file: Path = Path()

    def to(self, device: torch.device) -> Images:
        """Return the images on a device; a large split leaves its pixels in the file."""
        size = self.pixels.numel()
        if size <= min(RESIDENT_LIMIT, MEMORY_SHARE * _free_memory(device)):
            pixels = self.pixels.clone() if device.type == "cpu" else self.pixels.to(device)
            return Images(pixels, self.y.to(device), self.index.to(device), self.levels)
        return MappedImages(
            self.pixels, self.y.to(device), self.index.to(device), self.levels, self.file
        )

    def batch(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = chosen.cpu() if isinstance(chosen, Tensor) else chosen
        return self.pixels[rows].to(self.y.device).float() / self.levels, self.y[chosen]


def _free_memory(device: torch.device) -> int:
    """Bytes of memory of a device that are free; of a CPU, all that it has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not on every system
        return RESIDENT_LIMIT * 4


class BatchStream:
    """Batches of a split in a file, read ahead by two worker processes.

    Args:
        images: The split; its labels and indices are on the device of the batches.
    """

    def __init__(self, images: MappedImages) -> None:
        self.images, self.order = images, _Order()
        first = int(images.index[0])  # the index of a cached image is its row
        self.loader: DataLoader[Tensor] = DataLoader(
            _Rows(images.file, first),
            batch_size=None,
            sampler=self.order,
            num_workers=WORKERS,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            pin_memory=images.y.is_cuda,
        )
        self.batches: Iterator[Tensor] = iter(())

    def begin(self, batches: Sequence[Tensor]) -> None:
        """Start to read the batches of an epoch, given by positions in the split."""
        self.order.batches = [batch.cpu() for batch in batches]
        self.batches = iter(self.loader)
        self.number = 0

    def next(self) -> Images:
        """Return the next batch of the epoch on the device."""
        pixels = next(self.batches)
        chosen = self.order.batches[self.number].to(self.images.y.device)
        self.number += 1
        return Images(
            pixels.to(self.images.y.device, non_blocking=True),
            self.images.y[chosen],
            self.images.index[chosen],
            self.images.levels,
        )


class _Order(torch.utils.data.Sampler[Any]):
    """The batches of the current epoch."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Rows(Dataset[Tensor]):
    """Rows of a file of pixels; a worker inherits the mapping or opens the file again."""

    def __init__(self, file: Path, first: int) -> None:
        self.file, self.first = file, first
        self.pixels = np.load(file, mmap_mode="r", allow_pickle=False)

    def __reduce__(self) -> tuple[type["_Rows"], tuple[Path, int]]:
        return _Rows, (self.file, self.first)  # pickling a mapping would copy the pixels

    def __getitem__(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(self.pixels[(rows + self.first).numpy()])
