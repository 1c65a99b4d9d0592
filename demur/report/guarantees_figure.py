"""A picture of certificates: what was promised, and what each record shows."""

from typing import TYPE_CHECKING

from demur.evaluate.certificates import IssuedCertificate, Retest
from demur.report.certificates import SHARES
from demur.report.figures import FAINT, INK, RIGHT, WRONG, drawing, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE = 0.28  # inches
MARKS = {"kept": ("o", RIGHT), "within chance": ("s", INK), "broken": ("X", WRONG)}


def guarantees_svg(hits_and_trials: list[tuple[IssuedCertificate, list[Retest]]]) -> bytes:
    """One panel a certificate: observed shares with their intervals beside the promised level."""
    shown = [(made, lines) for made, lines in hits_and_trials if lines]
    heights = [len(lines) + 1.6 for _, lines in shown]
    with drawing(7.4, LINE * sum(heights) + 0.5) as figure:
        panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (made, lines) in zip(panels, shown, strict=True):
            _panel(axes, made, lines)
        return saved(figure, "svg")


def _panel(axes: "Axes", made: IssuedCertificate, lines: list[Retest]) -> None:
    level, quantity = 100 * lines[0].level, lines[0].quantity
    for place, line in enumerate(lines):
        if line.observed is None:
            continue
        marker, colour = MARKS[line.word]
        lo, hi, at = (100 * v for v in (*line.interval, line.observed))
        axes.plot((lo, hi), (place, place), color=colour, linewidth=2)
        axes.plot(at, place, marker, color=colour, markersize=7, markeredgecolor="white")
    axes.axvline(level, color=INK, linestyle=(0, (4, 2)), linewidth=1.2)
    kept = (0, level) if quantity == "risk" else (level, 100)
    axes.axvspan(*kept, color=RIGHT, alpha=0.06)
    names = [line.attack if line.covered else f"{line.attack} (not promised)" for line in lines]
    axes.set_yticks(range(len(lines)), names, fontsize=8)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    ends = [100 * end for line in lines for end in line.interval] + [level]
    room = max(2.0, 0.08 * (max(ends) - min(ends)))
    axes.set_xlim(max(0.0, min(ends) - room), min(100.0, max(ends) + room))
    axes.tick_params(axis="x", labelsize=8, colors=FAINT)
    bound = "at most" if quantity == "risk" else "at least"
    title = f"{made.rejector}: {SHARES[quantity]}, percent; promised: {bound} {level:g}"
    axes.set_title(title, fontsize=9)
