"""What a killed training resumes from: weights and momentum after the last whole epoch.

state/now.json names the files and their digests and is written last, so it always describes a
state that is whole. All randomness is a function of (seed, step), so nothing else is kept.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from demur.runs.files import read_story, read_tensors, write_story, write_tensors, write_text
from demur.runs.run import Run

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Best:
    """The weights chosen so far."""

    epoch: int
    value: float | None  # None where the last epoch is taken, whatever it can do
    file: str
    digest: str


@dataclass(frozen=True)
class State:
    """How far a training has come; epoch 0 is a fresh start."""

    epoch: int = 0
    best: Best | None = None
    lines: tuple[str, ...] = ()  # of metrics.jsonl


def load_state(run: Run) -> tuple[State, Tensors]:
    """The last whole state and its tensors; a fresh state and none where there is no file."""
    now = run.path / "state" / "now.json"
    if not now.exists():
        return State(), {}
    mend = f"delete the folder {now.parent} to train from the start"
    story = read_story(now, mend)
    best = Best(**story["best"])
    state = State(story["epoch"], best, tuple(story["lines"]))
    read_tensors(now.parent / best.file, best.digest, mend)
    return state, read_tensors(now.parent / story["file"], story["digest"], mend)


def advanced(run: Run, state: State, tensors: Tensors, weights: Tensors, value: float | None,
             line: dict[str, Any]) -> State:  # fmt: skip
    """The state after one more epoch, on disk before it is returned; without a value it is best."""
    folder, epoch = run.path / "state", state.epoch + 1
    best = state.best
    if best is None or best.value is None or value is None or value > best.value:
        file = f"best-{epoch:04d}.safetensors"
        best = Best(epoch, value, file, write_tensors(folder / file, weights))
    line = {"epoch": epoch, **line, "chosen_so_far": best.epoch}
    state = replace(state, epoch=epoch, best=best, lines=(*state.lines, json.dumps(line)))
    file = f"epoch-{epoch:04d}.safetensors"
    story = {
        "epoch": epoch,
        "file": file,
        "digest": write_tensors(folder / file, tensors),
        "best": vars(best),
        "lines": list(state.lines),
    }
    write_story(folder / "now.json", story)
    write_text(run.path / "metrics.jsonl", "\n".join(state.lines) + "\n")
    _forget(folder, keep={file, best.file, "now.json"})
    return state


def finish(run: Run, state: State, about: dict[str, Any]) -> None:
    """Put the chosen weights in place; chosen.json is written last and ends the run."""
    best, folder = state.best, run.path / "state"
    assert best is not None, "a run has at least one epoch"
    mend = f"delete the folder {folder} to train from the start"
    weights = read_tensors(folder / best.file, best.digest, mend)
    write_text(run.path / "metrics.jsonl", "\n".join(state.lines) + "\n")
    (run.path / "chosen.json").unlink(missing_ok=True)  # of weights that have been deleted
    digest = write_tensors(run.path / "model.safetensors", weights)
    story = {"epoch": best.epoch, "value": best.value, "weights": digest, **about}
    write_story(run.path / "chosen.json", story)
    shutil.rmtree(folder, ignore_errors=True)


def _forget(folder: Path, keep: set[str]) -> None:
    """Drop files of earlier epochs and of writes that were cut short."""
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink(missing_ok=True)
