"""Where options let results be written, looked at before any work.

out: Annotated[str | None, typer.Option("-o", callback=checked_file)]
"""

import os
from pathlib import Path

from demur.errors import BadInput


def checked_file(place: str | None) -> str | None:
    """The place, if a file can be written there, or something that takes what is written."""
    if place is None:
        return None
    if not place.strip():
        raise BadInput("the name of the file to write is empty; name one")
    path, target = Path(place), Path(os.path.realpath(place))
    if path.is_dir() or place.endswith(os.sep):
        raise BadInput(f"{place} is a folder; name a file")
    if target.is_symlink():
        raise BadInput(f"{place} is a link that leads in a circle; name another file")
    if path.exists() and not path.is_file():
        _check_access(path, os.W_OK, place)
    else:
        _check_room(target.parent, place)
    return place


def checked_folder(place: str | None) -> str | None:
    """The place, if it is there, or if a folder can be made there."""
    if place is None:
        return None
    if not place.strip():
        raise BadInput("the name of the folder to write is empty; name one")
    target = Path(os.path.realpath(place))
    if target.exists() and not target.is_dir():
        raise BadInput(f"{place} is a file; name a folder")
    if not target.exists():
        _check_room(target.parent, place)
    return place


def checked_shelf(place: str | None) -> str | None:
    """The place, if folders can be put into it, whether it is there or not."""
    if checked_folder(place) is not None:
        _check_room(Path(os.path.realpath(str(place))), str(place))
    return place


def _check_room(folder: Path, place: str) -> None:
    """Refuse a folder that is none, that cannot be made or that takes no new file."""
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if not nearest.is_dir():
        raise BadInput(f"{place} cannot be written, for {nearest} is a file; name another place")
    _check_access(nearest, os.W_OK | os.X_OK, place)


def _check_access(path: Path, mode: int, place: str) -> None:
    if not os.access(path, mode):
        raise BadInput(
            f"{place} cannot be written, for you may not write {path}; "
            "name another place or allow this one"
        )
