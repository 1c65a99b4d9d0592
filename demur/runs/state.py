"""The resume state of a training: weights and momentum after a complete epoch.

state/now.json names the tensor files and their digests. It is written last, so it always describes
a complete state. All randomness is a function of (seed, step), so no generator state is stored.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from demur.errors import BadInput
from demur.runs.files import read_tensors, write_json, write_tensors, write_text
from demur.runs.metadata import STATE, read_metadata
from demur.runs.run import Run
from demur.spec import digest, lines

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class BestEpoch:
    """The epoch selected so far; its value is None if the last epoch is selected."""

    epoch: int
    value: float | None


@dataclass(frozen=True)
class ResumeState:
    """Progress of a training; epoch 0 is a fresh start."""

    epoch: int = 0
    best: BestEpoch | None = None
    lines: tuple[str, ...] = ()  # of metrics.jsonl

    def after(self, value: float | None, line: dict[str, Any]) -> "ResumeState":
        """State after one more epoch, which becomes the best one if its value is larger."""
        epoch, best = self.epoch + 1, self.best
        if best is None or best.value is None or value is None or value > best.value:
            best = BestEpoch(epoch, value)
        line = {"epoch": epoch, **line, "best_epoch_so_far": best.epoch}
        return ResumeState(epoch, best, (*self.lines, json.dumps(line)))

    @property
    def is_best(self) -> bool:
        """Whether the last epoch is the one selected so far."""
        return self.best is not None and self.best.epoch == self.epoch


def write_metrics(run: Run, state: ResumeState) -> str:
    """Write metrics.jsonl, one line per epoch, and return its digest."""
    return write_text(run.path / "metrics.jsonl", "\n".join(state.lines) + "\n")


def load_state(run: Run, like: Tensors, best_like: Tensors) -> tuple[ResumeState, Tensors, Tensors]:
    """Read the state, its tensors and the best weights; a fresh state and {} if there is none.

    The tensors must have the names, types and shapes of `like`, the weights those of `best_like`.
    """
    now = run.path / "state" / "now.json"
    if not now.exists():
        return ResumeState(), {}, {}
    remedy = _remedy(now)
    metadata = read_metadata(now, STATE, remedy)
    chosen = BestEpoch(metadata["best"]["epoch"], metadata["best"]["value"])
    state = ResumeState(metadata["epoch"], chosen, tuple(metadata["lines"]))
    if chosen.epoch > state.epoch or len(state.lines) != state.epoch:
        raise BadInput(f"{now} is damaged: its epochs do not agree; {remedy}")
    file, best_file = (now.parent / metadata[key] for key in ("file", "best_file"))
    tensors = read_tensors(file, metadata["digest"], remedy, like)
    return state, tensors, read_tensors(best_file, metadata["best_digest"], remedy, best_like)


def stored_plan(run: Run) -> dict[str, Any] | None:
    """How the stored state was computed; None if there is none."""
    now = run.path / "state" / "now.json"
    if not now.exists():
        return None
    plan: dict[str, Any] | None = read_metadata(now, STATE, _remedy(now)).get("plan")
    return plan


def save_state(
    run: Run,
    state: ResumeState,
    tensors: Tensors,
    best: Tensors,
    plan: dict[str, Any] | None = None,
) -> None:
    """Write a state, with how it was computed; the earlier one stays until this one is complete."""
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
    _delete_others(folder, keep={file, best_file, "now.json"})


def write_checkpoint(
    run: Run, state: ResumeState, best: Tensors, last: Tensors, metadata: dict[str, Any]
) -> None:
    """Write the selected weights, then checkpoint.json, which marks the run as trained.

    If an earlier epoch than the last was selected, the last epoch becomes a run of its own in the
    folder `last`: it equals the run of the same recipe with selection=last.
    """
    assert state.best is not None, "a run has at least one epoch"
    metadata = metadata | {"metrics": write_metrics(run, state)}
    (run.path / "checkpoint.json").unlink(missing_ok=True)  # of weights that the user deleted
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
    last_metadata: dict[str, Any] = {
        "reason": "the last epoch",
        "selection_split": None,
        "selection_data": None,
        "recipe_digest": digest(recipe),
    }
    last_metadata |= {"epoch": state.epoch, "value": None, "weights": written}
    write_json(last.path / "checkpoint.json", metadata | last_metadata)


def _remedy(now: Path) -> str:
    return f"delete the folder {now.parent} to train from the start"


def _delete_others(folder: Path, keep: set[str]) -> None:
    """Delete the files of earlier epochs and of interrupted writes."""
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink(missing_ok=True)
