"""A table from runs that were kept, such as archive ones: read, never trained or attacked.

lines = measured(TABLES["methods-cifar10"], (0, 1, 2), kept_in(Path("results"), open_run, say))
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from demur.attacks import Attack
from demur.data import SplitName
from demur.errors import BadInput
from demur.evaluate import Evaluator
from demur.paper.measured import Factories, Open
from demur.recipes import Recipe
from demur.runs import Record, Run, runs_in
from demur.spec import digest


def stored_factories(folder: Path, open_run: Open, say: Callable[[str], None]) -> Factories:
    """Hands that find what a folder of runs holds, and nothing else.

    A run whose recipe cannot be read may be of any line; it is told of and passed over.
    """
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}; name one that holds runs, such as results")
    runs = runs_in(folder)
    if not runs:
        raise BadInput(f"{folder} holds no run; name a folder of runs, such as results")
    known: dict[str, list[Run]] = {}
    for run in runs:
        try:
            known.setdefault(digest(run.recipe), []).append(run)
        except BadInput as reason:
            say(f"{run.name} is passed over: {reason}")

    read = cache(_records)

    def found(recipe: Recipe, _: Path) -> Run | None:
        same = known.get(digest(recipe), [])
        if len(same) > 1:
            names = " and ".join(run.name for run in same)
            raise BadInput(f"{names} in {folder} are runs of one recipe; leave one of them there")
        for run in same:
            read(run)
        return same[0] if same else None

    def largest(evaluator: Evaluator, split: SplitName, _: str, attack: Attack) -> Record | None:
        """The record of that attack on the most images, under whatever name."""
        made = [r for r in read(evaluator.run)[split] if r.metadata["attack"] == digest(attack)]
        return max(made, key=lambda record: len(record.y), default=None)

    return Factories(found, open_run, largest)


def _records(run: Run) -> dict[SplitName, list[Record]]:
    """All records by their split, if all can be read."""
    return {split: run.records(split) for split in run.recipe.data.splits}
