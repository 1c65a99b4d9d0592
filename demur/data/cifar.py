"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test images of 32x32 pixels.

    CIFAR10().load(Path("data"))                # fit 45,000, val 1,000, cal 4,000, test 10,000
    CIFAR10(split="paper").load(Path("data"))   # fit 50,000, test 10,000: nothing held out

The index of an image is its position in the published order, test images after training images.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from demur.data.check import check_images
from demur.data.cifar_files import CifarBatch, concatenate, read_layout
from demur.data.dataset import SPLITS, Dataset, Images, SplitName, Splits, ThreatModel
from demur.data.locations import locate
from demur.data.published import CIFAR10_FILES, CIFAR100_FILES, Published
from demur.images import Domain
from demur.noise import permutation

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)  # both sets, as the reference code
SHUFFLE_SEED = 0
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


@dataclass(frozen=True)
class Cifar(Dataset):
    """Files, splits and threat model shared by CIFAR-10 and CIFAR-100."""

    published: ClassVar[Published]
    threat = ThreatModel(linf=8 / 255, linf_step=2 / 255, l2=128 / 255, l2_step=16 / 255)

    split: Literal["held-out", "paper"] = "held-out"

    @property
    def splits(self) -> tuple[SplitName, ...]:
        return SPLITS if self.split == "held-out" else ("fit", "test")

    def load(self, folder: Path | None = None) -> Splits:
        found = locate(self.published, folder)
        batches = read_layout(found, self.published.classes)
        check_images(self.published, found, batches)
        train, test = concatenate(batches[:-1]), batches[-1]
        count = len(train.y)
        test_images = _images(test, torch.arange(len(test.y)), first_index=count)
        if self.split == "paper":
            return {"fit": _images(train, torch.arange(count)), "test": test_images}
        positions = permutation(SHUFFLE_SEED, count, stream=0).split(self.published.held_out)
        splits = {
            name: _images(train, chosen) for name, chosen in zip(SPLITS[:3], positions, strict=True)
        }
        return {**splits, "test": test_images}


def _images(batch: CifarBatch, positions: Tensor, first_index: int = 0) -> Images:
    """The images at these positions of a batch whose first image has index `first_index`."""
    chosen = positions.numpy()
    pixels = torch.from_numpy(batch.pixels[chosen]).view(-1, 3, 32, 32)
    return Images(pixels, torch.from_numpy(batch.y[chosen]), positions + first_index, levels=255)


@dataclass(frozen=True)
class CIFAR10(Cifar):
    """CIFAR-10: 60,000 colour images of 32x32 pixels in 10 classes.

    Attributes:
        split: "held-out" takes 1,000 val and 4,000 cal images out of the training images by a
            fixed permutation; "paper" trains on all 50,000 and has no val and cal images.

    Raises:
        BadInput: `load` finds no files, or files that differ from the published ones.

    Example:
        >>> CIFAR10().splits
        ('fit', 'val', 'cal', 'test')
        >>> CIFAR10(split="paper").splits
        ('fit', 'test')
    """

    published = CIFAR10_FILES
    class_names = CIFAR10_CLASSES
    domain = Domain(classes=10, shape=(3, 32, 32), mean=MEAN, std=STD)


@dataclass(frozen=True)
class CIFAR100(Cifar):
    """CIFAR-100: 60,000 colour images of 32x32 pixels in 100 classes (the fine labels).

    Attributes:
        split: "held-out" takes 1,000 val and 4,000 cal images out of the training images by a
            fixed permutation; "paper" trains on all 50,000 and has no val and cal images.

    Raises:
        BadInput: `load` finds no files, or files that differ from the published ones.

    Example:
        >>> CIFAR100().domain.classes
        100
    """

    published = CIFAR100_FILES
    domain = Domain(classes=100, shape=(3, 32, 32), mean=MEAN, std=STD)
