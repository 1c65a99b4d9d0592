"""Figures of scores for notebooks; each function returns matplotlib axes.

All take one value per image, as arrays or columns of a table. They need matplotlib, which
pip install 'demur[report]' installs. New figures have one style; given axes keep theirs.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from demur.errors import BadInput, import_optional
from demur.files.checked_files import write_bytes
from demur.files.output_paths import check_output_file
from demur.metrics import WorstCase, aurc, auroc, ece, wilson
from demur.metrics import risk_coverage as risk_coverage_curve
from demur.metrics.checks import FloatArray, floats, same_length, scored_pair
from demur.metrics.thresholds import score_levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CORRECT, WRONG, INK, FAINT = "#0072B2", "#D55E00", "#1f2933", "#6b7280"
DASHES = ("-", "--", ":", "-.")
CURVE_POINTS = 200  # of a curve with a band
MOST_POINTS = 2000  # larger scatters are rasterised in vector files
UNDATED = {  # metadata that would differ between two files
    "svg": ("Date", "Creator"), "png": ("Software",),
    "pdf": ("CreationDate", "Creator", "Producer"),
}  # fmt: skip
STYLE = {
    "svg.hashsalt": "demur",
    "svg.fonttype": "none",  # real text, which a reader can search and copy
    "font.size": 10, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.frameon": False, "legend.fontsize": 9,
}  # fmt: skip


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
    for place, (name, score) in enumerate(_named(scores).items()):
        curve = risk_coverage_curve(score, correct)
        label, x = f"{name}, AURC {aurc(score, correct):.3f}", 100 * curve.coverage
        n = np.round(curve.coverage * np.size(correct)).astype(int)
        shown = np.unique(np.linspace(0, len(n) - 1, CURVE_POINTS).astype(int))
        ends = [wilson(round(curve.risk[at] * n[at]), n[at]) for at in shown]
        axes.plot(x, 100 * curve.risk, linestyle=DASHES[place % len(DASHES)], label=label)
        _band(axes, x[shown], 100 * np.array(ends).T)
    axes.set(
        xlabel="coverage: share accepted (%)", ylabel="wrong among accepted (%)", xlim=(0, 101)
    )
    axes.legend()
    return axes


def roc(scores: Mapping[str, ArrayLike], correct: ArrayLike, ax: "Axes | None" = None) -> "Axes":
    """Draw the accepted share of the correct against that of the wrong predictions.

    Args:
        scores: Scores by name, N each; higher means accept.
        correct: Whether each prediction is correct, N.
        ax: Axes to draw on; None makes a new figure.

    Returns:
        The axes; the legend has the AUROC of each score.
    """
    axes = _axes(ax)
    for place, (name, score) in enumerate(_named(scores).items()):
        _, right, wrong = score_levels(*scored_pair(score, correct))
        x, y = (np.append(0, part) / max(1, part[-1]) for part in (wrong, right))
        label = f"{name}, AUROC {auroc(score, correct):.3f}"
        axes.plot(100 * x, 100 * y, linestyle=DASHES[place % len(DASHES)], label=label)
    axes.plot([0, 100], [0, 100], color=FAINT, linewidth=1, linestyle=":")
    axes.set(xlabel="wrong predictions accepted (%)", ylabel="correct predictions accepted (%)")
    axes.legend()
    return axes


def seeds(
    x: ArrayLike, curves: Mapping[str, ArrayLike], ax: "Axes | None" = None,
    xlabel: str = "eps", ylabel: str = "accuracy (%)",
) -> "Axes":  # fmt: skip
    """Draw means over seeds with a band of one standard deviation, such as accuracy over eps.

    Args:
        x: Where the curves were measured, X values.
        curves: Values by name, one row per seed: S, X. A single row has no band.
        ax: Axes to draw on; None makes a new figure.
        xlabel: What x is.
        ylabel: What the values are.

    Returns:
        The axes.
    """
    axes, at = _axes(ax), floats(x, "x")
    for place, (name, values) in enumerate(_named(curves).items()):
        rows = np.array([floats(row, name) for row in np.atleast_2d(np.asarray(values))])
        same_length(x=at, **{name: rows[0]})
        mean, dashes = rows.mean(0), DASHES[place % len(DASHES)]
        label = f"{name}, {len(rows)} seeds" if len(rows) > 1 else name
        axes.plot(at, mean, linestyle=dashes, marker="o", markersize=3, label=label)
        if len(rows) > 1:
            _band(axes, at, mean + np.array([[-1], [1]]) * rows.std(0, ddof=1))
    axes.set(xlabel=xlabel, ylabel=ylabel)
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
    for place, (name, case) in enumerate(_named(cases).items()):
        coverage, errors, thresholds = case.curve
        shown = np.unique(np.linspace(0, len(thresholds) - 1, CURVE_POINTS).astype(int))
        ends = np.array([case.interval(t) for t in thresholds[shown]]).T
        dashes, x = DASHES[place % len(DASHES)], 100 * coverage[shown]
        axes.plot(x, 100 * errors[shown], linestyle=dashes, label=name)
        _band(axes, x, 100 * ends)
    axes.set(
        xlabel="coverage of clean images (%)", ylabel="wrong and accepted, of all (%)",
        xlim=(0, 101),
    )  # fmt: skip
    axes.legend()
    return axes


def scatter(
    x: ArrayLike, y: ArrayLike, correct: ArrayLike, thresholds: tuple[float, float] | None = None,
    xi: float | None = None, ax: "Axes | None" = None,
    names: tuple[str, str] = ("confidence", "R-Con"),
) -> "Axes":  # fmt: skip
    """Draw one score against another, correct predictions as dots and wrong ones as crosses.

    Args:
        x: A score of each image, N.
        y: Another score of each image, N.
        correct: Whether each prediction is correct, N.
        thresholds: Thresholds of x and y, whose accepted region is shaded.
        xi: An xi-error below 1; lines show Theorem 1: con above 1/(2 - xi), R-Con at 1/2.
        ax: Axes to draw on; None makes a new figure.
        names: What x and y are, for the axes.

    Returns:
        The axes. They hold every finite value; the title counts images with an infinite one.
    """
    axes = _axes(ax)
    x, is_correct = scored_pair(x, correct, "x")
    y, _ = scored_pair(y, correct, "y")
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.all():
        axes.set_title(f"{(~finite).sum()} of {len(x)} images have an infinite score, not shown")
    for chosen, name, marker, colour in (
        (is_correct & finite, "correct", "o", CORRECT),
        (~is_correct & finite, "wrong", "x", WRONG),
    ):
        axes.scatter(
            x[chosen], y[chosen], s=14, marker=marker, color=colour, alpha=0.6, linewidths=1,
            label=f"{name} ({chosen.sum()})", rasterized=len(x) > MOST_POINTS,
        )  # fmt: skip
    axes.set(xlabel=names[0], ylabel=names[1])
    for axis, values in ((axes.set_xlim, x[finite]), (axes.set_ylim, y[finite])):
        if ((values >= 0) & (values <= 1)).all():  # else matplotlib's limits, which hold all
            axis(0, 1.02)
    if thresholds is not None:
        right, top = axes.get_xlim()[1], axes.get_ylim()[1]
        corner = [thresholds[0], right], thresholds[1], top
        axes.fill_between(*corner, color=CORRECT, alpha=0.1, label="accepted")
        axes.set(xlim=(None, right), ylim=(None, top))
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
    import_optional("matplotlib", "demur.plot needs matplotlib", "'demur[report]'")
    from matplotlib import pyplot, style

    with style.context(["default", STYLE]):
        return pyplot.subplots(layout="constrained")[1]


def _named(curves: Mapping[str, Any]) -> Mapping[str, Any]:
    """The curves; BadInput if there is none."""
    if not curves:
        raise BadInput("there is nothing to draw; give at least one, such as {'Con': confidence}")
    return curves


def _band(axes: "Axes", x: FloatArray, ends: FloatArray) -> None:
    """Shade between two ends (2, X) in the colour of the last line."""
    axes.fill_between(x, *ends, color=axes.lines[-1].get_color(), alpha=0.15, linewidth=0)


def save(axes: "Axes", path: str | Path) -> None:
    """Write the figure as PDF, SVG or PNG, by the ending, undated; replace one of its kind."""
    from matplotlib import style

    kind = Path(path).suffix[1:].lower()
    if kind not in UNDATED:
        raise BadInput(f"{path} is no .pdf, .svg or .png file; name one that is")
    check_output_file(str(path), kind)
    figure = axes.get_figure(root=True)
    assert figure is not None
    with style.context(STYLE):
        write_bytes(Path(path), saved(figure, kind))


@contextmanager
def drawing(width: float, height: float) -> Iterator["Figure"]:
    """Yield a figure in the style of the report; pyplot and the user's settings are not touched."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(["default", STYLE]):
        figure = Figure((width, height), dpi=400 / 3, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure


def saved(figure: "Figure", kind: str) -> bytes:
    """Return the figure as the bytes of an svg, png or pdf file, without a date."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=dict.fromkeys(UNDATED[kind]))
    return buffer.getvalue()
