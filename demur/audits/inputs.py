"""Other people's images for an audit."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from demur.data import DATASETS, OwnImages
from demur.data.sources import Source, open_source
from demur.errors import BadInput, suggestion
from demur.files.image_files import resize_pixels
from demur.spec.importing import allow_import, is_import_path

LabelledImages = tuple[Any, Any]  # images N, C, H, W and labels N, as arrays or tensors


def audit_images(
    data: str, n: int | None, size: int | None = None
) -> tuple[LabelledImages, LabelledImages | None]:
    """Return the first n test images with labels, and calibration images if the data have them.

    The data are an .npz file with x and y, a folder with one folder per class, whose images are
    resized to `size`, a side in pixels, or a data set.
    """
    if n is not None and n < 1:
        raise BadInput(f"--n is {n}; give at least 1")
    if size is not None and size < 1:
        raise BadInput(f"--size is {size}; give a side in pixels, at least 1")
    if not data.strip():
        raise BadInput("--data is empty; name an .npz file, a folder or a data set")
    if is_import_path(data) and not Path(data).exists():
        allow_import(data)
        return _folder(data, n, size)
    if Path(data).is_dir():
        return _folder(data, n, size)
    if size is not None:
        raise BadInput("--size is for a folder of images; leave it out")
    return _arrays(data, n) if data.endswith(".npz") else _named(data, n)


def _arrays(data: str, n: int | None) -> tuple[LabelledImages, LabelledImages | None]:
    if not Path(data).is_file():
        raise BadInput(f"{data} is no file; name an .npz file with x and y")
    if not zipfile.is_zipfile(data):
        raise BadInput(f"{data} is no .npz file; write one with numpy.savez(file, x=x, y=y)")
    try:
        with np.load(data) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except Exception as error:
        raise BadInput(f"{data} cannot be read as .npz: {error}") from None
    if not {"x", "y"} <= set(found):
        raise BadInput(
            f"{data} needs arrays x (N, C, H, W) and y (N); cal_x and cal_y are optional"
        )
    if ("cal_x" in found) != ("cal_y" in found):
        raise BadInput(f"{data} has only one of cal_x and cal_y; give both or none")
    cal = (found["cal_x"], found["cal_y"]) if "cal_x" in found else None
    return (found["x"][:n], found["y"][:n]), cal


def _named(name: str, n: int | None) -> tuple[LabelledImages, LabelledImages | None]:
    known = {kind.__name__.lower(): kind for kind in DATASETS if kind is not OwnImages}
    if name.lower() not in known:
        raise BadInput(
            f"--data is {name!r}, no .npz file, no folder and no data set; "
            f"{suggestion(name, known)}"
        )
    try:
        splits = known[name.lower()]().load()
    except BadInput as reason:
        where = "in an audit the folder is named by the variable DEMUR_DATA"
        raise BadInput(f"{reason} ({where})") from None
    test = splits["test"] if n is None else splits["test"].first(n)
    cal = splits["cal"].batch(slice(None)) if "cal" in splits else None
    return test.batch(slice(None)), cal


def _folder(
    data: str, n: int | None, size: int | None
) -> tuple[LabelledImages, LabelledImages | None]:
    """Return the images of a folder, n drawn evenly over the classes; with splits test and cal."""
    source = open_source(data)
    found = {entry.label for entry in source.entries}
    classes = {name: number for number, name in enumerate(source.names or sorted(found))}
    if all(name.isdecimal() for name in found):  # numbers are those of the model
        classes = {name: int(name) for name in found}
    splits = [entry.split for entry in source.entries]
    rows = {
        at: [i for i, split in enumerate(splits) if split == at] for at in ("test", "cal", None)
    }
    test = rows["test"] or rows[None]
    if not test:
        raise BadInput(f"{data} has no folder test; add one, or name the folder to attack itself")
    if n is not None and n < len(test):
        test = [test[i * len(test) // n] for i in range(n)]
    cal = _read(source, rows["cal"], classes, size) if rows["cal"] else None
    return _read(source, test, classes, size), cal


def _read(
    source: Source, rows: list[int], classes: dict[str, int], size: int | None
) -> LabelledImages:
    """Return uint8 images N, 3, H, W and labels, the positions of the sorted class names."""
    images = []
    for i in rows:
        try:
            images.append(source.decode(i, source.content(i)))
        except BadInput as error:
            raise BadInput(f"{source.entries[i].name}: {error}") from None
    if size is not None:
        images = [resize_pixels(pixels, size, size) for pixels in images]
    shapes = sorted({pixels.shape[:2] for pixels in images})
    if len(shapes) > 1:
        (h, w), (other_h, other_w) = shapes[0], shapes[-1]
        raise BadInput(
            f"the images have several sizes, from {h} x {w} to {other_h} x {other_w} pixels; give "
            "--size, the side that the model takes"
        )
    x = np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))
    return x, np.array([classes[source.entries[i].label] for i in rows])
