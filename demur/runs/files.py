"""Files that are whole or absent: atomic writes, digests, and one writer at a time.

    digest = write_tensors(path, tensors)      # a kill at any moment leaves the old file or the new
    tensors = read_tensors(path, digest)       # a changed byte is noticed and named
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from demur.errors import BadInput


def write_bytes(path: Path, content: bytes) -> str:
    """Put content at path in one move; its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        with half.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except BaseException:
        with suppress(OSError):
            half.unlink()
        raise
    return content_digest(content)


def content_digest(content: bytes) -> str:
    """64 hex digits over the bytes of a file."""
    return hashlib.sha256(content).hexdigest()


def write_text(path: Path, text: str) -> str:
    """Put text at path in one move; its digest."""
    return write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> str:
    """Put a JSON document at path in one move; its digest."""
    return write_text(path, json.dumps(value, indent=2) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Put tensors at path as safetensors in one move; the file's digest."""
    return write_bytes(path, bytes_of({k: v.contiguous().cpu() for k, v in tensors.items()}))


def read_checked(path: Path, digest: str) -> bytes:
    """The file's bytes, refused when they are not those that were written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"{path} is missing; make it again with the command that made it") from None
    found = content_digest(content)
    if found != digest:
        raise BadInput(
            f"{path} is damaged: expected digest {digest[:16]}, found {found[:16]}; "
            "delete it and make it again"
        )
    return content


def read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, after checking its digest."""
    return tensors_of(read_checked(path, digest))


def read_json(path: Path) -> Any:
    """A JSON document; BadInput when it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise BadInput(f"{path} is damaged: it is not JSON; delete it and make it again") from None


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or refuse at once; the system drops it if the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        if not _locked(file.fileno()):
            raise BadInput(f"another process is writing {folder}; wait for it or use --out")
        yield


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
