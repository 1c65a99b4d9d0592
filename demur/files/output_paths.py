"""Checks of output paths, made before any work starts.

Each check returns its argument, so that it serves as the callback of a typer option:

    out: Annotated[str | None, typer.Option("-o", callback=check_output_file)]
"""

import os
from pathlib import Path

from demur.errors import BadInput

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")  # never overwritten
RUN_FILES = (
    "recipe.txt", "checkpoint.json", "model.safetensors", "metrics.jsonl", "records", "state",
    "certificates", "last", "data.csv", "metrics.csv", "tensorboard",
    "retrofit.json", ".lock",
)  # fmt: skip


def check_output_file(name: str | None) -> str | None:
    """Return the path if a file, a pipe or a device can be written there; raise BadInput if not."""
    if name is None:
        return None
    if not name.strip():
        raise BadInput("the output file has an empty name; name a file")
    path, target = Path(name), Path(os.path.realpath(name))
    if path.is_dir() or name.endswith(os.sep):
        raise BadInput(f"{name} is a folder; name a file")
    _check_not_of_a_run(target, name)
    if path.is_file() and path.suffix.lower() in IMAGES:
        raise BadInput(f"{name} is an image; name another file")
    if target.is_symlink():
        raise BadInput(f"{name} is a symbolic link to itself; name another file")
    if path.exists() and not path.is_file():
        _check_access(path, os.W_OK, name)
    else:
        _check_folder(target.parent, name)
    return name


def check_svg_file(name: str | None) -> str | None:
    """Return the path of an SVG file that can be written; raise BadInput if not."""
    suffix = Path(name or "").suffix
    if suffix.lower() in (".png", ".pdf", ".jpg", ".jpeg"):
        raise BadInput(f"the figure is an SVG file; name it {Path(str(name)).stem}.svg")
    return check_output_file(name)


def _check_not_of_a_run(target: Path, name: str) -> None:
    """Raise BadInput if the file is one that a run consists of."""
    for folder in target.parents:
        if (folder / "recipe.txt").is_file() and target.relative_to(folder).parts[0] in RUN_FILES:
            raise BadInput(f"{name} is a file of the run {folder.name}; name another file")


def check_output_folder(name: str | None) -> str | None:
    """Return the path if it is a folder or if one can be made there; raise BadInput if not."""
    if name is None:
        return None
    if not name.strip():
        raise BadInput("the output folder has an empty name; name a folder")
    target = Path(os.path.realpath(name))
    if target.exists() and not target.is_dir():
        raise BadInput(f"{name} is a file; name a folder")
    if not target.exists():
        _check_folder(target.parent, name)
    return name


def check_archive_folder(name: str | None) -> str | None:
    """Return the path if folders can be made in it; it need not exist. Raise BadInput if not."""
    if check_output_folder(name) is not None:
        _check_folder(Path(os.path.realpath(str(name))), str(name))
    return name


def _check_folder(folder: Path, name: str) -> None:
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
