"""A run folder: recipe, weights, records; what to do if its weights are damaged.

docs/reference/files.md describes the files. Trained nets that come with demur are run folders with
quantised weights, and records of attacks on exactly these weights. They lie in `zoo/` of a
checkout; the environment variable DEMUR_ZOO names another folder.
"""

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from demur.errors import BadInput, first_line, import_optional, suggestion
from demur.files.checked_files import (
    MEGABYTE,
    TEMPORARY_FILES,
    delete_temporary_files,
    exclusive_lock,
    read_checked,
    read_tensors,
    write_json,
    write_tensors,
    write_text,
)
from demur.files.output_paths import check_output_folder
from demur.nets import RejectingNet
from demur.recipes import Recipe, read_recipe
from demur.runs.metadata import CHECKPOINT, STATE, read_metadata
from demur.runs.record import REMEDY, Record, Records, read_record, record_path
from demur.spec import check_readable, differences, digest, lines

ZOO_VARIABLE = "DEMUR_ZOO"


def zoo_folder() -> Path:
    """The folder of the nets, which need not exist."""
    beside_package = Path(__file__).parents[2] / "zoo"
    return Path(os.environ.get(ZOO_VARIABLE) or beside_package)


def zoo_names() -> list[str]:
    """The names of the nets, in alphabetical order."""
    return sorted(path.parent.name for path in zoo_folder().glob("[!.]*/model.safetensors"))


HUB = "hub:"
HUB_FILES = ("recipe.txt", "checkpoint.json", "metrics.jsonl", "model.safetensors", "records/*")
MAX_METRICS = 64 * MEGABYTE
LISTING = "data.csv"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """A folder with one recipe, its trained weights and the records of attacks on them.

    Attributes:
        path: The folder. Use `Run.open` to find it by name, `demur.train` to make one.

    Example:
        >>> run = Run.open("digits-pgdat-rr")
        >>> net = run.net(torch.device("cpu"))
        >>> [record.label for record in run.records("test")]
        ['clean', 'pgd-3']
    """

    path: Path

    def __post_init__(self) -> None:
        path = Path(self.path)  # users pass text too
        # "." and ".." have no name that a file beside them could have
        object.__setattr__(self, "path", path.resolve() if path.name in ("", "..") else path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @staticmethod
    def open(name: str, home: Path = Path("runs")) -> "Run":
        """Find a run by its path, its name under `home`, or that of a net of the zoo.

        hub:OWNER/NAME is a run of the Hugging Face hub, which is downloaded into `home` once.
        BadInput suggests similar names if there is none.
        """
        if name.startswith(HUB):
            name = str(_from_hub(name, home))
        for path in (Path(name), home / name, zoo_folder() / name):
            if (path / "recipe.txt").is_file():
                return Run(path)
        if Path(name).is_dir():
            inside = [str(run.path) for run in runs_in(Path(name))][:1]
            hint = f"it holds runs, such as {inside[0]}" if inside else "recipe.txt is missing"
            raise BadInput(f"{name} is not a run; {hint}")
        names = [run.path.name for run in runs_in(home)] + get_close_matches(name, zoo_names())
        hint = suggestion(name, names) if names else "train one first with demur train RECIPE"
        raise BadInput(f"there is no run {name!r}; {hint}")

    @staticmethod
    def check(path: Path, recipe: Recipe) -> None:
        """Raise BadInput if the folder contains a run of another recipe or is not a run."""
        check_output_folder(str(path), "run")
        if (path / "recipe.txt").exists():
            if differing := differences(recipe, Run(path).recipe):
                raise BadInput(
                    f"{path} contains a run of another recipe ({'; '.join(differing)}); "
                    "choose another folder with --out"
                )
        elif path.exists() and set(path.iterdir()) - {path / ".lock", *path.glob(TEMPORARY_FILES)}:
            raise BadInput(
                f"{path} is in the way: it is not a run; choose another folder with --out"
            )
        run = Run(path)
        if not run.has_weights and any(run.records_folder.glob("*.json")):
            raise BadInput(
                f"{path} contains records of weights that are missing, and a training would "
                "orphan them; choose another folder with --out"
            )

    @staticmethod
    @contextmanager
    def claim(path: Path, recipe: Recipe) -> "Iterator[Run]":
        """Lock a folder and yield the run for this recipe, which is new or resumed."""
        check_readable(recipe)
        Run.check(path, recipe)  # before a lock file is written into a folder of something else
        was_there = path.exists()
        with exclusive_lock(path):
            Run.check(path, recipe)  # the previous holder of the lock may have changed the recipe
            run = Run(path)
            run.tidy()
            if not (path / "recipe.txt").exists():
                write_text(path / "recipe.txt", lines(recipe))
            try:
                yield run
            except BaseException:
                before_training = {path / name for name in ("recipe.txt", LISTING, ".lock")}
                if not was_there and set(path.iterdir()) <= before_training:
                    shutil.rmtree(path)
                raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the run for writing; BadInput in a second process."""
        with exclusive_lock(self.path):
            self.tidy()
            yield

    def tidy(self) -> None:
        """Delete the temporary files of processes that were killed."""
        for folder in (self.path, self.records_folder, self.path / "last"):
            delete_temporary_files(folder)
        for making in self.records_folder.glob(".making-*"):  # whose record is finished
            if any(self.records_folder.glob(f"*{making.name.removeprefix('.making')}.json")):
                shutil.rmtree(making, ignore_errors=True)
        if self.has_weights:
            shutil.rmtree(self.path / "state", ignore_errors=True)

    def tidy_finished(self) -> None:
        """Delete what commands left that met an error at their end, unless somebody writes here."""
        with suppress(BadInput, OSError), self.writing():
            pass

    @cached_property
    def recipe(self) -> Recipe:
        """Recipe of the run, read from recipe.txt."""
        return read_recipe(self.path / "recipe.txt")

    @property
    def trained(self) -> bool:
        """Whether training has ended; True for an archive too, which has no weights."""
        return (self.path / "checkpoint.json").exists()

    @property
    def has_weights(self) -> bool:
        """Whether training has ended and the folder contains the weights."""
        return self.trained and (self.path / "model.safetensors").exists()

    @property
    def checkpoint(self) -> dict[str, Any]:
        """Metadata of the weights: selected epoch, selection split, reason, digest, provenance.

        Raises BadInput if training has not ended or the recipe was changed since.
        """
        if not self.trained:
            raise self.unfinished()
        metadata = read_metadata(self.path / "checkpoint.json", CHECKPOINT, self._remedy)
        expected, found = str(metadata["recipe_digest"]), digest(self.recipe)
        if expected != found:
            raise BadInput(
                f"{self.path / 'recipe.txt'} is not the recipe these weights were trained with: "
                f"expected digest {expected[:16]}, found {found[:16]}; restore it or train again"
            )
        return metadata

    @property
    def metrics_state(self) -> Literal["verified", "not verified", "missing"]:
        """Whether metrics.jsonl is the file of these weights; old runs have no digest of it.

        Raises BadInput if the file was changed.
        """
        path, expected = self.path / "metrics.jsonl", self.checkpoint.get("metrics")
        if not path.exists():
            return "missing"
        if expected is None:
            return "not verified"
        remedy = "restore it, or delete it: only seconds per epoch need it"
        read_checked(path, expected, remedy, MAX_METRICS)
        return "verified"

    def check_weights(self) -> None:
        """Raise BadInput if the folder has no weights, as an archive."""
        if not self.trained:
            raise self.unfinished()
        if not (self.path / "model.safetensors").exists():
            raise BadInput(f"{self.path} contains records without weights; {self._remedy}")

    def net(self, device: torch.device) -> RejectingNet:
        """Load the trained net, in eval mode and without gradients for its weights."""
        expected = self.checkpoint["weights"]
        self.check_weights()
        net = self.recipe.net.build(self.recipe.data.domain, self.recipe.method.head)
        path = self.path / "model.safetensors"
        net.load_state_dict(read_tensors(path, expected, self._remedy, net.state_dict()))
        return net.to(device).eval().requires_grad_(False)

    def unfinished(self, command: str | None = None) -> BadInput:
        """The error for a run whose training has not ended; `command` resumes it."""
        if any(self.records_folder.glob("*.json")):  # a training here would orphan them
            return BadInput(
                f"{self.path} is not trained to the end but has records; {self._remedy}"
            )
        words = ["demur", "train", f"@{self.path / 'recipe.txt'}", "--out", str(self.path)]
        command = command or shlex.join(words)
        return BadInput(f"{self.path} is not trained to the end; resume it with: {command}")

    @property
    def _remedy(self) -> str:
        """Advice for missing or damaged weights; training elsewhere orphans no record."""
        if self.path.parent == zoo_folder():
            return "it came with demur; fetch another copy"
        again = self.path.with_name(f"{self.name}-again")
        if (self.path.parent / "recipe.txt").is_file():  # `last`: nothing is trained in a run
            again = self.path.parent.with_name(f"{self.path.parent.name}-{again.name}")
        words = ["demur", "train", f"@{self.path / 'recipe.txt'}", "--out", str(again)]
        return f"train it again elsewhere with: {shlex.join(words)}"

    @property
    def records_folder(self) -> Path:
        return self.path / "records"

    def orphan_arrays(self) -> list[Path]:
        """Array files without metadata, which are therefore not records."""
        arrays = sorted(self.records_folder.glob("[!.]*.npz"))
        return [path for path in arrays if not path.with_suffix(".json").exists()]

    def records(self, split: str = "test", model: str | None = None) -> Records:
        """Read the finished records of a split (fit, val, cal or test), oldest first.

        `model` is the `LoadedRun.model_key` of a wrapped or changed net; None stands for the run's
        own net. BadInput names a record that is damaged.
        """
        # metadata is written last, so a record with metadata is complete
        metadata_paths = self.records_folder.glob(f"*-{split}-*.json")
        found = [read_record(path.with_suffix(".npz")) for path in metadata_paths]
        found.sort(key=lambda record: str(record.metadata["created"]))
        weights = self.checkpoint["weights"]
        expected: dict[str, str | None] = {"split": split, "weights": weights}
        if self.has_weights:  # an archive holds the records of one model
            expected["model"] = model
        own = [r for r in found if all(r.metadata.get(k) == v for k, v in expected.items())]
        for record in own:
            self.check_labels(record)
        return Records(own, self.recipe.rejectors())

    def check_labels(self, record: Record) -> None:
        """Raise BadInput if a record holds a label that is no class of the run's data set."""
        if int(record.y.max()) >= self.recipe.data.domain.classes:  # no label is negative
            split = record.metadata["split"]
            path = record_path(self.records_folder, record.label, split, record.digest)
            raise BadInput(f"{path} is damaged: y holds a label that is no class; {REMEDY}")


def _from_hub(name: str, home: Path) -> Path:
    """Folder of a run of the hub, downloaded unless it is there; its name comes last."""
    repository = name.removeprefix(HUB)
    target = home / repository.replace("/", "--")
    if target.exists():
        return target
    hub = import_optional("huggingface_hub", f"{name} needs a package", "huggingface_hub")
    unfinished = home / f".{target.name}"  # a download that was stopped continues here
    try:
        hub.snapshot_download(repository, local_dir=unfinished, allow_patterns=[*HUB_FILES])
    except Exception as error:  # of its HTTP library, which depends on the version
        raise BadInput(f"{name} was not downloaded: {first_line(error)}") from error
    shutil.rmtree(unfinished / ".cache", ignore_errors=True)
    if not (unfinished / "recipe.txt").is_file():
        raise BadInput(f"{name} is not a run: recipe.txt is missing")
    unfinished.rename(target)
    return target


def runs_in(folder: Path) -> list[Run]:
    """Runs in a folder, sorted by name; hidden folders are unfinished archives and left out."""
    recipes = sorted(folder.glob("[!.]*/recipe.txt"))
    return [Run(path.parent) for path in recipes if path.is_file()]


def run_folder(name: str, recipe: Recipe, changed: bool, home: Path = Path("runs")) -> Path:
    """Default folder of a run: runs/NAME, or runs/NAME-digest if the recipe was changed.

    `@folder/recipe.txt` is named after its folder, since all recipes of runs are called recipe.txt.
    """
    stem = name
    if name.startswith("@"):
        file = Path(name[1:])
        stem = file.resolve().parent.name if file.name == "recipe.txt" else file.stem
    return home / (f"{stem}-{digest(recipe)[:6]}" if changed else stem)


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
    return read_metadata(now, STATE, _remedy(now)).get("plan")


def save_state(
    run: Run, state: ResumeState, tensors: Tensors, best: Tensors, plan: dict[str, Any] | None
) -> None:
    """Write a state, with how it was computed; the earlier one stays until this one is complete.

    state/now.json names the tensor files and their digests. It is written last, so it always
    describes a complete state. All randomness is a function of (seed, step), so no generator
    state is stored.
    """
    assert state.best is not None
    folder = run.path / "state"
    file = f"epoch-{state.epoch:04d}.safetensors"
    best_file = f"best-{state.best.epoch:04d}.safetensors"
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
    for path in folder.iterdir():  # of earlier epochs and of interrupted writes
        if path.name not in (file, best_file, "now.json"):
            path.unlink(missing_ok=True)


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
    own = {
        "reason": "the last epoch", "selection_split": None, "selection_data": None,
        "recipe_digest": digest(recipe), "epoch": state.epoch, "value": None, "weights": written,
    }  # fmt: skip
    write_json(last.path / "checkpoint.json", metadata | own)


def _remedy(now: Path) -> str:
    return f"delete the folder {now.parent} to train from the start"
