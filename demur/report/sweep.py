"""Recipes over seeds in one table: means, deviations, and paired differences to the first entry."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from rich.table import Table

from demur.errors import BadInput
from demur.evaluate import LoadedRun, RejectorEvaluation, Row, paired_shares
from demur.evaluate.paired_differences import mean_of, paired
from demur.metrics import BoolArray
from demur.recipes import AnyName, Recipe, recipe, rejectors_named, split_changes
from demur.rejectors import Con
from demur.report.scored_run import ScoredRun, main_row
from demur.report.terminal import difference, plain_table, spread_text
from demur.runs import Record
from demur.spec import digest

NOTE = (
    "Percent, and AUROC: means with deviations over seeds, or the 95% interval of one seed. Vs "
    "first: accepted errors minus those of {first}, paired by image and seed; the 95% interval "
    "includes the variance over seeds. Thresholds accept 95% of the correct predictions on clean "
    "cal images, or on the scored images if a net has none."
)


def sweep_entries(sources: Iterable[str], settings: Iterable[str]) -> dict[str, tuple[str, Recipe]]:
    """Sources and recipes with every combination of settings, such as "epochs=2,4", by name."""
    choices, found, names = list[list[str]](), dict[str, tuple[str, Recipe]](), dict[str, str]()
    for setting in settings:
        key, _, values = setting.partition("=")
        if key == "seed" or not split_changes(values):
            raise BadInput(f"--set {setting} sets nothing; write KEY=VALUE,VALUE, seeds as --seeds")
        choices.append([f"{key}={part}" for part in split_changes(values)])
    for source, changes in product(sources, [*product(*choices)]):
        name = " ".join([source, *changes])
        made = replace(recipe(source, changes), seed=0)
        if equal := names.get(digest(made)):
            raise BadInput(f"{name} is the same recipe as {equal}; leave out one of them")
        found[name], names[digest(made)] = (source, made), name
    return found


class SweepRow(NamedTuple):
    """One rejector on one net under one attack: its row, and its accepted errors by image."""

    entry: str
    attack: str
    rejector: str
    seed: int
    accuracy: float  # without a rejector
    row: Row
    errors: BoolArray
    images: str  # digest of the images


def score_net(
    entry: str,
    seed: int,
    loaded: LoadedRun,
    records: Mapping[str, Record],
    rejectors: AnyName | Sequence[AnyName] = (),
) -> tuple[list[SweepRow], list[str]]:
    """The rows of a trained net at frozen thresholds (the paper's without cal images); warnings."""
    made, rows, warnings = loaded.run.recipe, list[SweepRow](), list[str]()
    specs = {"Con": Con()} | dict([made.head_rejector]) | rejectors_named(rejectors, made)
    evaluation = RejectorEvaluation.of(loaded, rejectors=specs, records=[*records.values()])
    warnings += [f"without {name}: {why}" for name, why in evaluation.unavailable.items()]
    for label, record in records.items():
        scored = evaluation.score_record(record)
        run, right = ScoredRun(loaded, evaluation, [scored]), record.correct
        warnings += [scored.summary.artefact] if scored.summary.artefact else []
        warnings += [f"{label} without {name}" for name in scored.missing_rejectors]
        for name in [one for one in evaluation.scores if one not in scored.missing_rejectors]:
            row, errors = main_row(scored, name), run.accepted(scored, name) & ~right
            key = entry, label, name, seed, scored.summary.accuracy
            rows.append(SweepRow(*key, row, errors, record.metadata["data"]))
    return rows, warnings


def sweep_table(rows: Sequence[SweepRow], first: tuple[str, str]) -> Table:
    """Return recipes x attacks x rejectors; `first` is the entry and rejector to compare with."""
    seeds = len({row.seed for row in rows})
    table = plain_table(
        f"Recipes, {seeds} seed{'s' if seeds > 1 else ''}", "recipe, attack, rejector",
        "accuracy of accepted", "coverage", "accepted & wrong", "vs first", "AUROC",
        caption=NOTE.format(first=", ".join(first)),
    )  # fmt: skip
    groups = dict[tuple[str, str, str, int], list[SweepRow]]()
    for row in rows:
        groups.setdefault((row.entry, row.attack, row.rejector, row.row.point.n), []).append(row)
    shown = ("", "", 0)
    for (entry, attack, rejector, n), members in groups.items():
        if entry != shown[0]:
            table.add_row(entry, style="bold")
        if (entry, attack, n) != shown:
            fewer = f", {len(members)} of {seeds} seeds" if len(members) < seeds else ""
            every = mean_of([one.accuracy for one in members])
            table.add_row(f"  {attack}, n={n}{fewer}", spread_text(every))
        shown = entry, attack, n
        gaps = (
            []
            if (entry, rejector) == first
            else [
                paired_shares(one.errors, other.errors)
                for one, other in product(members, groups.get((first[0], attack, first[1], n), ()))
                if (one.seed, one.images) == (other.seed, other.images)
            ]
        )
        points, head = [one.row.point for one in members], members[0].row
        shares = [
            mean_of([getattr(one, name) for one in points], getattr(head, f"{name}_interval"))
            for name in ("accuracy", "coverage", "accepted_wrong")
        ]
        auroc = [one.row.ranking.auroc for one in members]
        table.add_row(
            f"    {rejector}", *map(spread_text, shares),
            difference(paired(gaps), 100, 1) if gaps else "",
            spread_text(mean_of(auroc, head.ranking.auroc_interval), 1, 3),
        )  # fmt: skip
    return table
