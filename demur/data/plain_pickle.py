"""A safe reader of pickles that contain only integer arrays and plain containers.

    read_plain_pickle(Path("data_batch_1"), "data", "labels")

A pickle is a program: Python's reader imports and calls any function that the file names. This
reader resolves only the few names that make up an array, and resolves them to classes of its own
that store bytes and a shape, without a copy.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.data.cifar_files import GET_AGAIN
from demur.errors import BadInput
from demur.files.atomic import MEGABYTE, read_regular_file

MAX_BYTES = 256 * MEGABYTE


class _DisallowedName(pickle.UnpicklingError):
    """The file names something that is not part of an integer array."""


class _Dtype:
    """An integer dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not re.fullmatch("[<>=|]?[iu][1248]", code):
            raise _DisallowedName(f"numpy.dtype({str(code)[:20]!r})")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """An array as the file describes it."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def to_numpy(self) -> NDArray[Any]:
        """The array; raises any error if its description is wrong."""
        _, shape, dtype, fortran, raw = self.state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        return np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if fortran else "C")


class _PlainUnpickler(pickle._Unpickler):
    """The reader in Python: the one in C allocates a memo as large as the file asks for."""

    names = {
        "numpy.core.multiarray._reconstruct": _Array, "numpy._core.multiarray._reconstruct": _Array,
        "numpy.ndarray": _Array, "numpy.dtype": _Dtype,
    }  # fmt: skip
    dispatch = {k: v for k, v in pickle._Unpickler.dispatch.items() if k != pickle.BYTEARRAY8[0]}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return self.encode
        if f"{module}.{name}" not in self.names:
            raise _DisallowedName(repr(f"{module}.{name}"[:60]))
        return self.names[f"{module}.{name}"]

    def encode(self, text: str, encoding: str) -> str:
        """Stands for `_codecs.encode`, by which Python 3 pickles bytes for Python 2."""
        if encoding != "latin1":
            raise _DisallowedName(f"_codecs.encode to {str(encoding)[:20]!r}")
        return text


def read_plain_pickle(path: Path, *keys: str) -> dict[str, Any]:
    """Read these entries of a pickled dictionary; Python 2 strings are decoded as latin-1.

    Raises:
        BadInput: The file is damaged or names anything but integer arrays and containers.
    """
    content = read_regular_file(path, MAX_BYTES, f"delete it and {GET_AGAIN}")
    try:
        loaded = _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
        items = loaded.items() if isinstance(loaded, dict) else ()
        found = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in items}
        wanted = {key: found[key] for key in keys if key in found}
        return {k: v.to_numpy() if isinstance(v, _Array) else v for k, v in wanted.items()}
    except _DisallowedName as name:
        raise BadInput(
            f"{path} was not loaded and nothing in it was run: it names {name}, "
            f"but a batch of images contains only arrays; delete it and {GET_AGAIN}"
        ) from None
    except Exception:  # a damaged pickle can raise anything
        raise BadInput(f"{path} is damaged; delete it and {GET_AGAIN}") from None
