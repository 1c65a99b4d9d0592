"""Progress bars and messages on stderr, so that the output of --json stays valid."""

from demur import distributed
from demur.progress import Bar
from demur.report.terminal import VisibleConsole
from demur.training import Progress as TrainingProgress

console = VisibleConsole(stderr=True, highlight=False, markup=False, emoji=False)


def on_message(sentence: str) -> None:
    """Print a sentence literally, without line breaks."""
    console.print(sentence, soft_wrap=True)


def silence_other_ranks() -> None:
    """Under torchrun, print bars and messages from rank 0 only."""
    console.quiet = not distributed.current().is_leader


class TrainingBar(Bar):
    """Epochs done, time left, loss, and accuracy on validation images, clean/attacked."""

    def __init__(self, title: str) -> None:
        super().__init__(title, console)

    def on_progress(self, progress: TrainingProgress) -> None:
        note = f"{min(progress.epoch + 1, progress.epochs)}/{progress.epochs}"
        if progress.loss is not None:
            note += f" loss {progress.loss:.2f}"
        if progress.robust is not None and progress.clean is not None:
            note += f" val {100 * progress.clean:.0f}/{100 * progress.robust:.0f}%"
        done = progress.epoch * progress.steps + progress.step
        self.update(done, progress.epochs * progress.steps, note)


class CountBar(Bar):
    """A count of finished items, and the time left."""

    def __init__(self, title: str, unit: str) -> None:
        super().__init__(title, console)
        self.unit = unit

    def on_progress(self, done: int, total: int) -> None:
        self.update(done, total, f"{done}/{total} {self.unit}")
