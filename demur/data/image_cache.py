"""The cache of a user's own images: decoded, resized, divided, with digests of what is stored.

Source files are known by size, times of change and inode, and so are the files of the cache once
they are hashed: a file in the same state is not hashed again unless `verify` asks for it.
"""

import csv
import hashlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from demur.data.cifar import cache_folder
from demur.data.dataset import SPLITS
from demur.data.image_splits import (
    IN_TWO_SPLITS,
    Pairs,
    SplitResult,
    assign_splits,
    pair_sentence,
    report,
    similar_pairs,
)
from demur.data.sources import Source, file_stamp, open_source
from demur.errors import BadInput
from demur.files.checked_files import read_checked, read_json, write_json
from demur.files.image_files import resize_pixels
from demur.progress import ignore

VERSION = 3  # of what is stored: raised when decoding, splits or files change
FILES = ("pixels.npy", "y.npy", "data.csv")  # of a cache, beside cache.json
DIGESTS = "digests.json"  # of the files, with the state in which they were hashed
SETTLED = 10**9  # nanoseconds after a change until the time of another one surely differs
ROWS = 1024  # images copied at a time
THREADS = 4
MOST_COMPARED = 100_000  # images among which similar ones are looked for
ProgressCallback = Callable[[int, int], None]  # images done, images in all


@dataclass(frozen=True)
class CachedImages:
    """Resized images of a source, ordered by split, and what is known about them."""

    file: Path  # of the pixels
    pixels: NDArray[np.uint8]  # N, C, S, S, mapped from the file
    y: NDArray[np.int64]
    metadata: dict[str, Any]  # as _build writes it

    @staticmethod
    def open(folder: Path, metadata: dict[str, Any]) -> "CachedImages":
        """Map the files of a cache; they stay what they are if the cache is built again.

        Raises ValueError or another error if the files and the metadata do not fit together.
        """
        file = folder / "pixels.npy"
        pixels = np.lib.format.open_memmap(file, mode="c")
        y = np.load(folder / "y.npy", allow_pickle=False)
        count = sum(metadata["counts"][name] for name in SPLITS)
        shape = (count, metadata["channels"], metadata["size"], metadata["size"])
        types = [type(metadata[key]) for key in ("content", "leaks", "report", "classes")]
        right = types == [str, str, list, list] and y.dtype == np.int64 and y.shape == (count,)
        right = right and pixels.dtype == np.uint8 and pixels.shape == shape
        if not right or y.min() < 0 or y.max() >= len(metadata["classes"]):
            raise ValueError
        return CachedImages(file, pixels, y, metadata)

    @property
    def listing(self) -> str:
        """CSV with split, class, file, digest of the pixels, and a note."""
        path, digest = self.file.with_name("data.csv"), self.metadata["files"]["data.csv"]
        return read_checked(path, digest, "run the command again", sys.maxsize).decode()


def read_images(
    path: str, size: int, channels: int | None, on_progress: ProgressCallback = ignore,
    keep: bool = False, verify: bool = False,
) -> CachedImages:  # fmt: skip
    """Return the cached images of a path; decode and resize them first where they changed.

    Reading and building hold a lock, and a finished cache appears by one rename. A process that
    is killed leaves nothing that is taken for a cache. `channels` None is 1 where every image is
    grey; `keep` keeps images that are in several splits; `verify` hashes the sources and the
    cache, whatever their times of change say.
    """
    place = str(Path(path).resolve())
    is_npz = Path(path).suffix.lower() == ".npz" and Path(path).is_file()
    source = None if is_npz and not verify else open_source(path)  # arrays are slow to read
    stamp = file_stamp(Path(path)) if source is None or is_npz else source.stamp()
    sources = _source_digest(source) if source is not None and verify else None
    # channels may have been found by an earlier call with None, whose cache then serves
    for found in dict.fromkeys((None, channels)):
        key = hashlib.sha256(repr((VERSION, place, size, found, keep)).encode()).hexdigest()[:20]
        folder = cache_folder() / "images" / key
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):  # released even if the process dies
            cached = _stored(folder, stamp, sources)
            if cached is None and (found == channels or folder.exists()):
                source = source or open_source(path)
                cached = _build(source, folder, stamp, size, found, on_progress, keep)
        if cached is not None and channels in (None, cached.metadata["channels"]):
            break
    assert cached is not None
    return cached


def _stored(folder: Path, stamp: str, sources: str | None) -> CachedImages | None:
    """The cache of these files, or None if there is none or a byte of it or of them changed."""
    try:
        metadata = read_json(folder / "cache.json", "it is built again")
        if sources is not None:
            (folder / DIGESTS).unlink(missing_ok=True)
        if metadata["stamp"] != stamp or metadata["files"] != _file_digests(folder):
            return None
        same = sources is None or metadata["sources"] == sources
        return CachedImages.open(folder, metadata) if same else None
    except Exception:  # NumPy raises nearly anything for a damaged header
        return None


def _file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a cache but its metadata; hashed once for a state of the files."""
    state = ", ".join(file_stamp(folder / name) for name in FILES)
    with suppress(BadInput, OSError, KeyError):
        stored = read_json(folder / DIGESTS, "it is written again")
        if stored["state"] == state:
            return dict(stored["files"])
    digests = {}
    for name in FILES:
        with (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    changed = max((folder / name).stat().st_ctime_ns for name in FILES)
    if time.time_ns() - changed > SETTLED:
        with suppress(OSError):  # a cache that may only be read is hashed every time
            write_json(folder / DIGESTS, {"state": state, "files": digests})
    return digests


def _build(
    source: Source, folder: Path, stamp: str, size: int, channels: int | None,
    on_progress: ProgressCallback, keep: bool,
) -> CachedImages:  # fmt: skip
    """Decode every image, divide them, and put the finished folder in its place."""
    half = folder.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)  # of a process that was killed
    half.mkdir()
    try:
        decoded = half / "decoded.npy"
        found, faults, grey = _decode(source, decoded, size, channels == 1, on_progress)
        contents, digests, inputs = zip(*found, strict=True)
        if len(faults) == len(source.entries):
            name, reason = source.entries[0].name, faults[0]
            raise BadInput(f"no image can be read, for example {name}: {reason}")
        result = assign_splits(source.entries, digests, inputs, faults, keep)
        channels = channels or (1 if grey else 3)
        result = result._replace(similar=_write_arrays(source, result, half, channels))
        listing = _listing(source, digests, result)
        (half / "data.csv").write_text(listing, encoding="utf-8")
        metadata = {
            "stamp": stamp,
            "content": _content(source, digests, result),
            "classes": list(result.classes),
            "channels": channels,
            "size": size,
            "counts": {name: len(part) for name, part in result.chosen.items()},
            "report": report(source.entries, result, faults, source.ignored),
            "leaks": pair_sentence(IN_TWO_SPLITS, source.entries, result.leaks),
            "sources": _joined(contents),
            "files": _file_digests(half),
        }
        write_json(half / "cache.json", metadata)
        decoded.unlink()
        for name in FILES:  # to the disk, so that the rename never precedes their contents
            with (half / name).open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        half.replace(folder)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return CachedImages.open(folder, metadata)


def _decode(
    source: Source, file: Path, size: int, as_grey: bool, on_progress: ProgressCallback
) -> tuple[list[tuple[str, ...]], dict[int, str], bool]:
    """Write every image as uint8 N, 3, S, S; return digests, faults, and whether all are grey.

    There are three digests of each image: of its bytes, of its pixels, and of these resized.
    """
    total = len(source.entries)
    rows = np.lib.format.open_memmap(file, "w+", np.uint8, (total, 3, size, size))
    digests, faults, grey = list[tuple[str, ...]](), dict[int, str](), True

    def read(i: int) -> tuple[tuple[str, ...], NDArray[np.uint8] | str]:
        digest = ""
        try:
            content = source.content(i)
            digest = hashlib.sha256(content).hexdigest()
            pixels = source.decode(i, content)
        except BadInput as error:
            return (digest, "", ""), str(error)
        sha256 = hashlib.sha256(repr(pixels.shape).encode())
        sha256.update(np.ascontiguousarray(pixels).data)
        row = np.moveaxis(resize_pixels(pixels, size, size), 2, 0)
        seen = hashlib.sha256((_luma(row[None]) if as_grey else row).tobytes())
        return (digest, sha256.hexdigest(), seen.hexdigest()), row

    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, total, ROWS):
            chunk = range(start, min(start + ROWS, total))
            for i, (three, found) in zip(chunk, pool.map(read, chunk), strict=True):
                digests.append(three)
                if isinstance(found, str):
                    faults[i] = found
                else:
                    rows[i] = found
                    grey = grey and bool((found == found[:1]).all())
                on_progress(i + 1, total)
    return digests, faults, grey


def _source_digest(source: Source) -> str:
    def content_digest(i: int) -> str:
        try:
            return hashlib.sha256(source.content(i)).hexdigest()
        except BadInput:  # as in a build
            return ""

    with ThreadPoolExecutor(THREADS) as pool:
        return _joined(pool.map(content_digest, range(len(source.entries))))


def _joined(digests: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _write_arrays(source: Source, result: SplitResult, half: Path, channels: int) -> Pairs:
    """Write pixels and labels of all splits, one after the other; return images that look alike."""
    order = np.array([i for _, i in result.ordered])
    decoded = np.load(half / "decoded.npy", mmap_mode="r", allow_pickle=False)
    shape = (len(order), channels, *decoded.shape[2:])
    pixels = np.lib.format.open_memmap(half / "pixels.npy", "w+", np.uint8, shape)
    for start in range(0, len(order), ROWS):
        block = decoded[order[start : start + ROWS]]
        pixels[start : start + ROWS] = block if channels == 3 else _luma(block)
    pixels.flush()
    label = {name: position for position, name in enumerate(result.classes)}
    y = np.array([label[source.entries[i].label] for i in order], dtype=np.int64)
    np.save(half / "y.npy", y, allow_pickle=False)
    if len(order) > MOST_COMPARED:
        return []
    split = np.repeat(np.arange(len(SPLITS)), [len(result.chosen[name]) for name in SPLITS])
    pairs = similar_pairs(pixels, split * len(label) + y)
    return [(int(order[i]), int(order[j])) for i, j in pairs]


def _luma(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Grey value of RGB pixels (N, 3, H, W), as Pillow computes it."""
    weights = np.array([19595, 38470, 7471], dtype=np.int64)[:, None, None]
    grey = (block * weights).sum(1, keepdims=True) + 0x8000 >> 16
    return np.asarray(grey, dtype=np.uint8)


def _listing(source: Source, digests: Sequence[str], result: SplitResult) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("split", "class", "file", "pixels", "note"))
    similar = {i: f"looks like {source.entries[j].name}" for i, j in result.similar}
    rows = [(name, i, similar.get(i, "")) for name, i in result.ordered]
    for name, i, note in [*rows, *(("", i, note) for i, note in sorted(result.notes.items()))]:
        entry = source.entries[i]
        table.writerow((name, entry.label, entry.name, digests[i], note))
    return text.getvalue().encode("utf-8", "replace").decode()


def _content(source: Source, digests: Sequence[str], result: SplitResult) -> str:
    sha256 = hashlib.sha256(repr(result.classes).encode("utf-8", "replace"))
    for name, i in result.ordered:
        sha256.update(repr((name, source.entries[i].label, digests[i])).encode())
    return sha256.hexdigest()
