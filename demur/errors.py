"""Errors in a user's request, as one sentence that says what to do instead.

The command prints the sentence and exits with code 2. The library raises it as a ValueError.
"""

import difflib
import errno
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from sysconfig import get_paths
from traceback import FrameSummary, extract_tb
from typing import Any

LONGEST = 80  # characters of user input that a message repeats
MOST_NAMES = 30  # known names that a message lists
MOST_CAUSES = 20  # errors that led to an error
LIBRARY_FOLDERS = (str(Path(__file__).parent), *{get_paths()[k] for k in ("stdlib", "purelib")})

NO_MEMORY = "there is not enough memory for this; use a smaller batch or net"
DISK_FULL = "the disk is full; free some space and run the same command again"
NO_FILES = "too many files are open; raise the limit (ulimit -n) and run the same command again"
NO_THREADS = "no thread could be started; end other programs or raise their limit (ulimit -u, -v)"
FILE_SIZE = "a file reached the limit on its size; raise it (ulimit -f) and run the command again"
LACKS_BY_NUMBER = {
    errno.ENOMEM: NO_MEMORY, errno.ENOSPC: DISK_FULL, errno.EDQUOT: DISK_FULL,
    errno.EFBIG: FILE_SIZE, errno.EMFILE: NO_FILES, errno.ENFILE: NO_FILES,
}  # fmt: skip
LACKS_BY_TEXT = {  # what libraries write; the loader of shared objects among them
    "allocate memory": NO_MEMORY, "not enough memory": NO_MEMORY, "out of memory": NO_MEMORY,
    "alloc_failed": NO_MEMORY, "bad_alloc": NO_MEMORY, "failed to map segment": NO_MEMORY,
    "storage size calculation overflowed": NO_MEMORY, "too many open files": NO_FILES,
    "start new thread": NO_THREADS, "no space left": DISK_FULL, "file too large": FILE_SIZE,
}  # fmt: skip


class BadInput(ValueError):
    """A wrong request, with a message of one sentence: what is wrong and what to write instead.

    Example:
        >>> from demur import PGD, BadInput, Linf
        >>> try:
        ...     PGD(Linf(8 / 255), steps=0)
        ... except BadInput as error:
        ...     message = str(error)
        >>> message
        'PGD.steps must be a whole number of at least 1, not 0'

    Raised where the machine has run out of memory, disk or descriptors, it says so instead.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(lack(sys.exception()) or message)


@contextmanager
def bad_input(sentence: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turn errors of these kinds into BadInput with this sentence; BadInput stays what it is."""
    try:
        yield
    except BadInput:
        raise
    except kinds:
        raise BadInput(sentence) from None


def import_optional(module: str, need: str, install: str) -> Any:
    """Import a module that not every installation has; BadInput says what needs it."""
    with bad_input(f"{need}; install it with pip install {install}", (ImportError,)):
        return import_module(module)


class NoGradientError(BadInput):
    """An objective or a score that has no gradient with respect to the images."""


class Diverged(BadInput):
    """A training run whose loss has diverged."""


def lack(error: BaseException | None) -> str | None:
    """What the machine ran out of, as a sentence, by an error or the errors that led to it."""
    sentence, left = None, MOST_CAUSES
    while error is not None and sentence is None and (left := left - 1):
        sentence, error = _lack(error), error.__cause__ or error.__context__
    return sentence


def _lack(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return NO_MEMORY
    if isinstance(error, OSError):
        return LACKS_BY_NUMBER.get(error.errno or 0)
    library = type(error).__module__.startswith(("safetensors", "onnxruntime"))
    text = str(error).lower() if library or isinstance(error, RuntimeError | ImportError) else ""
    return next((sentence for part, sentence in LACKS_BY_TEXT.items() if part in text), None)


def first_line(error: Exception) -> str:
    """The first line of an error message, or the type of the error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def user_frames(error: BaseException) -> list[FrameSummary]:
    """The lines of a traceback in a user's own files: not of demur, nor of installed packages."""
    frames = extract_tb(error.__traceback__)
    return [f for f in frames if not f.filename.startswith(("<", *LIBRARY_FOLDERS))]


def user_line(error: BaseException) -> str:
    """The last line of a user's own file in a traceback, as " at FILE:LINE"; or nothing."""
    return "".join(f" at {f.filename}:{f.lineno}" for f in user_frames(error)[-1:])


def blamed(error: Exception, what: str) -> str:
    """One sentence about an exception of a user's code: the object, the line, and the reason."""
    reason = shorten(f"{type(error).__name__}: {first_line(error)}")
    return f"{what} fails{user_line(error)} ({reason}); mend it and run the same again"


# control characters other than line breaks and tabs, and those that reverse the order of letters
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with control characters spelled out, as names may hold commands to a terminal."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shorten(text: str) -> str:
    """The text, cut to LONGEST characters."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def suggestion(word: str, known: Iterable[str]) -> str:
    """End of an error message that names the known words nearest to `word`, never itself."""
    words = sorted({*known} - {word})
    if not words:
        return "there is nothing to choose from"
    near = difflib.get_close_matches(word[:LONGEST], words, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    if len(words) > MOST_NAMES:
        return f"demur list shows the {len(words)} known names"
    return "known: " + ", ".join(words)
