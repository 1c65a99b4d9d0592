"""The data set of a user's own images, which `sources.py` reads; images streamed from a file.

A split that does not fit on the device stays in its file and is streamed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from demur.data.dataset import SPLITS, Dataset, Images, Splits, ThreatModel
from demur.data.image_cache import CachedImages, read_images
from demur.errors import BadInput, shorten
from demur.files.checked_files import release
from demur.images import Domain
from demur.progress import ignore
from demur.spec import later
from demur.spec.field_types import Condition, Positive

RESIDENT_LIMIT = 4 << 30  # bytes of a split; a larger one is streamed
MEMORY_SHARE = 0.25  # of the free memory of the device that a split may take
WORKERS, PREFETCH = 2, 4
ImageSize = Annotated[int, Condition(lambda v: 8 <= v <= 1024, "from 8 to 1024")]
EPS = 8 / 255
THREAT = ThreatModel(linf=EPS, linf_step=EPS / 4, l2=16 * EPS, l2_step=2 * EPS, l1=12.0)  # at EPS
MEAN, STD = 0.5, 0.25  # of every channel; the batch norm behind the first layer does the rest


@dataclass(frozen=True)
class OwnImages(Dataset):
    """Your own images, resized to squares, in splits that are stratified by class.

    The folder may have the splits train, val, cal and test. Those that it lacks are taken out of
    the training images: 10% val, 15% cal, 15% test of each class. The pixels of an image decide
    its split. Images that are equal after resizing are used once.

    Attributes:
        path: A folder with one folder per class (or train/CLASS, test/CLASS ...), a .csv with the
            columns path and label, an .npz with x and y, or MODULE:NAME.
        size: Height and width in pixels, 8 to 1024; images are resized to it.
        channels: 1 or 3; None is 1 where every image is grey.
        classes: Names of the classes; `prepared` finds them.
        content: Digest of all images, classes and splits; `prepared` computes it and `load`
            checks it.
        duplicates: Images in two splits of the folder: "refuse" raises BadInput, "drop" leaves
            them in the last split only, "keep" trains on images that are tested, as the recipe
            in every record then says.
        eps: Linf radius of the attacks by name; those in L2 and L1 scale with it. As a change of
            a recipe, eps=4/255 sets the radius in training too.

    Raises:
        BadInput: `prepared` or `load` finds no images, or other images than those of `content`.

    Example:
        >>> from demur import OwnImages
        >>> OwnImages("photos", size=64).resizes
        True
    """

    path: str = ""
    size: ImageSize = 32
    channels: Literal[1, 3] | None = None
    classes: tuple[str, ...] = ()
    content: str = ""
    duplicates: Literal["refuse", "drop", "keep"] = field(
        default="refuse", metadata=later(neutral="refuse")
    )
    eps: Positive = field(default=EPS, metadata=later(neutral=EPS))

    @property
    def threat(self) -> ThreatModel:
        scaled = ThreatModel(*(self.eps / EPS * value for value in THREAT))
        return scaled._replace(linf=self.eps)

    @property
    def domain(self) -> Domain:
        if not self.classes or self.channels is None:
            raise BadInput("the images are not read yet; name them with data=PATH")
        shape = (self.channels, self.size, self.size)
        each = self.channels
        return Domain(len(self.classes), shape, mean=(MEAN,) * each, std=(STD,) * each)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def resizes(self) -> bool:
        return True

    def prepared(
        self,
        on_progress: Callable[[int, int], None] = ignore,
        on_message: Callable[[str], None] = ignore,
    ) -> "OwnImages":
        """Return a copy with channels, classes and content, after every image is read once.

        `on_message` is called with sentences about splits, damaged files and duplicates.
        """
        if self.content:
            return self
        cached = self._cached(None, on_progress)
        found = cached.metadata
        for sentence in found["report"]:
            on_message(f"{self.path}: {sentence}")
        if found["leaks"] and self.duplicates == "refuse":
            raise BadInput(
                f"{self.path}: {found['leaks']}; remove them, or add duplicates=drop, which leaves "
                "them in the last split only, or duplicates=keep"
            )
        classes, channels = tuple(found["classes"]), found["channels"]
        return replace(self, channels=channels, classes=classes, content=found["content"])

    def load(self, folder: Path | None = None) -> Splits:
        if not self.content:
            return self.prepared().load(folder)
        cached = self._checked(folder)
        counts = [cached.metadata["counts"][name] for name in SPLITS]
        arrays = cached.pixels, cached.y, np.arange(sum(counts))
        parts = (torch.from_numpy(array).split(counts) for array in arrays)
        return {
            name: MappedImages(pixels, y, index, 255, cached.file, cached.pixels)
            for name, pixels, y, index in zip(SPLITS, *parts, strict=True)
        }

    def listing(self, folder: Path | None = None) -> str:
        return self._checked(folder).listing

    def _checked(self, folder: Path | None) -> CachedImages:
        """The images, which must be those that the fields describe."""
        cached = self._cached(folder)
        if (found := cached.metadata["content"]) != self.content:
            raise BadInput(
                f"the images in {shorten(str(folder or self.path))} are not those of this recipe: "
                f"expected digest {self.content[:16]}, found {found[:16]}; restore them, "
                "or train again with data=PATH (another version of Pillow may decode JPEG files "
                "differently)"
            )
        return cached

    def verify(self, folder: Path | None = None) -> None:
        self._cached(folder, verify=True)

    def _cached(
        self, folder: Path | None, on_progress: Callable[[int, int], None] = ignore,
        verify: bool = False,
    ) -> CachedImages:  # fmt: skip
        if not self.path:
            raise BadInput("this recipe needs your images; name them with data=PATH")
        path = str(folder) if folder else self.path
        keep = self.duplicates == "keep"
        return read_images(path, self.size, self.channels, on_progress, keep, verify)


@dataclass(frozen=True)
class MappedImages(Images):
    """One split in a file of uint8 pixels; `to` copies it to a device if it is small enough."""

    file: Path = Path()
    mapping: NDArray[np.uint8] | None = None  # of which `pixels` is a part

    def to(self, device: torch.device) -> Images:
        """Return the images on a device; a large split leaves its pixels in the file."""
        there = self.streamed(device)
        if self.pixels.numel() <= min(RESIDENT_LIMIT, MEMORY_SHARE * _free_memory(device)):
            return Images(there.stored(slice(None)), there.y, there.index, self.levels)
        return there

    def stored(self, chosen: Tensor | slice) -> Tensor:
        pixels = super().stored(chosen).clone()
        release(self.mapping)
        return pixels


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

    Training on a stream sees the same images with the same augmentation and noise, bit for bit.
    """

    def __init__(self, images: MappedImages) -> None:
        self.images, self.order = images, list[Tensor]()
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
        self.batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def begin(self, batches: Sequence[Tensor]) -> None:
        """Start to read the batches of an epoch, given by positions in the split."""
        self.order[:] = [batch.cpu() for batch in batches]  # which the loader reads at `iter`
        self.batches = zip(self.order, self.loader, strict=True)

    def next(self) -> Images:
        """Return the next batch of the epoch on the device."""
        chosen, pixels = next(self.batches)
        images, device = self.images, self.images.y.device
        chosen, pixels = chosen.to(device), pixels.to(device, non_blocking=True)
        return Images(pixels, images.y[chosen], images.index[chosen], images.levels)


class _Rows(torch.utils.data.Dataset[Tensor]):
    """Rows of a file of pixels; a worker inherits the mapping or opens the file again."""

    def __init__(self, file: Path, first: int) -> None:
        self.file, self.first = file, first
        self.pixels = np.load(file, mmap_mode="r", allow_pickle=False)

    def __reduce__(self) -> tuple[type["_Rows"], tuple[Path, int]]:
        return _Rows, (self.file, self.first)  # pickling a mapping would copy the pixels

    def __getitem__(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(self.pixels[(rows + self.first).numpy()])
