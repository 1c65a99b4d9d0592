"""Readers of CIFAR's published files, binary or pickled: N x 3072 bytes and N labels.

*train, test = read_layout(found, classes=10)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from demur.data.locations import DataFiles
from demur.data.plain_pickle import read_plain_pickle
from demur.data.published import GET_AGAIN, PIXELS, Layout, Part
from demur.errors import BadInput


class CifarBatch(NamedTuple):
    """The images of one file, in published order."""

    pixels: NDArray[np.uint8]  # N, 3072
    y: NDArray[np.int64]  # N


def read_layout(found: DataFiles, classes: int) -> list[CifarBatch]:
    """Read every file, the test images last."""
    layout, folder = found.layout, found.folder
    missing = [folder / part.name for part in layout.parts if not (folder / part.name).is_file()]
    if missing:
        raise BadInput(f"{missing[0]} is missing; {GET_AGAIN}")
    return [read_part(layout, folder, part, classes) for part in layout.parts]


def concatenate(batches: Sequence[CifarBatch]) -> CifarBatch:
    """Concatenate the images of several files."""
    pixels, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return CifarBatch(pixels, y)


def read_part(layout: Layout, folder: Path, part: Part, classes: int) -> CifarBatch:
    """Read one file.

    Raises:
        BadInput: The file has another number of images, or a label that is no class.
    """
    path = folder / part.name
    read = _read_binary if layout.form == "binary" else _read_python
    batch = read(path, layout, part.images)
    low, high = int(batch.y.min()), int(batch.y.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise BadInput(
            f"{path} contains the label {wrong}, but labels range from 0 to {classes - 1}; "
            f"delete it and {GET_AGAIN}"
        )
    return batch


def _read_binary(path: Path, layout: Layout, images: int) -> CifarBatch:
    size, expected = path.stat().st_size, images * (layout.label_bytes + PIXELS)
    if size != expected:
        fault = "is truncated" if size < expected else "is too long"
        raise BadInput(f"{path} {fault}: {size} bytes, not {expected}; delete it and {GET_AGAIN}")
    records = np.fromfile(path, np.uint8).reshape(images, -1)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    return CifarBatch(records[:, layout.label_bytes :], labels)


def _read_python(path: Path, layout: Layout, images: int) -> CifarBatch:
    loaded = read_plain_pickle(path)
    items = loaded.items() if isinstance(loaded, dict) else ()
    entries = {_text(key): value for key, value in items}
    pixels, y = entries.get("data"), _integer_array(entries.get(layout.label_key))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or y is None:
        raise BadInput(
            f"{path} is not a batch of images: it needs bytes under 'data' "
            f"and integers under {layout.label_key!r}; delete it and {GET_AGAIN}"
        )
    if pixels.shape != (images, PIXELS) or len(y) != images:
        raise BadInput(
            f"{path} should contain {images} images of {PIXELS} bytes and as many labels, "
            f"but contains an array of {' x '.join(map(str, pixels.shape))} and {len(y)}; "
            f"delete it and {GET_AGAIN}"
        )
    return CifarBatch(pixels, y)


def _text(key: Any) -> Any:
    return key.decode("latin1") if isinstance(key, bytes) else key


def _integer_array(labels: Any) -> NDArray[np.int64] | None:
    """Labels as a one-dimensional integer array, or None if they are anything else."""
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        labels = np.array(labels)  # of dtype object if a number does not fit int64
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        return None
    return labels.astype(np.int64)
