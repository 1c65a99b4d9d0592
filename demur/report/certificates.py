"""Certificates and their retests on other records: tables, sentences and a figure."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table

from demur.evaluate.certificates import IssuedCertificate, Retest
from demur.report.plot import CORRECT, FAINT, INK, WRONG, drawing, saved
from demur.report.terminal import percent, plain_table, show_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SHARES = {"risk": "wrong of accepted", "tpr": "accepted of correct", "coverage": "coverage"}
INTERVALS = {"risk": "risk_interval", "TPR": "tpr_interval", "coverage": "coverage_interval"}
LINE_HEIGHT = 0.28  # inches
MARKS = {"kept": ("o", CORRECT), "within chance": ("s", INK), "broken": ("X", WRONG)}


def certificate_text(certificate: IssuedCertificate) -> str:
    """Return a certificate as text for the terminal."""
    about = certificate.metadata
    intervals = ", ".join(
        f"{name} {percent(about[key]['lo'])} to {percent(about[key]['hi'])}%"
        for name, key in INTERVALS.items()
    )
    return (
        f"{certificate.rejector}: {about['sentence']}\n"
        f"tested on {about['n']:,} {about['on']} images of the cal split, after {about['pilot']:,} "
        f"others had chosen the thresholds to test: {about['accepted']:,} accepted, "
        f"{about['accepted_wrong']:,} of them wrong\n"
        f"simultaneous intervals at the same confidence: {intervals}\n"
        f"valid for {about['valid_for']}"
    )


def show_retests(retests: Iterable[tuple[IssuedCertificate, list[Retest]]]) -> None:
    """Print guaranteed beside observed shares, where there is a certificate."""
    table = retest_table(retests)
    if table.row_count:
        show_table(table)


def retest_table(retests: Iterable[tuple[IssuedCertificate, list[Retest]]]) -> Table:
    """Return a table with one block per certificate and one line per record."""
    table = plain_table(
        "certificates: guaranteed on cal, observed on test",
        "certificate, attack", "share", "guaranteed", "observed", "coverage", "verdict",
        caption="percent, with exact 95% intervals; broken: the interval excludes the guarantee",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    table.columns[1].justify = table.columns[5].justify = "left"
    for certificate, lines in retests:
        level = f"{100 * certificate.metadata['confidence']:g}% confidence"
        heading = f"{certificate.rejector}, {level}, on {certificate.metadata['on']}"
        table.add_row(heading, style="bold")
        if not lines:
            table.add_row("  not tested: its rejector is not scored here, or has changed")
        for line in lines:
            table.add_row(f"  {line.attack}", *cells(line))
        table.add_section()
    return table


def cells(line: Retest) -> tuple[str, str, str, str, str]:
    """Format a retest: share, guaranteed, observed, coverage, verdict."""
    bound = "at most" if line.quantity == "risk" else "at least"
    verdict = line.verdict if line.covered else f"{line.verdict}, but not guaranteed here"
    return (
        SHARES[line.quantity], f"{bound} {percent(line.level)}",
        "" if line.observed is None else percent(line.observed, line.interval),
        percent(line.coverage), verdict,
    )  # fmt: skip


def guarantees_svg(retests: list[tuple[IssuedCertificate, list[Retest]]]) -> bytes:
    """Draw one panel per certificate: observed shares with intervals, and the guaranteed level."""
    shown = [(made, lines) for made, lines in retests if lines]
    heights = [len(lines) + 1.6 for _, lines in shown]
    with drawing(7.4, LINE_HEIGHT * sum(heights) + 0.5) as figure:
        panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (made, lines) in zip(panels, shown, strict=True):
            _panel(axes, made, lines)
        return saved(figure, "svg")


def _panel(axes: "Axes", made: IssuedCertificate, lines: list[Retest]) -> None:
    level, quantity = 100 * lines[0].level, lines[0].quantity
    for y, line in enumerate(lines):
        if line.observed is None:
            continue
        marker, colour = MARKS[line.verdict]
        lo, hi, at = (100 * v for v in (*line.interval, line.observed))
        axes.plot((lo, hi), (y, y), color=colour, linewidth=2)
        axes.plot(at, y, marker, color=colour, markersize=7, markeredgecolor="white")
    axes.axvline(level, color=INK, linestyle=(0, (4, 2)), linewidth=1.2)
    allowed = (0, level) if quantity == "risk" else (level, 100)
    axes.axvspan(*allowed, color=CORRECT, alpha=0.06)
    names = [line.attack if line.covered else f"{line.attack} (not guaranteed)" for line in lines]
    axes.set_yticks(range(len(lines)), names, fontsize=8)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    ends = [100 * end for line in lines for end in line.interval] + [level]
    padding = max(2.0, 0.08 * (max(ends) - min(ends)))
    axes.set_xlim(max(0.0, min(ends) - padding), min(100.0, max(ends) + padding))
    axes.tick_params(axis="x", labelsize=8, colors=FAINT)
    bound = "at most" if quantity == "risk" else "at least"
    title = f"{made.rejector}: {SHARES[quantity]}, percent; guaranteed: {bound} {level:g}"
    axes.set_title(title, fontsize=9)
