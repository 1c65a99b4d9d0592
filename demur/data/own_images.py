"""A user's own images: a folder per class, a CSV of paths, an npz, or a data set of the Hub.

    data = OwnImages("photos", size=64).prepared()      # decodes, resizes, divides, caches
    data.classes                                        # ("cat", "dog", "fish")
    data.load()["test"]

`demur train images-pgdat-rr data=photos size=64` does the same. A split that does not fit on the
device stays in its file and is streamed.
"""

import csv
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from demur.data.cifar_files import cache_folder
from demur.data.dataset import SPLITS, Dataset, Images, Splits, ThreatModel
from demur.data.image_splits import SplitResult, assign_splits, report
from demur.data.sources import HUB, Source, open_source
from demur.errors import BadInput, shorten
from demur.files.atomic import read_json, write_json
from demur.files.image_files import resize_pixels
from demur.images import Domain
from demur.progress import ignore
from demur.spec.field_types import Condition

VERSION = 2  # of what is stored: raised when decoding, splits or files change
FILES = ("pixels.npy", "y.npy", "data.csv")  # of a cache, beside cache.json
RESIDENT_LIMIT = 4 << 30  # bytes of a split; a larger one is streamed
MEMORY_SHARE = 0.25  # of the free memory of the device that a split may take
WORKERS, PREFETCH = 2, 4
ROWS = 1024  # images copied at a time
THREADS = 4
ProgressCallback = Callable[[int, int], None]  # images done, images in all
ImageSize = Annotated[int, Condition(lambda v: 8 <= v <= 1024, "from 8 to 1024")]
MEAN, STD = 0.5, 0.25  # of every channel; the batch norm behind the first layer does the rest


@dataclass(frozen=True)
class CachedImages:
    """Resized images of a source, ordered by split, and what is known about them."""

    file: Path  # of the pixels
    pixels: NDArray[np.uint8]  # N, C, S, S, mapped from the file
    y: NDArray[np.int64]
    listing: str  # CSV with split, class, file, digest of the pixels, and why a file is left out
    metadata: dict[str, Any]

    @staticmethod
    def open(folder: Path, metadata: dict[str, Any]) -> "CachedImages":
        """Map the files of a cache; they stay what they are if the cache is built again."""
        file = folder / "pixels.npy"
        pixels = np.load(file, mmap_mode="c", allow_pickle=False)
        y = np.load(folder / "y.npy", allow_pickle=False)
        listing = (folder / "data.csv").read_text(encoding="utf-8")
        return CachedImages(file, pixels, y, listing, metadata)

    @property
    def content(self) -> str:
        """Digest of the pixels, classes and splits, whatever the names of the files."""
        return str(self.metadata["content"])

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, sorted; a label is a position in them."""
        return tuple(self.metadata["classes"])

    @property
    def channels(self) -> int:
        """1 if every image is grey, else 3."""
        return int(self.metadata["channels"])

    @property
    def report(self) -> list[str]:
        """Sentences about splits, unreadable files, duplicates and imbalance."""
        return list(self.metadata["report"])

    def splits(self) -> Splits:
        """The images of each split; their pixels are mapped from the file."""
        pixels, y = torch.from_numpy(self.pixels), torch.from_numpy(self.y)
        splits: Splits = {}
        start = 0
        for name in SPLITS:
            stop = start + self.metadata["counts"][name]
            splits[name] = MappedImages(
                pixels[start:stop], y[start:stop], torch.arange(start, stop), levels=255,
                file=self.file,
            )  # fmt: skip
            start = stop
        return splits


def read_images(
    path: str, size: int, channels: int | None, on_progress: ProgressCallback = ignore
) -> CachedImages:
    """Return the cached images of a path; decode and resize them first where they changed.

    Reading and building hold a lock, and a finished cache appears by one rename. A process that
    is killed leaves nothing that is taken for a cache.

    Args:
        path: What `open_source` reads.
        size: Height and width of the images.
        channels: 1 or 3; None is 1 where every image is grey.
        on_progress: Called with (images done, images in all) while they are decoded.
    """
    source = open_source(path)
    place = path if path.startswith(HUB) else str(Path(path).resolve())
    stamp = source.stamp()
    # channels may have been found by an earlier call with None, whose cache then serves
    for found in dict.fromkeys((None, channels)):
        folder = _folder(place, size, found)
        with _locked(folder):
            cached = _stored(folder, stamp)
            if cached is not None and channels in (None, cached.channels):
                return cached
            if found == channels:
                cached = _build(source, folder, stamp, size, channels, on_progress)
    assert cached is not None
    return cached


def _folder(place: str, size: int, channels: int | None) -> Path:
    """Folder of the cache of a path, for these settings."""
    key = hashlib.sha256(repr((VERSION, place, size, channels)).encode()).hexdigest()[:20]
    return cache_folder() / "images" / key


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache; the operating system releases it if the process dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        yield


def _stored(folder: Path, stamp: str) -> CachedImages | None:
    """The cache of these files, or None if there is none or a byte of it changed."""
    try:
        metadata = read_json(folder / "cache.json", "it is built again")
        if metadata["stamp"] != stamp or metadata["files"] != _file_digests(folder):
            return None
        return CachedImages.open(folder, metadata)
    except (BadInput, OSError, ValueError, TypeError, KeyError):
        return None


def _file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a cache but its metadata."""
    digests = {}
    for name in FILES:
        with (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _build(
    source: Source,
    folder: Path,
    stamp: str,
    size: int,
    channels: int | None,
    on_progress: ProgressCallback,
) -> CachedImages:
    """Decode every image, divide them, and put the finished folder in its place."""
    half = folder.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)  # of a process that was killed
    half.mkdir()
    try:
        digests, faults, grey = _decode(source, half / "decoded.npy", size, on_progress)
        if len(faults) == len(source.entries):
            name, reason = source.entries[0].name, faults[0]
            raise BadInput(f"no image can be read, for example {name}: {reason}")
        result = assign_splits(source.entries, digests, faults)
        channels = channels or (1 if grey else 3)
        _write_arrays(source, result, half, channels)
        listing = _listing(source, digests, result)
        (half / "data.csv").write_text(listing, encoding="utf-8")
        metadata = {
            "stamp": stamp,
            "content": _content(source, digests, result),
            "classes": result.classes,
            "channels": channels,
            "counts": {name: len(part) for name, part in result.chosen.items()},
            "report": report(source.entries, result, faults, source.ignored),
            "files": _file_digests(half),
        }
        write_json(half / "cache.json", metadata)
        (half / "decoded.npy").unlink()
        for name in FILES:
            _sync(half / name)
        shutil.rmtree(folder, ignore_errors=True)
        half.replace(folder)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return CachedImages.open(folder, metadata)


def _decode(
    source: Source, file: Path, size: int, on_progress: ProgressCallback
) -> tuple[list[str], dict[int, str], bool]:
    """Write every image as uint8 N, 3, S, S; return digests, faults, and whether all are grey."""
    total = len(source.entries)
    rows = np.lib.format.open_memmap(file, "w+", np.uint8, (total, 3, size, size))
    digests, faults, grey = [""] * total, {}, True

    def read(i: int) -> tuple[str, NDArray[np.uint8] | str]:
        try:
            pixels = source.read(i)
        except BadInput as error:
            return "", str(error)
        sha256 = hashlib.sha256(repr(pixels.shape).encode())
        sha256.update(np.ascontiguousarray(pixels).data)
        return sha256.hexdigest(), resize_pixels(pixels, size, size)

    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, total, ROWS):
            chunk = range(start, min(start + ROWS, total))
            for i, (digest, found) in zip(chunk, pool.map(read, chunk), strict=True):
                if isinstance(found, str):
                    faults[i] = found
                else:
                    digests[i], rows[i] = digest, np.moveaxis(found, 2, 0)
                    grey = grey and bool((found == found[:, :, :1]).all())
                on_progress(i + 1, total)
    return digests, faults, grey


def _write_arrays(source: Source, result: SplitResult, half: Path, channels: int) -> None:
    """Write the pixels and labels of all splits, one split after the other."""
    order = np.array([i for name in SPLITS for i in result.chosen[name]])
    decoded = np.load(half / "decoded.npy", mmap_mode="r", allow_pickle=False)
    shape = (len(order), channels, *decoded.shape[2:])
    pixels = np.lib.format.open_memmap(half / "pixels.npy", "w+", np.uint8, shape)
    for start in range(0, len(order), ROWS):
        block = decoded[order[start : start + ROWS]]
        pixels[start : start + ROWS] = block if channels == 3 else _luma(block)
    pixels.flush()
    label = {name: position for position, name in enumerate(result.classes)}
    y = np.array([label[source.entries[i].label] for i in order], dtype=np.int64)
    np.save(half / "y.npy", y, allow_pickle=False)


def _luma(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Grey value of RGB pixels (N, 3, H, W), as Pillow computes it."""
    weights = np.array([19595, 38470, 7471], dtype=np.int64)[:, None, None]
    grey = (block * weights).sum(1, keepdims=True) + 0x8000 >> 16
    return np.asarray(grey, dtype=np.uint8)


def _listing(source: Source, digests: list[str], result: SplitResult) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("split", "class", "file", "pixels", "note"))
    for name in SPLITS:
        for i in result.chosen[name]:
            entry = source.entries[i]
            table.writerow((name, entry.label, entry.name, digests[i], ""))
    for i, note in sorted(result.notes.items()):
        entry = source.entries[i]
        table.writerow(("", entry.label, entry.name, digests[i], note))
    return text.getvalue().encode("utf-8", "replace").decode()


def _content(source: Source, digests: list[str], result: SplitResult) -> str:
    sha256 = hashlib.sha256(repr(result.classes).encode("utf-8", "replace"))
    for name in SPLITS:
        for i in result.chosen[name]:
            sha256.update(repr((name, source.entries[i].label, digests[i])).encode())
    return sha256.hexdigest()


def _sync(path: Path) -> None:
    """Write a file to the disk, so that a rename never precedes its contents."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@dataclass(frozen=True)
class OwnImages(Dataset):
    """Your own images, resized to squares, in splits that are stratified by class.

    The folder may have the splits train, val, cal and test. Those that it lacks are taken out of
    the training images: 10% val, 15% cal, 15% test of each class. The pixels of an image decide
    its split. Duplicates are left out; of several splits the last one keeps the image.

    Attributes:
        path: A folder with one folder per class (or train/CLASS, test/CLASS ...), a .csv with the
            columns path and label, an .npz with x and y, or hub:NAME.
        size: Height and width in pixels, 8 to 1024; images are resized to it.
        channels: 1 or 3; None is 1 where every image is grey.
        classes: Names of the classes; `prepared` finds them.
        content: Digest of all images, classes and splits; `prepared` computes it and `load`
            checks it.

    Raises:
        BadInput: `prepared` or `load` finds no images, or other images than those of `content`.

    Example:
        >>> from demur import OwnImages
        >>> OwnImages("photos", size=64).resizes
        True
    """

    threat = ThreatModel(linf=8 / 255, linf_step=2 / 255, l2=128 / 255, l2_step=16 / 255, l1=12.0)

    path: str = ""
    size: ImageSize = 32
    channels: Literal[1, 3] | None = None
    classes: tuple[str, ...] = ()
    content: str = ""

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

        Args:
            on_progress: Called with (images done, images in all) while they are decoded.
            on_message: Called with sentences about splits, damaged files and duplicates.
        """
        if self.content:
            return self
        cached = self._cached(None, on_progress)
        for sentence in cached.report:
            on_message(f"{self.path}: {sentence}")
        channels: Literal[1, 3] = 1 if cached.channels == 1 else 3
        return replace(self, channels=channels, classes=cached.classes, content=cached.content)

    def load(self, folder: Path | None = None) -> Splits:
        if not self.content:
            return self.prepared().load(folder)
        return self._checked(folder).splits()

    def listing(self, folder: Path | None = None) -> str:
        return self._checked(folder).listing

    def _checked(self, folder: Path | None) -> CachedImages:
        """The images, which must be those that the fields describe."""
        cached = self._cached(folder)
        if cached.content != self.content:
            raise BadInput(
                f"the images in {shorten(str(folder or self.path))} are not those of this recipe: "
                f"expected digest {self.content[:16]}, found {cached.content[:16]}; restore them, "
                "or train again with data=PATH (another version of Pillow may decode JPEG files "
                "differently)"
            )
        return cached

    def _cached(
        self, folder: Path | None, on_progress: Callable[[int, int], None] = ignore
    ) -> CachedImages:
        if not self.path:
            raise BadInput("this recipe needs your images; name them with data=PATH")
        path = str(folder) if folder else self.path
        return read_images(path, self.size, self.channels, on_progress)


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

        stream.begin(batches)       # the positions of each batch of an epoch
        batch = stream.next()       # Images on the device

    Training on a stream sees the same images with the same augmentation and noise, bit for bit.

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


class _Rows(torch.utils.data.Dataset[Tensor]):
    """Rows of a file of pixels; a worker inherits the mapping or opens the file again."""

    def __init__(self, file: Path, first: int) -> None:
        self.file, self.first = file, first
        self.pixels = np.load(file, mmap_mode="r", allow_pickle=False)

    def __reduce__(self) -> tuple[type["_Rows"], tuple[Path, int]]:
        return _Rows, (self.file, self.first)  # pickling a mapping would copy the pixels

    def __getitem__(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(self.pixels[(rows + self.first).numpy()])
