"""Small CIFAR files with random content in every published format, from a fixed seed."""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from demur.data.cifar import Layout, Part, Published

BATCH = 20


class Content(NamedTuple):
    """The images of one file."""

    pixels: NDArray[np.uint8]  # N, 3072
    y: NDArray[np.uint8]


Writer = Callable[[Content, Layout], bytes]


def contents(published: Published) -> list[Content]:
    """The content of each file of a small data set, independent of the format."""
    files = []
    for part in range(len(published.layouts[0].parts)):
        noise = hashlib.shake_256(f"{published.name} {part}".encode()).digest(BATCH * 3073)
        records = np.frombuffer(noise, np.uint8).reshape(BATCH, 3073)
        y = records[:, 0] % published.classes
        y[:2] = 0, published.classes - 1
        files.append(Content(records[:, 1:], y))
    return files


def as_binary(content: Content, layout: Layout) -> bytes:
    return np.concatenate([content.y[:, None], content.pixels], 1).tobytes()


def as_python(content: Content, layout: Layout) -> bytes:
    """The published format: the opcodes that Python 2 and its numpy wrote."""
    count, raw = len(content.y), content.pixels.tobytes()
    return b"".join([
        b"\x80\x02}(", _string(b"data"),
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n", _tuple(0), _string(b"b"),
        b"\x87R(K\x01", _tuple(count, 3072),
        b"cnumpy\ndtype\n", _string(b"u1"), b"K\x00K\x01\x87R(K\x03", _string(b"|"),
        b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T", struct.pack("<i", len(raw)), raw,
        b"tb", _string(layout.label_key.encode()),
        b"](", b"".join(b"K" + bytes([label]) for label in content.y.tolist()), b"eu.",
    ])  # fmt: skip


def _string(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def _tuple(*numbers: int) -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", number) for number in numbers) + b"t"


WRITERS: dict[str, Writer] = {"binary": as_binary, "python": as_python}


def small(published: Published) -> Published:
    """The data set with 20 images a file and the checksums of the files from `write`."""
    small_contents = contents(published)

    def shrink(layout: Layout) -> Layout:
        files = [WRITERS[layout.form](content, layout) for content in small_contents]
        parts = [
            Part(part.name, BATCH, hashlib.md5(file).hexdigest())
            for part, file in zip(layout.parts, files, strict=True)
        ]
        return replace(layout, parts=tuple(parts))

    layouts = tuple(shrink(layout) for layout in published.layouts)
    count = BATCH * (len(layouts[0].parts) - 1)
    return replace(published, layouts=layouts, held_out=(count - 10, 4, 6))


def layout_of(published: Published, form: str) -> Layout:
    """The layout of a format."""
    (layout,) = (layout for layout in published.layouts if layout.form == form)
    return layout


def write(published: Published, data_folder: Path, form: str) -> Path:
    """Write a small data set in one format; return the folder of its files."""
    layout = layout_of(published, form)
    folder = data_folder / layout.folder
    folder.mkdir(parents=True)
    for part, content in zip(layout.parts, contents(published), strict=True):
        (folder / part.name).write_bytes(WRITERS[form](content, layout))
    return folder


def use_small_set(dataset: Any, monkeypatch: Any, data_folder: Path) -> None:
    """Make a data set class read a small data set, written to `data_folder`."""
    published = small(dataset.published)
    monkeypatch.setattr(dataset, "published", published)
    write(published, data_folder, published.layouts[0].form)
