"""A run folder: the recipe, the chosen weights, and the records made with them.

runs/NAME/recipe.txt         every field, defaults too
         model.safetensors   the chosen weights; checkpoint.json says which epoch and why
         metrics.jsonl       one line an epoch
         records/            one record an attack
         state/              what a killed training resumes from; gone when it is done
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from demur.errors import BadInput, suggestion
from demur.nets import RejectingNet
from demur.recipes import Recipe, recipe_in
from demur.runs.files import HALF_WRITTEN, exclusive_lock, read_tensors, sweep, write_text
from demur.runs.metadata import read_metadata
from demur.runs.record import Record, read_record
from demur.spec import differences, digest, lines


@dataclass(frozen=True)
class Run:
    """A folder that holds one recipe and what came of it."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @staticmethod
    def open(name: str, home: Path = Path("runs")) -> "Run":
        """The run at a path, or of that name under `home`."""
        for path in (Path(name), home / name):
            if (path / "recipe.txt").is_file():
                return Run(path)
        there = [run.path.name for run in runs_in(home)]
        hint = suggestion(name, there) if there else "train one first with demur train RECIPE"
        raise BadInput(f"there is no run {name!r}; {hint}")

    @staticmethod
    def check(path: Path, recipe: Recipe) -> None:
        """Refuse a folder that holds another recipe's run, or something that is no run."""
        if (path / "recipe.txt").exists():
            if differing := differences(recipe, Run(path).recipe):
                raise BadInput(
                    f"{path} holds a run of another recipe ({'; '.join(differing)}); "
                    "choose another folder with --out"
                )
        elif path.exists():
            ours = {path / ".lock", *path.glob(HALF_WRITTEN)} if path.is_dir() else set()
            if not path.is_dir() or set(path.iterdir()) - ours:
                raise BadInput(f"{path} is in the way: it is no run; choose another with --out")
        Run(path)._check_no_orphans()

    def _check_no_orphans(self) -> None:
        """Refuse to train where records of other weights would be left behind."""
        if not self.finished and any(self.records_folder.glob("*.json")):
            raise BadInput(
                f"{self.path} keeps records of weights that are not there, and a training would "
                "orphan them; choose another folder with --out"
            )

    @staticmethod
    @contextmanager
    def claim(path: Path, recipe: Recipe) -> "Iterator[Run]":
        """The run for this recipe, new or to be resumed, held for writing."""
        Run.check(path, recipe)  # before a lock file is put into somebody's folder
        was_there = path.exists()
        with exclusive_lock(path):
            Run.check(path, recipe)  # whoever held the lock may have made the run another's
            run = Run(path)
            run.tidy()
            if not (path / "recipe.txt").exists():
                write_text(path / "recipe.txt", lines(recipe))
            try:
                yield run
            except BaseException:
                if not was_there:
                    run._forget_if_empty()
                raise

    def _forget_if_empty(self) -> None:
        """Take the folder away if nothing was learned in it."""
        if set(self.path.iterdir()) <= {self.path / "recipe.txt", self.path / ".lock"}:
            shutil.rmtree(self.path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the run for writing; a second process is refused."""
        with exclusive_lock(self.path):
            self.tidy()
            yield

    def tidy(self) -> None:
        """Remove what killed processes have left behind."""
        for folder in (self.path, self.records_folder, self.path / "last"):
            sweep(folder)
        if self.finished:
            shutil.rmtree(self.path / "state", ignore_errors=True)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe the folder was made for."""
        return recipe_in(self.path / "recipe.txt")

    @property
    def trained(self) -> bool:
        """Whether training has ended; an archive keeps no weights of it."""
        return (self.path / "checkpoint.json").exists()

    @property
    def finished(self) -> bool:
        """Whether training has ended and the chosen weights are here."""
        return self.trained and (self.path / "model.safetensors").exists()

    @property
    def checkpoint(self) -> dict[str, Any]:
        """Which epoch's weights were taken, on which split, why, and where they were made."""
        if not self.trained:
            raise BadInput(f"{self.path} is not trained to the end; resume it with demur train")
        metadata = read_metadata(self.path / "checkpoint.json", self._mend)
        expected, found = str(metadata["recipe_digest"]), digest(self.recipe)
        if expected != found:
            raise BadInput(
                f"{self.path / 'recipe.txt'} is not what these weights were trained by: "
                f"expected digest {expected[:16]}, found {found[:16]}; restore it or train again"
            )
        return metadata

    def check_weights(self) -> None:
        """Refuse an archive, which has none."""
        if not (self.path / "model.safetensors").exists():
            raise BadInput(f"{self.path} keeps records alone, without weights; {self._mend}")

    def net(self, device: torch.device) -> RejectingNet:
        """The trained net in eval mode."""
        expected = self.checkpoint["weights"]
        self.check_weights()
        weights = read_tensors(self.path / "model.safetensors", expected, self._mend)
        net = self.recipe.net.build(self.recipe.data.domain, self.recipe.method.head)
        net.load_state_dict(weights)
        return net.to(device).eval().requires_grad_(False)

    @property
    def _mend(self) -> str:
        """What to do about weights that are gone or damaged, so that no record is orphaned."""
        return f"train it again elsewhere with demur train @{self.path / 'recipe.txt'}"

    @property
    def records_folder(self) -> Path:
        """Where records live."""
        return self.path / "records"

    def orphan_arrays(self) -> list[Path]:
        """Arrays whose story is lost, or is not written yet, so that they are no record."""
        arrays = sorted(self.records_folder.glob("[!.]*.npz"))
        return [path for path in arrays if not path.with_suffix(".json").exists()]

    def records(self, split: str = "test") -> list[Record]:
        """All finished records of these weights on a split, oldest first."""
        told = self.records_folder.glob(f"*-{split}-*.json")  # which is written last
        found = [read_record(path.with_suffix(".npz")) for path in told]
        found.sort(key=lambda record: str(record.metadata["created"]))
        weights = self.checkpoint["weights"]
        return [
            r for r in found if r.metadata["split"] == split and r.metadata["weights"] == weights
        ]


def runs_in(folder: Path) -> list[Run]:
    """The runs of a folder by name; one that begins with a dot is a copy still being made."""
    return [Run(path.parent) for path in sorted(folder.glob("[!.]*/recipe.txt"))]


def run_folder(name: str, recipe: Recipe, changed: bool, home: Path = Path("runs")) -> Path:
    """runs/NAME, or runs/NAME-digest when the recipe was changed, so that none collide.

    A recipe in the folder of a run, where all are called the same, is named by the folder.
    """
    stem = name
    if name.startswith("@"):
        file = Path(name[1:])
        stem = file.resolve().parent.name if file.name == "recipe.txt" else file.stem
    return home / (f"{stem}-{digest(recipe)[:6]}" if changed else stem)
