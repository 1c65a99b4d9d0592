"""Reads pickles that hold whole-number arrays and plain containers, and refuses all others unrun.

    read_plain(Path("data_batch_1"))["data"]

A pickle is a program. Python's own reader looks up any function the file names and calls it; here
the lookup knows the few names that spell an array, and what it hands out are stand-ins of ours that
hold bytes and a size, never numpy's own classes, whose raw memory a file could abuse.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.data.published import AGAIN
from demur.errors import BadInput


class _Refused(pickle.UnpicklingError):
    """The file names something that no array of whole numbers is made of."""


class _Dtype:
    """A kind of whole number."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.held = np.dtype(code) if isinstance(code, str) else np.dtype(object)
        if self.held.kind not in "iu":
            raise _Refused(f"numpy.dtype({code!r})")

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.held = self.held.newbyteorder(">")


class _Array:
    """An array, read from its bytes."""

    def __init__(self, *_: Any) -> None:
        self.held: NDArray[Any] = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        self.held = np.frombuffer(raw, dtype.held).reshape(shape, order="F" if fortran else "C")


def _bytes(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise _Refused(f"_codecs.encode to {encoding}")
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _bytes,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """One of the admitted stand-ins, never an import."""
        if (module, name) not in _ADMITTED:
            raise _Refused(f"{module}.{name}")
        return _ADMITTED[module, name]


def read_plain_pickle(path: Path) -> Any:
    """What a pickle holds; text of Python 2 comes as latin-1, which keeps every byte."""
    content = io.BytesIO(path.read_bytes())
    try:
        return _unwrapped(_PlainUnpickler(content, encoding="latin1").load())
    except _Refused as refused:
        raise BadInput(
            f"{path} is refused and nothing in it was run: it asks for {refused}, "
            f"and a batch of images holds arrays only; delete it and {AGAIN}"
        ) from None
    except Exception:  # a damaged pickle can fail in any way at all
        raise BadInput(f"{path} is damaged; delete it and {AGAIN}") from None


def _unwrapped(thing: Any) -> Any:
    """A dictionary's arrays, or an array by itself, as numpy's."""
    if isinstance(thing, dict):
        return {key: _unwrapped(value) for key, value in thing.items()}
    return thing.held if isinstance(thing, _Array) else thing
