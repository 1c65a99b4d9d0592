"""What a killed training resumes from: weights and momentum after a whole epoch.

state/now.json names the files and their digests and is written last, so it always describes a
state that is whole. All randomness is a function of (seed, step), so nothing else is kept.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from demur.runs.files import read_tensors, write_story, write_tensors, write_text
from demur.runs.run import Run
from demur.runs.story import Story, told_in

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Best:
    """The epoch chosen so far; without a value it is the last one, whatever it can do."""

    epoch: int
    value: float | None


@dataclass(frozen=True)
class State:
    """How far a training has come; epoch 0 is a fresh start."""

    epoch: int = 0
    best: Best | None = None
    lines: tuple[str, ...] = ()  # of metrics.jsonl

    def after(self, value: float | None, line: dict[str, Any]) -> "State":
        """The state after one more epoch, which is the best one if its value says so."""
        epoch, best = self.epoch + 1, self.best
        if best is None or best.value is None or value is None or value > best.value:
            best = Best(epoch, value)
        line = {"epoch": epoch, **line, "chosen_so_far": best.epoch}
        return State(epoch, best, (*self.lines, json.dumps(line)))

    @property
    def is_best(self) -> bool:
        """Whether the last epoch is the one chosen so far."""
        return self.best is not None and self.best.epoch == self.epoch


def write_metrics(run: Run, state: State) -> None:
    """One line an epoch."""
    write_text(run.path / "metrics.jsonl", "\n".join(state.lines) + "\n")


def load_state(run: Run) -> tuple[State, Tensors, Tensors]:
    """The last kept state, its tensors and the best weights; a fresh state and none of either."""
    now = run.path / "state" / "now.json"
    if not now.exists():
        return State(), {}, {}
    mend = _mend(now)
    story = told_in(now, mend)
    chosen = Story(now, story["best"], mend)
    state = State(story["epoch"], Best(chosen["epoch"], chosen["value"]), tuple(story["lines"]))
    best = read_tensors(now.parent / story["best_file"], story["best_digest"], mend)
    return state, read_tensors(now.parent / story["file"], story["digest"], mend), best


def kept_plan(run: Run) -> dict[str, Any] | None:
    """How the kept state was computed, if there is one."""
    now = run.path / "state" / "now.json"
    if not now.exists():
        return None
    plan: dict[str, Any] | None = told_in(now, _mend(now)).get("plan")
    return plan


def keep(
    run: Run, state: State, tensors: Tensors, best: Tensors, plan: dict[str, Any] | None = None
) -> None:
    """Put a state on disk, with how it was computed; an earlier one stays until it is whole."""
    assert state.best is not None
    folder = run.path / "state"
    file, best_file = (
        f"{kind}-{epoch:04d}.safetensors"
        for kind, epoch in (("epoch", state.epoch), ("best", state.best.epoch))
    )
    story = {
        "epoch": state.epoch,
        "file": file,
        "digest": write_tensors(folder / file, tensors),
        "best": vars(state.best),
        "best_file": best_file,
        "best_digest": write_tensors(folder / best_file, best),
        "lines": list(state.lines),
        "plan": plan,
    }
    write_story(folder / "now.json", story)
    _forget(folder, keep={file, best_file, "now.json"})


def finish(run: Run, state: State, best: Tensors, about: dict[str, Any]) -> None:
    """Put the chosen weights in place; chosen.json is written last and ends the run."""
    assert state.best is not None, "a run has at least one epoch"
    write_metrics(run, state)
    (run.path / "chosen.json").unlink(missing_ok=True)  # of weights that have been deleted
    digest = write_tensors(run.path / "model.safetensors", best)
    story = {"epoch": state.best.epoch, "value": state.best.value, "weights": digest, **about}
    write_story(run.path / "chosen.json", story)
    shutil.rmtree(run.path / "state", ignore_errors=True)


def _mend(now: Path) -> str:
    return f"delete the folder {now.parent} to train from the start"


def _forget(folder: Path, keep: set[str]) -> None:
    """Drop files of earlier epochs and of writes that were cut short."""
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink(missing_ok=True)
