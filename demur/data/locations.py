"""Search for the files of a data set.

    locate(CIFAR10_FILES, None).folder      # ~/.cache/demur/cifar-10-batches-bin

A folder given by the user (--data) is the only one searched; otherwise $DEMUR_DATA, then the cache.
The files may be in the folder itself or in the sub-folder of the published archive.
"""

import os
import shlex
from pathlib import Path
from typing import NamedTuple

from demur.data.published import Layout, Published
from demur.errors import BadInput


class DataFiles(NamedTuple):
    """A folder that contains some or all files of a layout."""

    layout: Layout
    folder: Path


def search_folders(given: Path | None) -> list[Path]:
    """The folders to search for data sets; `get` installs into the first."""
    if given is not None:
        return [given]
    variable = os.environ.get("DEMUR_DATA")
    return ([Path(variable)] if variable else []) + _cache_folders()


def locate(published: Published, given: Path | None) -> DataFiles:
    """Find the most complete set of files, in the first folder that has it.

    Raises:
        BadInput: No folder has any of the files.
    """
    found = find(published, search_folders(given))
    if found is not None:
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
    best = max(candidates, key=_share_present, default=None)
    return best if best is not None and _share_present(best) > 0 else None


def _share_present(found: DataFiles) -> float:
    parts = found.layout.parts
    return sum((found.folder / part.name).is_file() for part in parts) / len(parts)


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
