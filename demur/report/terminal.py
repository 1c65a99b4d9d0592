"""Tables of scores and sanity checks for the terminal.

No figure is ever cut. On a terminal narrower than the table, intervals go below their figures; if
that is still too wide, the columns are printed as several tables one below the other. Output that
is no terminal is PIPE_WIDTH columns wide unless COLUMNS says otherwise.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from demur.errors import BadInput, visible
from demur.evaluate import (
    BASELINE,
    LoadedRun,
    PairedCounts,
    Protocol,
    RecordOptions,
    Row,
    ScoredRecord,
)
from demur.evaluate.accepted_errors import LEVELS, WorstCaseRow
from demur.evaluate.paired_differences import Mean
from demur.files.tables import TextTable, write_tables
from demur.metrics import Difference, Interval
from demur.recipes import RECIPES, attack
from demur.runs import Record, Run
from demur.sanity import CheckResult, Flag
from demur.spec import digest

TPR_SLACK = 0.02  # how far below its level a TPR may lie and still be compared
PIPE_WIDTH = 100  # columns, where the output is no terminal
CAPTIONS: dict[Protocol, str] = {
    "paper": "paper: TPR-95 threshold chosen with labels on each scored set (strict >)",
    "deploy": "deploy: TPR-95 threshold frozen on clean cal images before any attack (>=)",
}
COLUMNS = (
    "accuracy of accepted", "vs Con", "coverage", "accepted & wrong", "TPR", "AUROC",
    "AUROC vs Con",
)  # fmt: skip
WORST_CASE_COLUMNS = (*(f"TPR-{100 * level:g}" for level in LEVELS), "AUGRC", "AURC", "vs Con")
NOTE = (
    "Percent with 95% intervals. The first line of each attack accepts every image. Differences "
    "to Con are paired by image, at an equal TPR."
)
NOTHING = "Nothing was flagged"
COLLECTED: list[list[Table]] = []  # tables to be written in another format, inside `tables_as`


class VisibleConsole(Console):
    """A console that spells out control characters in names, and commands the terminal itself."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for one in super().render(renderable, options):
            yield one if one.control else Segment(visible(one.text), one.style)


def show_scores(scored: list[ScoredRecord], protocols: Iterable[Protocol]) -> None:
    """Print one table per protocol, then a warning for each record whose ranking is an artefact."""
    for protocol in protocols:
        show_table(score_table(scored, protocol))
    for record in scored:
        if record.summary.artefact:
            terminal().print(record.summary.artefact, soft_wrap=True)


def show_worst_cases(rows: Sequence[WorstCaseRow]) -> None:
    """Print accepted errors by threshold of the rejectors that worst-score attacked, if any."""
    if rows:
        show_table(worst_case_table(rows))
        terminal().print(worst_case_words(rows), soft_wrap=True)


def paired_table(rows: Sequence[PairedCounts]) -> Table:
    """Return on how many images both sides of a comparison agree, and how they differ."""
    title = f"first: {rows[0].first}; second: {rows[0].second}; {rows[0].n} images"
    table = plain_table(
        title, "images", "both", "only first", "only second", "first - second", "p",
        caption="difference in points, with its paired 95% interval; p by McNemar's exact test",
    )  # fmt: skip
    for row in rows:
        counts = map(str, (row.both, row.only_first, row.only_second))
        gap = difference(row.difference, 100, 1)
        table.add_row(row.what, *counts, gap, f"{row.difference.p:.3g}")
    return table


def worst_case_words(rows: Sequence[WorstCaseRow]) -> str:
    """Return what the figures of worst-score records are."""
    origins = " or ".join(dict.fromkeys(row.threshold_from for row in rows))
    return (
        "worst-score: percent of all images with a wrong prediction that is accepted, with 95% "
        f"intervals. The threshold of TPR-95 accepts 95% of the correct predictions of {origins}. "
        "AUGRC is the mean of these errors with each clean score as threshold, AURC that of the "
        "wrong share of the accepted. A stronger attack may find more."
    )


def worst_case_table(rows: Sequence[WorstCaseRow]) -> Table:
    """Return accepted errors at four thresholds, AUGRC and AURC, a line for each rejector."""
    table = plain_table("Accepted errors under worst-score", "rejector", *WORST_CASE_COLUMNS)
    for row in rows:
        cells = (percent(share, interval) for share, interval in row.shares())
        gap = row.augrc_vs_con
        last = "" if gap is None else difference(gap, 100, 2)
        table.add_row(f"{row.rejector}, n={row.n}", *cells, last)
    return table


def terminal() -> Console:
    """Return a console that prints brackets and colons in names literally."""
    console = VisibleConsole(stderr=bool(COLLECTED), markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def show_table(table: Table) -> None:
    """Print a table; if it is too wide, intervals go below their figures, then it is split."""
    if COLLECTED:
        COLLECTED[-1].append(table)
        return
    console = terminal()
    if table_width(table) > console.width:
        table = _columns_of(table, range(1, len(table.columns)))
        for column in table.columns[1:]:
            column.header = str(column.header).replace(" ", "\n")
            column._cells = [re.sub(r" (?=[\[±])", "\n", str(cell)) for cell in column.cells]
    for part in split_table(table, console.width):
        console.print(part)


@contextmanager
def tables_as(form: str) -> Iterator[None]:
    """Write the tables that are shown inside in a format, and sentences to stderr unless "text"."""
    if form == "text":
        yield
        return
    COLLECTED.append([])
    try:
        yield
        sys.stdout.write(write_tables(text_tables(COLLECTED[-1]), form))
    finally:
        COLLECTED.pop()


def text_tables(tables: Iterable[Table]) -> list[TextTable]:
    """Return the cells of tables without layout.

    The first column of "attack, rejector" becomes two: an indented line belongs to the last one
    that is not.
    """
    found = []
    for table in tables:
        headings = [" ".join(str(column.header).split()) for column in table.columns]
        rows = [list(map(str, row)) for row in zip(*(c.cells for c in table.columns), strict=True)]
        levels = headings[0].split(", ")
        path = [""] * len(levels)
        for row in rows:
            level = min((len(row[0]) - len(row[0].lstrip())) // 2, len(levels) - 1)
            path[level:] = [row[0].strip()] + [""] * (len(levels) - level - 1)
            row[:1] = path
        headings[:1] = levels
        rows = [row for row in rows if any(row[len(levels) :])]
        found.append(TextTable(str(table.title), headings, rows, str(table.caption or "")))
    return found


def table_width(table: Table) -> int:
    """Return the number of columns that a table needs so that no cell is cut or wrapped."""
    console = terminal()
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def split_table(table: Table, width: int) -> list[Table]:
    """Split a table into tables of at most `width`, each of which repeats the first column.

    A single column that is too wide by itself stays whole: its text is folded, never cut.
    """
    if table_width(table) <= width or len(table.columns) <= 2:
        return [table]
    groups: list[list[int]] = [[]]
    for column in range(1, len(table.columns)):
        if groups[-1] and table_width(_columns_of(table, [*groups[-1], column])) > width:
            groups.append([])
        groups[-1].append(column)
    parts = [_columns_of(table, group) for group in groups]
    for part in parts[1:]:
        part.title = None
    for part in parts[:-1]:
        part.caption = None
    return parts


def _columns_of(table: Table, columns: Sequence[int]) -> Table:
    part = copy(table)
    part.columns = [
        replace(table.columns[old], _index=new, overflow="fold")
        for new, old in enumerate([0, *columns])
    ]
    return part


def plain_table(title: str, first: str, *columns: str, caption: str | None = None) -> Table:
    """Return a table without rows; all columns but the first hold numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold",
        caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def score_table(scored: list[ScoredRecord], protocol: Protocol) -> Table:
    """Return rejectors x attacks in one protocol."""
    table = plain_table(CAPTIONS[protocol], "attack, rejector", *COLUMNS, caption=NOTE)
    for record in scored:
        summary = record.summary
        accuracy = percent(summary.accuracy, summary.accuracy_interval)
        cells = (accuracy, "", "100.0", percent(1 - summary.accuracy), "100.0")
        table.add_row(f"{summary.attack}, n={summary.n}", *cells, style="bold")
        for row in record.rows:
            if row.protocol == protocol:
                table.add_row(f"  {row.rejector}", *_cells(row))
        table.add_section()
    return table


def verdict_table(scored: list[ScoredRecord], rejectors: Sequence[str]) -> Table:
    """Return what each rejector accepts and rejects at its frozen threshold, in percent.

    The four shares of a line add up to 100 (up to rounding). At most 80 columns wide.
    """
    table = plain_table(
        "Percent of all images, by correctness of the prediction and decision",
        "attack, rejector", "accepted\ncorrect", "accepted\nwrong", "rejected\ncorrect",
        "rejected\nwrong", "accuracy\nof accepted", "\nAUROC",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for record in scored:
        accuracy, n = record.summary.accuracy, record.summary.n
        everything = (percent(accuracy), percent(1 - accuracy), "", "", percent(accuracy), "")
        table.add_row(f"{record.summary.attack}, n={n}", *everything, style="bold")
        for row in record.rows:
            if row.protocol == "deploy" and row.rejector in rejectors:
                accepted_correct = row.point.coverage - row.point.accepted_wrong
                table.add_row(
                    f"  {row.rejector}", percent(accepted_correct),
                    percent(row.point.accepted_wrong), percent(accuracy - accepted_correct),
                    percent(1 - accuracy - row.point.accepted_wrong),
                    percent(row.point.accuracy), f"{row.ranking.auroc:.3f}",
                )  # fmt: skip
    return table


def percent(value: float, interval: Interval | None = None) -> str:
    """Format a proportion as a percentage, with its 95% interval."""
    return _with_interval(f"{100 * value + 0.0:.1f}", _ends(interval, 100, 1))


def spread_text(mean: Mean, scale: float = 100, decimals: int = 1) -> str:
    """Format a mean with its deviation over seeds, or with the interval of a single seed."""
    if mean.spread is not None:
        return f"{scale * mean.value:.{decimals}f} ± {scale * mean.spread:.{decimals}f}"
    ends = _ends(mean.interval, scale, decimals)
    return _with_interval(f"{scale * mean.value:.{decimals}f}", ends)


def _cells(row: Row) -> tuple[str, ...]:
    point, ranking = row.point, row.ranking
    auroc = _with_interval(f"{ranking.auroc:.3f}", _ends(ranking.auroc_interval, 1, 3))
    return (
        percent(point.accuracy, row.accuracy_interval),
        difference(row.accuracy_vs_con, 100, 1) if comparable(row) else "",
        percent(point.coverage, row.coverage_interval),
        percent(point.accepted_wrong, row.accepted_wrong_interval),
        percent(point.tpr, row.tpr_interval),
        auroc,
        "" if row.rejector == BASELINE else difference(ranking.auroc_vs_con, 1, 3),
    )


def comparable(row: Row) -> bool:
    """Return whether the row reaches the TPR it was asked for, so that accuracies compare."""
    asked = row.protocol == "deploy" or row.point.tpr >= row.level - TPR_SLACK
    return row.rejector != BASELINE and asked


def signed(value: float, scale: float, decimals: int) -> str:
    """Format a difference with its sign; zero gets a plus."""
    return f"{round(scale * value, decimals) + 0.0:+.{decimals}f}"


def difference(gap: Difference, scale: float, decimals: int) -> str:
    """Format a paired difference with its 95% interval."""
    value, *ends = (signed(v, scale, decimals) for v in gap[:3])
    return _with_interval(value, ends)


def _ends(interval: Interval | None, scale: float, decimals: int) -> list[str]:
    return [] if interval is None else [f"{scale * end:.{decimals}f}" for end in interval]


def _with_interval(value: str, ends: list[str]) -> str:
    return f"{value} [{', '.join(ends)}]" if ends else value


def label_is_current(record: Record, loaded: LoadedRun) -> bool:
    """Return whether the record's label still names the same attack."""
    try:
        current = attack(record.label, loaded.run.recipe)
    except BadInput:
        return False
    return digest(current) == str(record.metadata["attack"])


def attack_command(record: Record, loaded: LoadedRun, split_sizes: Mapping[str, int]) -> str:
    """Return the command that makes the same record again, from a spec file where needed.

    `split_sizes` is empty if the data set is not on this machine; the command then names n.
    """
    about, default = record.metadata, RecordOptions()
    n, images = about["n"], about["images"]
    options: list[str] = []
    if about["split"] != default.split:
        options += ["--split", about["split"]]
    if n != split_sizes.get(about["split"]):
        options += ["--n", str(n)]
    if images != min(default.keep_images, n):
        options += ["--keep-images", str(images)]
    if not about["features"]:
        options += ["--no-keep-features"]
    run = loaded.run
    name = run_argument(run) if run.has_weights else run.name  # as train_command trains it again
    if label_is_current(record, loaded):
        return shlex.join(["demur", "attack", name, record.label, *options])
    write_spec = f"echo {shlex.quote(about['spec'])} > attack.txt"
    command = shlex.join(["demur", "attack", name, "@attack.txt", *options])
    return f"{write_spec}\n{command}"


def train_command(run: Run) -> str:
    """Return the command that trains the run: by its recipe's name, or by its recipe file."""
    named = next((name for name, known in RECIPES.items() if known == run.recipe), None)
    words = ["demur", "train", named or f"@{run.path}/recipe.txt"]
    archive = run.trained and not run.has_weights  # an archive cannot be trained in place
    where = Path("runs", run.name) if archive else run.path
    is_default = where == Path("runs", run.name) and named == run.name
    return shlex.join(words if is_default else [*words, "--out", str(where)])


def run_argument(run: Run) -> str:
    """Return the run as an argument: its name where a command finds it by that, else its path."""
    runs = run.path.parent
    inside = Path().resolve().is_relative_to(runs.resolve())
    return run.name if runs.name == "runs" and not inside else str(run.path)


class SkippedCheck(NamedTuple):
    """A check that lacks a record, and the command that makes that record."""

    kind: str
    missing: str
    command: str


class Sanity(NamedTuple):
    """The results of all sanity checks of a run."""

    flags: list[Flag]
    passed: list[str]
    skipped: list[SkippedCheck]

    @staticmethod
    def of(checks: Iterable[CheckResult], run: Run, records: Iterable[Record]) -> "Sanity":
        """Group check results into flags, passed checks and skipped checks."""
        first = next(iter(records))
        found = Sanity([], [], [])
        for check in checks:
            found.flags.extend(check.flags)
            if check.missing:
                command = _command(check.needed_attack, run, first)
                found.skipped.append(SkippedCheck(check.kind, check.missing, command))
            elif not check.flags:
                found.passed.append(check.kind)
        return found

    @property
    def title(self) -> str:
        """The number of flags in words."""
        count = len(self.flags)
        return f"{count} flag{'s' if count > 1 else ''}" if count else NOTHING

    def to_json(self) -> dict[str, Any]:
        """Return flags and skipped checks as JSON values."""
        return {
            "sanity": [flag.to_json() for flag in self.flags],
            "unchecked": [skipped._asdict() for skipped in self.skipped],
        }


def show_sanity(found: Sanity) -> None:
    """Print the flags, then the passed and the skipped checks."""
    lines = [f"Sanity: {found.title}"]
    for flag in found.flags:
        lines += [f"! {flag.kind} ({', '.join(flag.attacks)})"]
        lines += [f"  observed: {flag.observed}", f"  remedy: {flag.remedy}"]
    if found.passed:
        lines += [f"checked and not found: {'; '.join(found.passed)}"]
    if found.skipped:
        lines += ["not checked, because records are missing:"]
    for skipped in found.skipped:
        command = f": {skipped.command}" if skipped.command else ""
        lines += [f"  {skipped.kind} (needs {skipped.missing}){command}"]
    console = terminal()
    console.print("\n".join(lines), soft_wrap=not console.is_terminal)


def _command(attack: str, run: Run, like: Record) -> str:
    """Return the command that attacks a split; an archive has no weights, so it names RUN."""
    if not attack:
        return ""
    split = [] if like.metadata["split"] == "test" else ["--split", str(like.metadata["split"])]
    name = run_argument(run) if run.has_weights else "RUN"
    return shlex.join(["demur", "attack", name, attack, *split])
