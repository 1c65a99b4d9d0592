"""Measure a table: train, attack and score every recipe, average over seeds; and a net's cost.

    results = measure_table(TABLES["methods-digits"], (0, 1), Factories(train, open_run, craft))
    stored_factories(Path("results/methods-cifar10"), open_run, print)    # reads records only

Existing runs and records are read, so an interrupted table resumes. A training that diverges or
fails becomes a result with the reason; the other trainings continue.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean, median, stdev

import torch
from scipy.stats import t

from demur.attacks import Attack
from demur.errors import BadInput, Diverged
from demur.evaluate import (
    LoadedRun,
    Protocol,
    RecordOptions,
    RejectorEvaluation,
    Row,
    ScoredRecord,
)
from demur.metrics import Difference, Interval
from demur.paper.tables import Table
from demur.recipes import Recipe, attack
from demur.rejectors import Con, Rejector
from demur.runs import Record, Run, runs_in
from demur.spec import digest

NOT_MEASURED, WITHOUT, DIVERGED = "not measured yet", "without", "diverged"
Train = Callable[[Recipe, Path], Run | None]
Open = Callable[[Run], LoadedRun]
Craft = Callable[[LoadedRun, str, Attack, RecordOptions], Record | None]
Z = NormalDist().inv_cdf(0.975)  # half-width of a 95% interval in standard errors
MEGABYTE = 1_000_000


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
        if (record := factories.craft(loaded, label, spec, RecordOptions(table.split)))
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


def stored_factories(folder: Path, open_run: Open, on_message: Callable[[str], None]) -> Factories:
    """Factories that return the stored runs and records of a folder, or None.

    Runs with an unreadable recipe are skipped and reported through `on_message`.

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

    def find_record(
        loaded: LoadedRun, _: str, attack: Attack, options: RecordOptions
    ) -> Record | None:
        """The record of this attack on the most images, whatever its label."""
        records = records_of(loaded.run)[options.split]
        matches = [one for one in records if one.metadata["attack"] == digest(attack)]
        return max(matches, key=lambda record: len(record.y), default=None)

    return Factories(find_run, open_run, find_record)


def _read_records(run: Run) -> dict[str, list[Record]]:
    """All records by split; raises BadInput if one is damaged."""
    return {split: run.records(split) for split in run.recipe.data.splits}


@dataclass(frozen=True)
class Mean:
    """A mean over seeds."""

    value: float
    spread: float | None  # standard deviation over seeds; None for a single seed
    interval: Interval | None = None  # 95% interval, only for a single seed


@dataclass(frozen=True)
class SeedAverage:
    """One rejector of one entry under one attack in one protocol, averaged over seeds."""

    entry: str
    attack: str
    rejector: str
    protocol: Protocol
    seeds: int
    n: int
    all: Mean  # accuracy on all images
    right: Mean  # accuracy on accepted images
    right_vs_con: Difference
    coverage: Mean
    accepted_wrong: Mean
    auroc: Mean
    auroc_vs_con: Difference


def average_seeds(results: Iterable[TrainingResult]) -> list[SeedAverage]:
    """Average over seeds: one result per entry, attack, rejector, protocol and image count."""
    groups: dict[tuple[str, str, str, Protocol, int], list[tuple[TrainingResult, Row]]] = {}
    for result in results:
        for row in result.rows:  # records of another number of images are not averaged
            key = (result.entry, row.attack, row.rejector, row.protocol, row.point.n)
            groups.setdefault(key, []).append((result, row))
    return [_average(*key, members) for key, members in groups.items()]


def paired(differences: Sequence[Difference]) -> Difference:
    """The mean of the differences of several seeds, all measured on the same images.

    The variance has two parts: that of the images, which more seeds do not reduce, and that of the
    seeds, divided by their number. The interval uses Student's t.
    """
    if len(differences) == 1:
        return differences[0]
    value = fmean(difference.value for difference in differences)
    image_variance = fmean(((d.hi - d.lo) / (2 * Z)) ** 2 for d in differences)
    seed_variance = stdev(d.value for d in differences) ** 2 / len(differences)
    error = math.sqrt(image_variance + seed_variance)
    if error == 0:
        return Difference(value, value, value, float(value == 0))
    # Satterthwaite: only the seed variance is estimated from few samples
    freedom = math.inf
    if seed_variance:
        freedom = (len(differences) - 1) * (error**2 / seed_variance) ** 2
    margin = float(t.ppf(0.975, freedom)) * error
    p = 2 * float(t.sf(abs(value) / error, freedom))
    return Difference(value, value - margin, value + margin, p)


def _average(
    entry: str,
    attack: str,
    rejector: str,
    protocol: Protocol,
    n: int,
    members: list[tuple[TrainingResult, Row]],
) -> SeedAverage:
    rows = [row for _, row in members]
    accuracy = [result.accuracy[attack] for result, _ in members if result.accuracy is not None]
    return SeedAverage(
        entry, attack, rejector, protocol, len(rows), n,
        _mean(accuracy),
        _mean([row.point.accuracy for row in rows], rows[0].accuracy_interval),
        paired([row.accuracy_vs_con for row in rows]),
        _mean([row.point.coverage for row in rows], rows[0].coverage_interval),
        _mean([row.point.accepted_wrong for row in rows], rows[0].accepted_wrong_interval),
        _mean([row.ranking.auroc for row in rows], rows[0].ranking.auroc_interval),
        paired([row.ranking.auroc_vs_con for row in rows]),
    )  # fmt: skip


def _mean(values: Sequence[float], interval: Interval | None = None) -> Mean:
    """The mean; `interval` is that of the first value and applies if it is the only one."""
    if len(values) == 1:
        return Mean(values[0], None, interval)
    return Mean(fmean(values), stdev(values))


def metrics_file(run: Run) -> Path:
    """The log of a training, one line per epoch."""
    return run.path / "metrics.jsonl"


def epoch_seconds(run: Run) -> float | None:
    """Median seconds per epoch, with validation if the recipe validates; None without a log.

    The first epoch compiles the training step, so it is no part of a mean.

    Raises:
        BadInput: The log was changed, or a line has no seconds.
    """
    if run.metrics_state == "missing":  # raises if the file was changed
        return None
    path = metrics_file(run)
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return float(median(float(line["seconds"]) for line in lines))
    except (ValueError, KeyError, TypeError):  # ValueError: no JSON, or no line
        raise BadInput(f"{path} has no seconds of each epoch; restore it, or delete it") from None


@cache
def megabytes(recipe: Recipe) -> float:
    """Size of the state of the net that a recipe trains, in millions of bytes."""
    with torch.device("meta"):
        net = recipe.net.build(recipe.data.domain, recipe.method.head)
    sizes: list[int] = [one.numel() * one.element_size() for one in net.state_dict().values()]
    return sum(sizes) / MEGABYTE
