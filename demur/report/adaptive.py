"""The adaptive evaluation as tables and as JSON values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from demur.evaluate import BASELINE, Row, ScoredRecord
from demur.evaluate.adaptive import Mark, Measure, Trial, marks, minima, row_of
from demur.report.text import percent, show_scores, show_table, table_width, terminal

STARS: dict[Mark, str] = {"": "", "objective": "* ", "all": "** "}
CAPTION = (
    "percent and AUROC, with 95% intervals; * the least of its objective, ** the least of all: an "
    "attacker may choose, but a least of many figures is also a lucky one"
)


@dataclass(frozen=True)
class Findings:
    """What the adaptive evaluation of a run found."""

    rejector: str  # that was attacked
    plain: ScoredRecord  # PGD on the cross-entropy with the same budget
    tried: Sequence[Trial]  # paper; empty where it was not asked for
    worst: ScoredRecord | None  # deploy

    @property
    def rejectors(self) -> list[str]:
        """The one that was attacked first, then confidence."""
        return list(dict.fromkeys([self.rejector, BASELINE]))

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        found: dict[str, Any] = {"rejector": self.rejector, "plain": _plain(self.plain)}
        if self.tried:
            least = {name: minima(self.tried, name) for name in self.rejectors}
            trials = [trial.plain() for trial in self.tried]
            found["paper"] = {"trials": trials, "least": least}
        if self.worst is not None:
            found["deploy"] = _plain(self.worst)
        return found


def show_adaptive(found: Findings) -> None:
    """Print the paper's protocol, then the deployed one."""
    if found.tried:
        wide = paper_table(found)
        fits = table_width(wide) <= terminal().width
        show_table(wide if fits else paper_table(found, narrow=True))
    if found.worst is not None:
        show_scores([found.plain, found.worst], ["deploy"])
        terminal().print(worst_words(found), soft_wrap=True)


def paper_table(found: Findings, narrow: bool = False) -> Table:
    """Objectives and etas in the paper's protocol, the least figures marked."""
    table = Table(
        title="paper: TPR-95 threshold chosen with labels on each scored set (strict >)",
        title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD,
        caption=CAPTION, caption_justify="left", padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("objective, eta", no_wrap=True)
    table.add_column("accuracy", justify="right", no_wrap=True)
    for name in found.rejectors:
        for figure in ("accuracy of accepted", "AUROC"):
            header = f"{name}:\n{figure}" if narrow else f"{name}: {figure}"
            table.add_column(header, justify="right", no_wrap=True)
    table.add_row(found.plain.summary.attack, *_cells(found.plain, found.rejectors, None, narrow))
    for trial, stars in zip(found.tried, _stars(found), strict=True):
        if trial.eta == found.tried[0].eta:
            table.add_section()
            table.add_row(f"{trial.objective}: {trial.formula}", style="bold")
        table.add_row(f"  {trial.eta:g}", *_cells(trial.scored, found.rejectors, stars, narrow))
    return table


def worst_words(found: Findings) -> str:
    """The worst case in a sentence."""
    assert found.worst is not None
    rows = [row_of(scored, found.rejector, "deploy") for scored in (found.plain, found.worst)]
    plain, worst = (percent(row.point.accepted_wrong, row.accepted_wrong_interval) for row in rows)
    return (
        f"wrong and accepted by {found.rejector} at its frozen threshold, of {rows[0].point.n} "
        f"images: {worst}% under the worst of all objectives and etas for each image, {plain}% "
        f"under {found.plain.summary.attack}"
    )


def _stars(found: Findings) -> list[list[str]]:
    """The marks of every trial, in the order of the columns."""
    measures: tuple[Measure, ...] = ("accuracy", "auroc")
    columns = [
        marks(found.tried, name, measure) for name in found.rejectors for measure in measures
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
    return {"attack": scored.summary.plain(), "rows": [row.plain() for row in scored.rows]}
