"""A figure of Theorem 1 on a record: confidence against xi, and the share inside by temperature.

write_figure(report, run, Path("theory.svg"))
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from demur.evaluate.theory import RecordTheory, TheoryReport, outputs_at
from demur.report.figures import (
    FAINT,
    INK,
    MOST_POINTS,
    RIGHT,
    STROKES,
    WRONG,
    check_installed,
    drawing,
    saved,
)
from demur.runs import Record, Run
from demur.runs.files import write_bytes
from demur.theory import TheoryInputs, con_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFERRED = "pgd-10"  # the attack of the paper's figures


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
        (inputs.correct, "correct", "o", RIGHT, 5),
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
