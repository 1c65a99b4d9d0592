"""Progress of long work: how far an attack is within a batch, and one bar for everybody.

Attacks call `report` and `part`; without `track` these do nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 100  # columns of a terminal on which titles and bars have their full length
SHORT_TITLE, SHORT_BAR = 16, 5  # elsewhere, so that percent, times and note fit 80 columns


class Range(NamedTuple):
    """The part of the whole work that is under way, and who hears of it."""

    begin: float
    end: float
    on_share: Callable[[float], None]


_range: ContextVar[Range | None] = ContextVar("range of the work", default=None)


def ignore(*_arguments: object) -> None:
    """Do nothing: the default of callbacks."""


@contextmanager
def track(on_share: Callable[[float], None]) -> Iterator[None]:
    """Call `on_share` with the share of the block's work that is done, from 0 to 1."""
    token = _range.set(Range(0.0, 1.0, on_share))
    try:
        yield
    finally:
        _range.reset(token)


@contextmanager
def part(number: int, count: int) -> Iterator[None]:
    """Count the block as one of `count` equal parts of the work under way."""
    outer = _range.get()
    if outer is None:
        yield
        return
    length = (outer.end - outer.begin) / count
    begin = outer.begin + number * length
    token = _range.set(Range(begin, begin + length, outer.on_share))
    try:
        yield
    finally:
        _range.reset(token)


def report(done: int, total: int) -> None:
    """Say that `done` of `total` steps of the work under way are done."""
    if (now := _range.get()) is not None:
        now.on_share(now.begin + (now.end - now.begin) * done / total)


class Bar:
    """A progress bar that appears with its first update, on standard output or a console."""

    def __init__(
        self, title: str, console: "Console | None" = None, transient: bool = False
    ) -> None:
        from rich import get_console, progress  # here: attacks import this module

        console = console or get_console()
        narrow = console.width < WIDE
        if narrow and len(title) > SHORT_TITLE:
            title = f"{title[: SHORT_TITLE - 1]}…"
        bar_column = progress.BarColumn(SHORT_BAR if narrow else 40)
        percentage = progress.TextColumn("{task.percentage:3.0f}%")
        note = progress.TextColumn("{task.fields[note]}", markup=False)
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False), bar_column, percentage,
            progress.TimeElapsedColumn(), progress.TextColumn("left"),
            progress.TimeRemainingColumn(), note, console=console, transient=transient,
        )  # fmt: skip
        self.task = self.bar.add_task(title, total=None, note="")
        self.shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.shown:
            self.bar.stop()

    def update(self, done: float, total: int, note: str) -> None:
        if not self.shown:
            self.bar.start()
            self.shown = True
        self.bar.update(self.task, total=total, completed=done, note=note)
