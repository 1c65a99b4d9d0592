"""Draw the pictures of the documentation from a finished demo: docs/overview.png, guarantees.svg.

The run needs the three certificates that docs/guides/thresholds.md names.

.venv/bin/python tools/draw_docs.py runs/demo
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes

from demur.cli.evaluate import load_run, score_run
from demur.evaluate import BASELINE, ORACLE, RejectorEvaluation, ScoredRecord, tcon_of, values
from demur.evaluate.certificates import IssuedCertificate, Retest, retests
from demur.evaluate.record_scores import has_tcon
from demur.metrics import risk_coverage
from demur.paper.draw import STROKES
from demur.report import plot
from demur.report.plot import CORRECT, FAINT, INK, WRONG, drawing, saved
from demur.report.scored_runs import RECTIFIED, SHARES, hardest, main_row

DOCS = Path(__file__).parents[1] / "docs"
PALE = "#f1f3f5"
DRAWN = (BASELINE, RECTIFIED, "Con+R-Con", "Energy", "KD", "GDA")  # more curves would overlap
LEFT_END = 0.1  # coverage below which a curve rests on too few images to set the scale
LINE_HEIGHT = 0.28  # inches
MARKS = {"kept": ("o", CORRECT), "within chance": ("s", INK), "broken": ("X", WRONG)}


def main(run: str) -> None:
    """Draw the pictures of one run with records and a certificate."""
    loaded = load_run(run, "cpu", None)
    evaluation, scored = score_run(loaded)
    (DOCS / "overview.png").write_bytes(overview_figure(scored, evaluation))
    records = [one.record for one in scored]
    tested = [pair for pair in retests(loaded, evaluation.scores, records) if pair[1]]
    (DOCS / "guarantees.svg").write_bytes(guarantees_svg(tested))


def overview_figure(records: list[ScoredRecord], evaluation: RejectorEvaluation) -> bytes:
    """Draw the attack with the most accepted errors: scores, and risk against coverage."""
    shown = hardest(records, evaluation)
    heading = f"{shown.summary.n} images attacked with {shown.summary.attack}: "
    with drawing(9.0, 3.5) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
        _scatter(left, shown, evaluation)
        _risk_coverage(right, shown, evaluation)
        heading += "scores, and risk against coverage"
        figure.suptitle(heading, x=0.01, ha="left", fontsize=11, fontweight="bold")
        return saved(figure, "png")


def _scatter(axes: Axes, scored: ScoredRecord, evaluation: RejectorEvaluation) -> None:
    record, correct = scored.record, scored.record.correct
    x, y = (values(evaluation.score_for(name, record), record) for name in (BASELINE, RECTIFIED))
    axes.fill([0, 0, 1], [0, 1, 1], color=PALE, linewidth=0, zorder=0)
    axes.text(0.03, 0.97, "impossible:\nR-Con is never above con", va="top", fontsize=8,
              color=FAINT)  # fmt: skip
    plot.scatter(x, y, correct, ax=axes)
    for line in (axes.axhline(0.5), axes.axvline(0.5)):  # of Theorem 1
        line.set(color=FAINT, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    _note(axes, 0.01, 0.5, "1/2", ha="left", va="top", color=FAINT)
    _note(axes, 0.5, 0.02, "1/2", ha="right", va="bottom", color=FAINT)
    at_con, at_rcon = (main_row(scored, name).point.threshold for name in (BASELINE, RECTIFIED))
    axes.axhline(at_rcon, color=INK, linewidth=1.3, zorder=3)
    axes.axvline(at_con, color=INK, linewidth=1.3, linestyle=(0, (5, 2)), zorder=3)
    _note(axes, 0.01, at_rcon, f"R-Con threshold {at_rcon:.2f}", ha="left", va="bottom")
    _note(axes, at_con, 0.22, f"Con threshold {at_con:.2f}", ha="right", va="bottom", rotation=90)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence (con)",
             ylabel="rectified confidence (R-Con)")  # fmt: skip
    axes.legend(
        loc="lower right", handletextpad=0.2, borderaxespad=0.2, frameon=True, framealpha=1,
        edgecolor="none",
    ).set_zorder(5)  # fmt: skip


def _note(axes: Axes, x: float, y: float, text: str, **alignment: str | float) -> None:
    axes.text(x, y, text, fontsize=8, zorder=4, **alignment)  # type: ignore[arg-type]


def _risk_coverage(axes: Axes, scored: ScoredRecord, evaluation: RejectorEvaluation) -> None:
    record, shown = scored.record, {row.rejector for row in scored.rows}
    curves = {name: values(evaluation.score_for(name, record), record) for name in DRAWN
              if name in shown}  # fmt: skip
    strokes = [*STROKES[: len(curves)], (INK, (0, (2, 2)))]
    curves |= {ORACLE: tcon_of(record)} if has_tcon(record) else {}
    highest = max(0.01, float(1 - record.correct.mean()))
    for (name, score), (colour, dashes) in zip(curves.items(), strokes, strict=False):
        curve = risk_coverage(score, record.correct)
        axes.plot(100 * curve.coverage, 100 * curve.risk, color=colour, linestyle=dashes,
                  linewidth=1.8, label=name)  # fmt: skip
        highest = max(highest, float(curve.risk[curve.coverage >= LEFT_END].max()))
        if name != ORACLE and (point := main_row(scored, name).point).accepted:
            axes.plot(100 * point.coverage, 100 * (1 - point.accuracy), "o", color=colour,
                      markeredgecolor="white", markersize=7, zorder=4)  # fmt: skip
    axes.set(xlim=(0, 101), ylim=(-3 * highest, 112 * highest), ylabel="wrong among accepted (%)",
             xlabel="coverage: share accepted (%)")  # fmt: skip
    axes.legend(loc="upper left", handlelength=3.4, labelspacing=0.3, frameon=True, framealpha=0.85,
                edgecolor="none")  # fmt: skip


def guarantees_svg(retests: list[tuple[IssuedCertificate, list[Retest]]]) -> bytes:
    """Draw one panel per certificate: observed shares with intervals, and the guaranteed level."""
    shown = [(made, lines) for made, lines in retests if lines]
    heights = [len(lines) + 1.6 for _, lines in shown]
    with drawing(7.4, LINE_HEIGHT * sum(heights) + 0.5) as figure:
        panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (made, lines) in zip(panels, shown, strict=True):
            _panel(axes, made, lines)
        return saved(figure, "svg")


def _panel(axes: Axes, made: IssuedCertificate, lines: list[Retest]) -> None:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
