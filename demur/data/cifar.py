"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test images of 32x32 pixels.

The index of an image is its position in the published order, test images after training images.
"""

import hashlib
import io
import os
import pickle
import shlex
import shutil
import tarfile
from collections.abc import Callable
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

from demur.data.dataset import SPLITS, Dataset, Images, SplitName, Splits, ThreatModel
from demur.errors import BadInput
from demur.files.checked_files import MEGABYTE, read_regular_file
from demur.images import Domain
from demur.noise import permutation

GET_AGAIN = "get the data again with 'demur data get'"
_CHUNK = 1 << 18
_TIMEOUT = 20  # seconds without a byte
ProgressCallback = Callable[[int, int], None]  # arguments: done, total
MAX_BYTES = 256 * MEGABYTE  # of a file
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)  # both sets, as the reference code
SHUFFLE_SEED = 0


class Part(NamedTuple):
    """One published file."""

    name: str
    images: int
    md5: str


@dataclass(frozen=True)
class Layout:
    """One file format of a data set: its folder and its files.

    A record of a binary file is a label and 3,072 bytes: red, green and blue planes, row-major. A
    Python file is a pickled dictionary.
    """

    form: Literal["binary", "python"]
    folder: str
    parts: tuple[Part, ...]  # the last one has the test images
    label_key: str = "labels"  # in the dictionary of a Python file


@dataclass(frozen=True)
class Published:
    """A data set as its authors published it, and the sizes of demur's held-out splits."""

    name: str  # in the command: demur data get NAME
    title: str
    classes: int
    held_out: tuple[int, int, int]  # sizes of fit, val, cal; they sum to all training images
    layouts: tuple[Layout, ...]  # the first one is that of the archive
    archive: str  # its address
    md5: str  # of the archive

    @property
    def images(self) -> int:
        return sum(part.images for part in self.layouts[0].parts)


_SITE = "https://www.cs.toronto.edu/~kriz"

_CIFAR10_BINARY = Layout("binary", "cifar-10-batches-bin", (
    Part("data_batch_1.bin", 10_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
    Part("data_batch_2.bin", 10_000, "5ea93a67294ea407fff1d09f752e9692"),
    Part("data_batch_3.bin", 10_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
    Part("data_batch_4.bin", 10_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
    Part("data_batch_5.bin", 10_000, "53f37980c15c3d472c316c40844f3f0d"),
    Part("test_batch.bin", 10_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
))  # fmt: skip
_CIFAR10_PYTHON = Layout("python", "cifar-10-batches-py", (
    Part("data_batch_1", 10_000, "c99cafc152244af753f735de768cd75f"),
    Part("data_batch_2", 10_000, "d4bba439e000b95fd0a9bffe97cbabec"),
    Part("data_batch_3", 10_000, "54ebc095f3ab1f0389bbae665268c751"),
    Part("data_batch_4", 10_000, "634d18415352ddfa80567beed471001a"),
    Part("data_batch_5", 10_000, "482c414d41f54cd18b22e5b47cb7c3cb"),
    Part("test_batch", 10_000, "40351d587109b95175f43aff81a1287e"),
))  # fmt: skip
_CIFAR100_PYTHON = Layout("python", "cifar-100-python", (
    Part("train", 50_000, "16019d7e3df5f24257cddd939b257f8d"),
    Part("test", 10_000, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
), "fine_labels")  # fmt: skip
CIFAR10_FILES = Published(
    "cifar10", "CIFAR-10", 10, (45_000, 1_000, 4_000), (_CIFAR10_BINARY, _CIFAR10_PYTHON),
    archive=f"{_SITE}/cifar-10-binary.tar.gz", md5="c32a1d4ab5d03f1284b67883e8d87530",
)  # fmt: skip
CIFAR100_FILES = Published(
    "cifar100", "CIFAR-100", 100, (45_000, 1_000, 4_000), (_CIFAR100_PYTHON,),
    archive=f"{_SITE}/cifar-100-python.tar.gz", md5="eb9058c3a382ffc7106e4002c42a8d85",
)  # fmt: skip
PUBLISHED = {files.name: files for files in (CIFAR10_FILES, CIFAR100_FILES)}


class DataFiles(NamedTuple):
    """A folder that contains some or all files of a layout."""

    layout: Layout
    folder: Path

    @property
    def share_present(self) -> float:
        parts = self.layout.parts
        return sum((self.folder / part.name).is_file() for part in parts) / len(parts)


def search_folders(given: Path | None) -> list[Path]:
    """The folders to search for data sets; `download` installs into the first."""
    if given is not None:
        return [given]
    variable = os.environ.get("DEMUR_DATA")
    return ([Path(variable)] if variable else []) + _cache_folders()


def locate(published: Published, given: Path | None) -> DataFiles:
    """Find the most complete set of files; raise BadInput if no folder has any of them.

    A folder given by the user (--data) is the only one searched; otherwise $DEMUR_DATA, then the
    cache. The files may be in the folder itself or in the sub-folder of the published archive.
    """
    folders = search_folders(given)
    if found := find(published, folders):
        return found
    searched = " or ".join(map(str, folders)) or "a cache folder: there is no home folder"
    option = f" --data {shlex.quote(str(given))}" if given else ""
    raise BadInput(
        f"{published.title} is not in {searched}; run 'demur data get {published.name}{option}' "
        "or name its folder with --data DIR"
    )


def find(published: Published, folders: list[Path]) -> DataFiles | None:
    """Find the most complete set of files in these folders; None if there is none."""
    candidates = [
        DataFiles(layout, candidate)
        for folder in folders
        for layout in published.layouts
        for candidate in (folder / layout.folder, folder)
    ]
    best = max(candidates, key=lambda one: one.share_present, default=None)
    return best if best and best.share_present > 0 else None


def cache_folder() -> Path:
    """The folder for what demur can make again; raise BadInput if there is no home folder."""
    folders = _cache_folders()
    if not folders:
        raise BadInput("there is no home folder for a cache; set XDG_CACHE_HOME to a folder")
    return folders[0]


def _cache_folders() -> list[Path]:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG standard ignores relative paths
        return [base / "demur"]
    try:
        return [Path.home() / ".cache" / "demur"]
    except RuntimeError:
        return []


class CifarBatch(NamedTuple):
    """The images of one file, in published order."""

    pixels: NDArray[np.uint8]  # N, 3072
    y: NDArray[np.int64]  # N


class ArrayUnpickler(pickle.Unpickler):
    """Resolves the names of an array of numbers and no others, so that no code runs."""

    names: ClassVar[dict[str, Any]] = {
        "numpy.core.multiarray._reconstruct": np.ndarray(0).__reduce__()[0],
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": lambda code, *_: np.dtype(code),  # Python 2 wrote flags as numbers
    }

    def find_class(self, module: str, name: str) -> Any:
        return self.names[f"{module}.{name}"]


def read_part(layout: Layout, folder: Path, part: Part) -> CifarBatch:
    """Read one published file; raise BadInput if it is missing or has another md5."""
    content = _published_bytes(folder / part.name, part)
    if layout.form == "binary":
        records = np.frombuffer(content, np.uint8).reshape(part.images, -1)
        return CifarBatch(records[:, 1:], records[:, 0].astype(np.int64))
    batch = ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    return CifarBatch(batch["data"], np.array(batch[layout.label_key]))


def _published_bytes(path: Path, part: Part) -> bytes:
    """The bytes of a file, which are those that the authors published."""
    content = read_regular_file(path, MAX_BYTES, GET_AGAIN)
    if (md5 := hashlib.md5(content, usedforsecurity=False).hexdigest()) != part.md5:
        raise BadInput(f"{path} has the md5 {md5}, not {part.md5}; {GET_AGAIN}")
    return content


def check_files(found: DataFiles) -> dict[str, str]:
    """Compare every file with its published md5; return what is wrong by the name of the file."""
    damaged = {}
    for part in found.layout.parts:
        path = found.folder / part.name
        try:
            _published_bytes(path, part)
        except BadInput as error:
            damaged[part.name] = str(error).removeprefix(f"{path} ").partition(";")[0]
    return damaged


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
        layout, place = locate(self.published, folder)
        *batches, test = (read_part(layout, place, part) for part in layout.parts)
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
    class_names = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    domain = Domain(classes=10, shape=(3, 32, 32), mean=MEAN, std=STD)


@dataclass(frozen=True)
class CIFAR100(Cifar):
    """CIFAR-100 with its 100 fine labels; otherwise as `CIFAR10`.

    Example:
        >>> CIFAR100().domain.classes
        100
    """

    published = CIFAR100_FILES
    domain = Domain(classes=100, shape=(3, 32, 32), mean=MEAN, std=STD)


def find_complete(published: Published, data_folder: Path) -> Path | None:
    """Return where the data set is in this folder if it is complete and undamaged, else None."""
    found = find(published, [data_folder])
    return None if found is None or check_files(found) else found.folder


def download(published: Published, data_folder: Path, on_progress: ProgressCallback) -> Path:
    """Download the data set into this folder and return the folder of its files.

    Files are prepared in a hidden folder, which is renamed at the end and removed on failure; the
    next call removes what a killed one left. The caller holds a lock of the folder.
    """
    prefix, destination = f".get-{published.name}-", data_folder / published.layouts[0].folder
    if destination.exists() and not destination.is_dir():
        raise BadInput(f"{destination} is in the way; move it or name another folder with --data")
    data_folder.mkdir(parents=True, exist_ok=True)
    for left_over in data_folder.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with TemporaryDirectory(prefix=prefix, dir=data_folder, ignore_cleanup_errors=True) as work:
        staged = Path(work, destination.name)
        staged.mkdir()
        try:
            _fetch_archive(published, staged, on_progress)
        except BadInput as reason:
            raise BadInput(
                f"{published.title} could not be fetched and nothing was installed "
                f"({published.archive}: {reason}); fix that and run the command again, "
                f"or unpack that archive in {data_folder} yourself"
            ) from None
        if not destination.exists():
            staged.rename(destination)
        else:
            for file in staged.iterdir():  # replaces damaged files, leaves other files of the user
                file.replace(destination / file.name)
    return destination


def _fetch_archive(published: Published, staged: Path, on_progress: ProgressCallback) -> None:
    """Download the archive and write its files to `staged`; BadInput says what is wrong."""
    tar_path = staged.with_name("archive.tar.gz")
    md5, layout = _receive(published.archive, tar_path, on_progress), published.layouts[0]
    if md5 != published.md5:
        raise BadInput(f"its md5 is {md5}, not {published.md5}")
    wanted = {f"{layout.folder}/{part.name}" for part in layout.parts}
    with tarfile.open(tar_path, "r:gz") as tar:
        for member in tar:  # all others are ignored
            found = member.name in wanted and member.isreg()
            if content := tar.extractfile(member) if found else None:
                with content, (staged.parent / member.name).open("wb") as file:
                    shutil.copyfileobj(content, file)
    for name, fault in check_files(DataFiles(layout, staged)).items():
        raise BadInput(f"its {name} {fault}")


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
        raise BadInput(f"the download stopped: {reason}" if done else reason) from None
    if done < total:
        raise BadInput(f"the download stopped after {done} of {total} bytes")
    return md5.hexdigest()
