"""Download, check and unpack the authors' archive of a data set.

fetch_archive(CIFAR10_FILES.archive, work, staged, on_progress)     # staged/data_batch_1.bin ...

A source that fails raises SourceFailed, so that the caller can try the next one. A full disk is not
the source's failure: its OSError propagates.
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

from demur.data.check import ProgressCallback, file_md5
from demur.data.published import Archive, Layout

_CHUNK = 1 << 18
_TIMEOUT = 20  # seconds without a byte


class SourceFailed(Exception):
    """A source did not deliver the published files; the message is the reason."""


def fetch_archive(
    archive: Archive, work: Path, staged: Path, on_progress: ProgressCallback
) -> None:
    """Download the archive and write its files into `staged`; check their published md5.

    Raises:
        SourceFailed: The download fails or a file differs from the published one.
    """
    tar_path = work / "archive.tar.gz"
    md5 = _download(archive.url, tar_path, on_progress)
    if md5 != archive.md5:
        raise SourceFailed(f"its md5 is {md5}, not {archive.md5}")
    folder = PurePosixPath(archive.layout.folder)
    extract_members(
        tar_path, {folder / part.name: staged / part.name for part in archive.layout.parts}
    )
    check_parts(archive.layout, staged)


def extract_members(tar_path: Path, wanted: dict[PurePosixPath, Path]) -> None:
    """Copy the wanted members of a .tar.gz to their targets and ignore all others."""
    try:
        with tarfile.open(tar_path, "r:gz") as tar:
            for member in tar:
                target = wanted.get(PurePosixPath(member.name))
                content = tar.extractfile(member) if target and member.isreg() else None
                if target and content:
                    with content, target.open("wb") as file:
                        shutil.copyfileobj(content, file)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error):
        raise SourceFailed("its archive is damaged") from None


def check_parts(layout: Layout, folder: Path) -> None:
    """Raise SourceFailed if a file is missing or is not the published one."""
    for part in layout.parts:
        path = folder / part.name
        if not path.is_file():
            raise SourceFailed(f"its {part.name} is missing")
        md5 = file_md5(path)
        if md5 != part.md5:
            raise SourceFailed(f"the md5 of its {part.name} is {md5}, not {part.md5}")


def _download(url: str, path: Path, on_progress: ProgressCallback) -> str:
    """Download to `path`; return the md5."""
    md5 = hashlib.md5(usedforsecurity=False)
    try:
        response = urlopen(url, timeout=_TIMEOUT)
    except (OSError, HTTPException, ValueError) as error:
        raise SourceFailed(_reason(error)) from None
    with response, path.open("wb") as file:
        length = response.headers.get("Content-Length", "")
        done, total = 0, int(length) if length.isdecimal() else 0
        while chunk := _read_chunk(response):
            file.write(chunk)
            md5.update(chunk)
            done += len(chunk)
            on_progress(done, max(done, total))
    if done < total:
        raise SourceFailed(f"the download stopped after {done} of {total} bytes")
    return md5.hexdigest()


def _read_chunk(response: IO[bytes]) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise SourceFailed(f"the download stopped: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The reason in one line; urllib wraps the cause."""
    cause = getattr(error, "reason", None) or error
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(str(text).split())[:200]
