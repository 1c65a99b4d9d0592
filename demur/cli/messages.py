"""Messages of a command that fails or is stopped: one sentence that says what to do."""

import errno
import os
import re
import shlex
import sys
from io import TextIOWrapper

from demur.errors import BadInput

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_MEMORY = (
    "allocate memory", "not enough memory", "out of memory", "alloc_failed",
    "storage size calculation overflowed",
)  # fmt: skip

# Commands that store what they finish, so that the same command resumes.
RESUMABLE = (
    "train", "retrofit", "attack", "table", "figure", "adaptive", "distortion", "calibrate", "demo",
)  # fmt: skip


def error_message(error: Exception) -> str | None:
    """Return why a command failed, in one sentence; None for a bug in demur."""
    if isinstance(error, BadInput):
        return str(error)
    if _is_out_of_memory(error):
        return "there is not enough memory for this; use a smaller batch or net"
    if isinstance(error, OSError):
        return _os_error_message(error)
    return _usage_message(error)


def _os_error_message(error: OSError) -> str:
    if error.errno in DISK_FULL:
        return "the disk is full; free some space and run the same command again"
    where = f"{error.filename}: " if error.filename else ""
    reason = (error.strerror or str(error)).lower()
    if error.errno == errno.EIO:
        return f"{where}{reason}; check the disk and run the same command again"
    return f"{where}{reason}; name another path or change its permissions"


def stop_message(words: list[str]) -> str:
    """Return what is stored of a command that the user stopped, and how to resume it.

    `words` are the words after `demur` on the command line.
    """
    if words[:1] == ["explore"]:  # Ctrl-C is how it ends
        return "stopped"
    again = shlex.join(["demur", *words])
    if _resumes(words) and "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun
        return "stopped; the same torchrun command resumes from what was finished"
    if _resumes(words):
        return f"stopped; the same command resumes from what was finished: {again}"
    return "stopped; nothing is stored, and the same command starts from the beginning"


def _resumes(words: list[str]) -> bool:
    """Return whether the command stores each part of its work as it finishes it."""
    if "bench" in words[:1]:
        return "--check" in words and any(word.startswith(("-o", "--out")) for word in words)
    if "audit" in words[:1]:
        return any(word.startswith("--state") for word in words)
    if any(word.startswith("--kept") for word in words):  # reads only
        return False
    return bool(words) and words[0] in RESUMABLE


def _usage_message(error: Exception) -> str | None:
    """Return typer's message about a wrong command line as one sentence; None for other errors."""
    if not hasattr(error, "format_message"):
        return None
    message = " ".join(error.format_message().split()).rstrip(".")
    message = re.sub(r"\. Did you mean (.*)\?$", r" (did you mean \1?)", message)
    message = re.sub(r"\(Possible options: (.*)\)$", r"(did you mean \1?)", message)
    return f"{message[:1].lower()}{message[1:]}; see {_command_of(error)} -h"


def is_help(error: Exception) -> bool:
    """Return whether typer raised this after printing the help of a group named alone."""
    return type(error).__name__ == "NoArgsIsHelpError"


def _command_of(error: Exception) -> str:
    """Return the command whose usage is wrong: the first word where typer does not say which."""
    if context := getattr(error, "ctx", None):
        return str(context.command_path)
    return " ".join(["demur", *(word for word in sys.argv[1:2] if not word.startswith("-"))])


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, by the type of the error or by torch's message."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in message for part in NO_MEMORY)


def replace_unencodable() -> None:
    """Print characters that the terminal cannot encode as question marks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
