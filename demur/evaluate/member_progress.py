"""Progress of one attack of an ensemble: a bar on a terminal, otherwise a line now and then."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Self

from demur.progress import Bar, track

LINE_SECONDS = 30.0  # least time between two lines
BAR_SECONDS = 0.1  # least time between two updates of a bar


class MemberProgress:
    """Images that one attack has finished, and the time left, on standard output."""

    def __init__(self, name: str, total: int, verbose: bool) -> None:
        self.name, self.total, self.verbose = name, total, verbose
        self.finished = 0  # images
        self.started = self.written = monotonic()
        self._bar: Bar | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.verbose and sys.stdout.isatty():
            self._bar = self._stack.enter_context(Bar(self.name, transient=True))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def batch(self, images: int) -> Iterator[None]:
        """Count the block as the attack on some images; steps of the attack count in part."""
        with track(lambda share: self._show(self.finished + share * images)):
            yield
        self.finished += images
        self._show(self.finished)

    def _show(self, done: float) -> None:
        """Show that `done` images are finished; a batch under way counts in part."""
        now, seconds = monotonic(), LINE_SECONDS if self._bar is None else BAR_SECONDS
        if not self.verbose or not 0 < done < self.total or now - self.written < seconds:
            return
        self.written = now
        if self._bar is not None:
            self._bar.update(done, self.total, f"{int(done)}/{self.total} images")
            return
        left = (now - self.started) / done * (self.total - done)
        sys.stdout.write(f"{self.name}: {int(done)} of {self.total} images, {left:.0f} s left\n")
        sys.stdout.flush()
