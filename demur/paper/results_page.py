"""RESULTS.md and its LaTeX form: the paper's tables, our numbers beside the published ones."""

from collections import Counter
from collections.abc import Iterable, Sequence

from demur.paper.cells import Cell
from demur.paper.published import TABLES_BY_NUMBER, PaperTable
from demur.paper.scales import ALL_IMAGES
from demur.paper.verdicts import Measure, Verdict

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
VERDICTS_INTRODUCTION = """\
## Does R-Con beat the confidence of its own net?

R-Con minus confidence on the same images of the same net, with paired 95% intervals (bootstrap over
images; DeLong for AUROC). The interval decides: *better*, *worse*, or *equal* where it contains
zero; about one in twenty differs by chance. A star marks attacks that stop at the first success,
whose rankings are artefacts; they are not counted. Of each attack the record of most images counts.
The totals pool attacks on the same nets and images, which are correlated.

- **Paper's threshold**: accuracy in percent of the accepted images, each score accepting 95% of the
  correct predictions of the attacked images.
- **Deployed threshold**: the same accuracy, each score accepting 95% of the correct predictions on
  clean images; those of the test set for nets that were trained on all other images.
- **Accepted errors** at the deployed threshold, in percent of all images: confidence, R-Con and
  their difference. Fewer are better.
"""
STRONGEST = """\
**Strongest attack**: accepted errors in percent of the images under RejectAutoAttack, aimed at each
score at its threshold from clean images. Less is better.
"""
MISSING = """\
Not measured; `RUN` is a run with weights (`demur train @{folder}/NET/recipe.txt --out RUN`):
"""
COLUMNS: tuple[tuple[Measure, str], ...] = (
    ("paper", "paper's threshold"),
    ("deployed", "deployed threshold"),
    ("errors", "accepted errors"),
    ("auroc", "AUROC"),
)
SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$",
}  # fmt: skip


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
    parts = [TITLE, *([conclusions] if conclusions else [])]
    parts.append(
        INTRODUCTION.format(
            command=command, count=len(cells), other_count=len(others),
            measured=_measured(cells), others=_measured(others),
        )
    )  # fmt: skip
    parts += [LAST_EPOCH] if any(cell.last is not None for cell in cells) else []
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


def verdict_section(verdicts: Sequence[Verdict], folder: str) -> str:
    """The section: counts, a row for each net and attack, the strongest attack, what is missing."""
    ranked = [one for one in verdicts if one.measure != "strongest"]
    strongest = [one for one in verdicts if one.measure == "strongest"]
    measured = [one for one in strongest if one.word != "not measured"]
    lines = [VERDICTS_INTRODUCTION, *_counts(verdicts), ""]
    lines += ["| net | attack | n | " + " | ".join(name for _, name in COLUMNS) + " |"]
    lines += ["|---|---|---:|" + "---|" * len(COLUMNS), *_rows(ranked), "", STRONGEST]
    if measured:
        lines += ["| net | n | Con | R-Con | difference |", "|---|---:|---:|---:|---|"]
        lines += [
            f"| {one.net} | {one.n:,} | {one.con:.1f} | {one.rcon:.1f} | {_cell(one)} |"
            for one in measured
        ]
    else:
        lines += ["No net has both records."]
    return "\n".join([*lines, "", *_missing(verdicts, folder)]).rstrip() + "\n"


def _counts(verdicts: Iterable[Verdict]) -> list[str]:
    """A sentence for each measure: how often R-Con is better, equal and worse."""
    names = (*COLUMNS, ("strongest", "strongest attack"))
    lines = []
    for measure, name in names:
        words = Counter(
            one.word for one in verdicts if one.measure == measure and not _is_artefact(one)
        )
        parts = [f"{words[word]} {word}" for word in ("better", "equal", "worse", "not measured")]
        lines.append(f"- {name}: {', '.join(parts)}")
    return lines


def _is_artefact(verdict: Verdict) -> bool:
    return bool(verdict.note) and verdict.word != "not measured"


def _rows(verdicts: Iterable[Verdict]) -> list[str]:
    groups: dict[tuple[str, str, int | None], dict[Measure, Verdict]] = {}
    for one in verdicts:
        groups.setdefault((one.net, one.attack, one.n), {})[one.measure] = one
    lines = []
    for (net, attack, n), own in groups.items():
        star = " *" if any(_is_artefact(one) for one in own.values()) else ""
        images = "" if n is None else f"{n:,}"
        cells = (_cell(own[measure]) if measure in own else "" for measure, _ in COLUMNS)
        lines.append(f"| {net} | {attack}{star} | {images} | " + " | ".join(cells) + " |")
    return lines


def _cell(verdict: Verdict) -> str:
    if verdict.difference is None or verdict.lo is None or verdict.hi is None:
        return verdict.word
    decimals = 3 if verdict.measure == "auroc" else 2
    value, lo, hi = (f"{end:+.{decimals}f}" for end in (verdict.difference, verdict.lo, verdict.hi))
    shown = f"{value} [{lo}, {hi}] {verdict.word}"
    if verdict.measure == "errors":
        return f"{verdict.con:.1f}, {verdict.rcon:.1f}: {shown}"
    return shown


def _missing(verdicts: Iterable[Verdict], folder: str) -> list[str]:
    """What is not measured by the command that makes it."""
    nets: dict[str, list[str]] = {}
    for one in verdicts:
        if one.word == "not measured":
            nets.setdefault(one.note, []).append(one.net)
    lines = [MISSING.format(folder=folder)] if nets else []
    for command, names in nets.items():
        lines.append(f"- {'; '.join(dict.fromkeys(names))}: `{command}`")
    return lines


def latex_page(cells: Sequence[Cell], command: str) -> str:
    """The tables of the cells, each a table environment."""
    # in a comment only a line break is special
    lines = [f"% made by {' '.join(command.split())}", r"% needs \usepackage{booktabs,graphicx}"]
    for number in dict.fromkeys(cell.table for cell in cells):
        own = [cell for cell in cells if cell.table == number]
        lines += ["", *_table(TABLES_BY_NUMBER[number], own)]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def _table(table: PaperTable, cells: Sequence[Cell]) -> list[str]:
    notes, width = Notes(), len(table.columns)
    header = " & ".join(["", *(escape(column.label) for column in table.columns)])
    rows = []
    for i, row in enumerate(table.rows):
        shown = [_latex_value(cell, notes) for cell in cells[i * width : (i + 1) * width]]
        rows.append(" & ".join([escape(row.label), *shown]) + r" \\")
    caption = f"{table.title}. Ours, and the paper's in parentheses. {notes.text} {table.notes}"
    return [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(' '.join(caption.split()))}}}",
        rf"\label{{tab:paper-{table.number}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{l{'r' * width}}}",
        r"\toprule",
        header + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
    ]


def _latex_value(cell: Cell, notes: Notes) -> str:
    published = number_text(cell.published, cell.column)
    if cell.measured is None:
        return f"-- ({published})"
    last = f" / {number_text(cell.last, cell.column)}" if cell.last is not None else ""
    measured = number_text(cell.measured, cell.column)
    return f"{measured}{last} ({published})$^{{{notes.letter(cell)}}}$"
