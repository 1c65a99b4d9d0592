"""Drawings of the paper's figures on a matplotlib figure, from the records of `figures.py`.

Correct predictions are blue dots and wrong ones orange crosses, so that colour is never alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from demur import metrics
from demur.errors import import_optional
from demur.evaluate import values
from demur.evaluate.record_scores import StoredScore, can_score
from demur.metrics import BoolArray, FloatArray
from demur.paper.theorems import (
    TheoryInputs,
    con_above,
    is_confident,
    is_xi_accurate,
    probabilities,
)
from demur.paper.theory import outputs_at
from demur.recipes import Recipe
from demur.rejectors import Con, RCon
from demur.rejectors.rule import Score
from demur.report import plot
from demur.report.plot import CORRECT, FAINT, INK, MOST_POINTS, WRONG
from demur.runs import Record
from demur.spec import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Record | None]
Recipes = Sequence[Recipe]
XIS = tuple(tenth / 10 for tenth in range(1, 10))
LOG_TAUS = (0, -1, -2, -3)  # of the panels
LOG_TAU_RANGE = np.arange(-5, 3.01, 0.5)
TSNE_IMAGES = 1000
# Colour (Okabe and Ito) and dashes of each curve, in order.
STROKES = (
    ("#56B4E9", (0, (5, 2))),
    ("#0072B2", (0, ())),
    ("#CC79A7", (0, (1, 1))),
    ("#009E73", (0, (6, 2, 1, 2))),
    ("#E69F00", (0, (3, 1, 1, 1, 1, 1))),
    ("#D55E00", (0, (8, 3))),
)
MARKERS = "osD^v<>PX*"
CLASS_COLOURS = (  # Okabe and Ito with a darker yellow, and two more
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#B8A800", "#000000",
    "#999999", "#882255",
)  # fmt: skip


def separability(figure: "Figure", records: Records, recipes: Recipes) -> None:
    """R-Con of the images above the confidence threshold, and of those inside Theorem 1."""
    panels, inputs = figure.subplots(1, 2, sharey=True), outputs_at(_only(records), 1.0)
    _columns(panels[0], inputs, with_accurate_head=False)
    _columns(panels[1], inputs)
    panels[0].set(ylabel="R-Con", title="confident")
    panels[1].set(title=r"confident, and A is $\xi$-error")
    _legend_below(figure, panels[0])


def temperatures(figure: "Figure", records: Records, recipes: Recipes) -> None:
    """R-Con of the images inside Theorem 1, for each xi, at four temperatures."""
    panels = figure.subplots(1, len(LOG_TAUS), sharey=True)
    for axes, log_tau in zip(panels, LOG_TAUS, strict=True):
        _columns(axes, outputs_at(_only(records), 2.0**log_tau), sparse=True)
        axes.set_title(_tau_title(log_tau))
    panels[0].set(ylabel="R-Con")
    _legend_below(figure, panels[0])


def _columns(
    axes: "Axes", inputs: TheoryInputs, sparse: bool = False, with_accurate_head: bool = True
) -> None:
    """A column of points per xi: correct left of its middle, wrong right of it.

    Args:
        axes: Where to draw.
        inputs: Outputs of the images.
        sparse: Fewer labels.
        with_accurate_head: Leave out images on which A is not xi-error, as Theorem 1 does.
    """
    many = len(inputs.con) > MOST_POINTS
    for place, xi in enumerate(XIS):
        inside = is_confident(inputs.con, xi)
        if with_accurate_head:
            inside &= is_xi_accurate(inputs, xi)
        for chosen, name, marker, colour, side in (
            (inside & inputs.correct, "correct", "o", CORRECT, -1),
            (inside & ~inputs.correct, "wrong", "x", WRONG, 1),
        ):
            y = inputs.rcon[chosen]
            spread = 0.012 + 0.024 * (np.arange(len(y)) * 0.618 % 1)  # even without random numbers
            axes.scatter(
                xi + side * spread, y, s=5 if many else 14, marker=marker, color=colour,
                alpha=0.4 if many else 0.75, linewidths=0.7 if many else 1.1, rasterized=many,
                label=name if place == 0 else None,
            )  # fmt: skip
        if not sparse or place % 2 == 0:
            share = f"{100 * inside.mean():.0f}%"
            axes.text(xi, 1.03, share, ha="center", va="bottom", fontsize=8)
    axes.axhline(0.5, color=INK, linewidth=1, linestyle=(0, (5, 2)))
    ticks = XIS[::2] if sparse else XIS
    axes.set_xticks(ticks, [f"{xi:g}" for xi in ticks])
    axes.set(xlabel=r"$\xi$", xlim=(0.03, 0.97), ylim=(0, 1.12))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])


def xi_against_confidence(figure: "Figure", records: Records, recipes: Recipes) -> None:
    """Confidence against the smallest xi of each image, at four temperatures."""
    panels = figure.subplots(1, len(LOG_TAUS), sharey=True)
    line = np.linspace(0, 0.999, 200)
    for axes, log_tau in zip(panels, LOG_TAUS, strict=True):
        inputs = outputs_at(_only(records), 2.0**log_tau)
        _two_groups(axes, inputs.xi, inputs.con, inputs.correct)
        axes.plot(line, [con_above(xi) for xi in line], color="black", linewidth=1.4)
        inside = is_confident(inputs.con, inputs.xi)
        axes.set_title(f"{_tau_title(log_tau)}, {100 * inside.mean():.0f}% above", weight="normal")
        axes.set(xlabel=r"$\xi$", xlim=(0, 2), ylim=(0, 1.04))
    panels[0].set(ylabel="confidence")
    _legend_below(figure, panels[0])


def _two_groups(axes: "Axes", x: FloatArray, y: FloatArray, correct: BoolArray) -> None:
    for chosen, name, marker, colour in (
        (correct, "correct", "o", CORRECT),
        (~correct, "wrong", "x", WRONG),
    ):
        axes.scatter(
            x[chosen], y[chosen], s=8, marker=marker, color=colour, alpha=0.45, linewidths=0.8,
            label=name, rasterized=len(x) > MOST_POINTS,
        )  # fmt: skip


def tau_effects(figure: "Figure", records: Records, recipes: Recipes) -> None:
    """TPR-95 accuracy, and mean confidence and T-Con, over the temperature."""
    left, right = figure.subplots(1, 2)
    record = _only(records)
    logits, y = record.output.logits.double().numpy(), record.y.numpy()
    predicted, rows, correct = logits.argmax(1), np.arange(len(logits)), record.correct
    at = {tau: probabilities(logits, tau) for tau in 2.0**LOG_TAU_RANGE}
    scores = {
        "confidence": [p[rows, predicted] for p in at.values()],
        "T-Con": [p[rows, y] for p in at.values()],
    }
    for (name, curve), (colour, dashes) in zip(scores.items(), STROKES[1:], strict=False):
        accuracy = [100 * metrics.paper_stats(one, correct, 0.95).accuracy for one in curve]
        left.plot(LOG_TAU_RANGE, accuracy, color=colour, linestyle=dashes, marker="o",
                  markersize=3, label=name)  # fmt: skip
        for chosen, group, marker in ((correct, "correct", "o"), (~correct, "wrong", "x")):
            mean = [float(one[chosen].mean()) if chosen.any() else np.nan for one in curve]
            right.plot(LOG_TAU_RANGE, mean, color=colour, linestyle=dashes, marker=marker,
                       markersize=4, label=f"{name}, {group}")  # fmt: skip
    left.set(xlabel=r"$\log_2 \tau$", ylabel="TPR-95 accuracy (%)")
    right.set(xlabel=r"$\log_2 \tau$", ylabel="mean value", ylim=(-0.03, 1.03))
    left.legend()
    right.legend()


def adaptive(
    figure: "Figure",
    names: Iterable[str],
    etas: Sequence[float],
    records: Records,
    baselines: Sequence[tuple[str, Record, Recipe]],
) -> None:
    """TPR-95 accuracy and AUROC of R-Con over eta, a curve per objective.

    Args:
        figure: Where to draw.
        names: The objectives, as they are shown.
        etas: The weights of each objective.
        records: One per objective and eta, in that order.
        baselines: Name, record and recipe of other rejectors, drawn as horizontal lines.
    """
    panels = figure.subplots(1, 2)
    found = [record for record in records if record is not None]
    for place, name in enumerate(names):
        own = found[place * len(etas) : (place + 1) * len(etas)]
        of_eta = np.array([_point(values(RCon(), one), one.correct) for one in own])
        colour, dashes = STROKES[place]
        for axes, column in zip(panels, of_eta.T, strict=True):
            axes.plot(etas, column, color=colour, linestyle=dashes, marker="osD^v"[place],
                      markersize=4, label=name)  # fmt: skip
    scores = {name: (_head_score(record, recipe), record) for name, record, recipe in baselines}
    points = {name: _point(one, r.correct) for name, (one, r) in scores.items() if one is not None}
    for column, axes in enumerate(panels):
        _horizontal_lines(axes, {name: point[column] for name, point in points.items()})
    panels[0].set(ylabel="TPR-95 accuracy (%)")
    panels[1].set(ylabel="AUROC")
    for axes in panels:
        axes.set(xscale="log", xlabel=r"$\eta$")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )


def _head_score(record: Record, recipe: Recipe) -> FloatArray | None:
    """The score of the head's own rejector; None if the record does not have it."""
    _, rejector = recipe.head_rejector
    score = StoredScore(show(rejector, full=True)) if record.scores_only else rejector
    if not isinstance(score, Score) or not can_score(score, record):
        return None
    return values(score, record)


def _point(score: FloatArray, correct: BoolArray) -> tuple[float, float]:
    """TPR-95 accuracy in percent, and AUROC."""
    return 100 * metrics.paper_stats(score, correct, 0.95).accuracy, metrics.auroc(score, correct)


def _horizontal_lines(axes: "Axes", lines: Mapping[str, float]) -> None:
    """Lines with their names at the right end, moved apart where they would overlap."""
    for value in lines.values():
        axes.axhline(value, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
    low, high = axes.get_ylim()
    place = -np.inf
    for name, value in sorted(lines.items(), key=lambda line: line[1]):
        place = max(value, place + 0.05 * (high - low))
        axes.annotate(
            name, (1, place), xycoords=("axes fraction", "data"), fontsize=8, color=FAINT,
            xytext=(2, 0), textcoords="offset points", va="center",
        )  # fmt: skip


def tsne(figure: "Figure", records: Records, recipes: Recipes) -> None:
    """t-SNE of features of clean images: standard and adversarial training."""
    import_optional("sklearn", "this figure needs scikit-learn", "'demur[sklearn]'")
    from sklearn.manifold import TSNE

    panels = figure.subplots(1, 2)
    for axes, record, title in zip(panels, records, ("standard", "adversarial"), strict=True):
        assert record is not None
        chosen = slice(0, TSNE_IMAGES)
        feature, y = record.output.feature[chosen].numpy(), record.y[chosen].numpy()
        perplexity = min(30, (len(y) - 1) / 3)
        places = TSNE(init="pca", perplexity=perplexity, random_state=0).fit_transform(feature)
        for label in np.unique(y):
            own = places[y == label]
            axes.scatter(
                own[:, 0], own[:, 1], s=22, marker=MARKERS[label % len(MARKERS)], linewidths=0.3,
                color=CLASS_COLOURS[label % len(CLASS_COLOURS)], edgecolors="white",
                label=f"{label}",
            )  # fmt: skip
        axes.set(title=f"{title} training", xticks=[], yticks=[])
        axes.set(xlabel="t-SNE 1", ylabel="t-SNE 2")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, title="class", loc="outside right center", frameon=False)


def reliability(figure: "Figure", records: Records, recipes: Recipes) -> None:
    """Accuracy in bins of confidence on clean images and under PGD-10."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, record, title in zip(panels, records, ("clean", "PGD-10"), strict=True):
        assert record is not None
        con, correct = values(Con(), record), record.correct
        plot.reliability(con, correct, ax=axes)
        share = np.histogram(con, 15, (0, 1))[0] / len(con)
        middle = (np.arange(15) + 0.5) / 15
        axes.bar(middle, share, width=0.03, color=INK, alpha=0.6)
        axes.set_title(f"{title}: ECE {100 * metrics.ece(con, correct):.1f}%")
        axes.set_aspect("equal")
    panels[1].set(ylabel="")
    accuracy, images = panels[0].containers
    figure.legend(
        [accuracy, images, panels[0].lines[0]], ["accuracy", "share of images", "calibrated"],
        loc="outside lower center", ncols=3, frameon=False,
    )  # fmt: skip


def module(figure: "Figure", records: Records, recipes: Recipes) -> None:
    """The diagram of the RR module: backbone, two heads, T-Con, R-Con and the loss."""
    axes = figure.subplots()
    axes.set(xlim=(0, 100), ylim=(0, 40))
    axes.set_axis_off()
    boxes = {
        "input": (1, 15, 10, 10, "input\n$x$", FAINT),
        "backbone": (17, 12, 15, 16, "backbone\nfeature $z$", INK),
        "classifier": (38, 24, 20, 10, "classifier $f_θ(x)$\nsoftmax($Wz + b$)", CORRECT),
        "aux": (38, 5, 20, 10, "RR module\n$A_φ(x)$ in $[0, 1]$", WRONG),
        "tcon": (64, 30, 16, 9, "T-Con\n$f_θ(x)[y]$", CORRECT),
        "con": (64, 17, 16, 9, "confidence\n$f_θ(x)[y^m]$", CORRECT),
        "rcon": (64, 1, 16, 9, "R-Con\ncon $\\cdot\\, A_φ(x)$", WRONG),
        "loss": (86, 14, 13, 12, "$L_{RR}$ =\nBCE(R-Con,\nT-Con)", INK),
    }
    for x, y, width, height, text, colour in boxes.values():
        _box(axes, (x, y), (width, height), text, colour)
    for start, end in (
        ((11, 20), (17, 20)), ((32, 22), (38, 29)), ((32, 18), (38, 10)), ((58, 31), (64, 34)),
        ((58, 27), (64, 22)), ((58, 9), (64, 6)), ((72, 17), (72, 10)), ((80, 34), (89, 26)),
        ((80, 6), (89, 14)),
    ):  # fmt: skip
        _arrow(axes, start, end)
    axes.text(73, 13.5, "no gradient\nif $y^m = y$", fontsize=7.5, color=FAINT, va="center")


def _box(
    axes: "Axes", corner: tuple[float, float], size: tuple[float, float], text: str, colour: str
) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0.2,rounding_size=1.5"
    axes.add_patch(
        FancyBboxPatch(corner, *size, boxstyle=style, facecolor="white", edgecolor=colour,
                       linewidth=1.5)
    )  # fmt: skip
    x, y = corner[0] + size[0] / 2, corner[1] + size[1] / 2
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5)


def _arrow(axes: "Axes", start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2})


def _only(records: Records) -> Record:
    (record,) = records
    assert record is not None
    return record


def _tau_title(log_tau: int) -> str:
    return rf"$\log_2 \tau = {log_tau}$"


def _legend_below(figure: "Figure", axes: "Axes") -> None:
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, markerscale=2,
        frameon=False,
    )  # fmt: skip
