"""Progress bars with the time left; on stderr, so that --json stays clean."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from demur import distributed
from demur.training import Progress as TrainingProgress

console = Console(stderr=True, highlight=False, markup=False, emoji=False)


def say(sentence: str) -> None:
    """Print a sentence as it is, on one line however long."""
    console.print(sentence, soft_wrap=True)


def silence_other_ranks() -> None:
    """Under torchrun only one process shows bars and says sentences."""
    console.quiet = not distributed.current().is_leader


class Bar:
    """A bar that appears with the first thing there is to show."""

    def __init__(self, words: str) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(),
            TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False), console=console,
        )  # fmt: skip
        self.task = self.bar.add_task(words, total=None, note="")
        self.shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown:
            self.bar.stop()

    def update(self, done: int, total: int, note: str) -> None:
        """Show how much is done."""
        if not self.shown:
            self.bar.start()
            self.shown = True
        self.bar.update(self.task, total=total, completed=done, note=note)


class TrainingBar(Bar):
    """Epochs done, time left, loss, and accuracy on the images that choose the epoch."""

    def watch(self, seen: TrainingProgress) -> None:
        """Show how far the training has come."""
        note = f"epoch {min(seen.epoch + 1, seen.epochs)}/{seen.epochs}"
        if seen.loss is not None:
            note += f"  loss {seen.loss:.3f}"
        if seen.robust is not None and seen.clean is not None:
            note += f"  {100 * seen.clean:.1f}% clean {100 * seen.robust:.1f}% attacked"
        done = seen.epoch * seen.steps + seen.step
        self.update(done, seen.epochs * seen.steps, note)


class CountBar(Bar):
    """Things done of how many, and time left."""

    def __init__(self, words: str, things: str) -> None:
        super().__init__(words)
        self.things = things

    def watch(self, done: int, total: int) -> None:
        """Show how many are done."""
        self.update(done, total, f"{done}/{total} {self.things}")
