"""The paper's tables as LaTeX, our numbers beside the published ones; needs the package booktabs.

latex_page(measure_cells(...), "demur table 2 --kept results")
"""

from collections.abc import Sequence

from demur.paper.cells import Cell
from demur.paper.published import TABLES_BY_NUMBER, PaperTable
from demur.paper.results_page import Notes, number_text

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$",
}  # fmt: skip


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
        shown = [_shown(cell, notes) for cell in cells[i * width : (i + 1) * width]]
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


def _shown(cell: Cell, notes: Notes) -> str:
    published = number_text(cell.published, cell.column)
    if cell.measured is None:
        return f"-- ({published})"
    last = f" / {number_text(cell.last, cell.column)}" if cell.last is not None else ""
    measured = number_text(cell.measured, cell.column)
    return f"{measured}{last} ({published})$^{{{notes.letter(cell)}}}$"
