"""Progress bars and messages on stderr, so that the output of --json stays valid."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from demur import distributed
from demur.training import Progress as TrainingProgress

console = Console(stderr=True, highlight=False, markup=False, emoji=False)


def on_message(sentence: str) -> None:
    """Print a sentence literally, without line breaks."""
    console.print(sentence, soft_wrap=True)


def silence_other_ranks() -> None:
    """Under torchrun, print bars and messages from rank 0 only."""
    console.quiet = not distributed.current().is_leader


class Bar:
    """A progress bar that appears with its first update."""

    def __init__(self, title: str) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(),
            TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False), console=console,
        )  # fmt: skip
        self.task = self.bar.add_task(title, total=None, note="")
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
        """Show `done` of `total` steps and a note."""
        if not self.shown:
            self.bar.start()
            self.shown = True
        self.bar.update(self.task, total=total, completed=done, note=note)


class TrainingBar(Bar):
    """Epochs done, time left, loss, and accuracy on the validation images."""

    def on_progress(self, progress: TrainingProgress) -> None:
        """Show the progress of a training."""
        note = f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}"
        if progress.loss is not None:
            note += f"  loss {progress.loss:.3f}"
        if progress.robust is not None and progress.clean is not None:
            note += f"  {100 * progress.clean:.1f}% clean {100 * progress.robust:.1f}% attacked"
        done = progress.epoch * progress.steps + progress.step
        self.update(done, progress.epochs * progress.steps, note)


class CountBar(Bar):
    """A count of finished items, and the time left."""

    def __init__(self, title: str, unit: str) -> None:
        super().__init__(title)
        self.unit = unit

    def on_progress(self, done: int, total: int) -> None:
        """Show `done` of `total` items."""
        self.update(done, total, f"{done}/{total} {self.unit}")
