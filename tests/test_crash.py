"""A process killed at any file operation leaves files that the next call can resume from.

A forked child counts its file operations and exits at the k-th without cleaning up, as under
kill -9. The parent then does the same work again and must end with the same files.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from demur.recipes import recipe
from demur.runs import Record, Run
from demur.runs.record import finished_record, read_record, record_path, write_record
from demur.runs.run import load_state, save_state, write_checkpoint, write_metrics
from demur.spec import digest
from tests.samples import EXHAUSTIVE

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

RECIPE = recipe("digits-standard")
VALUES = (0.7, 0.6)  # the first epoch is the best
WEIGHTS = {"w": torch.zeros(4)}
KILLED = 9  # exit status of the child
MAX_OPERATIONS = 200
STEP = 1 if EXHAUSTIVE else 5  # every fifth operation in the suite, all in `make exhaustive`


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count calls of fsync but write nothing to the disk: files outlive a killed process anyway."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def killed_at(operation: int, work: Callable[[], None]) -> bool:
    """Run the work in a child, killed before this file operation; return whether it got there."""
    child = os.fork()
    if child == 0:
        _exit_before(operation)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def _exit_before(operation: int) -> None:
    remaining = [operation]

    def count(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if remaining[0] == 0:
                os._exit(KILLED)
            remaining[0] -= 1
            return real(*args, **kwargs)

        return counted

    for name in ("open", "fsync", "replace", "unlink", "rename", "mkdir", "rmdir"):
        setattr(os, name, count(getattr(os, name)))


def made_up_record(label: str, digest: str) -> Record:
    """A record of two images, each misclassified."""
    arrays = {
        "y": torch.tensor([1, 0]), "index": torch.arange(2), "logits": torch.eye(2),
        "aux": torch.zeros(2, 0), "size_linf": torch.zeros(2), "size_l2": torch.zeros(2),
    }  # fmt: skip
    words = dict.fromkeys(("spec", "attack", "weights", "data", "created"), "made up")
    metadata = {"label": label, "split": "test", "digest": digest, "n": 2, **words}
    fixed = {"features": False, "images": 0, "thresholds": {}, "fitted": {}}
    return Record(arrays, metadata | fixed)


def train_with_made_up_epochs(folder: Path) -> None:
    with Run.claim(folder, RECIPE) as run:
        if run.has_weights:
            return
        state, _, best = load_state(run, WEIGHTS, WEIGHTS)
        while state.epoch < len(VALUES):
            tensors = {"w": torch.full((4,), float(state.epoch + 1))}
            value = VALUES[state.epoch]
            state = state.after(value, {"value": value})
            best = tensors if state.is_best else best
            write_metrics(run, state)
            save_state(run, state, tensors, best, None)
        last = {"w": torch.full((4,), float(state.epoch))}
        write_checkpoint(
            run, state, best, last, {"reason": "test", "recipe_digest": digest(RECIPE)}
        )


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_training_killed_at_any_file_operation_ends_with_the_same_files(tmp_path: Path) -> None:
    train_with_made_up_epochs(tmp_path / "expected")
    expected = files(tmp_path / "expected")
    assert set(expected) == {
        ".lock", "recipe.txt", "checkpoint.json", "model.safetensors", "metrics.jsonl",
        "last/recipe.txt", "last/checkpoint.json", "last/model.safetensors", "last/metrics.jsonl",
    }  # fmt: skip
    assert Run(tmp_path / "expected").checkpoint["epoch"] == 1
    assert Run(tmp_path / "expected" / "last").checkpoint["epoch"] == len(VALUES)
    operations = 0
    for operation in range(0, MAX_OPERATIONS, STEP):
        folder = tmp_path / str(operation)
        if not killed_at(operation, partial(train_with_made_up_epochs, folder)):
            break
        operations += STEP
        train_with_made_up_epochs(folder)
        train_with_made_up_epochs(folder)  # opening a finished run removes leftover files
        assert files(folder) == expected, f"killed at file operation {operation}"
    assert 40 < operations < MAX_OPERATIONS


def test_a_record_killed_at_any_file_operation_is_absent_or_complete(tmp_path: Path) -> None:
    record = made_up_record("pgd", "abcdef123456")
    operations = 0
    for operation in range(MAX_OPERATIONS):
        folder = tmp_path / str(operation)
        path = record_path(folder, "pgd", "test", record.digest)
        if not killed_at(operation, partial(write_record, path, record)):
            break
        operations += 1
        found = finished_record(folder, "test", record.digest)
        assert found is None or torch.equal(read_record(found).arrays["logits"], torch.eye(2))
        write_record(path, record)
        assert finished_record(folder, "test", record.digest) == path
        assert read_record(path).label == "pgd"
    assert 4 < operations < MAX_OPERATIONS
