"""CIFAR's published files as arrays: N x 3072 bytes and N labels, whichever form they come in.

*train, test = read_layout(found, classes=10)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from demur.data.locations import Found
from demur.data.plain_pickle import read_plain_pickle
from demur.data.published import AGAIN, PIXELS, Layout, Part
from demur.errors import BadInput


class CifarBatch(NamedTuple):
    """Images in published order."""

    pixels: NDArray[np.uint8]  # N, 3072
    y: NDArray[np.int64]  # N


def read_layout(found: Found, classes: int) -> list[CifarBatch]:
    """The images of every file, the test images last."""
    layout, folder = found.layout, found.folder
    missing = [folder / part.name for part in layout.parts if not (folder / part.name).is_file()]
    if missing:
        raise BadInput(f"{missing[0]} is missing; {AGAIN}")
    return [read_part(layout, folder, part, classes) for part in layout.parts]


def together(batches: Sequence[CifarBatch]) -> CifarBatch:
    """The images of several files as one."""
    pixels, y = (np.concatenate(each) for each in zip(*batches, strict=True))
    return CifarBatch(pixels, y)


def read_part(layout: Layout, folder: Path, part: Part, classes: int) -> CifarBatch:
    """One file's images and labels, refused if there are more, fewer or impossible ones."""
    path = folder / part.name
    read = _binary if layout.form == "binary" else _python
    batch = read(path, layout, part.images)
    low, high = int(batch.y.min()), int(batch.y.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise BadInput(f"{path} holds the label {wrong}, but classes run from 0 to {classes - 1}")
    return batch


def _binary(path: Path, layout: Layout, images: int) -> CifarBatch:
    size, expected = path.stat().st_size, images * (layout.label_bytes + PIXELS)
    if size != expected:
        fault = "is cut short" if size < expected else "is too long"
        raise BadInput(f"{path} {fault}: {size} bytes, not {expected}; delete it and {AGAIN}")
    records = np.fromfile(path, np.uint8).reshape(images, -1)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    return CifarBatch(records[:, layout.label_bytes :], labels)


def _python(path: Path, layout: Layout, images: int) -> CifarBatch:
    held = read_plain_pickle(path)
    entries = {_text(key): value for key, value in held.items()} if isinstance(held, dict) else {}
    pixels, y = entries.get("data"), _whole_numbers(entries.get(layout.label_key))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or y is None:
        raise BadInput(
            f"{path} is no batch of images: it needs bytes under 'data' "
            f"and whole numbers under {layout.label_key!r}; delete it and {AGAIN}"
        )
    if pixels.shape != (images, PIXELS) or len(y) != images:
        raise BadInput(
            f"{path} should hold {images} images of {PIXELS} bytes and as many labels, "
            f"but holds an array of {' x '.join(map(str, pixels.shape))} and {len(y)}; "
            f"delete it and {AGAIN}"
        )
    return CifarBatch(pixels, y)


def _text(key: Any) -> Any:
    return key.decode("latin1") if isinstance(key, bytes) else key


def _whole_numbers(labels: Any) -> NDArray[np.int64] | None:
    """Labels as an array, or None if they are anything else than a row of whole numbers."""
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        labels = np.array(labels)  # of objects if one is too large for any image
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        return None
    return labels.astype(np.int64)
