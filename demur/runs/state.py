"""What a killed training resumes from: weights and momentum after a whole epoch.

state/now.json names the files and their digests and is written last, so it always describes a
state that is whole. All randomness is a function of (seed, step), so nothing else is kept.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from demur.runs.files import read_tensors, write_json, write_tensors, write_text
from demur.runs.metadata import Metadata, read_metadata
from demur.runs.run import Run
from demur.spec import digest, lines

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class BestEpoch:
    """The epoch chosen so far; without a value it is the last one, whatever it can do."""

    epoch: int
    value: float | None


@dataclass(frozen=True)
class ResumeState:
    """How far a training has come; epoch 0 is a fresh start."""

    epoch: int = 0
    best: BestEpoch | None = None
    lines: tuple[str, ...] = ()  # of metrics.jsonl

    def after(self, value: float | None, line: dict[str, Any]) -> "ResumeState":
        """The state after one more epoch, which is the best one if its value says so."""
        epoch, best = self.epoch + 1, self.best
        if best is None or best.value is None or value is None or value > best.value:
            best = BestEpoch(epoch, value)
        line = {"epoch": epoch, **line, "best_epoch_so_far": best.epoch}
        return ResumeState(epoch, best, (*self.lines, json.dumps(line)))

    @property
    def is_best(self) -> bool:
        """Whether the last epoch is the one chosen so far."""
        return self.best is not None and self.best.epoch == self.epoch


def write_metrics(run: Run, state: ResumeState) -> None:
    """One line an epoch."""
    write_text(run.path / "metrics.jsonl", "\n".join(state.lines) + "\n")


def load_state(run: Run) -> tuple[ResumeState, Tensors, Tensors]:
    """The last kept state, its tensors and the best weights; a fresh state and none of either."""
    now = run.path / "state" / "now.json"
    if not now.exists():
        return ResumeState(), {}, {}
    mend = _mend(now)
    metadata = read_metadata(now, mend)
    chosen = Metadata(now, metadata["best"], mend)
    state = ResumeState(
        metadata["epoch"], BestEpoch(chosen["epoch"], chosen["value"]), tuple(metadata["lines"])
    )
    best = read_tensors(now.parent / metadata["best_file"], metadata["best_digest"], mend)
    return state, read_tensors(now.parent / metadata["file"], metadata["digest"], mend), best


def stored_plan(run: Run) -> dict[str, Any] | None:
    """How the kept state was computed, if there is one."""
    now = run.path / "state" / "now.json"
    if not now.exists():
        return None
    plan: dict[str, Any] | None = read_metadata(now, _mend(now)).get("plan")
    return plan


def keep(
    run: Run,
    state: ResumeState,
    tensors: Tensors,
    best: Tensors,
    plan: dict[str, Any] | None = None,
) -> None:
    """Put a state on disk, with how it was computed; an earlier one stays until it is whole."""
    assert state.best is not None
    folder = run.path / "state"
    file, best_file = (
        f"{kind}-{epoch:04d}.safetensors"
        for kind, epoch in (("epoch", state.epoch), ("best", state.best.epoch))
    )
    metadata = {
        "epoch": state.epoch,
        "file": file,
        "digest": write_tensors(folder / file, tensors),
        "best": vars(state.best),
        "best_file": best_file,
        "best_digest": write_tensors(folder / best_file, best),
        "lines": list(state.lines),
        "plan": plan,
    }
    write_json(folder / "now.json", metadata)
    _forget(folder, keep={file, best_file, "now.json"})


def finish(
    run: Run, state: ResumeState, best: Tensors, last: Tensors, metadata: dict[str, Any]
) -> None:
    """Write the selected weights; checkpoint.json is written last and ends the run.

    Where another epoch than the last was selected, the last one becomes a run of its own in the
    folder `last`: it is what the same recipe with selection=last would have given.
    """
    assert state.best is not None, "a run has at least one epoch"
    write_metrics(run, state)
    (run.path / "checkpoint.json").unlink(missing_ok=True)  # of weights that have been deleted
    if not state.is_best:
        _write_last(run, state, last, metadata)
    weights = write_tensors(run.path / "model.safetensors", best)
    selected = {"epoch": state.best.epoch, "value": state.best.value, "weights": weights}
    write_json(run.path / "checkpoint.json", selected | metadata)
    shutil.rmtree(run.path / "state", ignore_errors=True)


def _write_last(run: Run, state: ResumeState, weights: Tensors, metadata: dict[str, Any]) -> None:
    """Write the last epoch of a run whose selected epoch is an earlier one."""
    last, recipe = Run(run.path / "last"), replace(run.recipe, selection="last")
    write_text(last.path / "recipe.txt", lines(recipe))
    write_metrics(last, state)
    written = write_tensors(last.path / "model.safetensors", weights)
    about_last: dict[str, Any] = {
        "reason": "the last epoch",
        "selection_split": None,
        "selection_data": None,
        "recipe_digest": digest(recipe),
    }
    about_last |= {"epoch": state.epoch, "value": None, "weights": written}
    write_json(last.path / "checkpoint.json", metadata | about_last)


def _mend(now: Path) -> str:
    return f"delete the folder {now.parent} to train from the start"


def _forget(folder: Path, keep: set[str]) -> None:
    """Drop files of earlier epochs and of writes that were cut short."""
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink(missing_ok=True)
