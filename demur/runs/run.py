"""A run folder: the recipe, the chosen weights, and the records made with them.

    runs/NAME/recipe.txt         every field, defaults too
             model.safetensors   the chosen weights; chosen.json says which epoch and why
             metrics.jsonl       one line an epoch
             records/            one record an attack
             state/              what a killed training resumes from; gone when it is done
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from demur.errors import BadInput, suggestion
from demur.nets import RejectingNet
from demur.recipes import VOCABULARY, Recipe
from demur.runs.files import only_writer, read_json, read_tensors, write_text
from demur.runs.record import Record, read_record
from demur.spec import differences, digest, lines, read


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
        there = sorted(p.parent.name for p in home.glob("*/recipe.txt")) if home.is_dir() else []
        hint = suggestion(name, there) if there else "train one first with demur train RECIPE"
        raise BadInput(f"there is no run {name!r}; {hint}")

    @staticmethod
    def prepare(path: Path, recipe: Recipe) -> "Run":
        """The run at path for this recipe, new or to be resumed; another recipe's is refused."""
        run = Run(path)
        if not (path / "recipe.txt").exists():
            if path.exists() and any(p.name != ".lock" for p in path.iterdir()):
                raise BadInput(f"{path} is not empty and not a run; choose another with --out")
            write_text(path / "recipe.txt", lines(recipe))
        elif differing := differences(recipe, run.recipe):
            raise BadInput(
                f"{path} holds a run of another recipe ({'; '.join(differing)}); "
                "choose another folder with --out"
            )
        return run

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe the folder was made for."""
        path = self.path / "recipe.txt"
        try:
            found = read(path.read_text(), VOCABULARY)
        except BadInput as error:
            raise BadInput(f"{path} cannot be read: {error}") from None
        if not isinstance(found, Recipe):
            raise BadInput(f"{path} does not hold a recipe")
        return found

    @property
    def finished(self) -> bool:
        """Whether training has ended and the weights are chosen."""
        return (self.path / "chosen.json").exists()

    @property
    def chosen(self) -> dict[str, Any]:
        """Which epoch's weights were taken, on which split, why, and their digest."""
        if not self.finished:
            raise BadInput(f"{self.path} is not trained to the end; resume it with demur train")
        story: dict[str, Any] = read_json(self.path / "chosen.json")
        return story

    def net(self, device: torch.device) -> RejectingNet:
        """The trained net in eval mode."""
        weights = read_tensors(self.path / "model.safetensors", self.chosen["weights"])
        net = self.recipe.net.build(self.recipe.data.domain, self.recipe.method.head)
        net.load_state_dict(weights)
        return net.to(device).eval().requires_grad_(False)

    @property
    def records_folder(self) -> Path:
        """Where records live."""
        return self.path / "records"

    def records(self, split: str = "test") -> list[Record]:
        """All finished records of these weights on a split, oldest attack first."""
        stories = self.records_folder.glob("*.json")
        found = [read_record(path.with_suffix(".npz")) for path in stories]
        found.sort(key=lambda record: str(record.about["made"]))
        weights = self.chosen["weights"]
        return [r for r in found if r.about["split"] == split and r.about["weights"] == weights]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the run for writing; a second writer is refused."""
        with only_writer(self.path):
            yield


def run_folder(name: str, recipe: Recipe, changed: bool, home: Path = Path("runs")) -> Path:
    """runs/NAME, or runs/NAME-digest when the recipe was changed, so that none collide."""
    stem = Path(name.removeprefix("@")).stem
    return home / (f"{stem}-{digest(recipe)[:6]}" if changed else stem)
