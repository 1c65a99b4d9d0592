"""Logs of a training besides metrics.jsonl: metrics.csv and TensorBoard's event files.

    logs = open_logs(("csv", "tensorboard"), run.path)
    for log in logs:
        log.write(lines)        # of metrics.jsonl, after every epoch

A resumed training continues its logs: the CSV is written again, events of lost epochs are purged.
"""

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demur.errors import BadInput, suggestion
from demur.files.atomic import write_text

NUMBERS = (int, float)


class TrainingLog(ABC):
    """A file or folder that follows a training epoch by epoch."""

    @abstractmethod
    def write(self, lines: Sequence[str]) -> None:
        """Log the epochs so far, given as the lines of metrics.jsonl."""

    @abstractmethod
    def close(self) -> None:
        """Finish the log."""


class CsvLog(TrainingLog):
    """metrics.csv: one row per epoch, written whole each time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.csv"

    def write(self, lines: Sequence[str]) -> None:
        rows = [json.loads(line) for line in lines]
        text = io.StringIO()
        table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(self.path, text.getvalue())

    def close(self) -> None:
        pass


class TensorBoardLog(TrainingLog):
    """tensorboard/: a scalar per column of the metrics."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self.writer: Any = None
        _summary_writer()  # raises now if it is not installed

    def write(self, lines: Sequence[str]) -> None:
        latest = json.loads(lines[-1])
        epoch = latest.pop("epoch")
        if self.writer is None:
            self.writer = _summary_writer()(str(self.folder), purge_step=epoch)
        for name, value in latest.items():
            if isinstance(value, NUMBERS):
                self.writer.add_scalar(name, value, epoch)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


LOGS: dict[str, type[CsvLog] | type[TensorBoardLog]] = {
    "csv": CsvLog,
    "tensorboard": TensorBoardLog,
}


def open_logs(names: Sequence[str], folder: Path) -> list[TrainingLog]:
    """Logs by name in a run folder; raise BadInput for an unknown or missing kind."""
    for name in names:
        if name not in LOGS:
            raise BadInput(f"no log is called {name!r}; {suggestion(name, LOGS)}")
    return [LOGS[name](folder) for name in dict.fromkeys(names)]


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise BadInput(
            "the log needs TensorBoard; install it with pip install 'demur[tensorboard]'"
        ) from None
    return SummaryWriter
