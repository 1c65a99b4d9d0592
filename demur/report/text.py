"""Scores as tables for the terminal.

console.print(score_table(scored, "deploy"))
"""

from rich.table import Table

from demur.evaluate import Protocol, Row, Scored
from demur.metrics import Interval

CAPTIONS: dict[Protocol, str] = {
    "paper": "paper: TPR-95 threshold chosen with labels on each scored set (strict >)",
    "deploy": "deploy: TPR-95 threshold frozen on clean cal images before any attack (>=)",
}


def percent(value: float, interval: Interval | None = None) -> str:
    """A share as a percentage, with its 95% interval."""
    span = "" if interval is None else f" [{100 * interval.lo:.1f}, {100 * interval.hi:.1f}]"
    return f"{100 * value:.1f}{span}"


def score_table(scored: list[Scored], protocol: Protocol) -> Table:
    """Rejectors under attacks in one protocol; shares in percent with 95% intervals."""
    table = Table(title=CAPTIONS[protocol], title_justify="left", header_style="bold")
    table.add_column("attack", no_wrap=True)
    table.add_column("rejector", no_wrap=True)
    for name in ("right of accepted", "coverage", "accepted & wrong", "right kept", "AUROC"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in scored:
        summary = each.summary
        table.add_row(
            f"{summary.attack} (n={summary.n})",
            "none",
            percent(summary.accuracy, summary.accuracy_interval),
            "100.0",
            percent(1 - summary.accuracy),
            "100.0",
            "",
            style="dim",
        )
        for row in each.rows:
            if row.protocol == protocol:
                table.add_row("", *_cells(row))
        table.add_section()
    return table


def _cells(row: Row) -> tuple[str, ...]:
    point = row.point
    return (
        row.rejector,
        percent(point.accuracy, row.accuracy_interval),
        percent(point.coverage, row.coverage_interval),
        percent(point.accepted_wrong, row.accepted_wrong_interval),
        percent(point.tpr),
        f"{row.auroc:.3f} [{row.auroc_interval.lo:.3f}, {row.auroc_interval.hi:.3f}]",
    )
