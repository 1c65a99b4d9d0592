"""Tables from stored runs, such as archives: records are read, nothing is trained or attacked.

factories = stored_factories(Path("results/methods-cifar10"), open_run, say)
results = measured(TABLES["methods-cifar10"], (0, 1, 2), factories)
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from demur.attacks import Attack
from demur.data import SplitName
from demur.errors import BadInput
from demur.evaluate import LoadedRun
from demur.paper.measure import Factories, Open
from demur.recipes import Recipe
from demur.runs import Record, Run, runs_in
from demur.spec import digest


def stored_factories(folder: Path, open_run: Open, on_message: Callable[[str], None]) -> Factories:
    """Factories that return the stored runs and records of a folder, or None.

    Runs with an unreadable recipe are skipped and reported through `say`.

    Raises:
        BadInput: The folder does not exist or contains no run.
    """
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}; name one that contains runs, such as results")
    runs = runs_in(folder)
    if not runs:
        raise BadInput(f"{folder} holds no run; name a folder of runs, such as results")
    runs_by_recipe: dict[str, list[Run]] = {}
    for run in runs:
        try:
            runs_by_recipe.setdefault(digest(run.recipe), []).append(run)
        except BadInput as reason:
            on_message(f"{run.name} is skipped: {reason}")

    records_of = cache(_read_records)

    def find_run(recipe: Recipe, _: Path) -> Run | None:
        matches = runs_by_recipe.get(digest(recipe), [])
        if len(matches) > 1:
            names = " and ".join(run.name for run in matches)
            raise BadInput(f"{names} in {folder} have the same recipe; keep only one of them")
        for run in matches:
            records_of(run)  # fails here, not later, if a record is damaged
        return matches[0] if matches else None

    def find_record(loaded: LoadedRun, split: SplitName, _: str, attack: Attack) -> Record | None:
        """The record of this attack on the most images, whatever its label."""
        records = records_of(loaded.run)[split]
        matches = [one for one in records if one.metadata["attack"] == digest(attack)]
        return max(matches, key=lambda record: len(record.y), default=None)

    return Factories(find_run, open_run, find_record)


def _read_records(run: Run) -> dict[SplitName, list[Record]]:
    """All records by split; raises BadInput if one is damaged."""
    return {split: run.records(split) for split in run.recipe.data.splits}
