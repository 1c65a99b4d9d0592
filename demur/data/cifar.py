"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test images of 32x32 pixels.

    CIFAR10().load(Path("data"))                # fit 45,000, val 1,000, cal 4,000, test 10,000
    CIFAR10(split="paper").load(Path("data"))   # fit 50,000, test 10,000: nothing held out
    download(CIFAR10_FILES, Path("data"), on_progress)      # complete and checked, or nothing

The index of an image is its position in the published order, test images after training images.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, NamedTuple
from urllib.request import urlopen

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demur.data.cifar_files import (
    CIFAR10_FILES,
    CIFAR100_FILES,
    GET_AGAIN,
    PIXELS,
    Archive,
    DataFiles,
    Layout,
    Part,
    Published,
    find,
    locate,
)
from demur.data.dataset import SPLITS, Dataset, Images, SplitName, Splits, ThreatModel
from demur.data.plain_pickle import read_plain_pickle
from demur.errors import BadInput
from demur.images import Domain
from demur.noise import permutation

_CHUNK = 1 << 18
_TIMEOUT = 20  # seconds without a byte
ProgressCallback = Callable[[int, int], None]  # arguments: done, total
_WARNED: dict[Any, Any] = {}  # registry of `warnings`: each warning is shown once
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)  # both sets, as the reference code
SHUFFLE_SEED = 0
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


class CifarBatch(NamedTuple):
    """The images of one file, in published order."""

    pixels: NDArray[np.uint8]  # N, 3072
    y: NDArray[np.int64]  # N


def read_part(layout: Layout, folder: Path, part: Part, classes: int) -> CifarBatch:
    """Read one file.

    Raises:
        BadInput: The file has another number of images, or a label that is no class.
    """
    path = folder / part.name
    read = _read_binary if layout.form == "binary" else _read_python
    batch = read(path, layout, part.images)
    low, high = int(batch.y.min()), int(batch.y.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise BadInput(
            f"{path} contains the label {wrong}, but labels range from 0 to {classes - 1}; "
            f"delete it and {GET_AGAIN}"
        )
    return batch


def _read_binary(path: Path, layout: Layout, images: int) -> CifarBatch:
    size, expected = path.stat().st_size, images * (layout.label_bytes + PIXELS)
    if size != expected:
        fault = "is truncated" if size < expected else "is too long"
        raise BadInput(f"{path} {fault}: {size} bytes, not {expected}; delete it and {GET_AGAIN}")
    records = np.fromfile(path, np.uint8).reshape(images, -1)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    return CifarBatch(records[:, layout.label_bytes :], labels)


def _read_python(path: Path, layout: Layout, images: int) -> CifarBatch:
    entries = read_plain_pickle(path, "data", layout.label_key)
    pixels, y = entries.get("data"), _integer_array(entries.get(layout.label_key))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or y is None:
        raise BadInput(
            f"{path} is not a batch of images: it needs bytes under 'data' "
            f"and integers under {layout.label_key!r}; delete it and {GET_AGAIN}"
        )
    if pixels.shape != (images, PIXELS) or len(y) != images:
        raise BadInput(
            f"{path} should contain {images} images of {PIXELS} bytes and as many labels, "
            f"but contains an array of {' x '.join(map(str, pixels.shape))} and {len(y)}; "
            f"delete it and {GET_AGAIN}"
        )
    return CifarBatch(pixels, y)


def _integer_array(labels: Any) -> NDArray[np.int64] | None:
    """Labels as a one-dimensional integer array, or None if they are anything else."""
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        labels = np.array(labels)  # of dtype object if a number does not fit int64
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        return None
    return labels.astype(np.int64)


class DataCheck(NamedTuple):
    """The result of checking the files of a data set."""

    found: DataFiles
    images: int  # in undamaged files
    damaged: dict[str, str]  # file name: what is wrong
    rewritten: tuple[str, ...] = ()  # files with another md5 but the published images

    @property
    def checksums(self) -> bool:
        """Whether every file has a published checksum; otherwise sizes and labels were checked."""
        return all(part.md5 for part in self.found.layout.parts)


def check_files(
    published: Published, found: DataFiles, on_progress: ProgressCallback | None = None
) -> DataCheck:
    """Compare every file with its published checksum, or read it where none was published."""
    damaged, rewritten, parts = {}, [], found.layout.parts
    contents = zip(parts, published.content_md5s, strict=True)
    for done, (part, content_md5) in enumerate(contents, start=1):
        if fault := _fault(published, found, part):
            md5 = None
            with suppress(BadInput, OSError):  # it is unreadable
                md5 = _content_md5(read_part(found.layout, found.folder, part, published.classes))
            if md5 and md5 == content_md5:
                rewritten.append(part.name)
            else:
                damaged[part.name] = fault
        if on_progress:
            on_progress(done, len(parts))
    images = sum(part.images for part in parts if part.name not in damaged)
    return DataCheck(found, images, damaged, tuple(rewritten))


def _fault(published: Published, found: DataFiles, part: Part) -> str | None:
    path = found.folder / part.name
    if not path.is_file():
        return "it is missing"
    if part.md5:
        md5 = file_md5(path)
        return None if md5 == part.md5 else f"its md5 is {md5}, not {part.md5}"
    try:
        read_part(found.layout, found.folder, part, published.classes)
    except BadInput as error:
        return str(error).removeprefix(f"{path} ")
    return None


def check_images(published: Published, found: DataFiles, batches: Sequence[CifarBatch]) -> None:
    """Check that images and labels are the published ones, in whichever file format.

    Warns about a file with another md5 if no checksum of its images is known.

    Raises:
        BadInput: A pixel or a label differs.
    """
    for part, expected, batch in zip(
        found.layout.parts, published.content_md5s, batches, strict=True
    ):
        path = found.folder / part.name
        md5 = _content_md5(batch) if expected else None
        if md5 != expected and file_md5(path) != part.md5:
            raise BadInput(
                f"{path} does not contain the images of {published.title}: "
                f"the md5 of its labels and pixels is {md5}, not {expected}; {GET_AGAIN}"
            )
        if expected is None and part.md5 and file_md5(path) != part.md5:
            warning = f"{path} is not the published file, and its images cannot be verified"
            # as one line without a source location
            warnings.warn_explicit(warning, UserWarning, "demur", 0, registry=_WARNED)


def _content_md5(batch: CifarBatch) -> str:
    """The md5 of labels and pixels in the layout of a binary file."""
    records = np.concatenate([batch.y.astype(np.uint8)[:, None], batch.pixels], axis=1)
    return hashlib.md5(records.tobytes(), usedforsecurity=False).hexdigest()


def file_md5(path: Path) -> str:
    """The md5 of a file: detects damage, not forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@dataclass(frozen=True)
class Cifar(Dataset):
    """Files, splits and threat model shared by CIFAR-10 and CIFAR-100."""

    published: ClassVar[Published]
    threat = ThreatModel(linf=8 / 255, linf_step=2 / 255, l2=128 / 255, l2_step=16 / 255, l1=12.0)

    split: Literal["held-out", "paper"] = "held-out"

    @property
    def splits(self) -> tuple[SplitName, ...]:
        return SPLITS if self.split == "held-out" else ("fit", "test")

    def load(self, folder: Path | None = None) -> Splits:
        found = locate(self.published, folder)
        for part in found.layout.parts:
            if not (found.folder / part.name).is_file():
                raise BadInput(f"{found.folder / part.name} is missing; {GET_AGAIN}")
        *batches, test = (
            read_part(found.layout, found.folder, part, self.published.classes)
            for part in found.layout.parts
        )
        check_images(self.published, found, [*batches, test])
        train = CifarBatch(*map(np.concatenate, zip(*batches, strict=True)))
        count = len(train.y)
        test_images = _images(test, torch.arange(len(test.y)), first_index=count)
        if self.split == "paper":
            return {"fit": _images(train, torch.arange(count)), "test": test_images}
        positions = permutation(SHUFFLE_SEED, count, stream=0).split(self.published.held_out)
        held_out = (_images(train, chosen) for chosen in positions)
        return dict(zip(SPLITS, [*held_out, test_images], strict=True))


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


class DownloadFailed(Exception):
    """The site did not deliver the published files; the message is the reason."""


class Fetched(NamedTuple):
    """Where a data set is and where it came from."""

    folder: Path
    url: str | None  # None if it was there already


def find_complete(published: Published, data_folder: Path) -> Fetched | None:
    """Return the data set in this folder if it is complete and undamaged, else None."""
    found = find(published, [data_folder])
    if found is None or check_files(published, found).damaged:
        return None
    return Fetched(found.folder, None)


def download(published: Published, data_folder: Path, on_progress: ProgressCallback) -> Fetched:
    """Download the data set into this folder unless it is there already.

    Files are prepared in a hidden folder beside the destination, which is renamed at the end and
    removed on failure; the next call removes what a killed one left. The caller makes sure that
    only one call runs in a folder at a time (the command holds a lock).

    Raises:
        BadInput: The site does not deliver the published files, or a file has the folder's name.
    """
    existing = find_complete(published, data_folder)
    if existing:
        return existing
    archive, prefix = published.archive, f".get-{published.name}-"
    destination = data_folder / archive.layout.folder
    if destination.exists() and not destination.is_dir():
        raise BadInput(f"{destination} is in the way; move it or name another folder with --data")
    data_folder.mkdir(parents=True, exist_ok=True)
    for left_over in data_folder.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with TemporaryDirectory(prefix=prefix, dir=data_folder, ignore_cleanup_errors=True) as work:
        staged = Path(work, destination.name)
        staged.mkdir()
        try:
            _fetch_archive(archive, staged, on_progress)
        except DownloadFailed as reason:
            raise BadInput(
                f"{published.title} could not be fetched and nothing was installed "
                f"({archive.url}: {reason}); fix that and run the command again, "
                f"or unpack that archive in {data_folder} yourself"
            ) from None
        if not destination.exists():
            staged.rename(destination)
        else:
            for file in staged.iterdir():  # replaces damaged files, leaves other files of the user
                file.replace(destination / file.name)
    return Fetched(destination, archive.url)


def _fetch_archive(archive: Archive, staged: Path, on_progress: ProgressCallback) -> None:
    """Download the archive and write its files into `staged`; check their published md5.

    Raises:
        DownloadFailed: The download fails or a file differs from the published one.
    """
    tar_path = staged.with_name("archive.tar.gz")
    md5 = _receive(archive.url, tar_path, on_progress)
    if md5 != archive.md5:
        raise DownloadFailed(f"its md5 is {md5}, not {archive.md5}")
    wanted = {f"{archive.layout.folder}/{part.name}" for part in archive.layout.parts}
    try:
        with tarfile.open(tar_path, "r:gz") as tar:
            for member in tar:  # all others are ignored
                found = member.name in wanted and member.isreg()
                if content := tar.extractfile(member) if found else None:
                    with content, (staged.parent / member.name).open("wb") as file:
                        shutil.copyfileobj(content, file)
                        file.flush()
                        os.fsync(file.fileno())
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error):
        raise DownloadFailed("its archive is damaged") from None
    for part in archive.layout.parts:
        if not (staged / part.name).is_file():
            raise DownloadFailed(f"its {part.name} is missing")
        if (md5 := file_md5(staged / part.name)) != part.md5:
            raise DownloadFailed(f"the md5 of its {part.name} is {md5}, not {part.md5}")


def _receive(url: str, path: Path, on_progress: ProgressCallback) -> str:
    """Download to `path`; return the md5."""
    md5, done, total = hashlib.md5(usedforsecurity=False), 0, 0
    try:
        with urlopen(url, timeout=_TIMEOUT) as response, path.open("wb") as file:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else 0
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                md5.update(chunk)
                done += len(chunk)
                on_progress(done, max(done, total))
    except (OSError, HTTPException, ValueError) as error:
        cause = getattr(error, "reason", None) or error  # urllib wraps it
        text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        reason = " ".join(str(text).split())[:200]
        raise DownloadFailed(f"the download stopped: {reason}" if done else reason) from None
    if done < total:
        raise DownloadFailed(f"the download stopped after {done} of {total} bytes")
    return md5.hexdigest()
