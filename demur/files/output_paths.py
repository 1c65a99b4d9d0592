"""Decides whether a path may be written, for every command and before any work starts.

Nothing is written into a run, an archive, a guard or a folder of images, whatever links lead
there, and no file is replaced by one of another kind.
"""

import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal

from demur.errors import BadInput

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
PAGE_OF_RUN = "report.html"  # the one output that demur writes into a run
FolderKind = Literal["run", "guard"]
# How a file of each kind is called, its suffixes and its first bytes.
FILE_KINDS: dict[str, tuple[str, tuple[str, ...], bytes]] = {
    "page": ("an HTML page", (".html", ".htm"), rb"(?i)<!doctype html>"),
    "predictions": (
        "predictions of demur", (".csv", ".json", ".txt", ".parquet"),
        rb'PAR1|file,class,label,accepted,confidence|\[\s*(\]|\{\s*"file":)',
    ),
    "json": ("a JSON file", (".json",), rb"\s*[{\[]"),
    "table": ("a table of demur", (".md", ".tex", ".txt", ".json"), rb"##? \w|% made by |\["),
    "svg": ("an SVG file", (".svg",), rb"<\?xml|<svg"),
    "pdf": ("a PDF file", (".pdf",), rb"%PDF"),
    "png": ("a PNG file", (".png",), rb"\x89PNG"),
    "txt": ("a caption of demur", (".txt",), rb"Figure "),
    "npy": ("a NumPy array", (".npy",), rb"\x93NUMPY"),
}  # fmt: skip
STANDARD_OUTPUT = 1
START = 64  # bytes of a file that show its kind
OF_A_RUN = ("checkpoint.json", "records", "state", "metrics.jsonl", ".lock")  # beside recipe.txt
DATA_FILES = ("dataset_dict.json", "dataset_info.json")  # of the Hub's layout
TRAINING_FOLDERS = ("train", "training", "fit")
LOOKED_AT = 50  # entries of a folder that show whether it holds images


def output_file(kind: str) -> Callable[[str | None], str | None]:
    """Return `check_output_file` for a kind of file as the callback of a typer option."""
    return lambda name: check_output_file(name, kind)


def output_folder(kind: FolderKind | None = None) -> Callable[[str | None], str | None]:
    """Return `check_output_folder` for a kind of folder as the callback of a typer option."""
    return lambda name: check_output_folder(name, kind)


def check_output_file(
    name: str | None, kind: str | None = None, own_runs: Collection[Path] = ()
) -> str | None:
    """Return the path if a file, a pipe or a device can be written there; raise BadInput if not.

    An existing file must be of the kind that is written; None is any but images. The command may
    write the report.html of `own_runs`.
    """
    if name is None:
        return None
    if not name.strip():
        raise BadInput("the output file has an empty name; name a file")
    path, target = Path(name), Path(os.path.realpath(name))
    if path.is_dir() or name.endswith(os.sep):
        raise BadInput(f"{name} is a folder; name a file")
    if target.is_symlink():
        raise BadInput(f"{name} is a symbolic link to itself; name another file")
    is_own = target.name == PAGE_OF_RUN and target.parent in [run.resolve() for run in own_runs]
    if is_stream(path):
        _check_access(path, os.W_OK, name)
        return name
    if not is_own:
        _check_place(target.parent, name)
    _check_replaceable(target, name, kind)
    check_writable(target.parent, name)
    return name


def is_stream(path: Path) -> bool:
    """Whether path exists and cannot be replaced by a file: a pipe, a device, standard output."""
    return path.exists() and (not path.is_file() or is_standard_output(path))


def is_standard_output(path: Path) -> bool:
    """Whether path is the file that standard output is redirected to, as /dev/stdout may be."""
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(STANDARD_OUTPUT))
    return False


def check_output_folder(name: str | None, kind: FolderKind | None = None) -> str | None:
    """Return the path if it is a folder or if one can be made there; raise BadInput if not.

    `kind` says what the folder becomes: it may be one already, for example a run that is resumed.
    """
    if name is None:
        return None
    if not name.strip():
        raise BadInput("the output folder has an empty name; name a folder")
    target = Path(os.path.realpath(name))
    if target.exists() and not target.is_dir():
        raise BadInput(f"{name} is a file; name a folder")
    if (found := protected_kind(target)) not in (None, kind):
        raise BadInput(f"{name} is in the way: it is a {found}; name a new folder")
    _check_place(target.parent, name)
    if not target.exists():
        check_writable(target.parent, name)
    return name


def protected_kind(folder: Path) -> str | None:
    """What a folder is if nothing else may be written into it: a run, a guard, images; or None."""
    if (folder / "recipe.txt").is_file() and any((folder / name).exists() for name in OF_A_RUN):
        return "run"
    if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
        return "guard"
    if any((folder / name).is_file() for name in DATA_FILES) or _is_image_folder(folder):
        return "folder of images"
    return None


def _check_place(folder: Path, name: str) -> None:
    """Raise BadInput if a resolved folder is protected or lies in one that is."""
    for parent in (folder, *folder.parents):
        if found := protected_kind(parent):
            raise BadInput(f"{name} is in the {found} {parent.name}; name a path outside of it")


def _check_replaceable(target: Path, name: str, kind: str | None) -> None:
    """Raise BadInput if there is a file that an output of this kind must not replace."""
    if not target.is_file():
        return
    if target.stat().st_nlink > 1:
        raise BadInput(f"{name} has a second name (a hard link); name another file")
    if kind is None:
        if target.suffix.lower() in IMAGE_SUFFIXES:
            raise BadInput(f"{name} is an image; name another file")
        return
    called, suffixes, first = FILE_KINDS[kind]
    with target.open("rb") as file:
        start = file.read(START)
    if start and not (target.suffix.lower() in (*suffixes, "") and re.match(first, start)):
        raise BadInput(f"{name} is there and is not {called}; name another file")


def _is_image_folder(folder: Path) -> bool:
    """Whether a folder has one folder per class, also in folders of splits."""
    try:
        inside = [Path(one) for one in os.scandir(folder) if one.is_dir() and one.name[0] != "."]
        if any(one.name.lower() in TRAINING_FOLDERS and _is_image_folder(one) for one in inside):
            return True
        return len(inside) > 1 and all(map(_holds_images, inside))
    except OSError:  # what cannot be listed cannot be known
        return False


def _holds_images(folder: Path) -> bool:
    """Whether at least half of the entries of a folder are images by their names."""
    names = [one.name.lower() for one in islice(os.scandir(folder), LOOKED_AT)]
    return 0 < len(names) <= 2 * sum(name.endswith(IMAGE_SUFFIXES) for name in names)


def check_writable(folder: Path, name: str) -> None:
    """Raise BadInput unless files can be made in a folder, which need not exist yet."""
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir():
        raise BadInput(f"{name} cannot be written: {nearest} is a file; name another path")
    _check_access(nearest, os.W_OK | os.X_OK, name)


def _check_access(path: Path, mode: int, name: str) -> None:
    if not os.access(path, mode):
        raise BadInput(
            f"{name} cannot be written: you may not write to {path}; "
            "name another path or change its permissions"
        )
