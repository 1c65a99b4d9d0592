"""Promises and what became of them, as tables and sentences."""

from collections.abc import Iterable

from rich import box
from rich.table import Table

from demur.evaluate.certificates import Issued, Retest
from demur.report.text import percent, show_table

SHARES = {"risk": "wrong of accepted", "tpr": "right kept", "coverage": "coverage"}


def certificate_words(made: Issued) -> str:
    """A certificate for the terminal."""
    told = made.story
    ends = {
        name: f"{percent(told[key]['lo'])} to {percent(told[key]['hi'])}%"
        for name, key in (("risk", "risk_interval"), ("right answers kept", "tpr_interval"),
                          ("coverage", "coverage_interval"))
    }  # fmt: skip
    kept = ", ".join(f"{name} {words}" for name, words in ends.items())
    return (
        f"{made.rejector}: {told['sentence']}\n"
        f"tested on {told['n']:,} {told['on']} images of the cal split, after {told['pilot']:,} "
        f"others had chosen where to look: {told['accepted']:,} accepted, {told['wrong']:,} of "
        f"them wrong\nall at once with the same confidence: {kept}\n"
        f"valid for {told['valid_for']}"
    )


def show_retests(tested: Iterable[tuple[Issued, list[Retest]]]) -> None:
    """Print what was promised beside what every record shows."""
    table = retest_table(tested)
    if table.row_count:
        show_table(table)


def retest_table(tested: Iterable[tuple[Issued, list[Retest]]]) -> Table:
    """One block a certificate, one line a record."""
    table = Table(
        title="certificates: promised on cal, observed on test", title_justify="left",
        title_style="bold", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        caption="percent, with exact 95% intervals; broken: the promised level lies outside",
        caption_justify="left",
    )  # fmt: skip
    for name in ("certificate, attack", "share", "promised", "observed", "coverage", "verdict"):
        right = name in ("promised", "observed", "coverage")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for made, lines in tested:
        told = made.story
        sure = f"{made.rejector}, {100 * told['confidence']:g}% confidence, on {told['on']}"
        table.add_row(sure, style="bold")
        if not lines:
            table.add_row("  no record shows it: its rejector is not scored here, or changed")
        for line in lines:
            table.add_row(f"  {line.attack}", *cells(line))
        table.add_section()
    return table


def cells(line: Retest) -> tuple[str, str, str, str, str]:
    """A retest as text: the share, promised, observed, coverage, verdict."""
    bound = "at most" if line.about == "risk" else "at least"
    verdict = line.word if line.covered else f"{line.word}, though not promised here"
    return (
        SHARES[line.about], f"{bound} {percent(line.level)}",
        "" if line.observed is None else percent(line.observed, line.interval),
        percent(line.coverage), verdict,
    )  # fmt: skip
