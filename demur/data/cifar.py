"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test photographs of 32x32 pixels.

    CIFAR10().load(Path("data"))                # fit 45,000, val 1,000, cal 4,000, test 10,000
    CIFAR10(split="paper").load(Path("data"))   # fit 50,000, test 10,000: nothing held out

The index of an image is its place in the published order, test images after training images.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from demur.data.check import check_images
from demur.data.cifar_files import CifarBatch, read_layout, together
from demur.data.dataset import Dataset, ThreatModel
from demur.data.images import SPLITS, Images, SplitName, Splits
from demur.data.locations import locate
from demur.data.published import CIFAR10_FILES, CIFAR100_FILES, Published
from demur.images import Domain
from demur.noise import permutation

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)  # reference code: for both sets
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Cifar(Dataset):
    """What the two sets share."""

    published: ClassVar[Published]
    threat = ThreatModel(linf=8 / 255, linf_step=2 / 255, l2=128 / 255, l2_step=16 / 255)

    split: Literal["held-out", "paper"] = "held-out"

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """The splits that `load` gives."""
        return SPLITS if self.split == "held-out" else ("fit", "test")

    def load(self, folder: Path | None = None) -> Splits:
        """The four splits, or fit and test alone as in the paper."""
        found = locate(self.published, folder)
        batches = read_layout(found, self.published.classes)
        check_images(self.published, found, batches)
        train, test = together(batches[:-1]), batches[-1]
        count = len(train.y)
        last = _images(test, torch.arange(len(test.y)), first=count)
        if self.split == "paper":
            return {"fit": _images(train, torch.arange(count)), "test": last}
        chosen = permutation(SHUFFLE_SEED, count, stream=0).split(self.published.held_out)
        splits = {
            name: _images(train, places) for name, places in zip(SPLITS[:3], chosen, strict=True)
        }
        return {**splits, "test": last}


def _images(batch: CifarBatch, places: Tensor, first: int = 0) -> Images:
    """The images at these places of a batch whose own first place is `first`."""
    chosen = places.numpy()
    pixels = torch.from_numpy(batch.pixels[chosen]).view(-1, 3, 32, 32)
    return Images(pixels, torch.from_numpy(batch.y[chosen]), places + first, levels=255)


@dataclass(frozen=True)
class CIFAR10(Cifar):
    """Photographs of ten kinds of animals and vehicles."""

    published = CIFAR10_FILES
    domain = Domain(classes=10, shape=(3, 32, 32), mean=MEAN, std=STD)


@dataclass(frozen=True)
class CIFAR100(Cifar):
    """Photographs of a hundred kinds of things, by their fine labels."""

    published = CIFAR100_FILES
    domain = Domain(classes=100, shape=(3, 32, 32), mean=MEAN, std=STD)
