"""A table measured: every recipe trained, attacked and scored, or the reason why it is not there.

    lines = measured(TABLES["methods-digits"], (0, 1), Factories(train, open_run, craft))

What is trained or attacked already is read, so a table that was stopped goes on. A training that
diverges is a line that says so, and so is one that cannot be made; all others are made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from demur.attacks import Attack
from demur.data import SplitName
from demur.errors import BadInput, Diverged
from demur.evaluate import Evaluator, Row, ScoredRecord, Scorer
from demur.paper.tables import Table
from demur.recipes import Recipe, attack
from demur.rejectors import Con, Rejector
from demur.runs import Record, Run
from demur.spec import digest

LATER, WITHOUT, OVERFLOW = "not measured yet", "without", "overflow"
Train = Callable[[Recipe, Path], Run | None]
Open = Callable[[Run], Evaluator]
Craft = Callable[[Evaluator, SplitName, str, Attack], Record | None]


@dataclass(frozen=True)
class TrainingResult:
    """One training of one recipe: its figures, or why there are none."""

    entry: str
    seed: int
    recipe: str  # its digest
    run: str
    rows: tuple[Row, ...] = ()
    accuracy: dict[str, float] | None = None  # of all images, by attack
    notes: tuple[str, ...] = ()
    failure: str = ""  # why there are no figures, or not all

    @property
    def refused(self) -> bool:
        """Whether something is wrong that the user can mend."""
        return bool(self.failure) and not self.failure.startswith((LATER, WITHOUT, OVERFLOW))


@dataclass(frozen=True)
class Factories:
    """How trainings, opened runs and records come about, or None where they do not.

    A command shows progress beside.
    """

    train: Train
    open: Open
    craft: Craft
    keep: Callable[[Evaluator, Sequence[str]], object] = lambda evaluator, scores: (
        None
    )  # of one training


def measured(table: Table, seeds: Sequence[int], factories: Factories) -> Iterator[TrainingResult]:
    """The lines as they come, the seeds of an entry one after the other."""
    lost: set[tuple[str | None, int]] = set()
    for entry, recipe in table.entries.items():
        for seed in seeds:
            line = _line(table, entry, seed, factories, (recipe.base, seed) in lost)
            if line.failure.startswith(OVERFLOW):
                lost.add((entry, seed))
            yield line


def _line(
    table: Table, entry: str, seed: int, factories: Factories, base_lost: bool
) -> TrainingResult:
    recipe, folder, attacks = table.recipe(entry, seed), table.folder(entry, seed), table.attacks
    about = (entry, seed, digest(recipe), folder.name)
    meant = [attack(label, recipe) for label in attacks]  # a wrong name is refused before any work
    if base_lost:
        lost = table.entries[entry].base
        return TrainingResult(*about, failure=f"{OVERFLOW}: {lost}, which it begins with, diverged")
    try:
        run = factories.train(recipe, folder)
        if run is None:
            return TrainingResult(*about, failure=LATER)
        return _figures(
            table, replace(TrainingResult(*about), run=run.name), recipe, run, meant, factories
        )
    except Diverged as reason:
        return TrainingResult(*about, failure=f"{OVERFLOW}: {reason}")
    except BadInput as reason:
        return TrainingResult(*about, failure=str(reason))


def _figures(
    table: Table,
    line: TrainingResult,
    recipe: Recipe,
    run: Run,
    meant: Sequence[Attack],
    factories: Factories,
) -> TrainingResult:
    """The line of a trained net, with all figures that its records give."""
    evaluator, attacks = factories.open(run), table.attacks
    made = [
        factories.craft(evaluator, table.split, *each) for each in zip(attacks, meant, strict=True)
    ]
    records = {name: record for name, record in zip(attacks, made, strict=True) if record}
    scoring = Scorer.of(
        evaluator, rejectors=_rejectors(recipe, table.learned), records=[*records.values()]
    )
    # a record may have been made under another name
    scored = {name: scoring.scored(record) for name, record in records.items()}
    rows = [replace(row, attack=name) for name, each in scored.items() for row in each.rows]
    accuracy = {name: each.summary.accuracy for name, each in scored.items()}
    notes = tuple(each.summary.artefact for each in scored.values() if each.summary.artefact)
    unseen = {name for each in scored.values() for name in each.unseen}
    factories.keep(evaluator, [name for name in scoring.scores if name not in unseen])
    later = [name for name in attacks if name not in records]
    lacking = ([f"{LATER}: {', '.join(later)}"] if later else []) + _without(scoring, scored)
    return replace(
        line, rows=tuple(rows), accuracy=accuracy, notes=notes, failure="; ".join(lacking)
    )


def _without(scoring: Scorer, scored: Mapping[str, ScoredRecord]) -> list[str]:
    """The scores that no record gives and why, then those that some do not give."""
    by_reason, by_attacks = dict[str, list[str]](), dict[tuple[str, ...], list[str]]()
    for name, reason in scoring.without.items():
        by_reason.setdefault(reason, []).append(name)
    for name in scoring.scores:
        if lacking := tuple(label for label, each in scored.items() if name in each.unseen):
            by_attacks.setdefault(lacking, []).append(name)
    return [f"{WITHOUT} {', '.join(names)}: {reason}" for reason, names in by_reason.items()] + [
        f"{WITHOUT} {', '.join(names)} under {', '.join(labels)}"
        for labels, names in by_attacks.items()
    ]


def _rejectors(recipe: Recipe, learned: Sequence[str]) -> dict[str, Rejector]:
    """Confidence, the score that the head is for, and what learns from the finished net."""
    (name, own), known = recipe.head_rejector, recipe.rejectors()
    return {"Con": Con(), name: own} | {each: known[each] for each in learned}
