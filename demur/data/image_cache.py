"""The cache of a user's own images: resized to one size, as uint8, in one file on disk.

    cached = read_images("photos", size=32, channels=None)
    cached.splits()["fit"]      # images whose pixels stay in the file until they are moved

Reading and building hold a lock, and a finished cache appears by one rename. A process that is
killed leaves nothing that is taken for a cache.
"""

import csv
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from demur.data.dataset import SPLITS, Splits
from demur.data.image_splits import SplitResult, assign_splits, report
from demur.data.locations import cache_folder
from demur.data.mapped import MappedImages
from demur.data.sources import HUB, Source, open_source
from demur.errors import BadInput
from demur.image_files import resize_pixels

VERSION = 1  # of what is stored: raised when decoding, splits or files change
ROWS = 1024  # images copied at a time
THREADS = 4
ProgressCallback = Callable[[int, int], None]  # images done, images in all


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
    path: str,
    size: int,
    channels: int | None,
    on_progress: ProgressCallback = lambda done, total: None,
) -> CachedImages:
    """Return the cached images of a path; decode and resize them first where they changed.

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
    """The cache of these files, or None if there is none or its files changed."""
    try:
        metadata = json.loads((folder / "cache.json").read_text(encoding="utf-8"))
        files = {name: (folder / name).stat().st_size for name in metadata["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    whole = metadata["stamp"] == stamp and metadata["files"] == files
    return CachedImages.open(folder, metadata) if whole else None


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
        names = ("pixels.npy", "y.npy", "data.csv")
        metadata = {
            "stamp": stamp,
            "content": _content(source, digests, result),
            "classes": result.classes,
            "channels": channels,
            "counts": {name: len(part) for name, part in result.chosen.items()},
            "report": report(source.entries, result, faults, source.ignored),
            "files": {name: (half / name).stat().st_size for name in names},
        }
        (half / "cache.json").write_text(json.dumps(metadata), encoding="utf-8")
        (half / "decoded.npy").unlink()
        for name in (*names, "cache.json"):
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
