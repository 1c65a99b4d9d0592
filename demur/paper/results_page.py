"""The page RESULTS.md: every table of the paper, our numbers beside the published ones."""

from collections.abc import Sequence

from demur.paper.cells import Cell
from demur.paper.published import PAPER_TABLES, PaperTable

INTRODUCTION = """\
# Results

Every table of "Two Coupled Rejection Metrics Can Tell Adversarial Examples Apart" (CVPR 2022),
numbered as there. A cell shows our number and the published one in parentheses; a dash means not
measured. TPR-95 is the accuracy in percent on the images that a rejector accepts when it accepts
95% of the correct predictions. Letters lead to the notes under the table.

Made by `{command}` from stored records. `--json` prints every cell with its record, attack and
number of images.

{measured} of {count} cells are measured, {others} of the {other_count} that need no CIFAR-100.
"""


def results_page(cells: Sequence[Cell], command: str, conclusions: str = "") -> str:
    """The page for the cells of one or more tables."""
    needs_100 = [cell for cell in cells if "CIFAR-100" in cell.column or cell.table in (10, 11)]
    others = [cell for cell in cells if cell not in needs_100]
    parts = [
        INTRODUCTION.format(
            command=command, count=len(cells), other_count=len(others),
            measured=_measured(cells), others=_measured(others),
        )
    ]  # fmt: skip
    parts += [conclusions] if conclusions else []
    for number in dict.fromkeys(cell.table for cell in cells):
        own = [cell for cell in cells if cell.table == number]
        parts.append(_section(PAPER_TABLES[number], own))
    return "\n".join(part.strip() + "\n" for part in parts)


def _measured(cells: Sequence[Cell]) -> int:
    return sum(cell.measured is not None for cell in cells)


def _section(table: PaperTable, cells: Sequence[Cell]) -> str:
    notes: dict[str, str] = {}  # letter by note
    lines = [
        f"## Table {table.number}: {table.title}",
        "",
        f"{_measured(cells)} of {len(cells)} cells.",
        "",
        "| | " + " | ".join(column.label for column in table.columns) + " |",
        "|---|" + "---:|" * len(table.columns),
    ]
    width = len(table.columns)
    for i, row in enumerate(table.rows):
        shown = [_shown(cell, notes) for cell in cells[i * width : (i + 1) * width]]
        lines.append(f"| {row.label} | " + " | ".join(shown) + " |")
    if notes:
        lines += ["", "; ".join(f"{letter}: {note}" for note, letter in notes.items()) + "."]
    if table.notes:
        lines += ["", table.notes]
    return "\n".join(lines)


def _shown(cell: Cell, notes: dict[str, str]) -> str:
    published = _number(cell.published, cell.column)
    if cell.measured is None:
        return f"- ({published})"
    restarts = f", {cell.restarts} restarts" if (cell.restarts or 0) > 1 else ""
    images = "" if cell.n == 10_000 else f", {cell.n:,} images"
    attack = cell.attack.partition(":")[0]
    note = f"{cell.protocol}, {attack}{restarts}{images}"
    letter = notes.setdefault(note, chr(ord("a") + len(notes)))
    return f"{_number(cell.measured, cell.column)} ({published}) {letter}"


def _number(value: float, column: str) -> str:
    return f"{value:.3f}" if column.endswith("AUC") else f"{value:.1f}"
