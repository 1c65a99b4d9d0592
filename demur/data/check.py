"""Whether the files of a data set are those that were published, or at least their images.

state = check_files(CIFAR10_FILES, found)
state.damaged      # {"data_batch_3.bin": "its md5 is ..., not ..."}
check_images(CIFAR10_FILES, found, read_layout(found, classes=10))     # refuses a changed pixel
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from demur.data.cifar_files import CifarBatch, read_part
from demur.data.locations import Found
from demur.data.published import AGAIN, Part, Published
from demur.errors import BadInput

Watch = Callable[[int, int], None]  # done, total
_WARNED: dict[Any, Any] = {}  # what was said


class DataCheck(NamedTuple):
    """What was found of a data set, and what is wrong with it."""

    found: Found
    images: int  # in undamaged files
    damaged: dict[str, str]  # file name: what is wrong
    rewritten: tuple[str, ...] = ()  # files that somebody wrote anew, with the published images

    @property
    def checksums(self) -> bool:
        """Whether every file has a published checksum; if not, sizes and labels were checked."""
        return all(part.md5 for part in self.found.layout.parts)


def check_files(published: Published, found: Found, watch: Watch | None = None) -> DataCheck:
    """Every file compared with its published checksum, or read where none was published."""
    damaged, rewritten, parts = {}, [], found.layout.parts
    for done, (part, content) in enumerate(zip(parts, published.contents, strict=True), start=1):
        fault = _fault(published, found, part)
        if fault and content and content == _read_md5(published, found, part):
            rewritten.append(part.name)
        elif fault:
            damaged[part.name] = fault
        if watch:
            watch(done, len(parts))
    images = sum(part.images for part in parts if part.name not in damaged)
    return DataCheck(found, images, damaged, tuple(rewritten))


def _fault(published: Published, found: Found, part: Part) -> str | None:
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


def _read_md5(published: Published, found: Found, part: Part) -> str:
    """The md5 of the labels and pixels of a file; nothing where it cannot be read."""
    try:
        return _content_md5(read_part(found.layout, found.folder, part, published.classes))
    except (BadInput, OSError):
        return ""


def check_images(published: Published, found: Found, batches: Sequence[CifarBatch]) -> None:
    """Refuse images or labels that are not the published ones, in whatever file they come.

    Where no checksum of them is known, a file that is not the published one is warned of.
    """
    parts = zip(found.layout.parts, published.contents, batches, strict=True)
    for part, expected, batch in parts:
        path = found.folder / part.name
        md5 = _content_md5(batch) if expected else None
        if md5 != expected and file_md5(path) != part.md5:
            raise BadInput(
                f"{path} does not hold the images of {published.title}: the md5 of its labels and "
                f"pixels is {md5}, not {expected}; {AGAIN}"
            )
        if expected is None and part.md5 and file_md5(path) != part.md5:
            _warn(f"{path} is not the published file, and nothing says whether its images are")


def _content_md5(batch: CifarBatch) -> str:
    """The md5 of labels and pixels as a binary file holds them."""
    whole = np.concatenate([batch.y.astype(np.uint8)[:, None], batch.pixels], axis=1)
    return hashlib.md5(whole.tobytes(), usedforsecurity=False).hexdigest()


def _warn(sentence: str) -> None:
    """One line on stderr, once."""
    warnings.warn_explicit(sentence, UserWarning, "demur", 0, registry=_WARNED)


def file_md5(path: Path) -> str:
    """The md5 of a file: a checksum here, no proof against forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
