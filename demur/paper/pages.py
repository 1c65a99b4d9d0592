"""How tables are printed: the paper's as Markdown or LaTeX, marks, comparisons, disagreements.

A table of the paper has our numbers beside the published ones; a comparison has one section per
attack and one row per score. Cells that differ from the published number are listed with what
explains it; SECTION says when a cause is shown, likely or open.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from demur.evaluate import ORACLE
from demur.files.tables import PACKAGES, escape, grid, latex_table
from demur.metrics import Difference
from demur.paper.cells import Cell
from demur.paper.comparisons import (
    DIVERGED,
    PUBLISHED_NOTE,
    Comparison,
    PublishedScore,
    PublishedScores,
    SeedAverage,
    TrainingResult,
    average_seeds,
)
from demur.paper.published import TABLES_BY_NUMBER, PaperTable
from demur.paper.scales import ALL_IMAGES
from demur.report.terminal import spread_text

TITLE = "# Results"
INTRODUCTION = """\
## How to read the tables

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
HEADINGS = (
    "training", "score", "accuracy", "TPR-95: accuracy on accepted", "vs Con", "AUROC", "vs Con"
)  # fmt: skip
PAPER_HEADING = ("the paper",)
FROZEN_HEADINGS = ("frozen: coverage", "frozen: accepted errors")  # only with cal images
NOTES = (
    "Values are percent; AUROC is 0 to 1. `TPR-95` is the paper's protocol: the threshold accepts "
    "95% of the correct predictions of each evaluated set and uses its labels.",
    "Square brackets are 95% intervals. `vs Con` is a paired difference on the same images and "
    "includes the variance over seeds if there are several. ± is the standard deviation over "
    "seeds.",
)
FROZEN_NOTE = (
    "`frozen` is the deployed protocol: the threshold accepts 95% of the correct predictions on "
    "clean cal images and is fixed before any attack."
)
HELD_OUT_NOTE = (
    "All images are held-out training images, so that settings are compared without using the test "
    "images."
)
ADAPTIVE_NOTE = (
    "An adaptive attack targets the head's own score (Con if there is none), so it does not target "
    "the Con row of a net with another score."
)
LEARNED_CAPTION = "Rejectors fitted to features of the trained net, TPR-95 and AUROC:"
NO_CORRECT_NOTE = (
    "AUROC is undefined if no prediction is correct; the table then shows 0.500 [0.000, 1.000]."
)


def results_page(
    cells: Sequence[Cell], command: str, conclusions: str = "", sections: Sequence[str] = ()
) -> str:
    """The page for the cells of one or more tables, with sections that are made elsewhere."""
    numbered = [cell for cell in cells if isinstance(cell.table, int)]
    needs_100 = [
        cell
        for cell in numbered
        if "CIFAR-100" in f"{cell.row} {cell.column}" or cell.table in (10, 11)
    ]
    others = [cell for cell in numbered if cell not in needs_100]
    parts = [TITLE, *([conclusions] if conclusions else [])]
    parts.append(
        INTRODUCTION.format(
            command=command, count=len(numbered), other_count=len(others),
            measured=_measured(numbered), others=_measured(others),
        )
    )  # fmt: skip
    parts += [LAST_EPOCH] if any(cell.last is not None for cell in cells) else []
    for number in dict.fromkeys(cell.table for cell in cells):
        own = [cell for cell in cells if cell.table == number]
        parts.append(_section(TABLES_BY_NUMBER[number], own))
    parts += [section for section in sections if section]
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
    notes, width = Notes(), len(table.columns)
    rows = [
        [row.label, *(_shown(cell, notes) for cell in cells[i * width : (i + 1) * width])]
        for i, row in enumerate(table.rows)
    ]
    shown = _paper_grid([column.label for column in table.columns], rows)
    lines = [f"## {table.heading}", "", f"{_measured(cells)} of {len(cells)} cells.", "", shown]
    lines += ["", notes.text] if notes.text else []
    lines += ["", table.notes] if table.notes else []
    return "\n".join([*lines, *_variants(table, cells)])


def _paper_grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return grid(["", *headings], rows, "l" + "r" * len(headings))


def _variants(table: PaperTable, cells: Sequence[Cell]) -> list[str]:
    """A table for each other way in which cells were measured, with the rows that have any."""
    lines, width = list[str](), len(table.columns)
    rows = [cells[i * width : (i + 1) * width] for i in range(len(table.rows))]
    for name in dict.fromkeys(name for cell in cells for name in cell.variants):
        own = [row for row in rows if any(name in cell.variants for cell in row)]
        shown = [i for i in range(width) if any(name in row[i].variants for row in own)]
        headings = [table.columns[i].label for i in shown]
        texts = [[row[0].row, *(_variant_text(row[i], name) for i in shown)] for row in own]
        lines += ["", f"The same cells, {name}:", "", _paper_grid(headings, texts)]
    return lines


def _variant_text(cell: Cell, name: str) -> str:
    return number_text(cell.variants[name], cell.column) if name in cell.variants else "-"


def _shown(cell: Cell, notes: Notes) -> str:
    published = number_text(cell.published, cell.column)
    if cell.measured is None:
        return f"- ({published})"
    last = f" / {number_text(cell.last, cell.column)}" if cell.last is not None else ""
    return f"{number_text(cell.measured, cell.column)}{last} ({published}) {notes.letter(cell)}"


def number_text(value: float, column: str) -> str:
    """A number of a column: three decimals for AUROC, two for squared L2 and costs, else one."""
    if math.isnan(value):
        return "undefined"
    two = ", L2" in column or column.endswith(("MB", "per epoch"))
    decimals = 3 if column.endswith("AUC") else 2 if two else 1
    return f"{value:.{decimals}f}"


def latex_page(cells: Sequence[Cell], command: str) -> str:
    """The tables of the cells, each a table environment."""
    # in a comment only a line break is special
    lines = [f"% made by {' '.join(command.split())}", PACKAGES]
    for number in dict.fromkeys(cell.table for cell in cells):
        own = [cell for cell in cells if cell.table == number]
        lines += ["", _table(TABLES_BY_NUMBER[number], own)]
    return "\n".join(lines) + "\n"


def _table(table: PaperTable, cells: Sequence[Cell]) -> str:
    notes, width = Notes(), len(table.columns)
    rows = [
        [escape(row.label)]
        + [_latex_value(cell, notes) for cell in cells[i * width : (i + 1) * width]]
        for i, row in enumerate(table.rows)
    ]
    caption = f"{table.title}. Ours, and the paper's in parentheses. {notes.text} {table.notes}"
    headings = ["", *(escape(column.label) for column in table.columns)]
    caption, label = escape(" ".join(caption.split())), f"tab:paper-{table.number}"
    return latex_table(caption, headings, rows, "l" + "r" * width, label)


def _latex_value(cell: Cell, notes: Notes) -> str:
    published = number_text(cell.published, cell.column)
    if cell.measured is None:
        return f"-- ({published})"
    last = f" / {number_text(cell.last, cell.column)}" if cell.last is not None else ""
    measured = number_text(cell.measured, cell.column)
    return f"{measured}{last} ({published})$^{{{notes.letter(cell)}}}$"


def comparison_page(
    table: Comparison, results: Sequence[TrainingResult], command: str, version: str
) -> str:
    """The table as a Markdown page; `command` and `version` are quoted as its origin."""
    averages = average_seeds(results)
    seeds = len({result.seed for result in results})
    count = f"up to {seeds} seeds each" if seeds > 1 else "1 seed each"
    origin = f"Made by `{command}`, {count}, demur {version}."
    notes = sorted({note for result in results for note in result.notes})
    parts = [f"# {table.title}", origin, _explanation(table, averages), *notes]
    for label in table.attacks:
        rows = [row for row in averages if row.attack == label]
        kind = "images" if table.split == "test" else f"{table.split} images"
        n = f", {max(row.n for row in rows)} {kind}" if rows else ""
        parts += [f"## {label}{n}"]
        parts += _attack_section(rows, seeds, table) if rows else ["Not measured yet."]
    if missing := _missing_results(results):
        parts += ["## Missing", "\n".join(missing)]
    runs = [
        [result.entry, str(result.seed), result.run, result.recipe[:12]]
        for result in results
        if result.rows or result.failure.startswith(DIVERGED)
    ]
    parts += ["## Runs", grid(["training", "seed", "run", "recipe"], runs, "llll")]
    return "\n\n".join(parts) + "\n"


def _explanation(table: Comparison, rows: Sequence[SeedAverage]) -> str:
    """The notes on the columns that the table has."""
    first, second = NOTES
    frozen = [FROZEN_NOTE] if any(row.protocol == "deploy" for row in rows) else []
    adaptive = [ADAPTIVE_NOTE] if any("adaptive" in label for label in table.attacks) else []
    held = [HELD_OUT_NOTE] if table.split in ("val", "cal") else []
    paper = [PUBLISHED_NOTE] if table.published else []
    no_correct = [NO_CORRECT_NOTE] if any(row.all.value == 0 for row in rows) else []
    return " ".join([first, *frozen, second, *adaptive, *held, *paper, *no_correct])


def _missing_results(results: Sequence[TrainingResult]) -> list[str]:
    """One item per entry and reason, with all its seeds."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for result in results:
        if result.failure:
            seeds.setdefault((result.entry, result.failure), []).append(result.seed)
    return [
        f"- {entry}, seed{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}: {failure}"
        for (entry, failure), which in seeds.items()
    ]


def _attack_section(rows: Sequence[SeedAverage], seeds: int, table: Comparison) -> list[str]:
    """The grids of one attack: the nets' own scores, then the fitted rejectors."""
    most = max(row.n for row in rows)
    learned = [
        row
        for row in rows
        if row.rejector in table.learned and row.protocol == "paper" and row.n == most
    ]
    own = [row for row in rows if row.rejector not in table.learned]
    fitted = [LEARNED_CAPTION, _learned_grid(learned, seeds, table)] if learned else []
    return [_score_grid(own, seeds, table.published), *fitted]


def _score_grid(rows: Sequence[SeedAverage], seeds: int, published: PublishedScores) -> str:
    """One row per score: the paper's protocol, then the deployed one if there is one."""
    frozen = {(row.entry, row.rejector, row.n): row for row in rows if row.protocol == "deploy"}
    most = max(row.n for row in rows)
    in_paper = any(attack == rows[0].attack for _, _, attack in published)
    headings = HEADINGS + (PAPER_HEADING if in_paper else ()) + (FROZEN_HEADINGS if frozen else ())
    lines = list[Sequence[str]]()
    for row in rows:
        if row.protocol == "paper" and row.rejector != ORACLE:
            paper = published.get((row.entry, row.rejector, row.attack))
            deployed = frozen.get((row.entry, row.rejector, row.n))
            extra = ((_published(paper),) if in_paper else ()) + (
                _frozen(deployed) if frozen else ()
            )
            fewer = f", {row.n} images" if row.n < most else ""
            lines.append((_name(row, seeds) + fewer, *_score_cells(row), *extra))
    return grid(headings, lines, "ll" + "r" * (len(headings) - 2), spaced=True)


def _learned_grid(rows: Sequence[SeedAverage], seeds: int, table: Comparison) -> str:
    """One row per net, one column per rejector; the paper's numbers of the net follow below."""
    by_name = {(row.entry, row.rejector): row for row in rows}
    lines = list[Sequence[str]]()
    for entry in dict.fromkeys(row.entry for row in rows):
        of_entry = {name: by_name.get((entry, name)) for name in table.learned}
        first = next(row for row in of_entry.values() if row)
        cells = [
            f"{spread_text(row.right)}, {row.auroc.value:.3f}" if row else ""
            for row in of_entry.values()
        ]
        lines.append((_name(first, seeds), *cells))
        paper = [table.published.get((entry, name, first.attack)) for name in table.learned]
        if any(paper):
            lines.append((f"{entry}, the paper", *map(_published, paper)))
    align = "l" + "r" * len(table.learned)
    return grid(["training", *table.learned], lines, align, spaced=True)


def _published(score: PublishedScore | None) -> str:
    return "" if score is None else f"{score.right:.2f}, {score.auroc:.3f}"


def _name(row: SeedAverage, seeds: int) -> str:
    return row.entry + (f" ({row.seeds} of {seeds} seeds)" if row.seeds < seeds else "")


def _score_cells(row: SeedAverage) -> tuple[str, ...]:
    return (
        row.rejector, spread_text(row.all), spread_text(row.right),
        _difference(row.right_vs_con, 100, 1, row.rejector), spread_text(row.auroc, 1, 3),
        _difference(row.auroc_vs_con, 1, 3, row.rejector),
    )  # fmt: skip


def _frozen(row: SeedAverage | None) -> tuple[str, str]:
    return ("", "") if row is None else (spread_text(row.coverage), spread_text(row.accepted_wrong))


def _difference(gap: Difference, scale: float, digits: int, rejector: str) -> str:
    if rejector == "Con":
        return ""
    value, lo, hi = (f"{scale * end:+.{digits}f}" for end in (gap.value, gap.lo, gap.hi))
    return f"{value} [{lo}, {hi}]"


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
