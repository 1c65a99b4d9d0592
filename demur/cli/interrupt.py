"""Ctrl-C ends a command with exit code 130 and one sentence, at any moment.

SystemExit is raised, so that files and locks are released. Where it would be lost, the process is
ended at once: a module that is being imported may catch every exception and go on.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
UNWIND_SECONDS = 5.0  # until a process that caught SystemExit is ended
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


class Interrupt:
    """Handler of SIGINT; `sentence` is what it prints if it ends the process itself."""

    def __init__(self, sentence: Callable[[], str]) -> None:
        self.sentence, self.received = sentence, False
        self.timer = threading.Timer(UNWIND_SECONDS, self.end)
        self.timer.daemon = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received or _is_importing(frame):  # a second Ctrl-C does not wait
            self.end()
        self.received = True
        self.timer.start()
        sys.exit(INTERRUPTED)

    def end(self) -> None:
        """Print the sentence and end the process without cleaning up, as kill -9 would."""
        if sys.stderr.isatty():
            getattr(sys.stderr, "rich_proxied_file", sys.stderr).write(SHOW_CURSOR)
        sys.stderr.write(f"demur: {self.sentence()}\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)


@contextmanager
def ctrl_c(sentence: Callable[[], str]) -> Iterator[Interrupt]:
    """Handle SIGINT inside the block."""
    interrupt = Interrupt(sentence)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        interrupt.timer.cancel()
        signal.signal(signal.SIGINT, before)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is among the calls that lead to a frame."""
    while frame is not None and frame.f_code.co_filename != _IMPORT_SYSTEM:
        frame = frame.f_back
    return frame is not None
