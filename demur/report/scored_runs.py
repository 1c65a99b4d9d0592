"""The results of runs: scored records, `demur sweep` over seeds, certificates and retests."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from rich.table import Table

from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import (
    BASELINE,
    LoadedRun,
    Protocol,
    RejectorEvaluation,
    Row,
    ScoredRecord,
    paired_shares,
    values,
)
from demur.evaluate.accepted_errors import ScoredWorstCase
from demur.evaluate.certificates import IssuedCertificate, Retest
from demur.evaluate.paired_differences import mean_of, paired
from demur.metrics import BoolArray
from demur.metrics.thresholds import ANY_SCORE
from demur.recipes import AnyName, Recipe, recipe, rejectors_named, split_changes
from demur.rejectors import Con
from demur.report.terminal import difference, percent, plain_table, show_table, spread_text
from demur.runs import Record
from demur.spec import digest

RECTIFIED = "R-Con"
MAX_RUNS = 6  # of one page
NO_DATA = "the data set is not on this machine"


@dataclass(frozen=True)
class ScoredRun:
    """A run, its fitted rejectors and its scored records, those of worst-score apart."""

    loaded: LoadedRun
    evaluation: RejectorEvaluation
    scored: list[ScoredRecord]
    worst: list[ScoredWorstCase] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.loaded.run.name

    @property
    def protocol(self) -> Protocol:
        """Protocol of the sentences: deploy, or paper if no cal images were held out."""
        return "deploy" if self.evaluation.thresholds else "paper"

    @property
    def main_rejector(self) -> str:
        return main_rejector(self.evaluation)

    def accepted(self, scored: ScoredRecord, rejector: str) -> BoolArray:
        """Return which images a rejector accepts in the protocol of the sentences; N."""
        if self.protocol == "deploy":
            return self.evaluation.accepted(rejector, scored.record)
        score = values(self.evaluation.score_for(rejector, scored.record), scored.record)
        above: BoolArray = score > main_row(scored, rejector).point.threshold
        return above

    @property
    def training(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, one per epoch; none if there is no such file."""
        path = self.loaded.run.path / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.splitlines() if line]

    @property
    def split_sizes(self) -> dict[str, int]:
        """Number of images of each split; empty if the data set is not on this machine."""
        try:
            return {name: len(images) for name, images in self.loaded.splits.items()}
        except BadInput:
            return {}


def main_rejector(evaluation: RejectorEvaluation) -> str:
    """Return R-Con where the net has it, else Con."""
    return RECTIFIED if RECTIFIED in evaluation.scores else BASELINE


def main_row(scored: ScoredRecord, rejector: str) -> Row:
    """Return the row of a rejector at its frozen threshold, or the paper's row without one."""
    rows = [row for row in scored.rows if row.rejector == rejector]
    return next((row for row in rows if row.protocol == "deploy"), rows[0])


def hardest(records: list[ScoredRecord], evaluation: RejectorEvaluation) -> ScoredRecord:
    """Return the record with the most accepted errors of the main rejector."""
    name = main_rejector(evaluation)
    return max(records, key=lambda scored: main_row(scored, name).point.accepted_wrong)


def attacked_images(scored: ScoredRecord) -> bool:
    """Return whether any image of the record was changed."""
    return scored.summary.largest_linf > 0


def clean_images(record: Record, loaded: LoadedRun) -> Images:
    """Return the images that the record attacked; raise BadInput where the data have changed."""
    split = next(s for name, s in loaded.splits.items() if name == record.metadata["split"])
    if len(record.y) > len(split) or split.first(len(record.y)).digest() != record.metadata["data"]:
        raise BadInput(
            f"the record of {record.label} was made of other images than the data now hold; "
            "make it again with demur attack"
        )
    return split.first(len(record.y))


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
    entry: str, seed: int, loaded: LoadedRun, records: Mapping[str, Record],
    rejectors: AnyName | Sequence[AnyName] = (),
) -> tuple[list[SweepRow], list[str]]:  # fmt: skip
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
        base = groups.get((first[0], attack, first[1], n), []) if (entry, rejector) != first else []
        gaps = [
            paired_shares(one.errors, other.errors)
            for one, other in product(members, base)
            if (one.seed, one.images) == (other.seed, other.images)
        ]
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


SHARES = {"risk": "wrong of accepted", "tpr": "accepted of correct", "coverage": "coverage"}
INTERVALS = {"risk": "risk_interval", "TPR": "tpr_interval", "coverage": "coverage_interval"}


def certificate_text(certificate: IssuedCertificate) -> str:
    """Return a certificate as text for the terminal."""
    about = certificate.metadata
    intervals = ", ".join(
        f"{name} {percent(about[key]['lo'])} to {percent(about[key]['hi'])}%"
        for name, key in INTERVALS.items()
    )
    nothing = all(t <= ANY_SCORE for t in certificate.thresholds)
    return (
        f"{certificate.rejector}: {about['sentence']}{', so it rejects nothing' * nothing}\n"
        f"tested on {about['n']:,} {about['on']} images of the cal split, after {about['pilot']:,} "
        f"others had chosen the thresholds to test: {about['accepted']:,} accepted, "
        f"{about['accepted_wrong']:,} of them wrong\n"
        f"simultaneous intervals at the same confidence: {intervals}\n"
        f"valid for {about['valid_for']}"
    )


def show_retests(retests: Iterable[tuple[IssuedCertificate, list[Retest]]]) -> None:
    """Print guaranteed beside observed shares, where there is a certificate."""
    table = retest_table(retests)
    if table.row_count:
        show_table(table)


def retest_table(retests: Iterable[tuple[IssuedCertificate, list[Retest]]]) -> Table:
    """Return a table with one block per certificate and one line per record."""
    table = plain_table(
        "certificates: guaranteed on cal, observed on test",
        "certificate, attack", "share", "guaranteed", "observed", "coverage", "verdict",
        caption="percent, with exact 95% intervals; broken: the interval excludes the guarantee; "
        "aimed at: an attack on this rejector and threshold may do more",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    table.columns[1].justify = table.columns[5].justify = "left"
    for certificate, lines in retests:
        level = f"{100 * certificate.metadata['confidence']:g}% confidence"
        heading = f"{certificate.rejector}, {level}, on {certificate.metadata['on']}"
        table.add_row(heading, style="bold")
        if not lines:
            table.add_row("  not tested: its rejector is not scored here, or has changed")
        for line in lines:
            table.add_row(f"  {line.attack}", *cells(line))
        table.add_section()
    return table


def cells(line: Retest) -> tuple[str, str, str, str, str]:
    """Format a retest: share, guaranteed, observed, coverage, verdict."""
    bound = "at most" if line.quantity == "risk" else "at least"
    missed = line.aim if line.verdict in ("kept", "within chance") else ""
    verdict = line.verdict + f", but {missed or 'not guaranteed here'}" * (not line.covered)
    return (
        SHARES[line.quantity], f"{bound} {percent(line.level)}",
        "" if line.observed is None else percent(line.observed, line.interval),
        percent(line.coverage), verdict,
    )  # fmt: skip
