"""Samples of somebody's data set: a torch `Dataset`, of torchvision, or a table of Hugging Face."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from demur.errors import BadInput, blamed
from demur.files.image_files import Pixels, decode_image

IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x")  # of a sample that is a mapping
LABEL_KEYS = ("label", "labels", "fine_label", "target", "y")


def is_dataset(thing: Any) -> bool:
    """Whether this is a torch `Dataset` or a table of Hugging Face `datasets`."""
    is_table = hasattr(thing, "features") and hasattr(thing, "column_names")
    return isinstance(thing, torch.utils.data.Dataset) or is_table


def class_names(dataset: Any) -> tuple[str, ...]:
    """The names of the classes in the order of their numbers, where the data set says them."""
    features = dict(getattr(dataset, "features", None) or {})
    named = [getattr(features[key], "names", None) for key in LABEL_KEYS if key in features]
    return tuple(map(str, getattr(dataset, "classes", None) or next(iter(named), None) or ()))


def samples(
    dataset: Any, name: str, convert: Callable[[Any, Any], tuple[Any, Any]]
) -> Iterator[tuple[Any, Any]]:
    """Yield each sample, converted; BadInput names the data set, as `name`, and the sample."""
    position = 0
    try:
        has_length = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        rows = (dataset[i] for i in range(len(dataset))) if has_length else iter(dataset)
        for sample in rows:
            yield convert(*_pair(sample))
            position += 1
    except BadInput as error:
        raise BadInput(f"sample {position} of the data set {name}: {error}") from error
    except Exception as error:
        raise BadInput(blamed(error, f"sample {position} of the data set {name}")) from error
    if not position:
        raise BadInput(f"the data set {name} is empty; give at least one sample")


def _pair(sample: Any) -> tuple[Any, Any]:
    if isinstance(sample, Mapping):
        keys = [next((k for k in known if k in sample), None) for known in (IMAGE_KEYS, LABEL_KEYS)]
        if None in keys:
            given = ", ".join(map(repr, sample))
            raise BadInput(f"it has the keys {given}; name them 'image' and 'label'")
        return sample[keys[0]], sample[keys[1]]
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        raise BadInput(f"it is a {type(sample).__name__}; return a pair (image, label)")
    return sample[0], sample[1]


def decoded(image: Any, label: Any) -> tuple[Pixels, int | str]:
    """Return pixels, uint8 H, W, C with one or three channels, and the number or word."""
    return pixels_of_sample(image), label_of_sample(label)


def pixels_of_sample(image: Any) -> Pixels:
    """The image as uint8 H, W, C with one or three channels."""
    if isinstance(getattr(image, "mode", None), str):  # of Pillow; a tensor has a method
        return decode_image(image, channels=3)
    array = np.asarray(image)
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
        array = array.astype(np.uint8)  # a table may hold larger integers
    pixels: Pixels = as_bytes(array[None], "it")[0]
    return pixels


def label_of_sample(label: Any) -> int | str:
    """The label as a number or a word; a one-hot vector is the position of its 1."""
    value = label if isinstance(label, str) else np.asarray(label)
    if isinstance(value, np.ndarray) and value.ndim == 1 and len(value) > 1:
        if (value == 0).sum() != len(value) - 1 or value.sum() != 1:
            raise BadInput("its label is a vector; give a number, a word or a one-hot vector")
        return int(value.argmax())
    if isinstance(value, np.ndarray) and (value.size != 1 or value.dtype.kind not in "iu"):
        raise BadInput(f"its label is {label!r}; give a whole number, a word or a one-hot vector")
    return value if isinstance(value, str) else int(value.item())


def as_bytes(x: NDArray[Any], file: object) -> NDArray[np.uint8]:
    """Images as uint8 N, H, W, C with one or three channels."""
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] not in (1, 3):
        x = np.moveaxis(x, 1, 3)
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4 or x.shape[3] not in (1, 3) or 0 in x.shape:
        raise BadInput(f"{file} needs images of shape N, H, W or N, H, W, 3, not {x.shape}")
    if x.dtype.kind == "f" and x.min() >= 0 and x.max() <= 1:
        x = np.rint(x * 255).astype(np.uint8)
    if x.dtype != np.uint8:
        raise BadInput(f"{file} needs uint8 pixels or floats in [0, 1], not {x.dtype}")
    return np.ascontiguousarray(x)
