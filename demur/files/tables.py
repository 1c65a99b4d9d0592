"""Tables as Markdown, LaTeX and CSV, written in one place for commands, audits and pages."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from demur.errors import BadInput, shorten, suggestion

FORMATS = ("text", "markdown", "latex", "csv", "json")
SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$",
}  # fmt: skip
PACKAGES = r"% needs \usepackage{booktabs,graphicx}"
NUMBER = r"([+-]?[\d.]+(?:e-\d+)?)"
FIGURE = re.compile(rf"{NUMBER}(?: ± {NUMBER})?(?: \[{NUMBER}, {NUMBER}\])?")
PARTS = ("", " deviation", " low", " high")  # of a figure


class TextTable(NamedTuple):
    """A table whose cells are text, such as "93.1 [92.0, 94.1]" with an interval."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def check_format(name: str) -> str:
    """Return the name of a format of tables; raise BadInput for another name."""
    if name not in FORMATS:
        raise BadInput(f"no format is called {shorten(name)!r}; {suggestion(name, FORMATS)}")
    return name


def write_tables(tables: Iterable[TextTable], form: str) -> str:
    """The tables in a format: markdown, latex, csv or json."""
    match form:
        case "csv":
            return _csv(tables)
        case "json":
            return json.dumps(list(map(_json, tables)), indent=2) + "\n"
        case "markdown":
            return "\n\n".join(map(_markdown, tables)) + "\n"
    return "\n\n".join([PACKAGES, *map(_latex, tables)]) + "\n"


def grid(
    headings: Sequence[str], rows: Iterable[Sequence[str]], align: str, spaced: bool = False
) -> str:
    """A Markdown table; `align` has l or r for each column."""
    first = "|".join(f" {heading} " if heading else " " for heading in map(_cell, headings))
    gap = " " if spaced else ""
    rule = "|".join(f"{gap}{'---:' if side == 'r' else '---'}{gap}" for side in align)
    lines = (f"| {' | '.join(map(_cell, row))} |" for row in rows)
    return "\n".join([f"|{first}|", f"|{rule}|", *lines])


def _cell(text: str) -> str:
    """Text as a Markdown cell: in one line, without bars that would end it."""
    return " ".join(text.split("\n")).replace("|", "\\|")


def _markdown(table: TextTable) -> str:
    title, text = f"**{_cell(table.title)}**", grid(table.headings, table.rows, _align(table))
    return "\n\n".join(filter(None, (title, text, table.note)))


def _align(table: TextTable) -> str:
    """r for each column whose first filled cell is a number, l for the others."""
    columns = zip(*table.rows, strict=True) if table.rows else [()] * len(table.headings)
    firsts = (next(filter(None, column), "") for column in columns)
    return "".join("r" if FIGURE.fullmatch(first) else "l" for first in firsts)


def escape(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def _latex(table: TextTable) -> str:
    rows = [list(map(escape, row)) for row in table.rows]
    caption = escape(" ".join(f"{table.title}. {table.note}".split()))
    return latex_table(caption, list(map(escape, table.headings)), rows, _align(table))


def latex_table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], align: str,
    label: str = "",
) -> str:  # fmt: skip
    """A LaTeX table environment of cells that are LaTeX already."""
    # a row that begins with a bracket or a star would be an argument of the \\ before it
    header, *lines = (
        f"{'{}' if row[0][:1] in ('[', '*') else ''}{' & '.join(row)} \\\\"
        for row in (headings, *rows)
    )
    return "\n".join([
        r"\begin{table}", r"\centering", rf"\caption{{{caption}}}",
        *([rf"\label{{{label}}}"] if label else []),
        r"\resizebox{\textwidth}{!}{%", rf"\begin{{tabular}}{{{align}}}", r"\toprule", header,
        r"\midrule", *lines, r"\bottomrule", r"\end{tabular}}", r"\end{table}",
    ])  # fmt: skip


def _csv(tables: Iterable[TextTable]) -> str:
    """A block of lines for consecutive tables with the same headings, whose titles are a column."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    for place, (headings, group) in enumerate(groupby(tables, lambda one: tuple(one.headings))):
        rows = [(table.title, *row) for table in group for row in table.rows]
        columns = list(_plain_columns(("table", *headings), rows))
        writer.writerows([[]] if place else [])
        writer.writerow(heading for heading, _ in columns)
        writer.writerows(zip(*(cells for _, cells in columns), strict=True))
    return buffer.getvalue()


def _json(table: TextTable) -> dict[str, Any]:
    columns = dict(_plain_columns(table.headings, table.rows))
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {"title": table.title, "rows": rows, "note": table.note}


def _plain_columns(
    headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[tuple[str, list[str]]]:
    """The columns of a table, with deviations and ends of intervals in columns of their own."""
    for place, heading in enumerate(headings):
        cells = [row[place] for row in rows]
        found = [FIGURE.fullmatch(cell) for cell in cells]
        if not all(match or not cell for match, cell in zip(found, cells, strict=True)):
            yield heading, cells
            continue
        for part, name in enumerate(PARTS, 1):
            values = [(match[part] or "") if match else "" for match in found]
            if part == 1 or any(values):
                yield heading + name, values
