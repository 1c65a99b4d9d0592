"""The check of the theory on a run, as tables for the terminal and as a figure.

    show_theory(theory(run))
    write_figure(theory(run), run, Path("theory.svg"))

One table per statement. Shares are in percent; the JSON output has their intervals.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from demur.files.checked_files import write_bytes
from demur.metrics import wilson
from demur.paper.draw import STROKES
from demur.paper.theorems import TheoryInputs, con_above, n_sub
from demur.paper.theory import (
    RHO,
    SMALL,
    Proportion,
    RecordTheory,
    TheoryReport,
    WorstCaseXi,
    outputs_at,
)
from demur.report.page import check_installed
from demur.report.plot import CORRECT, FAINT, INK, MOST_POINTS, WRONG, drawing, saved
from demur.report.terminal import percent, show_table, terminal
from demur.runs import Record, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFERRED = "pgd-10"  # the attack of the paper's figures


class Section(NamedTuple):
    """A table with a title and an optional caption."""

    title: str
    table: Table
    caption: str = ""


def show_theory(report: TheoryReport) -> None:
    """Print every table, the records that are left out, and the command of an attack on xi."""
    console = terminal()
    for title, table, caption in theory_tables(report):
        console.print(title, style="bold", soft_wrap=True)
        show_table(table)
        console.print(f"{caption}\n" if caption else "", soft_wrap=True)
    if report.scores_only:
        names = ", ".join(report.scores_only)
        console.print(f"left out, since only their scores are stored: {names}", soft_wrap=True)
    if report.xi_attack_command is not None:
        console.print(missing(report.xi_attack_command), soft_wrap=True)


def missing(how: str) -> str:
    """Return how to make the record of the attack on xi."""
    return (
        "share of images with xi below 2 - 1/gamma in the whole ball: there is no record of the "
        f"attack on xi; make one with {how}"
    )


def theory_tables(report: TheoryReport) -> list[Section]:
    """Return all tables of a report."""
    return [
        _checks(report),
        _xi(report),
        _inside(report),
        _at_fixed_xi(report),
        _with_threshold(report),
        *(_worst_case(xi) for xi in report.worst_case_xi),
        _randomised(report),
        _calibration(report),
        _difficulty(report),
        _toy_examples(report),
    ]


def _table(*columns: str) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table


def _per_record(
    table: Table,
    report: TheoryReport,
    lines: Callable[[RecordTheory], Sequence[tuple[str, Sequence[str]]]],
) -> Table:
    """Add a group of lines per record, the first with the record's name."""
    for record in report.records:
        first, *rest = lines(record)
        table.add_row(f"{_named(record, report)}: {first[0]}", *first[1])
        for name, cells in rest:
            table.add_row(f"  {name}", *cells)
        table.add_section()
    return table


def _named(record: RecordTheory, report: TheoryReport) -> str:
    """Return the attack, with the number of images if it has several records."""
    same = sum(other.attack == record.attack for other in report.records)
    return record.attack if same == 1 else f"{record.attack}, n={record.n}"


def _checks(report: TheoryReport) -> Section:
    names = [check.statement for check in report.records[0].checks]
    table = _table("failed / applied", *names)
    for record in report.records:
        counts = [f"{check.violated} / {check.applied:,}" for check in record.checks]
        table.add_row(f"{record.attack}, n={record.n}", *counts)
    return Section(
        f"{report.run}: statements checked on every image, at every temperature, xi and gamma",
        table,
        "the statements are proven, so a failure is a bug in demur",
    )


def _xi(report: TheoryReport) -> Section:
    bins = n_sub(SMALL, RHO)
    table = _table(
        "", "median (i)", "median (ii)", "smallest A", "xi < 1", "better than A = 1/2",
        f"xi <= {SMALL}", "of correct", "of wrong", f"same of {bins} bins",
    )  # fmt: skip
    for record in report.records:
        xi = record.xi
        shares = (xi.below_one, xi.better_than_guess, xi.small, xi.small_of_right,
                  xi.small_of_wrong, xi.same_bin)  # fmt: skip
        numbers = (xi.median_geometric, xi.median_arithmetic, xi.smallest_a)
        name = _named(record, report)
        table.add_row(name, *(f"{number:.3f}" for number in numbers), *_shares(shares))
    return Section(
        f"xi-error by both bounds, at tau = {_tau(report.tau)}",
        table,
        "A = 1/2 has xi = 1 where the prediction is correct, and at most 1 elsewhere\n"
        f"Theorem 2: xi <= {SMALL} is a task of {bins} classes; the paper expects 70 to 90%",
    )


def _inside(report: TheoryReport) -> Section:
    table = _table("tau", *(_tau(at.tau) for at in report.records[0].at_tau))

    def lines(record: RecordTheory) -> list[tuple[str, list[str]]]:
        return [
            ("all", _shares(at.inside for at in record.at_tau)),
            ("of correct", _shares(at.of_right for at in record.at_tau)),
            ("of wrong", _shares(at.of_wrong for at in record.at_tau)),
            ("all, if A were 1", _shares(at.without_head for at in record.at_tau)),
        ]

    return Section(
        "inside Theorem 1: con > 1/(2 - xi), each image at its own xi",
        _per_record(table, report, lines),
        f"the paper: about 50% of the attacked images\n{_widest(report)}",
    )


def _at_fixed_xi(report: TheoryReport) -> Section:
    table = _table("xi", *(f"{at.xi:g}" for at in report.records[0].at_xi))

    def lines(record: RecordTheory) -> list[tuple[str, list[str]]]:
        return [
            ("con > 1/(2 - xi)", _shares(at.confident for at in record.at_xi)),
            ("A is xi-error", _shares(at.accurate for at in record.at_xi)),
            ("inside: both", _shares(at.inside for at in record.at_xi)),
        ]

    return Section("inside Theorem 1 at one xi for all", _per_record(table, report, lines))


def _with_threshold(report: TheoryReport) -> Section:
    at_gamma = report.records[0].at_gamma
    table = _table("gamma (xi below)", *(f"{at.gamma:g} ({at.xi_below:.2f})" for at in at_gamma))

    def lines(record: RecordTheory) -> list[tuple[str, list[str]]]:
        return [
            ("con >= gamma", _shares(at.past for at in record.at_gamma)),
            ("and inside the theorem", _shares(at.inside for at in record.at_gamma)),
            ("inside, of con >= gamma", _shares(at.inside_of_past for at in record.at_gamma)),
            ("con >= gamma, R-Con > 1/2", _shares(at.accepted for at in record.at_gamma)),
            ("correct, of these", _shares(at.right_of_accepted for at in record.at_gamma)),
        ]

    return Section(
        "inside Theorem 1 with a confidence threshold: con >= gamma and xi < 2 - 1/gamma",
        _per_record(table, report, lines),
    )


def _worst_case(found: WorstCaseXi) -> Section:
    table = _table("gamma", "xi below", "clean", "in the whole ball, at most")
    for at in found.stays_low:
        clean = "" if at.clean is None else percent(at.clean.value)
        share = percent(at.attacked.value, at.attacked.interval)
        table.add_row(f"{at.gamma:g}", f"{at.xi:.3f}", clean, share)
    return Section(
        f"xi stays below 2 - 1/gamma throughout {found.ball}, n={found.n}",
        table,
        f"by the worst of {', '.join(found.records)}",
    )


def _randomised(report: TheoryReport) -> Section:
    table = _table("tau", *(_tau(at.tau) for at in report.records[0].at_tau))

    def lines(record: RecordTheory) -> list[tuple[str, list[str]]]:
        drawn = [f"{100 * at.sampled:.2f} ±{100 * at.sampling_error:.2f}" for at in record.at_tau]
        mean = [f"{100 * at.randomised:.2f}" for at in record.at_tau]
        return [("mean T-Con", mean), ("labels drawn", drawn)]

    return Section(
        "A_tau: the accuracy of labels drawn from the probabilities",
        _per_record(table, report, lines),
        "at tau -> 0 this is the accuracy; drawn labels with their standard error",
    )


def _calibration(report: TheoryReport) -> Section:
    thresholds = report.records[0].calibration
    table = _table("t", *(f"{at.t:g}" for at in thresholds), "T-Con > 1/2")

    def lines(record: RecordTheory) -> list[tuple[str, list[str]]]:
        at_all, oracle = record.calibration, record.oracle
        return [
            ("coverage", _shares([*(at.coverage for at in at_all), oracle.coverage])),
            ("calibrated", [percent(at.calibrated) if at.calibrated else "-" for at in at_all]),
            ("measured", _shares([*(at.measured for at in at_all), oracle.accuracy])),
        ]

    return Section(
        "accuracy after rejection by confidence at t, and by T-Con above 1/2",
        _per_record(table, report, lines),
        "calibrated: the value for a calibrated confidence, at least t; T-Con needs the label",
    )


def _difficulty(report: TheoryReport) -> Section:
    table = _table("xi", "N1", "N2", "N_sub")
    for at in report.difficulty:
        table.add_row(f"{at.xi:g}", f"{at.n1:.1f}", f"{at.n2:.1f}", str(at.n_sub))
    rho = report.difficulty[0].rho
    return Section(
        f"Theorem 2: the number of classes equivalent to a xi-error A, rho = {rho:g}", table
    )


def _toy_examples(report: TheoryReport) -> Section:
    table = _table("", "x1, tau = 1", "x2, tau = 1", "x1, tau = 2", "x2, tau = 2")
    for toy in report.toys:
        table.add_row(toy.measure, *(f"{value:.4f}" for value in (*toy.at_one, *toy.at_two)))
    return Section("the temperature can reverse an order: the paper's two toy examples", table)


def _shares(shares: Iterable[Proportion]) -> list[str]:
    return [percent(share.value) if share.n else "-" for share in shares]


def _tau(tau: float) -> str:
    return "-> 0" if tau == 0 else str(Fraction(tau).limit_denominator(1000))


def _widest(report: TheoryReport) -> str:
    """Return the largest half-width of the 95% intervals."""
    n = min(record.n for record in report.records)
    half = (wilson(n // 2, n).hi - wilson(n // 2, n).lo) / 2
    return f"95% intervals of shares of all reach at most {100 * half:.1f} points to either side"


def write_figure(report: TheoryReport, run: Run, path: Path) -> None:
    """Draw the PGD-10 record, or else the last one, as an SVG file."""
    check_installed()
    found = {record.digest: record for record in run.records("test")}
    shown = next((r for r in report.records if r.attack == PREFERRED), report.records[-1])
    write_bytes(path, theory_svg(shown, found[shown.record], report.tau))


def theory_svg(shown: RecordTheory, record: Record, tau: float) -> bytes:
    """Draw both panels of one record."""
    with drawing(9.0, 3.6) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
        _xi_against_con(left, outputs_at(record, tau))
        _inside_against_tau(right, shown)
        heading = f"{shown.attack}, {shown.n} images"
        figure.suptitle(heading, x=0.01, ha="left", fontsize=11, fontweight="bold")
        return saved(figure, "svg")


def _xi_against_con(axes: "Axes", inputs: TheoryInputs) -> None:
    as_pixels = len(inputs.con) > MOST_POINTS
    for chosen, name, marker, colour, size in (
        (inputs.correct, "correct", "o", CORRECT, 5),
        (~inputs.correct, "wrong", "x", WRONG, 8),
    ):
        axes.scatter(
            inputs.xi[chosen], inputs.con[chosen], s=size, marker=marker, color=colour, alpha=0.4,
            linewidths=0.7, label=name, rasterized=as_pixels,
        )  # fmt: skip
    xi = np.linspace(0, 0.999, 200)
    axes.plot(xi, [con_above(value) for value in xi], color=INK, linewidth=1.4)
    axes.text(0.03, 0.02, "above the line, con = 1/(2 - xi),\nTheorem 1 applies", fontsize=8)
    axes.axvline(1, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
    axes.set(xlim=(0, 2), ylim=(0, 1.02), xlabel="xi-error of the image", ylabel="confidence",
             title="confidence against xi")  # fmt: skip
    axes.legend(loc="lower right", markerscale=2)


def _inside_against_tau(axes: "Axes", shown: RecordTheory) -> None:
    rows = shown.at_tau
    positions = range(len(rows))
    lines = (
        ("all", [at.inside.value for at in rows]),
        ("of the correct", [at.of_right.value for at in rows]),
        ("of the wrong", [at.of_wrong.value for at in rows]),
        ("all, if A were 1", [at.without_head.value for at in rows]),
    )
    for (name, shares), (colour, dashes) in zip(lines, STROKES, strict=False):
        axes.plot(positions, [100 * share for share in shares], color=colour, linestyle=dashes,
                  marker="o", markersize=3, label=name)  # fmt: skip
    axes.set_xticks(positions, ["0" if at.tau == 0 else f"{at.tau:g}" for at in rows], fontsize=8)
    axes.set_yticks(range(0, 101, 20))
    axes.set(ylim=(-2, 130), xlabel="temperature", ylabel="percent inside Theorem 1",
             title="inside Theorem 1 at its own xi")  # fmt: skip
    axes.legend(loc="upper right", ncols=2)
