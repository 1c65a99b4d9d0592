"""Checks of a data set's files, or at least their images, against the published checksums.

state = check_files(CIFAR10_FILES, found)
state.damaged      # {"data_batch_3.bin": "its md5 is ..., not ..."}
check_images(CIFAR10_FILES, found, read_layout(found, classes=10))     # raises if a pixel differs
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from demur.data.cifar_files import CifarBatch, read_part
from demur.data.locations import DataFiles
from demur.data.published import GET_AGAIN, Part, Published
from demur.errors import BadInput

ProgressCallback = Callable[[int, int], None]  # arguments: done, total
_WARNED: dict[Any, Any] = {}  # registry of `warnings`: each warning is shown once


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
        fault = _fault(published, found, part)
        if fault and content_md5 and content_md5 == _part_md5(published, found, part):
            rewritten.append(part.name)
        elif fault:
            damaged[part.name] = fault
        if on_progress:
            on_progress(done, len(parts))
    images = sum(part.images for part in parts if part.name not in damaged)
    return DataCheck(found, images, damaged, tuple(rewritten))


def _fault(published: Published, found: DataFiles, part: Part) -> str | None:
    """What is wrong with a file, or None."""
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


def _part_md5(published: Published, found: DataFiles, part: Part) -> str:
    """The md5 of the labels and pixels of a file, or an empty string if it is unreadable."""
    try:
        return _content_md5(read_part(found.layout, found.folder, part, published.classes))
    except (BadInput, OSError):
        return ""


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
            _warn(f"{path} is not the published file, and its images cannot be verified")


def _content_md5(batch: CifarBatch) -> str:
    """The md5 of labels and pixels in the layout of a binary file."""
    records = np.concatenate([batch.y.astype(np.uint8)[:, None], batch.pixels], axis=1)
    return hashlib.md5(records.tobytes(), usedforsecurity=False).hexdigest()


def _warn(sentence: str) -> None:
    """Show a warning once per process, as one line without a source location."""
    warnings.warn_explicit(sentence, UserWarning, "demur", 0, registry=_WARNED)


def file_md5(path: Path) -> str:
    """The md5 of a file: detects damage, not forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
