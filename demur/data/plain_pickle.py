"""Reads pickles that hold numpy arrays and plain containers, and refuses all others unrun.

read_plain(Path("data_batch_1"))["data"]

A pickle is a program. Python's own reader looks up any function the file names and calls it; here
the lookup knows four names, those of which an array is made, and every other name ends the reading.
"""

import codecs
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from demur.errors import BadInput

_RECONSTRUCT = np.empty(0).__reduce__()[0]  # numpy has moved it; arrays know where it is
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes for Python 2
}


class _Refused(pickle.UnpicklingError):
    """The file names something that no array is made of."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """One of the admitted names, never an import."""
        if (module, name) not in _ADMITTED:
            raise _Refused(f"{module}.{name}")
        return _ADMITTED[module, name]


def read_plain(path: Path) -> Any:
    """What a pickle holds; text of Python 2 comes as latin-1, which keeps every byte."""
    content = io.BytesIO(path.read_bytes())
    try:
        return _PlainUnpickler(content, encoding="latin1").load()
    except _Refused as refused:
        raise BadInput(
            f"{path} is refused and nothing in it was run: it asks for {refused}, "
            "and a batch of images holds arrays only; delete it and get the data again"
        ) from None
    except Exception:  # a damaged pickle can fail in any way at all
        raise BadInput(f"{path} is damaged; delete it and get the data again") from None
