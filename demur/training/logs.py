"""Logs of a training besides metrics.jsonl: metrics.csv and TensorBoard's event files.

    logs = open_logs(("csv", "tensorboard"), run.path)
    for write in logs:
        write(lines)            # of metrics.jsonl, after every epoch

A resumed training continues its logs: the CSV is written again, events of lost epochs are purged.
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from demur.errors import BadInput, import_optional, suggestion
from demur.files.atomic import write_text

Log = Callable[[Sequence[str]], None]  # of the lines of metrics.jsonl so far


def csv_log(folder: Path) -> Log:
    """metrics.csv: one row per epoch, written whole each time."""

    def write(lines: Sequence[str]) -> None:
        rows = [json.loads(line) for line in lines]
        text = io.StringIO()
        table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(folder / "metrics.csv", text.getvalue())

    return write


def tensorboard_log(folder: Path) -> Log:
    """tensorboard/: a scalar per column of the metrics."""
    need = "the log needs TensorBoard"
    tensorboard = import_optional("torch.utils.tensorboard", need, "'demur[tensorboard]'")
    writer: Any = None

    def write(lines: Sequence[str]) -> None:
        nonlocal writer
        latest = json.loads(lines[-1])
        epoch = latest.pop("epoch")
        writer = writer or tensorboard.SummaryWriter(folder / "tensorboard", purge_step=epoch)
        for name, value in latest.items():
            if isinstance(value, int | float):
                writer.add_scalar(name, value, epoch)
        writer.flush()

    return write


LOGS: dict[str, Callable[[Path], Log]] = {"csv": csv_log, "tensorboard": tensorboard_log}


def open_logs(names: Sequence[str], folder: Path) -> list[Log]:
    """Logs by name in a run folder; raise BadInput for an unknown or missing kind."""
    for name in names:
        if name not in LOGS:
            raise BadInput(f"no log is called {name!r}; {suggestion(name, LOGS)}")
    return [LOGS[name](folder) for name in dict.fromkeys(names)]
