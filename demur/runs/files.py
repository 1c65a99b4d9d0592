"""Files that are whole or absent: atomic writes, digests, and one writer at a time.

digest = write_tensors(path, tensors)      # a kill at any moment leaves the old file or the new
tensors = read_tensors(path, digest)       # a changed byte is noticed and named
write_story(path, {"epoch": 3});  read_story(path)       # JSON that carries its own digest
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from demur.errors import BadInput

HALF_WRITTEN = ".*.tmp"
PATIENCE = 0.2  # seconds between two tries at a lock
STANDARD_OUTPUT = 1
LONGEST = 50  # letters of a name that are kept while it is written, beside what is added to it
_held: set[Path] = set()  # folders this process is the writer of


def write_bytes(path: Path, content: bytes) -> str:
    """Put content at path in one move; its digest.

    A link stays and what it leads to is written; pipes and devices take the bytes as they come.
    """
    if is_stream(path):
        _pour(path, content)
    else:
        _replace(path, content)
    return content_digest(content)


def is_stream(path: Path) -> bool:
    """Whether something is there that no file can be put in the place of."""
    return path.exists() and (not path.is_file() or _is_our_output(path))


def move(path: Path, folder: Path) -> None:
    """Put a whole file into another folder, to stay."""
    path.replace(folder / path.name)
    _sync_folder(folder)


@contextmanager
def put_in_place(target: Path) -> Iterator[tuple[Path, Path]]:
    """A folder to be made, and where it will be once it is whole; a link to there stays.

    One process at a time. What is there is replaced, and comes back if that is cut short.
    """
    place = target.resolve()
    if not place.name:
        raise BadInput(f"{target} is in the way; name a folder that is not there yet")
    beside = place.with_name(f".{place.name}.making")
    half, old = beside / "half", beside / "old"
    with exclusive_lock(beside):
        try:
            _settle(place, half, old)
            yield half, place
            if place.exists():
                place.replace(old)
            half.replace(place)
        finally:
            _settle(place, half, old)
            (beside / ".lock").unlink(missing_ok=True)
            with suppress(OSError):  # something of somebody else's is there
                beside.rmdir()


def _settle(place: Path, half: Path, old: Path) -> None:
    """Take away what is not whole; what was put aside comes back if nothing is in its place."""
    if old.exists() and not place.exists():
        old.replace(place)
    for left in (half, old):
        shutil.rmtree(left, ignore_errors=True)


def content_digest(content: bytes) -> str:
    """64 hex digits over the bytes of a file."""
    return hashlib.sha256(content).hexdigest()


def write_text(path: Path, text: str) -> str:
    """Put text at path in one move; its digest."""
    return write_bytes(path, text.encode())


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Put tensors at path as safetensors in one move; the file's digest."""
    return write_bytes(path, bytes_of({k: v.contiguous().cpu() for k, v in tensors.items()}))


def write_json(path: Path, metadata: dict[str, Any]) -> None:
    """Put a JSON document at path in one move, with a digest of itself inside."""
    write_text(
        path, json.dumps(metadata | {"metadata_digest": _story_digest(metadata)}, indent=2) + "\n"
    )


def read_checked(path: Path, digest: str, mend: str) -> bytes:
    """The file's bytes, refused when they are not those that were written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"{path} is missing; {mend}") from None
    _compare(path, digest, content_digest(content), mend)
    return content


def read_tensors(path: Path, digest: str, mend: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, after checking its digest."""
    return tensors_of(read_checked(path, digest, mend))


def read_json(path: Path, mend: str) -> dict[str, Any]:
    """A JSON document, after checking the digest it carries."""
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        expected = metadata.pop("metadata_digest")
    except FileNotFoundError:
        raise BadInput(f"{path} is missing; {mend}") from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise BadInput(f"{path} is damaged: it carries no digest; {mend}") from None
    _compare(path, str(expected), _story_digest(metadata), mend)
    checked: dict[str, Any] = metadata
    return checked


def sweep(folder: Path) -> None:
    """Delete what writes that were cut short have left in a folder."""
    for half in folder.glob(HALF_WRITTEN):
        half.unlink(missing_ok=True)


def refuse(folder: Path) -> None:
    """What a second writer is told, unless it may wait."""
    raise BadInput(f"another process is writing {folder}; wait until it has ended")


@contextmanager
def exclusive_lock(folder: Path, taken: Callable[[Path], None] = refuse) -> Iterator[None]:
    """Hold the folder's lock; the system drops it if the process dies.

    Where another process holds it, `taken` is called, which refuses or lets this one wait.
    """
    place = folder.resolve()
    if place in _held:
        yield
        return
    with _opened(folder / ".lock") as file:
        if not _locked(file.fileno()):
            taken(folder)
            while not _locked(file.fileno()):
                time.sleep(PATIENCE)
        _held.add(place)
        try:
            yield
        finally:
            _held.discard(place)


def _is_our_output(path: Path) -> bool:
    """Whether that is the file our standard output goes to, as /dev/stdout may be."""
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(STANDARD_OUTPUT))
    return False


def _pour(path: Path, content: bytes) -> None:
    """Write into what is there; into our own output after what was said before."""
    if _is_our_output(path):
        sys.stdout.flush()
        with os.fdopen(os.dup(STANDARD_OUTPUT), "wb") as stream:
            stream.write(content)
    else:
        with path.open("wb") as stream:
            stream.write(content)


def _replace(path: Path, content: bytes) -> None:
    """Write beside the file, then put it there; what goes wrong is said of the file itself."""
    place = Path(os.path.realpath(path))
    if place.is_symlink():  # it leads in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    half = place.with_name(f".{place.name[:LONGEST]}.{os.getpid()}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with half.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        half.replace(place)
    except BaseException as error:
        with suppress(OSError):
            half.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(half)):
            error.filename = str(path)
        raise
    _sync_folder(place.parent)


def _compare(path: Path, expected: str, found: str, mend: str) -> None:
    if found != expected:
        raise BadInput(
            f"{path} is damaged: expected digest {expected[:16]}, found {found[:16]}; {mend}"
        )


def _story_digest(metadata: dict[str, Any]) -> str:
    return content_digest(json.dumps(metadata, sort_keys=True).encode())


def _sync_folder(folder: Path) -> None:
    """Make a move outlast a power cut, before anything that relied on the old name is deleted."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _opened(lock: Path) -> IO[str]:
    """The file, in a folder that a writer who has just ended may be deleting."""
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            return lock.open("a+")
        except FileNotFoundError:
            continue
        except OSError as error:
            error.filename = str(lock.parent)  # which is what the user has named
            raise


def _locked(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
