"""The page RESULTS.md: every table of the paper, our numbers beside the published ones."""

from collections.abc import Sequence

from demur.paper.cells import Cell
from demur.paper.published import TABLES_BY_NUMBER, PaperTable
from demur.paper.scales import ALL_IMAGES

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
LAST_EPOCH = """\
The paper selects the epoch with the best accuracy under PGD-10 on the test images. Where that is
not the last epoch, the number of the last one follows after a slash.
"""


def results_page(
    cells: Sequence[Cell], command: str, conclusions: str = "", verdicts: str = ""
) -> str:
    """The page for the cells of one or more tables, with two sections that are made elsewhere."""
    needs_100 = [
        cell
        for cell in cells
        if "CIFAR-100" in f"{cell.row} {cell.column}" or cell.table in (10, 11)
    ]
    others = [cell for cell in cells if cell not in needs_100]
    parts = [
        INTRODUCTION.format(
            command=command, count=len(cells), other_count=len(others),
            measured=_measured(cells), others=_measured(others),
        )
    ]  # fmt: skip
    parts += [LAST_EPOCH] if any(cell.last is not None for cell in cells) else []
    parts += [conclusions] if conclusions else []
    for number in dict.fromkeys(cell.table for cell in cells):
        own = [cell for cell in cells if cell.table == number]
        parts.append(_section(TABLES_BY_NUMBER[number], own))
    parts += [verdicts] if verdicts else []
    return "\n".join(part.strip() + "\n" for part in parts)


def _measured(cells: Sequence[Cell]) -> int:
    return sum(cell.measured is not None for cell in cells)


class Notes:
    """The notes under a table: how cells were measured, a letter for each way."""

    def __init__(self) -> None:
        self.letters: dict[str, str] = {}  # by note

    def letter(self, cell: Cell) -> str:
        """The letter of the note of a measured cell."""
        restarts = f", {cell.restarts} restarts" if (cell.restarts or 0) > 1 else ""
        images = "" if cell.n in (ALL_IMAGES, None) else f", {cell.n:,} images"
        attack = f", {cell.attack.partition(':')[0]}" if cell.attack else ""
        note = f"{cell.protocol}{attack}{restarts}{images}"
        return self.letters.setdefault(note, chr(ord("a") + len(self.letters)))

    @property
    def text(self) -> str:
        """All notes as a sentence; empty without a measured cell."""
        notes = "; ".join(f"{letter}: {note}" for note, letter in self.letters.items())
        return f"{notes}." if notes else ""


def _section(table: PaperTable, cells: Sequence[Cell]) -> str:
    notes = Notes()
    lines = [
        f"## {table.heading}",
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
    lines += ["", notes.text] if notes.text else []
    lines += ["", table.notes] if table.notes else []
    return "\n".join([*lines, *_beside(table, cells)])


def _beside(table: PaperTable, cells: Sequence[Cell]) -> list[str]:
    """A table for each other way in which cells were measured, with the rows that have any."""
    lines, width = list[str](), len(table.columns)
    rows = [cells[i * width : (i + 1) * width] for i in range(len(table.rows))]
    for name in dict.fromkeys(name for cell in cells for name in cell.beside):
        own = [row for row in rows if any(name in cell.beside for cell in row)]
        shown = [i for i in range(width) if any(name in row[i].beside for row in own)]
        lines += ["", f"The same cells, {name}:", ""]
        lines.append("| | " + " | ".join(table.columns[i].label for i in shown) + " |")
        lines.append("|---|" + "---:|" * len(shown))
        for row in own:
            texts = (_beside_text(row[i], name) for i in shown)
            lines.append(f"| {row[0].row} | " + " | ".join(texts) + " |")
    return lines


def _beside_text(cell: Cell, name: str) -> str:
    return number_text(cell.beside[name], cell.column) if name in cell.beside else "-"


def _shown(cell: Cell, notes: Notes) -> str:
    published = number_text(cell.published, cell.column)
    if cell.measured is None:
        return f"- ({published})"
    last = f" / {number_text(cell.last, cell.column)}" if cell.last is not None else ""
    return f"{number_text(cell.measured, cell.column)}{last} ({published}) {notes.letter(cell)}"


def number_text(value: float, column: str) -> str:
    """A number of a column: three decimals for AUROC, two for squared L2 and costs, else one."""
    two = ", L2" in column or column.endswith(("MB", "per epoch"))
    decimals = 3 if column.endswith("AUC") else 2 if two else 1
    return f"{value:.{decimals}f}"
