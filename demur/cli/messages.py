"""How a command ends that is not carried out: one sentence that says what to do."""

import errno
import os
import re
import shlex
import sys
from io import TextIOWrapper

from demur.errors import BadInput

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_MEMORY = (
    "allocate memory", "not enough memory", "out of memory", "alloc_failed",
    "storage size calculation overflowed",
)  # fmt: skip

# commands whose trainings and records are kept part by part
KEEPING = ("train", "attack", "table", "adaptive", "distortion", "calibrate", "demo")


def sentence_for(error: Exception) -> str | None:
    """Why a command was not carried out; None where the fault is our own."""
    if isinstance(error, BadInput):
        return str(error)
    if _lacks_memory(error):
        return "there is not enough memory for this; make the batch or the net smaller"
    if isinstance(error, OSError):
        return _refusal_of_the_system(error)
    return _refusal_of_words(error)


def _refusal_of_the_system(error: OSError) -> str:
    if error.errno in NO_ROOM:
        return "the disk is full; what was finished is kept: make room and give the command again"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{(error.strerror or str(error)).lower()}; name another place or allow this one"


def after_a_stop(words: list[str]) -> str:
    """What is left of a command that the user has stopped, and how to go on."""
    again = shlex.join(["demur", *words])
    if _goes_on(words) and "TORCHELASTIC_RUN_ID" in os.environ:  # by which torchrun is known
        return "stopped; the same torchrun command goes on from what was finished"
    if _goes_on(words):
        return f"stopped; the same command goes on from what was finished: {again}"
    return "stopped; nothing is kept, and the same command begins anew"


def _goes_on(words: list[str]) -> bool:
    """Whether the command keeps what it has finished as it goes."""
    if "bench" in words[:1]:
        grows = "rejection" in words[1:2] or "--check" in words
        return grows and any(word.startswith(("-o", "--out")) for word in words)
    if any(word.startswith("--kept") for word in words):
        return False
    return bool(words) and words[0] in KEEPING


def _refusal_of_words(error: Exception) -> str | None:
    """What typer does not take among the words of a command; None for any other error."""
    if not hasattr(error, "format_message"):
        return None
    told = " ".join(error.format_message().split()).rstrip(".")
    told = re.sub(r"\. Did you mean (.*)\?$", r" (did you mean \1?)", told)
    told = re.sub(r"\(Possible options: (.*)\)$", r"(did you mean \1?)", told)
    return f"{told[:1].lower()}{told[1:]}; see {_command_of(error)} -h"


def is_help(error: Exception) -> bool:
    """Whether it stands for a group of commands that was named alone, and has told its help."""
    return type(error).__name__ == "NoArgsIsHelpError"


def _command_of(error: Exception) -> str:
    """The command whose words are wrong; where typer does not say which, the first word."""
    if context := getattr(error, "ctx", None):
        return str(context.command_path)
    return " ".join(["demur", *(word for word in sys.argv[1:2] if not word.startswith("-"))])


def _lacks_memory(error: Exception) -> bool:
    """Whether memory ran out, by the kind of the error or by the words of torch."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    told = str(error).lower()
    spoken = isinstance(error, RuntimeError) and any(words in told for words in NO_MEMORY)
    return spoken or isinstance(error, MemoryError)


def show_all_letters() -> None:
    """Let a letter that the terminal does not know be a question mark, and not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
