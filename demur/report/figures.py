"""Figures of scored records: R-Con against confidence, risk against coverage, and image galleries.

    png = overview_figure(scored, evaluation)               # both panels of the hardest attack
    inline_svg(overview_figure(scored, evaluation, "svg"), "run-0-", "...")       # for a page

Colours suit colour-blind readers and never carry meaning alone. The same records give the same
bytes, whatever the user's matplotlib style.
"""

import base64
import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from demur.errors import import_optional
from demur.evaluate import BASELINE, ORACLE, RejectorEvaluation, ScoredRecord, tcon_of, values
from demur.evaluate.accepted_errors import ScoredWorstCase
from demur.evaluate.record_scores import has_tcon
from demur.metrics import BoolArray, FloatArray, risk_coverage
from demur.output import prediction
from demur.report import plot
from demur.report.scored_run import RECTIFIED, ScoredRun, clean_images, main_rejector, main_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIGHT, WRONG, INK, FAINT, PALE = "#0072B2", "#D55E00", "#1f2933", "#6b7280", "#f1f3f5"
# Colour (Okabe and Ito) and dashes of each curve, in order.
STROKES = (
    ("#56B4E9", (0, (5, 2))),
    ("#0072B2", (0, ())),
    ("#CC79A7", (0, (1, 1))),
    ("#009E73", (0, (6, 2, 1, 2))),
    ("#E69F00", (0, (3, 1, 1, 1, 1, 1))),
    ("#D55E00", (0, (8, 3))),
)
DRAWN = (BASELINE, RECTIFIED, "Con+R-Con", "Energy", "KD", "GDA")  # more curves would overlap
MOST_POINTS = 2000  # larger scatters are rasterised, so that the page stays small
LEFT_END = 0.1  # coverage below which a curve rests on too few images to set the scale
STYLE = {
    "svg.hashsalt": "demur",
    "svg.fonttype": "none",  # real text, which a reader can search and copy
    "font.size": 10, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.frameon": False, "legend.fontsize": 9,
}  # fmt: skip
PER_GROUP = 3


def check_installed() -> None:
    """Raise BadInput unless the report extra is installed."""
    for name in ("matplotlib", "jinja2"):
        import_optional(name, "the page needs matplotlib and jinja2", "'demur[report]'")


def overview_figure(
    records: list[ScoredRecord], evaluation: RejectorEvaluation, kind: Literal["svg", "png"] = "png"
) -> bytes:
    """Draw the attack with the most accepted errors: scores, and risk against coverage."""
    check_installed()
    shown = hardest(records, evaluation)
    how = f"attacked with {shown.summary.attack}" if attacked_images(shown) else "without attack"
    heading = f"{shown.summary.n} images {how}: scores, and risk against coverage"
    with drawing(9.0, 3.5) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
        draw = _scatter if RECTIFIED in evaluation.scores else _histogram
        draw(left, shown, evaluation)
        _risk_coverage(right, shown, evaluation)
        figure.suptitle(heading, x=0.01, ha="left", fontsize=11, fontweight="bold")
        return saved(figure, kind)


def worst_case_svg(worst: Sequence[ScoredWorstCase]) -> bytes:
    """Draw accepted errors against clean coverage, under worst-score and without an attack."""
    cases = {f"{entry.row.rejector}, worst-score": entry.case for entry in worst}
    cases |= {f"{entry.row.rejector}, clean": entry.unattacked for entry in worst}
    with drawing(6.0, 3.5) as figure:
        plot.worst_case(cases, figure.subplots())
        return saved(figure, "svg")


def hardest(records: list[ScoredRecord], evaluation: RejectorEvaluation) -> ScoredRecord:
    """Return the record with the most accepted errors of the main rejector."""
    name = main_rejector(evaluation)
    return max(records, key=lambda scored: main_row(scored, name).point.accepted_wrong)


def inline_svg(content: bytes, prefix: str, description: str) -> str:
    """Return an SVG file as an element of a page, with ids of its own and the page's colours."""
    text = content.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    used = set(re.findall(r"#([\w-]+)[\")]", text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}", text).replace("xlink:href", "href")
    for colour, name in ((INK, "ink"), (FAINT, "soft"), ("#ffffff", "card"), (PALE, "wash")):
        text = text.replace(f": {colour}", f": var(--{name})")
    opening = re.match(r"<svg[^>]*>", text)
    assert opening is not None
    box = re.search(r'viewBox="[^"]*"', opening[0])
    assert box is not None
    label = html.escape(description, quote=True)
    start = f'<svg class="figure" role="img" aria-label="{label}" {box[0]}>'
    return start + text[opening.end() :].strip()


def attacked_images(scored: ScoredRecord) -> bool:
    """Return whether any image of the record was changed."""
    return scored.summary.largest_linf > 0


def pixel_png(picture: FloatArray) -> str:
    """Return an image (C, H, W) in [0, 1] as the data URI of a PNG of H x W pixels."""
    from matplotlib.image import imsave

    channels = np.moveaxis(np.round(picture.clip(0, 1) * 255).astype(np.uint8), 0, -1)  # H, W, C
    colours = np.repeat(channels, 3, -1) if channels.shape[-1] == 1 else channels
    buffer = io.BytesIO()
    imsave(buffer, colours, format="png", metadata={"Software": None})  # type: ignore[dict-item]
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


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
    undated = {
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }[kind]
    figure.savefig(buffer, format=kind, metadata=undated)
    return buffer.getvalue()


def _scatter(axes: "Axes", scored: ScoredRecord, evaluation: RejectorEvaluation) -> None:
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


def _note(axes: "Axes", x: float, y: float, text: str, **alignment: str | float) -> None:
    axes.text(x, y, text, fontsize=8, zorder=4, **alignment)  # type: ignore[arg-type]


def _histogram(axes: "Axes", scored: ScoredRecord, evaluation: RejectorEvaluation) -> None:
    correct = scored.record.correct
    x = values(evaluation.score_for(BASELINE, scored.record), scored.record)
    plot.separability(x, correct, bins=np.linspace(0, 1, 26), ax=axes)
    at = main_row(scored, BASELINE).point.threshold
    axes.axvline(at, color=INK, linewidth=1.3, linestyle=(0, (5, 2)))
    top = axes.get_ylim()[1]
    _note(axes, at - 0.01, top, f"Con threshold {at:.2f}", ha="right", va="top", rotation=90)
    axes.set(xlim=(0, 1.02), xlabel="confidence (con)", title="")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.3)


def _risk_coverage(axes: "Axes", scored: ScoredRecord, evaluation: RejectorEvaluation) -> None:
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


class Group(NamedTuple):
    """A combination of decision and correctness."""

    key: str
    words: str
    accepted: bool
    correct: bool


GROUPS = (
    Group("accepted-correct", "accepted, correct", True, True),
    Group("accepted-wrong", "accepted, wrong", True, False),
    Group("rejected-correct", "rejected, would have been correct", False, True),
    Group("rejected-wrong", "rejected, would have been wrong", False, False),
)


class Verdicts:
    """Decisions of the main rejector on every image of a record.

    They are those at the frozen threshold, or at the paper's without cal images.
    """

    def __init__(self, results: ScoredRun, scored: ScoredRecord) -> None:
        self.results, self.scored, self.record = results, scored, scored.record
        self.accepted = results.accepted(scored, results.main_rejector)

    def members(self, group: Group) -> BoolArray:
        chosen: BoolArray = self.accepted == group.accepted
        chosen &= self.record.correct == group.correct
        return chosen

    def certainties(self, position: int) -> list[dict[str, Any]]:
        """Return Con, and R-Con where the net has it, of one image with their thresholds."""
        scores = self.results.evaluation.scores
        return [self._certainty(one, position) for one in (BASELINE, RECTIFIED) if one in scores]

    def words(self, position: int, predicted: str) -> str:
        """Return the decision on one image, with the reason of a rejection."""
        if self.accepted[position]:
            return f"accepted: {predicted}"
        at = self._certainty(self.results.main_rejector, position)
        return f"rejected: {at['name']} {at['value']} {at['sign']} {at['threshold']}"

    def _certainty(self, name: str, position: int) -> dict[str, Any]:
        score = self.results.evaluation.score_for(name, self.record)
        value = float(values(score, self.record)[position])
        row = main_row(self.scored, name)
        threshold, strict = row.point.threshold, row.protocol == "paper"
        above = value > threshold if strict else value >= threshold
        sign = (">" if strict else "≥") if above else ("≤" if strict else "<")
        left, right = _distinguishable(value, threshold)
        decides = name == self.results.main_rejector
        return {"name": name, "value": left, "sign": sign, "threshold": right, "decides": decides}


def gallery(verdicts: Verdicts) -> dict[str, Any]:
    """Return the first stored images of every group, before and after the attack.

    `stored` is the number of adversarial examples in the record, `factor` that by which changes are
    amplified, `found` the number of stored images of a group.
    """
    record = verdicts.record
    attacked = record.arrays["x_adv"].double().numpy()
    stored = len(attacked)
    images = clean_images(record, verdicts.results.loaded).first(stored)
    clean = images.batch(slice(None))[0].double().numpy()
    largest = float(record.arrays["size_linf"][:stored].max())
    factor = max(1, math.floor(0.5 / largest + 1e-6)) if largest > 0 else 1
    names = verdicts.results.loaded.run.recipe.data.class_names
    predicted = prediction(record.output).tolist()

    def card(i: int) -> dict[str, Any]:
        change = 0.5 + factor * (attacked[i] - clean[i])
        pixels = {"clean": clean[i], "attacked": attacked[i], "change": change}
        return {name: pixel_png(image) for name, image in pixels.items()} | {
            "place": int(record.arrays["index"][i]),
            "label": names[int(record.y[i])],
            "predicted": names[predicted[i]],
            "certainties": verdicts.certainties(i),
            "verdict": verdicts.words(i, names[predicted[i]]),
        }

    groups = []
    for group in GROUPS:
        positions = np.flatnonzero(verdicts.members(group)[:stored]).tolist()
        cards = [card(i) for i in positions[:PER_GROUP]]
        groups.append({"group": group, "found": len(positions), "cards": cards})
    return {"stored": stored, "factor": factor, "groups": groups}


def _distinguishable(value: float, threshold: float) -> tuple[str, str]:
    """Format value and threshold with enough decimals to show which is larger."""
    for decimals in range(2, 9):
        left, right = f"{value:.{decimals}f}", f"{threshold:.{decimals}f}"
        if left != right:
            break
    return left, right
