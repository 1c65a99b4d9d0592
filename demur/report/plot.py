"""Figures of scores for notebooks; each function returns matplotlib axes.

    from demur import plot
    plot.risk_coverage({"Con": table["Con"], "R-Con": table["R-Con"]}, table["correct"])

All take one value per image, as arrays or columns of a table. They need matplotlib, which
pip install 'demur[report]' installs, and use the user's own style.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from demur.errors import BadInput
from demur.metrics import WorstCase, auroc, ece
from demur.metrics import risk_coverage as risk_coverage_curve
from demur.metrics.checks import FloatArray, scored_pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CORRECT, WRONG, FAINT = "#0072B2", "#D55E00", "#6b7280"
DASHES = ("-", "--", ":", "-.")
CURVE_POINTS = 200  # of a curve with a band
MOST_POINTS = 2000  # larger scatters are rasterised in vector files


def risk_coverage(
    scores: Mapping[str, ArrayLike], correct: ArrayLike, ax: "Axes | None" = None
) -> "Axes":
    """Draw the share of errors among the accepted images at every coverage, a curve per score.

    Args:
        scores: Scores by name, N each; higher means accept.
        correct: Whether each prediction is correct, N.
        ax: Axes to draw on; None makes a new figure.

    Returns:
        The axes.
    """
    axes = _axes(ax)
    if not scores:
        raise BadInput("there is no score to draw; give at least one, such as {'Con': confidence}")
    for place, (name, score) in enumerate(scores.items()):
        curve = risk_coverage_curve(score, correct)
        dashes = DASHES[place % len(DASHES)]
        axes.plot(100 * curve.coverage, 100 * curve.risk, linestyle=dashes, label=name)
    axes.set(
        xlabel="coverage: share accepted (%)", ylabel="wrong among accepted (%)", xlim=(0, 101)
    )
    axes.legend()
    return axes


def worst_case(cases: Mapping[str, WorstCase], ax: "Axes | None" = None) -> "Axes":
    """Draw the accepted errors under a worst-score attack at every clean coverage, with 95% bands.

    Args:
        cases: Worst cases by name. `WorstCase.of(score, np.where(correct, -np.inf, score))` of
            clean images draws the errors without an attack.
        ax: Axes to draw on; None makes a new figure.

    Returns:
        The axes. Bands are Wilson intervals at each threshold by itself.
    """
    axes = _axes(ax)
    if not cases:
        raise BadInput("there is no worst case to draw; give at least one, by its name")
    for place, (name, case) in enumerate(cases.items()):
        coverage, errors, thresholds = case.curve
        shown = np.unique(np.linspace(0, len(thresholds) - 1, CURVE_POINTS).astype(int))
        ends = np.array([case.interval(t) for t in thresholds[shown]]).T
        dashes, x = DASHES[place % len(DASHES)], 100 * coverage[shown]
        (line,) = axes.plot(x, 100 * errors[shown], linestyle=dashes, label=name)
        axes.fill_between(x, *(100 * ends), color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(
        xlabel="coverage of clean images (%)", ylabel="wrong and accepted, of all (%)",
        xlim=(0, 101),
    )  # fmt: skip
    axes.legend()
    return axes


def scatter(
    con: ArrayLike,
    rcon: ArrayLike,
    correct: ArrayLike,
    thresholds: tuple[float, float] | None = None,
    xi: float | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw R-Con against confidence, correct predictions as dots and wrong ones as crosses.

    Args:
        con: Confidence of each image, N.
        rcon: R-Con of each image, N.
        correct: Whether each prediction is correct, N.
        thresholds: Thresholds of con and R-Con, whose accepted region is shaded.
        xi: An xi-error below 1; lines show Theorem 1: con above 1/(2 - xi), R-Con at 1/2.
        ax: Axes to draw on; None makes a new figure.

    Returns:
        The axes.
    """
    axes = _axes(ax)
    x, is_correct = scored_pair(con, correct, "con")
    y, _ = scored_pair(rcon, correct, "rcon")
    for chosen, name, marker, colour in (
        (is_correct, "correct", "o", CORRECT),
        (~is_correct, "wrong", "x", WRONG),
    ):
        axes.scatter(
            x[chosen], y[chosen], s=14, marker=marker, color=colour, alpha=0.6, linewidths=1,
            label=f"{name} ({chosen.sum()})", rasterized=len(x) > MOST_POINTS,
        )  # fmt: skip
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="R-Con")
    if thresholds is not None:
        t_con, t_rcon = thresholds
        axes.fill_between([t_con, 1.02], t_rcon, 1.02, color=CORRECT, alpha=0.1, label="accepted")
    if xi is not None:
        if not 0 <= xi < 1:
            raise BadInput(f"xi is {xi}, and must be from 0 to below 1")
        bound = 1 / (2 - xi)  # the confidence that Theorem 1 requires
        label = f"Theorem 1, xi = {xi:.2f}"
        axes.plot([bound, bound], [0, 1.02], color=FAINT, linestyle=":", label=label)
        axes.plot([bound, 1.02], [0.5, 0.5], color=FAINT, linestyle=":")
    axes.legend(loc="upper left")
    return axes


def reliability(
    confidence: ArrayLike, correct: ArrayLike, bins: int = 15, ax: "Axes | None" = None
) -> "Axes":
    """Draw the accuracy in equal bins of confidence; a calibrated confidence lies on the diagonal.

    Args:
        confidence: Probabilities, N: confidence, R-Con or T-Con.
        correct: Whether each prediction is correct, N.
        bins: Number of bins.
        ax: Axes to draw on; None makes a new figure.

    Returns:
        The axes, titled with the expected calibration error.
    """
    axes = _axes(ax)
    error = ece(confidence, correct, bins)
    values, is_correct = scored_pair(confidence, correct, "confidence")
    place = np.clip(np.ceil(values * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    accuracy = np.bincount(place, weights=is_correct, minlength=bins) / np.maximum(count, 1)
    middle = (np.arange(bins) + 0.5) / bins
    filled = count > 0
    axes.bar(middle[filled], accuracy[filled], width=0.94 / bins, color=CORRECT, alpha=0.75)
    axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    axes.set_title(f"expected calibration error {error:.3f}")
    return axes


def separability(
    score: ArrayLike, correct: ArrayLike, bins: int | FloatArray = 30, ax: "Axes | None" = None
) -> "Axes":
    """Draw histograms of a score for correct and wrong predictions; the title has the AUROC.

    Args:
        score: Score of each image, N; infinite ones are left out of the bars.
        correct: Whether each prediction is correct, N.
        bins: Number of bins, or their edges.
        ax: Axes to draw on; None makes a new figure.

    Returns:
        The axes.
    """
    axes = _axes(ax)
    values, is_correct = scored_pair(score, correct)
    shown = np.isfinite(values)
    if not shown.any():
        raise BadInput("every score is infinite; give a score with finite values")
    edges = np.histogram_bin_edges(values[shown], bins).tolist()
    right, wrong = values[shown & is_correct], values[shown & ~is_correct]
    axes.hist(right, edges, color=CORRECT, alpha=0.55, label=f"correct ({is_correct.sum()})")
    axes.hist(wrong, edges, histtype="step", hatch="////", edgecolor=WRONG, linewidth=1.4,
              label=f"wrong ({(~is_correct).sum()})")  # fmt: skip
    axes.set(xlabel="score", ylabel="images")
    axes.set_title(f"AUROC {auroc(values, is_correct):.3f}")
    axes.legend()
    return axes


def _axes(ax: "Axes | None") -> "Axes":
    """The given axes, or new ones; BadInput without matplotlib."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError:
        raise BadInput(
            "demur.plot needs matplotlib; install it with pip install 'demur[report]'"
        ) from None
    return pyplot.subplots(layout="constrained")[1]
