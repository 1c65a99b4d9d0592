"""Cells that differ from the published number, each with what explains it.

    rows = disagreements(cells)
    rows[0].cause, rows[0].status      # "ten steps, 1 restart: 34.2", "shown"

SECTION says when a cause is shown, likely or open.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from demur.files.tables import grid
from demur.paper.cells import Cell
from demur.paper.pages import number_text

Status = Literal["shown", "likely", "open"]
POINTS, AREA = 1.5, 0.02  # smaller differences are not listed
DISTANCE = 0.1  # of a mean distance, as a share of the published one
SHORTER = ("20 epochs", "36 epochs")
FEWER_EPOCHS = "fewer epochs"
# PGD-AT + RR gains 3.7 points at TPR-95 on clean images from 20 to 110 epochs.
MOST_POINTS, MOST_AREA = 4.0, 0.03
SECTION = """\
## Why ours differs

One row for each of the {count} measured cells that differ by more than {points} points, {area} of
AUROC or {distance:.0%} of a distance. A cause is *shown* where the same net, measured in that way,
agrees with the published number. It is *likely* where that closes at least half of the gap, where
it is shown for a gap as large in another row of the column, or where our net was trained for 20 or
36 epochs instead of 110 and is lower by at most {most_points:g} points or {most_area:g} of AUROC.
All others are *open*. {totals}.
"""


class Disagreement(NamedTuple):
    """A cell that differs, and why."""

    cell: Cell
    status: Status
    cause: str

    @property
    def gap(self) -> float:
        """Ours minus the published number."""
        assert self.cell.measured is not None
        return self.cell.measured - self.cell.published


def disagreements(cells: Iterable[Cell]) -> list[Disagreement]:
    """The measured cells that differ, in their order; costs of a training are left out."""
    rows = [
        Disagreement(cell, *_explained(cell))
        for cell in cells
        if cell.measured is not None
        and not cell.column.endswith(("MB", "per epoch"))
        and not _agrees(cell.measured, cell)
    ]
    return [_like_others(row, rows) if row.status == "open" else row for row in rows]


def _like_others(row: Disagreement, rows: Sequence[Disagreement]) -> Disagreement:
    """A row whose gap is as large as one of its column that a variant explains is likely that."""
    for other in rows:
        same = (row.cell.table, row.cell.column) == (other.cell.table, other.cell.column)
        name = other.cause.partition(":")[0]
        as_large = row.gap * other.gap > 0 and abs(row.gap) <= 1.25 * abs(other.gap)
        if same and other.status == "shown" and name not in row.cell.variants and as_large:
            return row._replace(status="likely", cause=f"{name}, as in {other.cell.row}")
    return row


def _tolerance(cell: Cell) -> float:
    """The largest difference that is not listed."""
    if cell.column.endswith("AUC"):
        return AREA
    return DISTANCE * cell.published if cell.table == 7 else POINTS


def _agrees(value: float, cell: Cell) -> bool:
    return abs(value - cell.published) <= _tolerance(cell)  # False for NaN


def _explained(cell: Cell) -> tuple[Status, str]:
    """Status and cause."""
    assert cell.measured is not None
    if math.isnan(cell.measured):
        return "open", "no prediction is correct"
    gap = abs(cell.measured - cell.published)
    others = {name: value for name, value in cell.variants.items() if _is_whole(name)}
    if others:
        name = min(others, key=lambda name: abs(others[name] - cell.published))
        how = f"{name}: {number_text(others[name], cell.column)}"
        if _agrees(others[name], cell):
            return "shown", how
        if abs(others[name] - cell.published) <= gap / 2:
            return "likely", how
    most = MOST_AREA if cell.column.endswith("AUC") else MOST_POINTS
    if cell.protocol.startswith(SHORTER) and 0 < cell.published - cell.measured <= most:
        return "likely", FEWER_EPOCHS
    return "open", ""


def _is_whole(variant: str) -> bool:
    """Whether a variant measures the same quantity as the cell."""
    return variant != "broken by a change, %"


def disagreement_section(cells: Sequence[Cell]) -> str:
    """The table as Markdown; empty without a disagreement."""
    rows = disagreements(cells)
    if not rows:
        return ""
    counts = Counter(row.status for row in rows)
    totals = ", ".join(f"{counts[status]} {status}" for status in ("shown", "likely", "open"))
    lines = [
        [str(row.cell.table), row.cell.row, row.cell.column, *_numbers(row), row.status, row.cause]
        for row in rows
    ]
    headings = "table", "row", "column", "ours", "published", "difference", "cause", "which"
    text = SECTION.format(
        count=len(rows), points=POINTS, area=AREA, distance=DISTANCE, totals=totals,
        most_points=MOST_POINTS, most_area=MOST_AREA,
    )  # fmt: skip
    return text + "\n" + grid(headings, lines, "lllrrrll")


def _numbers(row: Disagreement) -> list[str]:
    """Ours, the published number and the difference."""
    cell = row.cell
    assert cell.measured is not None
    both = [number_text(value, cell.column) for value in (cell.measured, cell.published)]
    undefined = math.isnan(row.gap)
    return [*both, "" if undefined else f"{row.gap:+.{len(both[1].partition('.')[2])}f}"]
