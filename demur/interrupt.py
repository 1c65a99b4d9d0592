"""Ctrl-C ends a command with exit code 130 and one sentence, at any moment.

on_ctrl_c(lambda: "stopped before anything was done")

SystemExit is raised, so that files and locks are released. Where it would be lost, the process is
ended at once: a module that is being imported may catch every exception and go on.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130
UNWIND_SECONDS = 5.0  # until a process that caught SystemExit is ended
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


def on_ctrl_c(sentence: Callable[[], str]) -> None:
    """Install the handler of SIGINT; `sentence` is what it prints if it ends the process itself."""

    def end() -> None:
        cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
        sys.stderr.write(f"{cursor}demur: {sentence()}\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda *_: end())  # a second Ctrl-C does not wait
        if _is_importing(frame):
            end()
        timer = threading.Timer(UNWIND_SECONDS, end)
        timer.daemon = True
        timer.start()
        sys.exit(INTERRUPTED)

    signal.signal(signal.SIGINT, interrupt)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is among the calls that lead to a frame."""
    while frame is not None and frame.f_code.co_filename != _IMPORT_SYSTEM:
        frame = frame.f_back
    return frame is not None
