"""The npz file of a record: its arrays, checked against their declared types, shapes and sizes.

content = npz_bytes(arrays)
arrays = read_npz(content, path, remedy)       # BadInput names the file and the array

Nothing is unpacked before the sizes in the zip directory are known to be in bounds.
"""

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

from demur.errors import BadInput
from demur.regular_file import MEGABYTE

MAX_NPZ = 4096 * MEGABYTE  # bytes of the file
SMALL = 256 * MEGABYTE  # bytes of all arrays that any file may unpack to
MAX_RATIO = 20  # unpacked bytes of a larger file per byte
MAX_DICTIONARY = 64 * MEGABYTE  # of LZMA, allocated before a byte is unpacked
HEADER = re.compile(  # of an npy file as NumPy writes it, without objects and records
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|]\w{1,9})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,15},? ?)*)\), \} *\n",
    re.DOTALL,
)
LOCAL_HEADER = 30  # bytes of the fixed part of a member's header
COMPRESSIONS = (ZIP_STORED, ZIP_DEFLATED, ZIP_LZMA)


class ArrayType(NamedTuple):
    """Declared dtype of an array, and its shape in the letters of docs/reference/files.md."""

    dtype: str
    shape: str


ARRAYS = {
    "y": ArrayType("<i8", "N"),
    "index": ArrayType("<i8", "N"),
    "size_linf": ArrayType("<f4", "N"),
    "size_l2": ArrayType("<f4", "N"),
    "logits": ArrayType("<f4", "NC"),
    "aux": ArrayType("<f4", "NA"),
    "feature": ArrayType("<f4", "ND"),
    "x_adv": ArrayType("<f4", "MEHW"),
    "scores": ArrayType("<f4", "SN"),
    "correct": ArrayType("|b1", "N"),
}
HALF = {"feature": "<f2"}  # dtypes that a pack may store instead; they are read as floats
ALWAYS = ("y", "index", "size_linf", "size_l2")
NOT_IN_SCORES_ONLY = ("size_l2",)  # may be left out of a scores-only record
OUTPUTS = (("logits", "aux"), ("scores", "correct"))  # a record has one pair


def npz_bytes(arrays: Mapping[str, Tensor], compression: int = ZIP_DEFLATED) -> bytes:
    """Arrays as an npz file without time stamps, so that equal arrays give equal bytes."""
    members = {f"{name}.npy": _npy_bytes(values) for name, values in arrays.items()}
    unpacked = sum(map(len, members.values()))
    buffer = io.BytesIO()
    with ZipFile(buffer, "w") as file:
        for name, member in members.items():
            file.writestr(ZipInfo(name), member, compression)
    content = buffer.getvalue()
    too_dense = unpacked > _max_unpacked(len(content))  # the reader would raise
    return npz_bytes(arrays, ZIP_STORED) if too_dense else content


def _npy_bytes(values: Tensor) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, values.numpy(), allow_pickle=False)
    return buffer.getvalue()


def read_npz(content: bytes, path: Path, remedy: str) -> dict[str, Tensor]:
    """Arrays of a record; BadInput if the file is not such an npz file."""
    try:
        with ZipFile(io.BytesIO(content)) as file:
            _check_directory(file, content)
            return {
                member.filename.removesuffix(".npy"): _read_member(file, member)
                for member in file.infolist()
            }
    except BadInput as error:
        raise BadInput(f"{path} is damaged: {error}; {remedy}") from None
    except Exception:  # zipfile and its decompressors raise many kinds
        raise BadInput(f"{path} is damaged: it is not a file of arrays; {remedy}") from None


def check_arrays(arrays: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Raise BadInput if the arrays of a record lack one, or do not have the sizes of its metadata.

    y holds labels, index is without repetition, and no value is NaN.
    """
    outputs = next((pair for pair in OUTPUTS if set(pair) <= set(arrays)), OUTPUTS[0])
    scores = ("scores",) if metadata.get("scores") else ()
    optional = () if "logits" in arrays else NOT_IN_SCORES_ONLY
    always = [name for name in ALWAYS if name not in optional]
    if missing := [name for name in (*always, *outputs, *scores) if name not in arrays]:
        raise BadInput(f"the array {missing[0]!r} is missing")
    sizes = {"N": metadata["n"], "S": len(metadata.get("scores", ()))}
    for name, array in arrays.items():
        for letter, size in zip(ARRAYS[name].shape, array.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise BadInput(f"{name} has {size} where {sizes[letter]} are expected")
        if array.is_floating_point() and bool(array.isnan().any()):
            raise BadInput(f"{name} holds values that are not numbers")
    classes = sizes.get("C", math.inf)
    labels = arrays["y"]
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise BadInput("y holds a label that is no class")
    if len(arrays["index"].unique()) < len(labels):
        raise BadInput("index holds an image twice")


def _max_unpacked(size: int) -> int:
    """Bytes that a file of this size may unpack to."""
    return max(SMALL, MAX_RATIO * size)


def _check_directory(file: ZipFile, content: bytes) -> None:
    """Raise BadInput unless the members are known arrays whose sizes are in bounds."""
    members = file.infolist()
    names = [member.filename.removesuffix(".npy") for member in members]
    if unknown := [name for name in names if name not in ARRAYS]:
        raise BadInput(f"it holds {unknown[0][:40]!r}, which no record has")
    if len(set(names)) < len(names):
        raise BadInput("it holds an array twice")
    unpacked = sum(member.file_size for member in members)
    if unpacked > _max_unpacked(len(content)):
        raise BadInput(f"its arrays have {unpacked:,} bytes, too many for {len(content):,} packed")
    for member in members:
        if member.compress_type not in COMPRESSIONS:
            raise BadInput(f"{member.filename} is packed in an unknown way")
        if member.compress_type == ZIP_LZMA:
            _check_lzma(member, content)


def _check_lzma(member: ZipInfo, content: bytes) -> None:
    """Raise BadInput if a member asks for a large LZMA dictionary."""
    header = content[member.header_offset :][:LOCAL_HEADER]
    name_and_extra = int.from_bytes(header[26:28], "little") + int.from_bytes(
        header[28:30], "little"
    )
    start = member.header_offset + LOCAL_HEADER + name_and_extra
    # two bytes each of version and length, one of settings, four of the dictionary's size
    dictionary = int.from_bytes(content[start + 5 : start + 9], "little")
    if dictionary > MAX_DICTIONARY:
        raise BadInput(f"{member.filename} needs {dictionary:,} bytes to be unpacked")


def _read_member(file: ZipFile, member: ZipInfo) -> Tensor:
    """Read one array of the declared dtype, byte order, number of dimensions and size."""
    name = member.filename.removesuffix(".npy")
    dtype, letters = ARRAYS[name]
    with file.open(member) as packed:
        content = packed.read(member.file_size + 1)
    header = HEADER.match(content)
    if header is None:
        raise BadInput(f"{name} has no npy header")
    found, fortran, sizes = (group.decode() for group in header.groups())
    if found not in (dtype, HALF.get(name)):
        raise BadInput(f"{name} is of type {found} instead of {dtype}")
    data, shape = content[header.end() :], tuple(map(int, re.findall(r"\d+", sizes)))
    if len(shape) != len(letters):
        raise BadInput(f"{name} has {len(shape)} dimensions instead of {len(letters)}")
    if math.prod(shape) * np.dtype(found).itemsize != len(data):
        raise BadInput(f"{name} has {len(data):,} bytes, not those of its shape {shape}")
    if dtype == "|b1" and data.strip(b"\0\1"):
        raise BadInput(f"{name} holds values other than 0 and 1")
    order: Literal["F", "C"] = "F" if fortran == "True" else "C"
    values = np.frombuffer(bytearray(data), found).reshape(shape, order=order)
    return torch.from_numpy(values if found == dtype else values.astype(dtype))
