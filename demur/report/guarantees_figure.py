"""A figure of certificates: guaranteed levels and observed shares."""

from typing import TYPE_CHECKING

from demur.evaluate.certificates import IssuedCertificate, Retest
from demur.report.certificates import SHARES
from demur.report.figures import FAINT, INK, RIGHT, WRONG, drawing, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_HEIGHT = 0.28  # inches
MARKS = {"kept": ("o", RIGHT), "within chance": ("s", INK), "broken": ("X", WRONG)}


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
    axes.axvspan(*allowed, color=RIGHT, alpha=0.06)
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
