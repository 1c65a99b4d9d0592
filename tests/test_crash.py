"""A process that dies at any file operation whatever leaves nothing that a second call cannot mend.

A forked child counts its file operations and leaves at the k-th without any clean-up, as under
kill -9; the parent then does the same work again and must end with the same files.
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
from demur.runs.state import finish, keep, load_state, write_metrics
from demur.spec import digest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

RECIPE = recipe("digits-standard")
VALUES = (0.5, 0.7, 0.6)  # the second epoch is the best
KILLED = 9
MOST = 200


def dies_at(place: int, work: Callable[[], None]) -> bool:
    """Whether the work reached its `place`-th file operation, where it died."""
    child = os.fork()
    if child == 0:
        _count_down(place)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def _count_down(place: int) -> None:
    left = [place]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os._exit(KILLED)
            left[0] -= 1
            return real(*args, **kwargs)

        return operation

    for name in ("open", "fsync", "replace", "unlink", "rename", "mkdir", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def train_with_made_up_epochs(folder: Path) -> None:
    with Run.claim(folder, RECIPE) as run:
        if run.finished:
            return
        state, _, best = load_state(run)
        while state.epoch < len(VALUES):
            tensors = {"w": torch.full((4,), float(state.epoch + 1))}
            value = VALUES[state.epoch]
            state = state.after(value, {"value": value})
            best = tensors if state.is_best else best
            write_metrics(run, state)
            keep(run, state, tensors, best)
        last = {"w": torch.full((4,), float(state.epoch))}
        finish(run, state, best, last, {"reason": "test", "recipe_digest": digest(RECIPE)})


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_training_that_dies_anywhere_ends_as_if_it_had_not(tmp_path: Path) -> None:
    train_with_made_up_epochs(tmp_path / "whole")
    expected = files(tmp_path / "whole")
    assert set(expected) == {
        ".lock", "recipe.txt", "checkpoint.json", "model.safetensors", "metrics.jsonl", "last/recipe.txt",
        "last/checkpoint.json", "last/model.safetensors", "last/metrics.jsonl",
    }  # fmt: skip
    assert Run(tmp_path / "whole").checkpoint["epoch"] == 2
    assert Run(tmp_path / "whole" / "last").checkpoint["epoch"] == len(VALUES)
    places = 0
    for place in range(MOST):
        folder = tmp_path / str(place)
        if not dies_at(place, partial(train_with_made_up_epochs, folder)):
            break
        places += 1
        train_with_made_up_epochs(folder)
        train_with_made_up_epochs(folder)  # a finished run is tidied by the next that opens it
        assert files(folder) == expected, f"died at file operation {place}"
    assert 40 < places < MOST


def test_a_record_that_dies_anywhere_is_absent_or_whole(tmp_path: Path) -> None:
    arrays = {"y": torch.zeros(3, dtype=torch.int64), "logits": torch.eye(3)}
    record = Record(arrays, {"digest": "abcdef123456", "split": "test", "label": "pgd"})
    places = 0
    for place in range(MOST):
        folder = tmp_path / str(place)
        path = record_path(folder, "pgd", "test", record.digest)
        if not dies_at(place, partial(write_record, path, record)):
            break
        places += 1
        made = finished_record(folder, "test", record.digest)
        assert made is None or torch.equal(read_record(made).arrays["logits"], torch.eye(3))
        write_record(path, record)
        assert finished_record(folder, "test", record.digest) == path
        assert read_record(path).label == "pgd"
    assert 4 < places < MOST
