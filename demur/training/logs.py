"""Logs of a training besides metrics.jsonl: CSV, TensorBoard, MLflow, Weights & Biases, your own.

A log of your own is a function of the run folder that returns a function of the lines of
metrics.jsonl. A resumed training begins a new run of a tracker, with all epochs so far.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from demur.errors import (
    BadInput,
    bad_input,
    blamed,
    first_line,
    import_optional,
    lack,
    shorten,
    suggestion,
    user_line,
)
from demur.files.checked_files import write_text
from demur.progress import ignore
from demur.spec.importing import import_object, is_import_path

# Called with the lines of metrics.jsonl so far. Its method `close`, if any, is called at the end.
Log = Callable[[Sequence[str]], object]
MakeLog = Callable[[Path], Log]  # of the run folder, in which nothing may be written yet
Add = Callable[[int, dict[str, float]], object]  # stores the numbers of an epoch
PROJECT = "demur"  # the experiment or project of a tracker
SERVER = "MLFLOW_TRACKING_URI"  # environment variable; without it MLflow writes a folder
MLFLOW_DEFAULTS = {  # MLflow would retry for minutes, and its newest versions refuse folders
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}  # fmt: skip


def scalars(lines: Sequence[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each epoch with its numbers."""
    for line in map(json.loads, lines):
        epoch = line.pop("epoch")
        yield epoch, {k: value for k, value in line.items() if isinstance(value, int | float)}


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
    package = import_optional("torch.utils.tensorboard", need, "'demur[tensorboard]'")
    writer: Any = None

    def write(lines: Sequence[str]) -> None:
        nonlocal writer
        ((epoch, values),) = scalars(lines[-1:])
        writer = writer or package.SummaryWriter(str(folder / "tensorboard"), purge_step=epoch)
        for name, value in values.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()

    return write


class TrackerLog:
    """A run of a tracker, which `begin` starts at the first epoch that is written."""

    def __init__(
        self, folder: Path, begin: Callable[[str], tuple[Add, Callable[[], object]]]
    ) -> None:
        self.folder, self.begin, self.done = folder, begin, 0
        self.close: Callable[[], object] = ignore

    def __call__(self, lines: Sequence[str]) -> None:
        if not self.done:
            recipe = (self.folder / "recipe.txt").read_text().strip()
            self.add, self.close = self.begin(recipe)
        for epoch, values in scalars(lines[self.done :]):
            self.add(epoch, values)
        self.done = len(lines)


def mlflow_log(folder: Path) -> Log:
    """mlruns/, or a run on the server of MLFLOW_TRACKING_URI, which must answer at the start."""
    for name, value in MLFLOW_DEFAULTS.items():
        os.environ.setdefault(name, value)
    package = import_optional("mlflow.tracking", "the log needs MLflow", "'demur[mlflow]'")
    if address := os.environ.get(SERVER):
        with bad_input(
            f"the MLflow server of {SERVER} does not answer; start it, or unset the variable to "
            "write into the run folder"
        ):
            package.MlflowClient(address).search_experiments(max_results=1)

    def begin(recipe: str) -> tuple[Add, Callable[[], object]]:
        client = package.MlflowClient(address or (folder / "mlruns").resolve().as_uri())
        found = client.get_experiment_by_name(PROJECT)
        place = found.experiment_id if found else client.create_experiment(PROJECT)
        tags = {"recipe": recipe[:5000]}  # the length that every version takes
        run = client.create_run(place, run_name=folder.name, tags=tags).info.run_id

        def add(epoch: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                client.log_metric(run, name, value, step=epoch)

        return add, lambda: client.set_terminated(run)

    return TrackerLog(folder, begin)


def wandb_log(folder: Path) -> Log:
    """wandb/: an offline run of Weights & Biases, for `wandb sync`."""
    wandb = import_optional("wandb", "the log needs Weights & Biases", "'demur[wandb]'")

    def begin(recipe: str) -> tuple[Add, Callable[[], object]]:
        run = wandb.init(
            project=PROJECT, name=folder.name, dir=str(folder), mode="offline",
            config={"recipe": recipe}, reinit="finish_previous",
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        return (lambda epoch, values: run.log(values, step=epoch)), run.finish

    return TrackerLog(folder, begin)


LOGS: dict[str, MakeLog] = {
    "csv": csv_log, "tensorboard": tensorboard_log, "mlflow": mlflow_log, "wandb": wandb_log,
}  # fmt: skip


class Logs:
    """The logs of a training; one that fails is left out with a message.

    Raises BadInput for an unknown log, one whose package is missing, or a server that does not
    answer, before anything is written.
    """

    def __init__(
        self, logs: Sequence[str | MakeLog], folder: Path,
        on_message: Callable[[str], object] = ignore,
    ) -> None:  # fmt: skip
        self.on_message, self.logs = on_message, dict[str, Log]()
        for one in logs:
            name = str(getattr(one, "__qualname__", one))
            try:
                self.logs[name] = _maker(one)(folder)
            except BadInput:
                raise
            except Exception as error:  # of a user's function
                raise BadInput(blamed(error, f"the log {name}")) from error

    def write(self, lines: Sequence[str]) -> None:
        """Write the lines of metrics.jsonl so far to every log."""
        for name, log in [*self.logs.items()]:
            self._call(name, log, lines)

    def close(self) -> None:
        """End the logs after the last epoch."""
        for name, log in [*self.logs.items()]:
            self._call(name, getattr(log, "close", ignore))

    def _call(self, name: str, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:  # a server that went away must not cost a training
            if lack(error):
                raise
            del self.logs[name]
            reason = shorten(f"{type(error).__name__}: {first_line(error)}")
            line = user_line(error)
            self.on_message(f"the log {name} fails{line} ({reason}); training goes on without it")


def _maker(log: str | MakeLog) -> MakeLog:
    if not isinstance(log, str):
        return log
    if log not in LOGS and is_import_path(log):
        made: MakeLog = import_object(log)
        return made
    if log not in LOGS:
        raise BadInput(f"no log is called {log!r}; {suggestion(log, LOGS)}, or write MODULE:NAME")
    return LOGS[log]
