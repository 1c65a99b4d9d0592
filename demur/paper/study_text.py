"""Adaptive attacks on a rejector, and minimal distortions, as tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from demur.evaluate import BASELINE, Row, ScoredRecord
from demur.paper.adaptive import Mark, Measure, Trial, marks, minima, row_of
from demur.paper.distortion import Distances
from demur.report.terminal import percent, show_scores, show_table, table_width, terminal

STARS: dict[Mark, str] = {"": "", "objective": "* ", "all": "** "}
CAPTION = (
    "percent and AUROC, with 95% intervals; * the minimum of its objective, ** the minimum of "
    "all; a minimum of many noisy figures is biased downwards"
)

UNITS = {"L2": "squared L2", "Linf": "Linf x 255", "Linf-adam": "Linf x 255, Adam"}
DISTANCE_COLUMNS = (
    "broken, %", "wrong unattacked", "mean of broken", "median", "times normal",
    "paper: mean of all",
)  # fmt: skip
DISTANCE_CAPTION = (
    "adaptive: misclassified, with a score of at least the median of correct predictions on clean "
    "training images. Mean and median are over the images that the attack broke; times normal is "
    "over those that both attacks broke. The last column follows the paper: where the adaptive "
    "attack fails, the distance of normal C&W counts; where that fails, and for images "
    "misclassified without attack, 0. An attack that fails seems closer"
)


@dataclass(frozen=True)
class AdaptiveResults:
    """Results of the adaptive evaluation of a run."""

    rejector: str  # the one under attack
    plain: ScoredRecord  # PGD on the cross-entropy with the same budget
    tried: Sequence[Trial]  # paper protocol; empty where it is not evaluated
    worst: ScoredRecord | None  # deploy protocol

    @property
    def rejectors(self) -> list[str]:
        """The rejector under attack, then confidence."""
        return list(dict.fromkeys([self.rejector, BASELINE]))

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        entries: dict[str, Any] = {"rejector": self.rejector, "plain": _plain(self.plain)}
        if self.tried:
            least = {name: minima(self.tried, name) for name in self.rejectors}
            trials = [trial.to_json() for trial in self.tried]
            entries["paper"] = {"trials": trials, "least": least}
        if self.worst is not None:
            entries["deploy"] = _plain(self.worst)
        return entries


def show_adaptive(results: AdaptiveResults) -> None:
    """Print the table of the paper protocol, then that of the deploy protocol."""
    if results.tried:
        wide = paper_table(results)
        fits = table_width(wide) <= terminal().width
        show_table(wide if fits else paper_table(results, narrow=True))
    if results.worst is not None:
        show_scores([results.plain, results.worst], ["deploy"])
        terminal().print(worst_case_sentence(results), soft_wrap=True)


def paper_table(results: AdaptiveResults, narrow: bool = False) -> Table:
    """Return a table of objectives and etas in the paper protocol, with the minima marked."""
    table = Table(
        title="paper: TPR-95 threshold chosen with labels on each scored set (strict >)",
        title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD,
        caption=CAPTION, caption_justify="left", padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("objective, eta", no_wrap=True)
    table.add_column("accuracy", justify="right", no_wrap=True)
    for name in results.rejectors:
        for figure in ("accuracy of accepted", "AUROC"):
            header = f"{name}:\n{figure}" if narrow else f"{name}: {figure}"
            table.add_column(header, justify="right", no_wrap=True)
    table.add_row(
        results.plain.summary.attack, *_cells(results.plain, results.rejectors, None, narrow)
    )
    for trial, stars in zip(results.tried, _stars(results), strict=True):
        if trial.eta == results.tried[0].eta:
            table.add_section()
            table.add_row(f"{trial.objective}: {trial.formula}", style="bold")
        table.add_row(f"  {trial.eta:g}", *_cells(trial.scored, results.rejectors, stars, narrow))
    return table


def worst_case_sentence(results: AdaptiveResults) -> str:
    """Return the accepted errors in the worst case, in one sentence."""
    assert results.worst is not None
    rows = [row_of(scored, results.rejector, "deploy") for scored in (results.plain, results.worst)]
    plain, worst = (percent(row.point.accepted_wrong, row.accepted_wrong_interval) for row in rows)
    return (
        f"wrong and accepted by {results.rejector} at its frozen threshold, of {rows[0].point.n} "
        f"images: {worst}% under the worst of all objectives and etas for each image, {plain}% "
        f"under {results.plain.summary.attack}"
    )


def _stars(results: AdaptiveResults) -> list[list[str]]:
    """Return the marks of every trial, in the order of the columns."""
    measures: tuple[Measure, ...] = ("accuracy", "auroc")
    columns = [
        marks(results.tried, name, measure) for name in results.rejectors for measure in measures
    ]
    return [[STARS[mark] for mark in line] for line in zip(*columns, strict=True)]


def _cells(
    scored: ScoredRecord, rejectors: Sequence[str], stars: Sequence[str] | None, narrow: bool
) -> list[str]:
    rows = [row_of(scored, name, "paper") for name in rejectors]
    figures = [figure for row in rows for figure in _figures(row, narrow)]
    marked = zip(stars or [""] * len(figures), figures, strict=True)
    return [percent(scored.summary.accuracy), *(star + figure for star, figure in marked)]


def _figures(row: Row, narrow: bool) -> tuple[str, str]:
    area, (lo, hi) = row.ranking.auroc, row.ranking.auroc_interval
    separator = "\n" if narrow else " "
    auroc = f"{area:.3f}{separator}[{lo:.3f}, {hi:.3f}]"
    return percent(row.point.accuracy, row.accuracy_interval, narrow), auroc


def _plain(scored: ScoredRecord) -> dict[str, Any]:
    return {"attack": scored.summary.to_json(), "rows": [row.to_json() for row in scored.rows]}


def show_distances(lines: Sequence[Distances]) -> None:
    """Print the table, and which means leave out images that were not broken."""
    show_table(distance_table(lines))
    for line in lines:
        if line.unbroken:
            terminal().print(
                f"{line.attack} did not break {line.unbroken} of {line.n} images: its mean and "
                "median are over the others",
                soft_wrap=True,
            )


def distance_table(lines: Sequence[Distances]) -> Table:
    """Return minimum-norm attacks by norm, normal beside adaptive."""
    table = Table(
        title=f"smallest change that breaks an image, n={lines[0].n}", title_justify="left",
        title_style="bold", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        caption=DISTANCE_CAPTION, caption_justify="left",
    )  # fmt: skip
    table.add_column("distance, must be accepted by", no_wrap=True)
    for name in DISTANCE_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for norm in dict.fromkeys(line.norm for line in lines):
        table.add_row(UNITS[norm], style="bold")
        for line in lines:
            if line.norm == norm:
                table.add_row(f"  {line.rejector_name} ({line.attack})", *distance_cells(line))
        table.add_section()
    return table


def distance_cells(line: Distances) -> tuple[str, ...]:
    """Format a line: the cells of DISTANCE_COLUMNS."""
    ends = line.mean_interval
    mean = "" if line.mean is None else _three_digits(line.mean)
    return (
        percent(line.broken, line.broken_interval),
        percent(line.broken_clean),
        mean if ends is None else f"{mean} [{_three_digits(ends.lo)}, {_three_digits(ends.hi)}]",
        "" if line.median is None else _three_digits(line.median),
        "" if line.ratio_to_normal is None else f"{line.ratio_to_normal:.2f}",
        "" if line.paper_mean is None else _three_digits(line.paper_mean),
    )


def _three_digits(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
