"""Scores as tables for the terminal.

    show_scores(scored, ["deploy"])

Piped output is as wide as the table; on a narrow terminal the intervals go below their figures.
"""

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from demur.evaluate import BASELINE, Protocol, Row, ScoredRecord
from demur.metrics import Difference, Interval

SLACK = 0.02  # of a TPR that few images can miss
CAPTIONS: dict[Protocol, str] = {
    "paper": "paper: TPR-95 threshold chosen with labels on each scored set (strict >)",
    "deploy": "deploy: TPR-95 threshold frozen on clean cal images before any attack (>=)",
}
COLUMNS = (
    "right of accepted", "vs Con's", "coverage", "accepted & wrong", "right kept", "AUROC",
    "AUROC vs Con",
)  # fmt: skip


def show_scores(scored: list[ScoredRecord], protocols: Iterable[Protocol]) -> None:
    """Print one table a protocol."""
    console = terminal()
    for protocol in protocols:
        table = score_table(scored, protocol)
        whole = whole_width(table)
        if not console.is_terminal:
            terminal(whole).print(table)
        else:
            console.print(score_table(scored, protocol, narrow=console.width < whole))
    for each in scored:
        if each.summary.artefact:
            console.print(each.summary.artefact, soft_wrap=True)


def terminal(width: int | None = None) -> Console:
    """A console that prints names as they are: no bracket or colon in them is a command to it."""
    return Console(width=width, markup=False, emoji=False, highlight=False)


def show_table(table: Table) -> None:
    """Print a table, as wide as it has to be where no terminal ends."""
    console = terminal()
    (console if console.is_terminal else terminal(whole_width(table))).print(table)


def whole_width(table: Table) -> int:
    """How wide a table is where nothing has to be cut."""
    console = terminal()
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def score_table(scored: list[ScoredRecord], protocol: Protocol, narrow: bool = False) -> Table:
    """Rejectors under attacks in one protocol; shares in percent with 95% intervals."""
    table = Table(
        title=CAPTIONS[protocol], title_justify="left", header_style="bold", box=box.SIMPLE_HEAD,
        caption="percent, with 95% intervals; the first line of each attack answers everything; "
        "differences to Con are on the same images, at an equal share of right answers kept",
        caption_justify="left", padding=(0, 1, 0, 0), title_style="bold",
    )  # fmt: skip
    table.add_column("attack, rejector", no_wrap=True)
    for name in COLUMNS:
        least = 11 if name == "AUROC" else 9
        table.add_column(name, justify="right", no_wrap=not narrow, min_width=least)
    for each in scored:
        everything = each.summary.accuracy, each.summary.accuracy_interval
        wrong = 1 - each.summary.accuracy
        cells = (percent(*everything, narrow), "", "100.0", percent(wrong), "100.0", "", "")
        table.add_row(f"{each.summary.attack}, n={each.summary.n}", *cells, style="bold")
        for row in each.rows:
            if row.protocol == protocol:
                table.add_row(f"  {row.rejector}", *_cells(row, narrow))
        table.add_section()
    return table


def percent(value: float, interval: Interval | None = None, narrow: bool = False) -> str:
    """A share as a percentage, with its 95% interval beside or below it."""
    return _with(f"{100 * value:.1f}", _ends(interval, 100, 1), narrow)


def _cells(row: Row, narrow: bool) -> tuple[str, ...]:
    point, ranking = row.point, row.ranking
    area, gap = _ends(ranking.auroc_interval, 1, 3), ranking.auroc_vs_con
    return (
        percent(point.accuracy, row.accuracy_interval, narrow),
        _gap(row.accuracy_vs_con, 100, 1, narrow) if comparable(row) else "",
        percent(point.coverage, row.coverage_interval, narrow),
        percent(point.accepted_wrong, row.accepted_wrong_interval, narrow),
        percent(point.tpr, row.tpr_interval, narrow),
        _with(f"{ranking.auroc:.3f}", area, narrow),
        "" if row.rejector == BASELINE else _gap(gap, 1, 3, narrow),
    )


def comparable(row: Row) -> bool:
    """Whether a row keeps as many right answers as it was asked to, so that shares compare."""
    asked = row.protocol == "deploy" or row.point.tpr >= row.level - SLACK
    return row.rejector != BASELINE and asked


def signed(value: float, scale: float, decimals: int) -> str:
    """A difference with its sign; nothing has a plus."""
    return f"{round(scale * value, decimals) + 0.0:+.{decimals}f}"


def _gap(gap: Difference, scale: float, decimals: int, narrow: bool) -> str:
    value, *ends = (signed(v, scale, decimals) for v in gap[:3])
    return _with(value, ends, narrow)


def _ends(interval: Interval | None, scale: float, decimals: int) -> list[str]:
    return [] if interval is None else [f"{scale * end:.{decimals}f}" for end in interval]


def _with(value: str, ends: list[str], narrow: bool) -> str:
    if not ends:
        return value
    return f"{value}\n{'-'.join(ends)}" if narrow else f"{value} [{', '.join(ends)}]"
