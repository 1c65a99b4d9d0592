"""A safe reader of pickles that contain only integer arrays and plain containers.

    read_plain_pickle(Path("data_batch_1"))["data"]

A pickle is a program: Python's reader imports and calls any function that the file names. This
reader resolves only the few names that make up an array, and resolves them to classes of its own
that store bytes and a shape. The program is checked before it is run: its operations, their number
and the memo indices.
"""

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.data.cifar_files import GET_AGAIN
from demur.errors import BadInput
from demur.files.atomic import MEGABYTE, read_regular_file

MAX_BYTES = 256 * MEGABYTE
MAX_OPERATIONS = 2_000_000  # CIFAR-100's training file has about 300,000
# operations that build numbers, texts, containers and arrays; none that duplicates a value
OPERATIONS = frozenset((
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1",
    "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL",
    "REDUCE", "BUILD", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET", "MEMOIZE",
))  # fmt: skip
MEMO_WRITES = ("PUT", "BINPUT", "LONG_BINPUT")


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
    """An array as the file describes it; its bytes are copied only where it is used."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def to_numpy(self) -> NDArray[Any]:
        """The array; raises any error if its description is wrong."""
        _, shape, dtype, fortran, raw = self.state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        return np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if fortran else "C")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): None,  # a method of the unpickler
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that resolves only `_ALLOWED` names and imports nothing."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self.left = len(content)  # bytes that may still be copied out of texts

    def find_class(self, module: str, name: str) -> Any:
        self.check_name(module, name)
        return _ALLOWED[module, name] or self._encode

    @staticmethod
    def check_name(module: str, name: str) -> None:
        """Raise an error if a name is not allowed."""
        if (module, name) not in _ALLOWED:
            raise _DisallowedName(repr(f"{module}.{name}"[:60]))

    def _encode(self, text: str, encoding: str) -> bytes:
        """Replaces `_codecs.encode`, by which Python 3 pickles bytes for Python 2."""
        if encoding != "latin1":
            raise _DisallowedName(f"_codecs.encode to {str(encoding)[:20]!r}")
        self.left -= len(text)
        if self.left < 0:
            raise pickle.UnpicklingError("one text is copied many times")
        return text.encode("latin1")


def read_plain_pickle(path: Path) -> Any:
    """Read a pickle; Python 2 strings are decoded as latin-1, which preserves every byte.

    Raises:
        BadInput: The file is damaged or names anything but integer arrays and containers.
    """
    content = read_regular_file(path, MAX_BYTES, f"delete it and {GET_AGAIN}")
    try:
        _check_operations(content)
        return _unwrap(_PlainUnpickler(content).load(), limit=len(content))
    except _DisallowedName as name:
        raise BadInput(
            f"{path} was not loaded and nothing in it was run: it names {name}, "
            f"but a batch of images contains only arrays; delete it and {GET_AGAIN}"
        ) from None
    except Exception:  # a damaged pickle can raise anything
        raise BadInput(f"{path} is damaged; delete it and {GET_AGAIN}") from None


def _check_operations(content: bytes) -> None:
    """Raise an error unless the pickle does a bounded number of harmless operations."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if operation.name == "GLOBAL":
            _PlainUnpickler.check_name(*str(argument).split(" ", 1))
        if operation.name not in OPERATIONS:
            raise _DisallowedName(f"the operation {operation.name}")
        memo_index = int(argument) if operation.name in MEMO_WRITES and argument else 0
        if count > MAX_OPERATIONS or memo_index > count:
            raise pickle.UnpicklingError("too large")


def _unwrap(value: Any, limit: int) -> Any:
    """Convert the arrays that are values of a dictionary to numpy's, of `limit` bytes in all."""
    if not isinstance(value, dict):
        return value
    if sum(len(v.state[-1]) for v in value.values() if isinstance(v, _Array)) > limit:
        raise pickle.UnpicklingError("one array is copied many times")
    return {k: v.to_numpy() if isinstance(v, _Array) else v for k, v in value.items()}
