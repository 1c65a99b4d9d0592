"""Progress bars with the time left; on stderr, so that --json stays clean."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from demur.train import Progress as TrainingProgress

console = Console(stderr=True, highlight=False)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"), console=console,
    )  # fmt: skip


class TrainingBar:
    """Epochs done, time left, loss and val accuracy."""

    def __init__(self, name: str) -> None:
        self.bar = _bar()
        self.task = self.bar.add_task(f"train {name}", total=None, note="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def watch(self, seen: TrainingProgress) -> None:
        """Show how far the training has come."""
        note = f"epoch {min(seen.epoch + 1, seen.epochs)}/{seen.epochs}"
        if seen.loss is not None and seen.val_robust is not None and seen.val_clean is not None:
            note += f"  loss {seen.loss:.3f}  val {100 * seen.val_clean:.1f}% clean"
            note += f" {100 * seen.val_robust:.1f}% attacked"
        self.bar.update(
            self.task,
            total=seen.epochs * seen.steps,
            completed=seen.epoch * seen.steps + seen.step,
            note=note,
        )


class AttackBar(TrainingBar):
    """Images attacked and time left."""

    def __init__(self, name: str) -> None:
        self.bar = _bar()
        self.task = self.bar.add_task(f"attack {name}", total=None, note="")

    def count(self, done: int, total: int) -> None:
        """Show how many images are done."""
        self.bar.update(self.task, total=total, completed=done, note=f"{done}/{total} images")
