"""RejectAutoAttack compared with simpler attacks, as a table and as a figure."""

from typing import Any

from rich import box
from rich.table import Table

from demur.report.figures import FAINT, INK, RIGHT, WRONG, drawing, saved
from demur.report.text import show_table, terminal

OURS = "reject-autoattack"
COLOURS = {OURS: WRONG, "orthogonal PGD": INK, "product PGD": RIGHT}


def show_peer_rejection(report: dict[str, Any]) -> None:
    """Print one line per rule: accepted errors, and gradient queries per image."""
    table = Table(
        box=box.SIMPLE_HEAD, title_justify="left",
        title=f"{report['run']}, {report['ball']}: wrong and accepted, of {report['n']} images",
    )  # fmt: skip
    for column in ("rule", *COLOURS):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for name, about in report["rules"].items():
        ends = [about["curves"][label][-1] for label in COLOURS]
        table.add_row(name, *(f"{errors} at {queries:,.0f}" for queries, errors in ends))
    show_table(table)
    terminal().print(
        f"errors at gradient queries per image (a forward pass counts a third); the other attacks "
        f"get {report['times']:g} times as many queries"
    )


def peer_rejection_svg(report: dict[str, Any]) -> bytes:
    """Draw one panel per rule: accepted errors against gradient queries per image."""
    rules = report["rules"]
    with drawing(2.5 * len(rules), 2.6) as figure:
        panels = figure.subplots(1, len(rules), squeeze=False)[0]
        for axes, (name, about) in zip(panels, rules.items(), strict=True):
            for label, curve in about["curves"].items():
                queries, errors = zip(*curve, strict=True)
                axes.plot(queries, errors, color=COLOURS[label], linewidth=1.6, marker=".",
                          markersize=4, label=label)  # fmt: skip
            axes.set_xscale("log")
            axes.set_title(name, fontsize=9)
            axes.tick_params(labelsize=7, colors=FAINT)
            axes.set_xlabel("gradient queries per image", fontsize=8)
        panels[0].set_ylabel(f"wrong and accepted, of {report['n']}", fontsize=8)
        panels[-1].legend(fontsize=7, frameon=False)
        return saved(figure, "svg")
