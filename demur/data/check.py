"""Whether the files of a data set are those that were published.

state = check_files(CIFAR10_FILES, found)
state.damaged      # {"data_batch_3.bin": "its md5 is ..., not ..."}
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from demur.data.batches import read_part
from demur.data.places import Found
from demur.data.published import Part, Published
from demur.errors import BadInput

Watch = Callable[[int, int], None]  # done, total


class State(NamedTuple):
    """What was found of a data set, and what is wrong with it."""

    found: Found
    images: int  # in undamaged files
    damaged: dict[str, str]  # file name: what is wrong

    @property
    def checksums(self) -> bool:
        """Whether every file has a published checksum; if not, sizes and labels were checked."""
        return all(part.md5 for part in self.found.layout.parts)


def check_files(published: Published, found: Found, watch: Watch | None = None) -> State:
    """Every file compared with its published checksum, or read where none was published."""
    damaged, images, parts = {}, 0, found.layout.parts
    for done, part in enumerate(parts, start=1):
        fault = _fault(published, found, part)
        if fault:
            damaged[part.name] = fault
        else:
            images += part.images
        if watch:
            watch(done, len(parts))
    return State(found, images, damaged)


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


def file_md5(path: Path) -> str:
    """The md5 of a file: a checksum here, no proof against forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
