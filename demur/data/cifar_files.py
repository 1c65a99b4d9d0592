"""CIFAR as its authors published it: files, sizes, checksums, addresses and folders.

CIFAR10_FILES.layouts[0].parts     # the six binary batches
PUBLISHED["cifar100"].archive.url

Every function that reads, checks or downloads takes a `Published`, so a test can pass a small one.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from demur.errors import BadInput

GET_AGAIN = "get the data again with 'demur data get'"


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
    train: tuple[Part, ...]
    test: Part
    label_key: str = "labels"  # in the dictionary of a Python file

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every file, training images first."""
        return (*self.train, self.test)


class Archive(NamedTuple):
    """The authors' archive of one layout."""

    url: str
    md5: str
    layout: Layout


@dataclass(frozen=True)
class Published:
    """A data set as its authors published it, and the sizes of demur's held-out splits."""

    name: str  # in the command: demur data get NAME
    title: str
    classes: int
    held_out: tuple[int, int, int]  # sizes of fit, val, cal; they sum to all training images
    layouts: tuple[Layout, ...]
    archive: Archive

    @property
    def images(self) -> int:
        return sum(part.images for part in self.archive.layout.parts)


_SITE = "https://www.cs.toronto.edu/~kriz"

_CIFAR10_BINARY = Layout(
    form="binary",
    folder="cifar-10-batches-bin",
    train=(
        Part("data_batch_1.bin", 10_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
        Part("data_batch_2.bin", 10_000, "5ea93a67294ea407fff1d09f752e9692"),
        Part("data_batch_3.bin", 10_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
        Part("data_batch_4.bin", 10_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
        Part("data_batch_5.bin", 10_000, "53f37980c15c3d472c316c40844f3f0d"),
    ),
    test=Part("test_batch.bin", 10_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
)
_CIFAR10_PYTHON = Layout(
    form="python",
    folder="cifar-10-batches-py",
    train=(
        Part("data_batch_1", 10_000, "c99cafc152244af753f735de768cd75f"),
        Part("data_batch_2", 10_000, "d4bba439e000b95fd0a9bffe97cbabec"),
        Part("data_batch_3", 10_000, "54ebc095f3ab1f0389bbae665268c751"),
        Part("data_batch_4", 10_000, "634d18415352ddfa80567beed471001a"),
        Part("data_batch_5", 10_000, "482c414d41f54cd18b22e5b47cb7c3cb"),
    ),
    test=Part("test_batch", 10_000, "40351d587109b95175f43aff81a1287e"),
)
CIFAR10_FILES = Published(
    name="cifar10",
    title="CIFAR-10",
    classes=10,
    held_out=(45_000, 1_000, 4_000),
    layouts=(_CIFAR10_BINARY, _CIFAR10_PYTHON),
    archive=Archive(
        f"{_SITE}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", _CIFAR10_BINARY
    ),
)

_CIFAR100_PYTHON = Layout(
    form="python",
    folder="cifar-100-python",
    train=(Part("train", 50_000, "16019d7e3df5f24257cddd939b257f8d"),),
    test=Part("test", 10_000, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    label_key="fine_labels",
)
CIFAR100_FILES = Published(
    name="cifar100",
    title="CIFAR-100",
    classes=100,
    held_out=(45_000, 1_000, 4_000),
    layouts=(_CIFAR100_PYTHON,),
    archive=Archive(
        f"{_SITE}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", _CIFAR100_PYTHON
    ),
)

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
    """Find the most complete set of files, in the first folder that has it.

    A folder given by the user (--data) is the only one searched; otherwise $DEMUR_DATA, then
    the cache. The files may be in the folder itself or in the sub-folder of the published
    archive.

    Raises:
        BadInput: No folder has any of the files.
    """
    if found := find(published, search_folders(given)):
        return found
    raise not_found_error(f"{published.title} is not", published.name, given)


def not_found_error(what: str, name: str, given: Path | None) -> BadInput:
    """The error that names the searched folders and the command that downloads the data."""
    searched = (
        " or ".join(map(str, search_folders(given))) or "a cache folder: there is no home folder"
    )
    option = f" --data {shlex.quote(str(given))}" if given else ""
    return BadInput(
        f"{what} in {searched}; run 'demur data get {name}{option}' "
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
