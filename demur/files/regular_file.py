"""Bounded reads of regular files: a pipe never blocks and a large file is never loaded.

content = read_regular_file(Path("recipe.txt"), limit=MEGABYTE, remedy="write one")
"""

import os
import stat
from pathlib import Path

from demur.errors import BadInput

MEGABYTE = 1 << 20
FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # each on some systems only
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def read_regular_file(path: Path, limit: int, remedy: str) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Raises:
        BadInput: The file is missing, too large, or a pipe, a folder or a device; the message ends
            with `remedy`.
    """
    try:
        # a plain open of a pipe waits for a writer
        handle = os.open(path, os.O_RDONLY | FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"{path} is missing; {remedy}") from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
            raise BadInput(f"{path} is {kind} and not a file; {remedy}")
        if found.st_size > limit:
            raise BadInput(
                f"{path} has {found.st_size:,} bytes and may have at most {limit:,}; {remedy}"
            )
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(handle)


def raise_unreadable(error: OSError) -> None:
    """Raise BadInput for a folder that os.walk cannot read, which it would skip in silence."""
    reason = (error.strerror or "it cannot be read").lower()
    raise BadInput(f"{error.filename}: {reason}; change its permissions or remove it")
