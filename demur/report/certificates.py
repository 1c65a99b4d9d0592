"""Certificates and their retests on other records: tables and sentences."""

from collections.abc import Iterable

from rich.table import Table

from demur.evaluate.certificates import IssuedCertificate, Retest
from demur.metrics.thresholds import ANY_SCORE
from demur.report.terminal import percent, plain_table, show_table

SHARES = {"risk": "wrong of accepted", "tpr": "accepted of correct", "coverage": "coverage"}
INTERVALS = {"risk": "risk_interval", "TPR": "tpr_interval", "coverage": "coverage_interval"}


def certificate_text(certificate: IssuedCertificate) -> str:
    """Return a certificate as text for the terminal."""
    about = certificate.metadata
    intervals = ", ".join(
        f"{name} {percent(about[key]['lo'])} to {percent(about[key]['hi'])}%"
        for name, key in INTERVALS.items()
    )
    nothing = all(t <= ANY_SCORE for t in certificate.thresholds)
    return (
        f"{certificate.rejector}: {about['sentence']}{', so it rejects nothing' * nothing}\n"
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
        caption="percent, with exact 95% intervals; broken: the interval excludes the guarantee; "
        "aimed at: an attack on this rejector and threshold may do more",
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
    missed = line.aim if line.verdict in ("kept", "within chance") else ""
    verdict = line.verdict + f", but {missed or 'not guaranteed here'}" * (not line.covered)
    return (
        SHARES[line.quantity], f"{bound} {percent(line.level)}",
        "" if line.observed is None else percent(line.observed, line.interval),
        percent(line.coverage), verdict,
    )  # fmt: skip
