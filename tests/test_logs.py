"""Logs of a training: TensorBoard, MLflow and Weights & Biases with the real packages, and own."""

import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from demur import BadInput, recipe, train
from demur.training.logs import Log, Logs, TrackerLog
from tests.conftest import TINIEST, Command

LINES = [
    json.dumps({"epoch": epoch, "loss": 1 / epoch, "val_robust": 0.25, "note": None})
    for epoch in (1, 2, 3)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder; what a log sets in the environment is taken back."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    (tmp_path / "my run's").mkdir()
    (tmp_path / "my run's" / "recipe.txt").write_text("Recipe()\n")
    return tmp_path / "my run's"


def test_a_tracker_gets_each_epoch_once_and_all_of_them_after_a_restart(folder: Path) -> None:
    seen: list[Any] = []

    def begin(text: str) -> Any:
        seen.append(text)
        return (lambda epoch, values: seen.append((epoch, sorted(values)))), lambda: seen.append(0)

    def make(path: Path) -> Log:
        return TrackerLog(path, begin)

    logs = Logs((make,), folder)
    assert not seen  # nothing is written before the first epoch
    for count in (1, 2):
        logs.write(LINES[:count])
    logs.close()
    names = ["loss", "val_robust"]
    assert seen == ["Recipe()", (1, names), (2, names), 0]
    seen.clear()
    Logs((make,), folder).write(LINES)
    assert seen == ["Recipe()", (1, names), (2, names), (3, names)]


def test_a_log_that_fails_is_left_out_with_its_line(folder: Path) -> None:
    said: list[str] = []
    good: list[int] = []

    def broken(path: Path) -> Log:
        def write(lines: Sequence[str]) -> None:
            raise ConnectionError("the server went away")

        return write

    def kept(path: Path) -> Log:
        return lambda lines: good.append(len(lines))

    logs = Logs((broken, kept, "csv"), folder, said.append)
    for count in (1, 2):
        logs.write(LINES[:count])
    logs.close()
    assert good == [1, 2]
    assert len(said) == 1
    assert "broken fails at " in said[0] and "test_logs.py:" in said[0]
    assert "the server went away" in said[0] and "training goes on without it" in said[0]
    assert (folder / "metrics.csv").read_text().count("\n") == 3


def test_a_full_disk_is_no_fault_of_a_log(folder: Path) -> None:
    def full(path: Path) -> Log:
        def write(lines: Sequence[str]) -> None:
            raise OSError(28, "No space left on device")

        return write

    with pytest.raises(OSError, match="No space"):
        Logs((full,), folder).write(LINES)


def test_a_training_with_a_log_of_the_users_own(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "from pathlib import Path\n\n\ndef log(folder):\n    def write(lines):\n"
    module += "        (folder / 'own.txt').write_text(lines[-1])\n\n    return write\n"
    (tmp_path / "ownlog.py").write_text(
        module + "\n\ndef bad(folder):\n    return folder.nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = [*(c for c in TINIEST if not c.startswith("attack")), "width=2"]
    code, _, err = command(
        "train", "digits-standard", *changes, "--out", "r", "--log", "ownlog:log"
    )
    assert code == 0, err
    assert json.loads(Path("r/own.txt").read_text())["epoch"] == 1
    for name, sentence in (
        ("ownlog:bad", "the log ownlog:bad fails at"),
        ("ownlog:lg", "did you mean log?"),
        ("mlfow", "did you mean mlflow?"),
    ):
        code, _, err = command("train", "digits-standard", *changes, "--out", "n", "--log", name)
        assert (code, sentence in err) == (2, True), err
        assert not Path("n").exists()
    with pytest.raises(BadInput, match="nothing"):
        train(recipe("digits-standard", changes), Path("n"), logs=(lambda path: path.nothing,))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("log", "package"), [("mlflow", "mlflow.tracking"), ("wandb", "wandb")])
def test_a_missing_package_is_named(
    folder: Path, log: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=f"pip install 'demur\\[{log}\\]'"):
        Logs((log,), folder)


# ------------------------------------------------ the real packages


def test_mlflow_writes_into_the_run_folder(folder: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    logs = Logs(("mlflow",), folder)
    assert not (folder / "mlruns").exists()
    for count in (1, 2, 3):
        logs.write(LINES[:count])
    logs.close()
    client = tracking.MlflowClient((folder / "mlruns").resolve().as_uri())
    place = client.get_experiment_by_name("demur").experiment_id
    (run,) = client.search_runs([place])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert (run.info.status, run.data.tags["recipe"]) == ("FINISHED", "Recipe()")


def test_an_mlflow_server_that_does_not_answer_is_said_before_the_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow.tracking")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{port}")
    with pytest.raises(BadInput, match="MLFLOW_TRACKING_URI does not answer") as error:
        Logs(("mlflow",), folder)
    assert "secret" not in str(error.value)


def test_wandb_writes_an_offline_run(folder: Path) -> None:
    pytest.importorskip("wandb")
    logs = Logs(("wandb",), folder)
    logs.write(LINES[:1])
    logs.write(LINES)
    logs.close()
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"val_robust" in content and b"Recipe()" in content
    assert logs.logs  # nothing failed
