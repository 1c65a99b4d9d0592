"""The authors' archive of a data set, downloaded, checked, and its expected files taken out.

fetch_archive(CIFAR10_FILES.archive, work, new, watch)     # new/data_batch_1.bin ...

A source that cannot deliver raises SourceFailed, so that the next may be tried; a full disk is no
fault of the source and goes through.
"""

import gzip
import hashlib
import shutil
import tarfile
import zlib
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.request import urlopen

from demur.data.check import Watch, file_md5
from demur.data.published import Archive, Layout

_CHUNK = 1 << 18
_PATIENCE = 20  # seconds without a byte


class SourceFailed(Exception):
    """A source did not deliver what was published; the reason, as the end of a sentence."""


def fetch_archive(archive: Archive, work: Path, new: Path, watch: Watch) -> None:
    """Put the layout's files into `new`, each with its published md5."""
    packed = work / "archive.tar.gz"
    md5 = _download(archive.url, packed, watch)
    if md5 != archive.md5:
        raise SourceFailed(f"its md5 is {md5}, not {archive.md5}")
    folder = PurePosixPath(archive.layout.folder)
    take_members(packed, {folder / part.name: new / part.name for part in archive.layout.parts})
    check_parts(archive.layout, new)


def take_members(packed: Path, wanted: dict[PurePosixPath, Path]) -> None:
    """Copy the wanted members of a .tar.gz to their targets; whatever else it holds is left."""
    try:
        with tarfile.open(packed, "r:gz") as tar:
            for member in tar:
                target = wanted.get(PurePosixPath(member.name))
                content = tar.extractfile(member) if target and member.isreg() else None
                if target and content:
                    with content, target.open("wb") as file:
                        shutil.copyfileobj(content, file)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error):
        raise SourceFailed("its archive is damaged") from None


def check_parts(layout: Layout, folder: Path) -> None:
    """Refuse a folder in which a file is missing or is not the one that was published."""
    for part in layout.parts:
        path = folder / part.name
        if not path.is_file():
            raise SourceFailed(f"it lacks {part.name}")
        md5 = file_md5(path)
        if md5 != part.md5:
            raise SourceFailed(f"the md5 of its {part.name} is {md5}, not {part.md5}")


def _download(url: str, path: Path, watch: Watch) -> str:
    """The md5 of what was downloaded to path."""
    md5 = hashlib.md5(usedforsecurity=False)
    try:
        response = urlopen(url, timeout=_PATIENCE)
    except (OSError, HTTPException, ValueError) as error:
        raise SourceFailed(_reason(error)) from None
    with response, path.open("wb") as file:
        length = response.headers.get("Content-Length", "")
        done, total = 0, int(length) if length.isdecimal() else 0
        while chunk := _chunk(response):
            file.write(chunk)
            md5.update(chunk)
            done += len(chunk)
            watch(done, max(done, total))
    if done < total:
        raise SourceFailed(f"the download broke off after {done} of {total} bytes")
    return md5.hexdigest()


def _chunk(response: IO[bytes]) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise SourceFailed(f"the download broke off: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What went wrong, in few words; urllib wraps the cause."""
    cause = getattr(error, "reason", None) or error
    words = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(str(words).split())[:200]
