"""Measurement of a table: train, attack and score every recipe.

    results = measured(TABLES["methods-digits"], (0, 1), Factories(train, open_run, craft))

Existing runs and records are read, so an interrupted table resumes. A training that diverges or
fails becomes a result with the reason; the other trainings continue.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from demur.attacks import Attack
from demur.data import SplitName
from demur.errors import BadInput, Diverged
from demur.evaluate import LoadedRun, RejectorEvaluation, Row, ScoredRecord
from demur.paper.tables import Table
from demur.recipes import Recipe, attack
from demur.rejectors import Con, Rejector
from demur.runs import Record, Run
from demur.spec import digest

NOT_MEASURED, WITHOUT, DIVERGED = "not measured yet", "without", "diverged"
Train = Callable[[Recipe, Path], Run | None]
Open = Callable[[Run], LoadedRun]
Craft = Callable[[LoadedRun, SplitName, str, Attack], Record | None]


@dataclass(frozen=True)
class TrainingResult:
    """The results of one training of one recipe, or the reason why there are none."""

    entry: str
    seed: int
    recipe: str  # digest
    run: str
    rows: tuple[Row, ...] = ()
    accuracy: dict[str, float] | None = None  # on all images, by attack
    notes: tuple[str, ...] = ()
    failure: str = ""  # why results are missing, if any are

    @property
    def has_failed(self) -> bool:
        """Whether an error that the user can fix prevented the training."""
        expected = (NOT_MEASURED, WITHOUT, DIVERGED)
        return bool(self.failure) and not self.failure.startswith(expected)


@dataclass(frozen=True)
class Factories:
    """Functions that make runs, evaluators and records; None means not available.

    `keep` stores an evaluated run with the named scores, for example as an archive.
    """

    train: Train
    open: Open
    craft: Craft
    keep: Callable[[LoadedRun, Sequence[str]], object] = lambda loaded, scores: None


def measure_table(
    table: Table, seeds: Sequence[int], factories: Factories
) -> Iterator[TrainingResult]:
    """Measure a table; yield one result per entry and seed, in that order."""
    diverged: set[tuple[str | None, int]] = set()
    for entry, recipe in table.entries.items():
        for seed in seeds:
            base_diverged = (recipe.base, seed) in diverged
            result = _measure_entry(table, entry, seed, factories, base_diverged)
            if result.failure.startswith(DIVERGED):
                diverged.add((entry, seed))
            yield result


def _measure_entry(
    table: Table, entry: str, seed: int, factories: Factories, base_diverged: bool
) -> TrainingResult:
    recipe, folder, attacks = table.recipe(entry, seed), table.folder(entry, seed), table.attacks
    result = TrainingResult(entry, seed, digest(recipe), folder.name)
    specs = [attack(label, recipe) for label in attacks]  # an unknown name raises before any work
    if base_diverged:
        return replace(result, failure=f"{DIVERGED}: its base {table.entries[entry].base} diverged")
    try:
        run = factories.train(recipe, folder)
        if run is None:
            return replace(result, failure=NOT_MEASURED)
        return _score(table, replace(result, run=run.name), recipe, run, specs, factories)
    except Diverged as reason:
        return replace(result, failure=f"{DIVERGED}: {reason}")
    except BadInput as reason:
        return replace(result, failure=str(reason))


def _score(
    table: Table,
    result: TrainingResult,
    recipe: Recipe,
    run: Run,
    specs: Sequence[Attack],
    factories: Factories,
) -> TrainingResult:
    """Attack and score a trained net; return the result with all available rows."""
    loaded, attacks = factories.open(run), table.attacks
    records = {
        label: record
        for label, spec in zip(attacks, specs, strict=True)
        if (record := factories.craft(loaded, table.split, label, spec))
    }
    evaluation = RejectorEvaluation.of(
        loaded, rejectors=_rejectors(recipe, table.learned), records=[*records.values()]
    )
    scored = {label: evaluation.score_record(record) for label, record in records.items()}
    # a stored record may have another label
    rows = [replace(row, attack=label) for label, one in scored.items() for row in one.rows]
    accuracy = {label: one.summary.accuracy for label, one in scored.items()}
    notes = tuple(one.summary.artefact for one in scored.values() if one.summary.artefact)
    unavailable = {name for one in scored.values() for name in one.missing_rejectors}
    factories.keep(loaded, [name for name in evaluation.scores if name not in unavailable])
    missing = [label for label in attacks if label not in records]
    reasons = [f"{NOT_MEASURED}: {', '.join(missing)}"] if missing else []
    reasons += _missing_scores(evaluation, scored)
    return replace(
        result, rows=tuple(rows), accuracy=accuracy, notes=notes, failure="; ".join(reasons)
    )


def _missing_scores(
    evaluation: RejectorEvaluation, scored: Mapping[str, ScoredRecord]
) -> list[str]:
    """The scores missing under all attacks with the reason, then those missing under some."""
    by_reason, by_attacks = dict[str, list[str]](), dict[tuple[str, ...], list[str]]()
    for name, reason in evaluation.unavailable.items():
        by_reason.setdefault(reason, []).append(name)
    for name in evaluation.scores:
        if labels := tuple(label for label, one in scored.items() if name in one.missing_rejectors):
            by_attacks.setdefault(labels, []).append(name)
    return [f"{WITHOUT} {', '.join(names)}: {reason}" for reason, names in by_reason.items()] + [
        f"{WITHOUT} {', '.join(names)} under {', '.join(labels)}"
        for labels, names in by_attacks.items()
    ]


def _rejectors(recipe: Recipe, learned: Sequence[str]) -> dict[str, Rejector]:
    """Con, the head's own score, and the rejectors fitted to features."""
    (name, own), known = recipe.head_rejector, recipe.rejectors()
    return {"Con": Con(), name: own} | {name: known[name] for name in learned}
