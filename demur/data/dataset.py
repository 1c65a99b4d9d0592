"""A data set: splits of labelled uint8 images, domain and usual threat model.

fit trains, val selects the checkpoint, cal sets thresholds, test is only evaluated. A study
compares settings on cal images, so thresholds for the settings it selects need other images.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from demur.errors import BadInput
from demur.images import Domain
from demur.noise import permutation
from demur.progress import ignore
from demur.spec import Spec

DIGITS_SPLITS = (1150, 150, 197, 300)
SHUFFLE_SEED = 0
SplitName = Literal["fit", "val", "cal", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


@dataclass(frozen=True)
class Images:
    """One split: images, labels, and each image's position in the published data set."""

    pixels: Tensor  # N, C, H, W, uint8
    y: Tensor  # N, int64
    index: Tensor  # N, int64
    levels: int  # the pixel value that maps to 1.0

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the chosen images as floats in [0, 1] (N, C, H, W) and their labels (N)."""
        return self.stored(chosen).float() / self.levels, self.y[chosen]

    def stored(self, chosen: Tensor | slice) -> Tensor:
        """Return the chosen images as they are stored, uint8, on the device of the labels."""
        rows = chosen.to(self.pixels.device) if isinstance(chosen, Tensor) else chosen
        return self.pixels[rows].to(self.y.device)

    def first(self, count: int) -> "Images":
        """Return the first `count` images; raise BadInput if there are fewer."""
        if not 1 <= count <= len(self):
            raise BadInput(
                f"asked for {count} images of a split that has {len(self)}; "
                f"ask for 1 to {len(self)}"
            )
        return replace(self, pixels=self.pixels[:count], y=self.y[:count], index=self.index[:count])

    def to(self, device: torch.device) -> "Images":
        """Return a copy on another device."""
        pixels, y, index = (part.to(device) for part in (self.pixels, self.y, self.index))
        return replace(self, pixels=pixels, y=y, index=index)

    def streamed(self, device: torch.device) -> "Images":
        """Return a copy whose batches are on another device; its pixels stay where they are."""
        return replace(self, y=self.y.to(device), index=self.index.to(device))

    def slices(self, batch_size: int) -> Iterator[slice]:
        """Yield consecutive slices of at most `batch_size` images."""
        for begin in range(0, len(self), batch_size):
            yield slice(begin, min(begin + batch_size, len(self)))

    def digest(self) -> str:
        """SHA-256 over pixels, labels and indices, as 64 hex digits."""
        sha256 = hashlib.sha256(f"{tuple(self.pixels.shape)} {self.levels}".encode())
        pieces = (self.stored(piece) for piece in self.slices(256))
        for tensor in chain(pieces, (self.y, self.index)):
            sha256.update(tensor.cpu().contiguous().numpy().data)
        return sha256.hexdigest()


Splits = dict[SplitName, Images]


class ThreatModel(NamedTuple):
    """The usual attack radii of a data set and their PGD step sizes, for pixels in [0, 1]."""

    linf: float
    linf_step: float
    l2: float
    l2_step: float
    l1: float


@dataclass(frozen=True)
class Dataset(Spec, ABC):
    """A data set that loads as named splits."""

    @property
    @abstractmethod
    def domain(self) -> Domain:
        """Number of classes, shape and normalisation of the images."""

    @property
    @abstractmethod
    def threat(self) -> ThreatModel:
        """The usual attack radii."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class; its number where the data set has no names."""
        return tuple(str(label) for label in range(self.domain.classes))

    @property
    def resizes(self) -> bool:
        """Whether images of any size are resized to the shape of the domain."""
        return False

    def prepared(
        self,
        on_progress: Callable[[int, int], None] = ignore,
        on_message: Callable[[str], None] = ignore,
    ) -> "Dataset":
        """Return the data set with every field that depends on its files filled in."""
        return self

    def verify(self, folder: Path | None = None) -> None:
        """Hash the files of a user's own images; what changed is read again."""

    def listing(self, folder: Path | None = None) -> str | None:
        """CSV of the files in each split; None for a published data set, which fixes them."""
        return None

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """The names of the splits that `load` returns."""
        return SPLITS

    @abstractmethod
    def load(self, folder: Path | None = None) -> Splits:
        """Load the splits from `folder`, or from where `demur.data.cifar` finds the files."""


@dataclass(frozen=True)
class Digits(Dataset):
    """Handwritten digits: 1,797 images of 1x8x8 pixels with 17 grey levels in 10 classes.

    They are part of the package, so `load` needs no folder. A fixed permutation orders them; the
    index of an image is its position in scikit-learn's order. There are no fields.

    Example:
        >>> splits = Digits().load()
        >>> {name: len(images) for name, images in splits.items()}
        {'fit': 1150, 'val': 150, 'cal': 197, 'test': 300}
        >>> x, y = splits["test"].batch(slice(0, 4))
        >>> x.shape
        torch.Size([4, 1, 8, 8])
    """

    domain = Domain(classes=10, shape=(1, 8, 8), mean=(0.305,), std=(0.376,))
    threat = ThreatModel(linf=0.15, linf_step=0.0375, l2=0.8, l2_step=0.1, l1=2.0)

    def load(self, folder: Path | None = None) -> Splits:
        table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.int64)
        pixels = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(-1, 1, 8, 8)
        y = torch.from_numpy(table[:, -1].copy())
        indices = permutation(SHUFFLE_SEED, len(y), stream=0).split(DIGITS_SPLITS)
        return {
            name: Images(pixels[index], y[index], index, levels=16)
            for name, index in zip(SPLITS, indices, strict=True)
        }
