"""Promises and what became of them, as tables and sentences."""

from collections.abc import Iterable

from rich import box
from rich.table import Table

from demur.evaluate.certificates import IssuedCertificate, Retest
from demur.report.text import percent, show_table

SHARES = {"risk": "wrong of accepted", "tpr": "right kept", "coverage": "coverage"}


def certificate_words(made: IssuedCertificate) -> str:
    """A certificate for the terminal."""
    describe_counts = made.metadata
    ends = {
        name: f"{percent(describe_counts[key]['lo'])} to {percent(describe_counts[key]['hi'])}%"
        for name, key in (("risk", "risk_interval"), ("right answers kept", "tpr_interval"),
                          ("coverage", "coverage_interval"))
    }  # fmt: skip
    kept = ", ".join(f"{name} {words}" for name, words in ends.items())
    return (
        f"{made.rejector}: {describe_counts['sentence']}\n"
        f"tested on {describe_counts['n']:,} {describe_counts['on']} images of the cal split, after {describe_counts['pilot']:,} "
        f"others had chosen where to look: {describe_counts['accepted']:,} accepted, {describe_counts['wrong']:,} of "
        f"them wrong\nall at once with the same confidence: {kept}\n"
        f"valid for {describe_counts['valid_for']}"
    )


def show_retests(hits_and_trials: Iterable[tuple[IssuedCertificate, list[Retest]]]) -> None:
    """Print what was promised beside what every record shows."""
    table = retest_table(hits_and_trials)
    if table.row_count:
        show_table(table)


def retest_table(hits_and_trials: Iterable[tuple[IssuedCertificate, list[Retest]]]) -> Table:
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
    for made, lines in hits_and_trials:
        describe_counts = made.metadata
        sure = f"{made.rejector}, {100 * describe_counts['confidence']:g}% confidence, on {describe_counts['on']}"
        table.add_row(sure, style="bold")
        if not lines:
            table.add_row("  no record shows it: its rejector is not scored here, or changed")
        for line in lines:
            table.add_row(f"  {line.attack}", *cells(line))
        table.add_section()
    return table


def cells(line: Retest) -> tuple[str, str, str, str, str]:
    """A retest as text: the share, promised, observed, coverage, verdict."""
    bound = "at most" if line.quantity == "risk" else "at least"
    verdict = line.word if line.covered else f"{line.word}, though not promised here"
    return (
        SHARES[line.quantity], f"{bound} {percent(line.level)}",
        "" if line.observed is None else percent(line.observed, line.interval),
        percent(line.coverage), verdict,
    )  # fmt: skip
