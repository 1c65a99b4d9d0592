"""Downloads a data set from its authors and checks it; installs it complete or not at all.

    get(CIFAR10_FILES, Path("data"), on_progress=lambda done, total: None)

Files are prepared in a hidden folder beside the destination, which is renamed at the end and
removed on failure. The next `get` removes what a killed one left. The caller makes sure that only
one `get` runs in a folder at a time (the command holds a lock).
"""

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple
from urllib.request import urlopen

from demur.data.cifar import ProgressCallback, check_files, file_md5
from demur.data.published import Archive, Layout, Published, find
from demur.errors import BadInput

_CHUNK = 1 << 18
_TIMEOUT = 20  # seconds without a byte


class DownloadFailed(Exception):
    """The site did not deliver the published files; the message is the reason."""


class Fetched(NamedTuple):
    """Where a data set is and where it came from."""

    folder: Path
    url: str | None  # None if it was there already


def find_complete(published: Published, data_folder: Path) -> Fetched | None:
    """Return the data set in this folder if it is complete and undamaged, else None."""
    found = find(published, [data_folder])
    if found is None or check_files(published, found).damaged:
        return None
    return Fetched(found.folder, None)


def get(published: Published, data_folder: Path, on_progress: ProgressCallback) -> Fetched:
    """Download the data set into this folder unless it is there already.

    Raises:
        BadInput: The site does not deliver the published files, or a file has the folder's name.
    """
    existing = find_complete(published, data_folder)
    if existing:
        return existing
    archive = published.archive
    destination = data_folder / archive.layout.folder
    if destination.exists() and not destination.is_dir():
        raise BadInput(f"{destination} is in the way; move it or name another folder with --data")
    with _work_folder(published, data_folder) as work:
        staged = work / destination.name
        staged.mkdir()
        try:
            _fetch_archive(archive, work, staged, on_progress)
        except DownloadFailed as reason:
            raise BadInput(
                f"{published.title} could not be fetched and nothing was installed "
                f"({archive.url}: {reason}); fix that and run the command again, "
                f"or unpack that archive in {data_folder} yourself"
            ) from None
        _install(staged, destination)
    return Fetched(destination, archive.url)


@contextmanager
def _work_folder(published: Published, data_folder: Path) -> Iterator[Path]:
    """A hidden temporary folder inside `data_folder`, removed on exit."""
    prefix = f".get-{published.name}-"
    data_folder.mkdir(parents=True, exist_ok=True)
    for left_over in data_folder.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=data_folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _install(staged: Path, destination: Path) -> None:
    """Move the staged files to the destination: by one rename, or one by one if it exists."""
    for file in staged.iterdir():
        with file.open("rb+") as content:
            os.fsync(content.fileno())
    if not destination.exists():
        staged.rename(destination)
        return
    for file in staged.iterdir():  # replaces damaged files, leaves other files of the user
        file.replace(destination / file.name)


def _fetch_archive(
    archive: Archive, work: Path, staged: Path, on_progress: ProgressCallback
) -> None:
    """Download the archive and write its files into `staged`; check their published md5.

    Raises:
        DownloadFailed: The download fails or a file differs from the published one.
    """
    tar_path = work / "archive.tar.gz"
    md5 = _download(archive.url, tar_path, on_progress)
    if md5 != archive.md5:
        raise DownloadFailed(f"its md5 is {md5}, not {archive.md5}")
    folder = PurePosixPath(archive.layout.folder)
    _extract_members(
        tar_path, {folder / part.name: staged / part.name for part in archive.layout.parts}
    )
    _check_parts(archive.layout, staged)


def _extract_members(tar_path: Path, wanted: dict[PurePosixPath, Path]) -> None:
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
        raise DownloadFailed("its archive is damaged") from None


def _check_parts(layout: Layout, folder: Path) -> None:
    """Raise DownloadFailed if a file is missing or is not the published one."""
    for part in layout.parts:
        path = folder / part.name
        if not path.is_file():
            raise DownloadFailed(f"its {part.name} is missing")
        md5 = file_md5(path)
        if md5 != part.md5:
            raise DownloadFailed(f"the md5 of its {part.name} is {md5}, not {part.md5}")


def _download(url: str, path: Path, on_progress: ProgressCallback) -> str:
    """Download to `path`; return the md5."""
    md5 = hashlib.md5(usedforsecurity=False)
    try:
        response = urlopen(url, timeout=_TIMEOUT)
    except (OSError, HTTPException, ValueError) as error:
        raise DownloadFailed(_reason(error)) from None
    with response, path.open("wb") as file:
        length = response.headers.get("Content-Length", "")
        done, total = 0, int(length) if length.isdecimal() else 0
        while chunk := _read_chunk(response):
            file.write(chunk)
            md5.update(chunk)
            done += len(chunk)
            on_progress(done, max(done, total))
    if done < total:
        raise DownloadFailed(f"the download stopped after {done} of {total} bytes")
    return md5.hexdigest()


def _read_chunk(response: IO[bytes]) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise DownloadFailed(f"the download stopped: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The reason in one line; urllib wraps the cause."""
    cause = getattr(error, "reason", None) or error
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(str(text).split())[:200]
