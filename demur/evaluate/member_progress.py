"""Progress of one attack of an ensemble: a bar on a terminal, otherwise a line now and then."""

import sys
from contextlib import ExitStack
from time import monotonic
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 30.0  # least time between two lines


class MemberProgress:
    """Images that one attack has finished, and the time left, on standard output."""

    def __init__(self, name: str, total: int, verbose: bool) -> None:
        self.name, self.total, self.verbose = name, total, verbose
        self.done, self.started = 0, monotonic()
        self.written = self.started
        self._bar: Progress | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.verbose and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(),
                TextColumn("{task.completed}/{task.total} images"), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(), transient=True,
            )  # fmt: skip
            self._stack.enter_context(self._bar)
            self._bar.add_task(self.name, total=self.total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def advance(self, images: int) -> None:
        """Report that some more images are finished."""
        self.done += images
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], images)
            return
        now = monotonic()
        if self.verbose and self.done < self.total and now - self.written >= LINE_SECONDS:
            self.written = now
            left = (now - self.started) / self.done * (self.total - self.done)
            sys.stdout.write(
                f"{self.name}: {self.done} of {self.total} images, {left:.0f} s left\n"
            )
            sys.stdout.flush()
