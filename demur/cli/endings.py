"""How a command ends when the system refuses: one sentence that says what to do."""

import errno

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_MEMORY = (
    "allocate memory", "not enough memory", "out of memory", "alloc_failed",
    "storage size calculation overflowed",
)  # fmt: skip


def reason_of_the_system(error: OSError | MemoryError | RuntimeError) -> str | None:
    """Why the system did not do it; None where the fault is our own."""
    if _lacks_memory(error):
        return "there is not enough memory for this; make the batch or the net smaller"
    if not isinstance(error, OSError):
        return None
    if error.errno in NO_ROOM:
        return "the disk is full; what was finished is kept: make room and give the command again"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{(error.strerror or str(error)).lower()}; name another place or allow this one"


def _lacks_memory(error: OSError | MemoryError | RuntimeError) -> bool:
    """Whether memory ran out, by the kind of the error or by the words of torch."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    told = str(error).lower()
    return isinstance(error, MemoryError) or any(words in told for words in NO_MEMORY)
