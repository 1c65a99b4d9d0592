"""Where the files of named data sets are looked for.

    locate(CIFAR10_FILES, None).folder      # ~/.cache/demur/cifar-10-batches-bin

A folder that is named (--data) is the only place; otherwise $DEMUR_DATA, then the user's cache.
The files may lie in the place itself or in the sub-folder in which they are published.
"""

import os
from pathlib import Path
from typing import NamedTuple

from demur.data.published import Layout, Published
from demur.errors import BadInput


class Found(NamedTuple):
    """A folder that holds files of a layout, perhaps not all of them."""

    layout: Layout
    folder: Path


def places(given: Path | None) -> list[Path]:
    """The folders in which data sets are looked for, the first is where `get` puts them."""
    if given is not None:
        return [given]
    named = os.environ.get("DEMUR_DATA")
    return ([Path(named)] if named else []) + _cache()


def locate(published: Published, given: Path | None) -> Found:
    """The most complete set of files there is, in the earliest place that has it."""
    found = find(published, places(given))
    if found is not None:
        return found
    raise not_found_error(f"{published.title} is not", published.name, given)


def not_found_error(what: str, name: str, given: Path | None) -> BadInput:
    """The sentence that says where was looked and what to do."""
    looked = " or ".join(str(place) for place in places(given)) or "a cache: there is no home"
    where = f" --data {given}" if given else ""
    return BadInput(
        f"{what} in {looked}; run 'demur data get {name}{where}' or say with --data DIR where it is"
    )


def find(published: Published, where: list[Path]) -> Found | None:
    """The most complete set of files in these places, or None."""
    candidates = [
        Found(layout, folder)
        for place in where
        for layout in published.layouts
        for folder in (place / layout.folder, place)
    ]
    best = max(candidates, key=_share_present, default=None)
    return best if best is not None and _share_present(best) > 0 else None


def _share_present(found: Found) -> float:
    parts = found.layout.parts
    return sum((found.folder / part.name).is_file() for part in parts) / len(parts)


def _cache() -> list[Path]:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the standard says to ignore any other
        return [base / "demur"]
    try:
        return [Path.home() / ".cache" / "demur"]
    except RuntimeError:
        return []
