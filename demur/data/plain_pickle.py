"""A safe reader of pickles that contain only integer arrays and plain containers.

    read_plain_pickle(Path("data_batch_1"))["data"]

A pickle is a program: Python's reader imports and calls any function that the file names. This
reader resolves only the few names that make up an array, and resolves them to classes of its own
that store bytes and a shape, never to numpy's classes, whose raw memory a file could corrupt.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.data.published import GET_AGAIN
from demur.errors import BadInput


class _DisallowedName(pickle.UnpicklingError):
    """The file names something that is not part of an integer array."""


class _Dtype:
    """An integer dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.dtype = np.dtype(code) if isinstance(code, str) else np.dtype(object)
        if self.dtype.kind not in "iu":
            raise _DisallowedName(f"numpy.dtype({code!r})")

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """An array built from its bytes."""

    def __init__(self, *_: Any) -> None:
        self.array: NDArray[Any] = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        self.array = np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if fortran else "C")


def _bytes(text: str, encoding: str) -> bytes:
    """Replaces `_codecs.encode`, by which Python 3 pickles bytes for Python 2."""
    if encoding != "latin1":
        raise _DisallowedName(f"_codecs.encode to {encoding}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _bytes,
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that resolves only `_ALLOWED` names and imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise _DisallowedName(f"{module}.{name}")
        return _ALLOWED[module, name]


def read_plain_pickle(path: Path) -> Any:
    """Read a pickle; Python 2 strings are decoded as latin-1, which preserves every byte.

    Raises:
        BadInput: The file is damaged or names anything but integer arrays and containers.
    """
    content = io.BytesIO(path.read_bytes())
    try:
        return _unwrap(_PlainUnpickler(content, encoding="latin1").load())
    except _DisallowedName as name:
        raise BadInput(
            f"{path} was not loaded and nothing in it was run: it names {name}, "
            f"but a batch of images contains only arrays; delete it and {GET_AGAIN}"
        ) from None
    except Exception:  # a damaged pickle can raise anything
        raise BadInput(f"{path} is damaged; delete it and {GET_AGAIN}") from None


def _unwrap(value: Any) -> Any:
    """Convert an array, or the arrays of a dictionary, to numpy's."""
    if isinstance(value, dict):
        return {key: _unwrap(entry) for key, entry in value.items()}
    return value.array if isinstance(value, _Array) else value
