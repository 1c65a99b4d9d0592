"""Layouts of a user's own images: a folder per class, a CSV of paths, an npz, a data set.

A data set is a torch `Dataset`, of torchvision, or a table of Hugging Face. Nothing in these files
is trusted: sizes are checked before memory is taken, and no code runs.
"""

import csv
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from demur.data.dataset import SplitName
from demur.errors import BadInput, bad_input, blamed, shorten
from demur.files.checked_files import MEGABYTE, raise_unreadable, read_array, read_regular_file
from demur.files.image_files import MAX_FILE, Pixels, decode_image
from demur.files.output_paths import IMAGE_SUFFIXES
from demur.spec.importing import import_object, is_import_path

IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x")  # of a sample that is a mapping
LABEL_KEYS = ("label", "labels", "fine_label", "target", "y")


def is_dataset(thing: Any) -> bool:
    """Whether this is a torch `Dataset` or a table of Hugging Face `datasets`."""
    is_table = hasattr(thing, "features") and hasattr(thing, "column_names")
    return isinstance(thing, torch.utils.data.Dataset) or is_table


def class_names(dataset: Any) -> tuple[str, ...]:
    """The names of the classes in the order of their numbers, where the data set says them."""
    features = dict(getattr(dataset, "features", None) or {})
    named = [getattr(features[key], "names", None) for key in LABEL_KEYS if key in features]
    return tuple(map(str, getattr(dataset, "classes", None) or next(iter(named), None) or ()))


def samples(
    dataset: Any, name: str, convert: Callable[[Any, Any], tuple[Any, Any]]
) -> Iterator[tuple[Any, Any]]:
    """Yield each sample, converted; BadInput names the data set, as `name`, and the sample."""
    position = 0
    try:
        has_length = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        rows = (dataset[i] for i in range(len(dataset))) if has_length else iter(dataset)
        for sample in rows:
            yield convert(*_pair(sample))
            position += 1
    except BadInput as error:
        raise BadInput(f"sample {position} of the data set {name}: {error}") from error
    except Exception as error:
        raise BadInput(blamed(error, f"sample {position} of the data set {name}")) from error
    if not position:
        raise BadInput(f"the data set {name} is empty; give at least one sample")


def _pair(sample: Any) -> tuple[Any, Any]:
    if isinstance(sample, Mapping):
        keys = [next((k for k in known if k in sample), None) for known in (IMAGE_KEYS, LABEL_KEYS)]
        if None in keys:
            given = ", ".join(map(repr, sample))
            raise BadInput(f"it has the keys {given}; name them 'image' and 'label'")
        return sample[keys[0]], sample[keys[1]]
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        raise BadInput(f"it is a {type(sample).__name__}; return a pair (image, label)")
    return sample[0], sample[1]


def decoded(image: Any, label: Any) -> tuple[Pixels, int | str]:
    """Return pixels, uint8 H, W, C with one or three channels, and the number or word."""
    return pixels_of_sample(image), label_of_sample(label)


def pixels_of_sample(image: Any) -> Pixels:
    """The image as uint8 H, W, C with one or three channels."""
    if isinstance(getattr(image, "mode", None), str):  # of Pillow; a tensor has a method
        return decode_image(image, channels=3)
    array = np.asarray(image)
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
        array = array.astype(np.uint8)  # a table may hold larger integers
    return np.asarray(as_bytes(array[None], "it")[0])


def label_of_sample(label: Any) -> int | str:
    """The label as a number or a word; a one-hot vector is the position of its 1."""
    value = label if isinstance(label, str) else np.asarray(label)
    if isinstance(value, np.ndarray) and value.ndim == 1 and len(value) > 1:
        if (value == 0).sum() != len(value) - 1 or value.sum() != 1:
            raise BadInput("its label is a vector; give a number, a word or a one-hot vector")
        return int(value.argmax())
    if isinstance(value, np.ndarray) and (value.size != 1 or value.dtype.kind not in "iu"):
        raise BadInput(f"its label is {label!r}; give a whole number, a word or a one-hot vector")
    return value if isinstance(value, str) else int(value.item())


def as_bytes(x: NDArray[Any], file: object) -> NDArray[np.uint8]:
    """Images as uint8 N, H, W, C with one or three channels."""
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] not in (1, 3):
        x = np.moveaxis(x, 1, 3)
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4 or x.shape[3] not in (1, 3) or 0 in x.shape:
        raise BadInput(f"{file} needs images of shape N, H, W or N, H, W, 3, not {x.shape}")
    if x.dtype.kind == "f" and x.min() >= 0 and x.max() <= 1:
        x = np.rint(x * 255).astype(np.uint8)
    if x.dtype != np.uint8:
        raise BadInput(f"{file} needs uint8 pixels or floats in [0, 1], not {x.dtype}")
    return np.ascontiguousarray(x)


SPLIT_WORDS: dict[str, SplitName] = {
    "train": "fit", "training": "fit", "fit": "fit",
    "val": "val", "valid": "val", "validation": "val",
    "cal": "cal", "calib": "cal", "calibration": "cal",
    "test": "test", "testing": "test",
}  # fmt: skip
MAX_CSV = 256 * MEGABYTE
MAX_ARRAYS = 32 * 1024 * MEGABYTE  # bytes that an npz may unpack to
LAYOUTS = (
    "a folder with one folder per class, a .csv with the columns path and label, an .npz with x "
    "and y, or MODULE:NAME of a torch Dataset or a table of Hugging Face"
)


class Entry(NamedTuple):
    """One image of a source."""

    name: str
    label: str  # name of the class
    split: SplitName | None  # None: demur assigns one
    stamp: str  # differs if the file differs


class Source(ABC):
    """Labelled images that can be listed before they are read."""

    entries: list[Entry]
    names: tuple[str, ...] = ()  # of the classes in the order of their numbers, if it is known
    ignored: int = 0  # files that are no images by their name

    @abstractmethod
    def content(self, i: int) -> bytes:
        """Return the bytes of entry i; raise BadInput if they cannot be read."""

    def decode(self, i: int, content: bytes) -> Pixels:
        """Return the pixels of entry i, uint8 H, W, 3; raise BadInput if it is damaged."""
        return decode_image(content, channels=3)

    def stamp(self) -> str:
        """Digest of the names, classes, splits and stamps of all entries."""
        sha256 = hashlib.sha256()
        for entry in self.entries:
            sha256.update(repr(entry).encode("utf-8", "surrogateescape"))
        return sha256.hexdigest()


def open_source(path: str) -> Source:
    """List the images at a path, whose kind is found by looking; raise BadInput if none fits."""
    place = Path(path)
    if is_import_path(path) and not place.exists():
        return DatasetSource(path)
    if place.is_dir():
        return FolderSource(place)
    if not place.exists():
        raise BadInput(
            f"there is no folder or file {shorten(path)}; give {LAYOUTS}; if the images of a run "
            "have moved, add --data PATH"
        )
    if place.suffix.lower() == ".csv":
        return CsvSource(place)
    if place.suffix.lower() == ".npz":
        return ArraySource(place)
    raise BadInput(f"{shorten(path)} is not a set of images; give {LAYOUTS}")


def split_by_word(word: str, where: str) -> SplitName:
    """Split that a word such as train or validation means; raise BadInput for another word."""
    if word.lower() not in SPLIT_WORDS:
        raise BadInput(f"{where} has the split {shorten(word)!r}; use train, val, cal or test")
    return SPLIT_WORDS[word.lower()]


def file_stamp(path: Path) -> str:
    """Size, times of the last changes and inode; empty if the file is not there."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


class FileSource(Source):
    """Images in files of their own."""

    paths: list[Path]

    def content(self, i: int) -> bytes:
        return read_regular_file(self.paths[i], MAX_FILE, "check the listing")


class FolderSource(FileSource):
    """FOLDER/CLASS/IMAGE, or FOLDER/SPLIT/CLASS/IMAGE with at least a folder train."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.entries, self.paths, self.class_folders = folder, [], [], set[str]()
        names = _folders_in(folder)
        splits = {name: SPLIT_WORDS[name.lower()] for name in names if name.lower() in SPLIT_WORDS}
        if "fit" not in splits.values():
            self._add_classes(folder, names, None)
        elif len(splits) < len(names):
            odd = next(name for name in names if name not in splits)
            raise BadInput(
                f"{folder} has folders of splits and the folder {odd!r}; put the folders of the "
                "classes into train, val, cal and test, or have no such folders"
            )
        else:
            for name, split in splits.items():
                self._add_classes(folder / name, _folders_in(folder / name), split)
        if not self.entries:
            raise BadInput(
                f"{folder} has no images in folders of classes; lay them out as "
                f"{folder}/CLASS/IMAGE.png"
            )
        if empty := sorted(self.class_folders - {entry.label for entry in self.entries}):
            raise BadInput(
                f"the folder {empty[0]!r} has no image, so later classes would get other numbers; "
                "delete it if the model has no such class, else add an image"
            )

    def _add_classes(self, folder: Path, names: list[str], split: SplitName | None) -> None:
        self.class_folders |= {*names}
        for name in names:
            for path in files_below(folder / name):
                if path.suffix.lower() not in IMAGE_SUFFIXES:
                    self.ignored += 1
                    continue
                relative = path.relative_to(self.folder).as_posix()
                self.entries.append(Entry(relative, name, split, file_stamp(path)))
                self.paths.append(path)


class CsvSource(FileSource):
    """A CSV with the columns path, label and, if wanted, split; paths start at the CSV's folder."""

    def __init__(self, file: Path) -> None:
        self.entries, self.paths = [], []
        content = read_regular_file(file, MAX_CSV, "name a CSV file")
        wrong = f"{file} is not a CSV in UTF-8; save it again as one"
        with bad_input(wrong, (UnicodeDecodeError, csv.Error)):
            rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig")), strict=True))
        if not rows or not {"path", "label"} <= set(rows[0]):
            raise BadInput(f"{file} needs the columns path and label in its first line, and rows")
        for number, row in enumerate(rows, start=2):
            name, label, word = row["path"], row["label"], row.get("split")
            if not name or not label or "\0" in name:
                raise BadInput(f"{file} has no path or no label in line {number}; complete it")
            split = split_by_word(word, f"line {number} of {file}") if word else None
            self.paths.append(file.parent / name)
            self.entries.append(Entry(name, label, split, file_stamp(self.paths[-1])))


class HeldSource(Source):
    """Images in memory, H, W, C with one or three channels."""

    held: list[Pixels]

    def content(self, i: int) -> bytes:
        return self.held[i].tobytes()

    def decode(self, i: int, content: bytes) -> Pixels:
        return np.repeat(self.held[i], 3 // self.held[i].shape[2], axis=2)


class ArraySource(HeldSource):
    """An npz with x and y, or x_train, y_train, x_test ... (also train_images, train_labels)."""

    def __init__(self, file: Path) -> None:
        arrays = _read_arrays(file)
        names = [str(name) for name in arrays.pop("classes", np.empty(0)).tolist()]
        self.entries, self.held = [], []
        for split, x, y in _array_pairs(arrays, file):
            block = as_bytes(x, file)
            labels = np.asarray(y).reshape(-1)
            if len(labels) != len(block) or labels.dtype.kind not in "iuUS":
                raise BadInput(f"{file} needs one label per image, a whole number or a word")
            where = split or "x"
            for row, label in enumerate(labels.tolist()):
                named = names and isinstance(label, int) and 0 <= label < len(names)
                word = names[label] if named else str(label)
                self.entries.append(Entry(f"{where}[{row}]", word, split, ""))
            self.held += list(block)


class DatasetSource(HeldSource):
    """What module:name is or returns: a torch `Dataset`, a table, or a mapping of splits to these.

    All samples are read at once, so that data sets of which one can only iterate are read too.
    """

    def __init__(self, path: str) -> None:
        found = import_object(path)
        if not isinstance(found, Mapping) and not is_dataset(found) and callable(found):
            try:
                found = found()
            except Exception as error:
                raise BadInput(blamed(error, path)) from error
        self.entries, self.held = [], []
        for word, one in (found if isinstance(found, Mapping) else {"": found}).items():
            if not is_dataset(one):
                raise BadInput(f"{path} is no torch Dataset but {type(one).__name__}; return one")
            name, names = f"{path}[{word!r}]" if word else path, class_names(one)
            self.names = self.names or names
            split = split_by_word(word, name) if word else None
            for i, (pixels, label) in enumerate(samples(one, name, decoded)):
                known = isinstance(label, int) and 0 <= label < len(names)
                text = names[label] if known else str(label)
                digest = hashlib.sha256(pixels).hexdigest()
                self.entries.append(Entry(f"{word or 'x'}[{i}]", text, split, digest))
                self.held.append(pixels)


def _folders_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def files_below(folder: Path) -> list[Path]:
    """Files in a folder and its sub-folders in a fixed order, without hidden ones."""
    found = []
    # does not follow links to folders
    for place, folders, files in os.walk(folder, onerror=raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(found)


def _read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """Arrays of an npz, after the sizes in its directory are checked."""
    damaged = f"{file} is damaged: it is not an npz of plain arrays"
    with bad_input(damaged), ZipFile(file) as packed:  # which raise nearly anything
        members = packed.infolist()
        if sum(member.file_size for member in members) > MAX_ARRAYS:
            raise BadInput(f"{file} unpacks to more than {MAX_ARRAYS:,} bytes; use a folder")
        return {
            one.filename.removesuffix(".npy"): read_array(packed.open(one), one.file_size)
            for one in members
        }


def _array_pairs(
    arrays: dict[str, NDArray[Any]], file: Path
) -> list[tuple[SplitName | None, NDArray[Any], NDArray[Any]]]:
    if {"x", "y"} <= set(arrays):
        return [(None, arrays["x"], arrays["y"])]
    found = {}
    for word, split in SPLIT_WORDS.items():
        for x, y in ((f"x_{word}", f"y_{word}"), (f"{word}_images", f"{word}_labels")):
            if x in arrays and y in arrays:
                found[split] = (split, arrays[x], arrays[y])
    if "fit" not in found:
        raise BadInput(f"{file} needs the arrays x and y, or x_train, y_train, x_test and y_test")
    return list(found.values())
