"""Checks of the arrays that metrics take: one value per image, no NaN."""

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from demur.errors import BadInput, bad_input

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


def as_decimal(share: float) -> Fraction:
    """Exact value of the decimal that a user wrote: 0.1 is 1/10, not the nearest double."""
    return Fraction(repr(float(share)))


def check_share(name: str, share: float, allow_one: bool = False) -> None:
    """Raise BadInput unless 0 < share < 1; `allow_one` also allows 1."""
    if not (0 < share < 1 or (allow_one and share == 1)):
        such = "0.05" if name == "risk" else "0.95"
        raise BadInput(f"{name} is {share:g}; give a share between 0 and 1, such as {such}")


def check_shape(array: NDArray[Any], name: str) -> None:
    """Raise BadInput unless the array is one-dimensional and not empty."""
    if array.ndim != 1:
        raise BadInput(f"{name} has shape {array.shape}; give one value per image in one dimension")
    if array.size == 0:
        raise BadInput(f"{name} is empty; give at least one image")


def same_length(**arrays: NDArray[Any]) -> int:
    """Common length of the arrays; raises BadInput if they differ."""
    if len({len(array) for array in arrays.values()}) > 1:
        sizes = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise BadInput(f"the numbers of images differ ({sizes}); give the same images in all")
    return len(next(iter(arrays.values())))


def floats(values: ArrayLike, name: str) -> FloatArray:
    """Values as doubles, N; raises BadInput for other shapes and NaN."""
    with bad_input(f"{name} cannot be read; give one number per image", (TypeError, ValueError)):
        array = np.asarray(values, dtype=np.float64)
    check_shape(array, name)
    if np.isnan(array).any():
        raise BadInput(f"{name} has a NaN; use -inf for an image that must be rejected")
    return array


def flags(values: ArrayLike, name: str) -> BoolArray:
    """Values as booleans, N; raises BadInput for values other than 0, 1, False and True."""
    if isinstance(values, np.ndarray) and values.dtype == np.bool_:
        check_shape(values, name)
        return values
    array = floats(values, name)
    flags: BoolArray = array == 1
    if not (flags | (array == 0)).all():
        raise BadInput(f"{name} has values other than true and false; compare labels first")
    return flags


def scored_pair(
    score: ArrayLike, correct: ArrayLike, name: str = "score"
) -> tuple[FloatArray, BoolArray]:
    """Score and correctness of the same images, N each, checked."""
    values, is_correct = floats(score, name), flags(correct, "correct")
    same_length(**{name: values, "correct": is_correct})
    return values, is_correct
