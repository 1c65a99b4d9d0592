"""The paper's eight figures: caption, the records each is drawn from, and the function that draws.

    FIGURES["tau"].caption
    drawn = draw_figure(FIGURES["tau"], stored_runs, ("paper", "short"), ["svg"])

`figure_needs` lists the attacks that a figure is drawn from. Drawing needs matplotlib.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from demur.errors import BadInput, suggestion
from demur.evaluate import RecordOptions
from demur.evaluate.record_scores import can_score
from demur.paper import draw
from demur.paper.adaptive import ETAS
from demur.paper.cells import protocol_of
from demur.paper.paper_runs import Need, StoredRuns
from demur.paper.scales import SCALES, Scale
from demur.recipes import Recipe, attack
from demur.rejectors.rule import Score
from demur.report.plot import drawing, saved
from demur.runs import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg", "png")


class Evidence(NamedTuple):
    """A record that a figure is drawn from."""

    entry: str
    attacks: tuple[str, ...]  # alternatives, the paper's own first
    features: bool = False  # whether the features are drawn, not only the outputs
    outputs: bool = True  # whether the outputs are drawn; otherwise the head's score suffices
    required: bool = True


Draw = Callable[["Figure", Sequence[Record | None], Sequence[Recipe]], None]


@dataclass(frozen=True)
class PaperFigure:
    """One figure of the paper."""

    name: str
    number: int
    title: str
    caption: str
    evidence: tuple[Evidence, ...]
    size: tuple[float, float]  # width and height in inches
    draw: Draw


class MissingRecord(BadInput):
    """A record that a figure needs is not stored."""


class DrawnFigure(NamedTuple):
    """The files of a figure by format, and its caption with what it was made from."""

    files: dict[str, bytes]
    caption: str


def figures_by_name(names: Sequence[str]) -> list[PaperFigure]:
    """The figures with these names or numbers, or all; raises BadInput for another name."""
    if list(names) == ["all"]:
        return [*FIGURES.values()]
    numbers = {str(figure.number): figure.name for figure in FIGURES.values()}
    found = [numbers.get(name, name) for name in names]
    for name in found:
        if name not in FIGURES:
            raise BadInput(f"the paper has no figure {name!r}; {suggestion(name, FIGURES)}")
    return [FIGURES[name] for name in dict.fromkeys(found)]


def figure_needs(figures: Iterable[PaperFigure], scale: str) -> Iterator[Need]:
    """Every attack that the figures are drawn from at a scale."""
    at = SCALES[scale]
    for figure in figures:
        for evidence in figure.evidence:
            recipe = _recipe(evidence, at)
            for text in at.choose(evidence.attacks):
                label = at.attack_text(text, recipe)
                options = RecordOptions("test", at.images(text), None, 0, evidence.features)
                yield Need(f"{scale}-{evidence.entry}", recipe, label, options)


def draw_figure(
    figure: PaperFigure, stored: StoredRuns | None, scales: Sequence[str], formats: Sequence[str]
) -> DrawnFigure:
    """Draw a figure from the runs of the first scale that has all its records.

    Raises:
        MissingRecord: No scale has them; the message names the first that is missing.
    """
    missing: list[MissingRecord] = []
    for scale in scales:
        try:
            return _drawn(figure, stored, SCALES[scale], formats)
        except MissingRecord as reason:
            missing.append(reason)
    raise missing[0]


def _drawn(
    figure: PaperFigure, stored: StoredRuns | None, scale: Scale, formats: Sequence[str]
) -> DrawnFigure:
    records = [_find(evidence, stored, scale) for evidence in figure.evidence]
    recipes = [_recipe(evidence, scale) for evidence in figure.evidence]
    files = {}
    for kind in formats:
        with drawing(*figure.size) as canvas:
            figure.draw(canvas, records, recipes)
            files[kind] = saved(canvas, kind)
    caption = f"{figure.caption} {_made_from(figure, records, recipes, scale)}"
    return DrawnFigure(files, caption.strip())


def _find(evidence: Evidence, stored: StoredRuns | None, scale: Scale) -> Record | None:
    """The record of an evidence; None if it is missing and not required."""
    recipe = _recipe(evidence, scale)
    runs = stored.find(recipe) if stored else []
    for text, run in product(evidence.attacks, runs):
        spec = attack(scale.attack_text(text, recipe), recipe)
        record = stored.record(run, spec) if stored else None
        if record is not None and _suffices(record, evidence, recipe):
            return record
    if not evidence.required:
        return None
    what = "features" if evidence.features else "outputs" if evidence.outputs else "R-Con"
    text = scale.attack_text(scale.choose(evidence.attacks)[0], recipe)
    raise MissingRecord(
        f"no record with {what} of {text} on {evidence.entry} at the scale {scale.name} is stored; "
        f"compute it with --scale {scale.name}"
    )


def _suffices(record: Record, evidence: Evidence, recipe: Recipe) -> bool:
    if not evidence.required:
        return True
    if not evidence.outputs:
        _, rejector = recipe.head_rejector
        return isinstance(rejector, Score) and can_score(rejector, record)
    has_outputs = not record.scores_only
    return has_outputs and (not evidence.features or record.output.feature.shape[-1] > 0)


def _recipe(evidence: Evidence, scale: Scale) -> Recipe:
    recipe = scale.recipe(evidence.entry, ())
    assert recipe is not None, "every entry has a recipe at every scale"
    return recipe


def _made_from(
    figure: PaperFigure, records: Sequence[Record | None], recipes: Sequence[Recipe], scale: Scale
) -> str:
    """What a figure was made from, in words; empty for a diagram."""
    if not figure.evidence:
        return ""
    counts = sorted({len(record.y) for record in records if record is not None})
    stand_ins = scale.stand_ins(())
    protocols = dict.fromkeys(map(protocol_of, recipes))
    parts = [*([stand_ins] if stand_ins else []), *protocols]
    return f"({'; '.join(parts)}; {' to '.join(f'{n:,}' for n in counts)} images.)"


OBJECTIVES = {  # the paper's five, by their names here
    "ce-log-score": r"$L_{CE} + \eta\, \log$R-Con",
    "ce-rr": r"$L_{CE} + \eta\, L_{RR}$",
    "con-rr": r"$L_{Con} + \eta\, L_{RR}$",
    "con-log-score": r"$L_{Con} + \eta\, \log$R-Con",
    "targets-rr": r"$L_{Con} + \eta\, L_{RR}$ (multi)",
}
BASELINES = {"pgdat-snet": "SNet", "pgdat-ebd": "EBD", "pgdat": "confidence"}
_PGD_10 = ("pgd-10",)
_PGD_100 = ("pgd-100:restarts=10", "pgd-100")


def _adaptive_evidence() -> tuple[Evidence, ...]:
    names = [f"adaptive-{name}:eta={eta:g}" for name in OBJECTIVES for eta in ETAS]
    return (
        *(Evidence("pgdat-rr", (name, f"{name},restarts=1"), outputs=False) for name in names),
        *(Evidence(entry, _PGD_100, required=False) for entry in BASELINES),
    )


def _draw_adaptive(
    figure: "Figure", records: Sequence[Record | None], recipes: Sequence[Recipe]
) -> None:
    curves = len(OBJECTIVES) * len(ETAS)
    baselines = zip(BASELINES.values(), records[curves:], recipes[curves:], strict=True)
    draw.adaptive(
        figure, OBJECTIVES.values(), ETAS, records[:curves],
        [(name, record, recipe) for name, record, recipe in baselines if record is not None],
    )  # fmt: skip


_FIGURES = (
    PaperFigure(
        "separability", 1, "Separability by R-Con, for each xi",
        "PGD-10 examples against PGD-AT+RR. Left: those above the confidence threshold 1/(2 - xi), "
        "which a user can apply. Right: of these, the examples on which A is xi-error, which takes "
        "the labels, as in the paper's figure. There R-Con separates correct from wrong "
        "predictions at 1/2 by construction, as Theorem 1 states. The share of all examples that "
        "are shown is above each column.",
        (Evidence("pgdat-rr", _PGD_10),), (10.0, 3.6), draw.separability,
    ),
    PaperFigure(
        "module", 2, "The RR module",
        "The objective L_RR for training the RR module: the binary cross-entropy between T-Con and "
        "R-Con. The module shares the backbone with the classifier. Gradients through the "
        "confidence are stopped where the prediction is correct.",
        (), (7.6, 3.0), draw.module,
    ),
    PaperFigure(
        "temperatures", 3, "Separability at four temperatures",
        "PGD-10 examples as in Figure 1, at four temperatures of the logits. A lower temperature "
        "lets more examples pass the confidence threshold.",
        (Evidence("pgdat-rr", _PGD_10),), (10.0, 3.2), draw.temperatures,
    ),
    PaperFigure(
        "adaptive", 4, "Adaptive attacks over eta",
        "Accuracy at TPR 95% and AUROC of R-Con under adaptive attacks with five objectives "
        "against classifier and rejector, over the weight eta. Grey lines are baselines under "
        "PGD-100, which is not adaptive.",
        _adaptive_evidence(), (9.0, 3.6), _draw_adaptive,
    ),
    PaperFigure(
        "tau", 5, "The effects of the temperature",
        "The effects of the temperature tau on PGD-AT without RR under PGD-10. Left: accuracy at "
        "TPR 95% by confidence and by T-Con. Right: mean confidence and T-Con of correct and of "
        "wrong predictions.",
        (Evidence("pgdat", _PGD_10),), (8.4, 3.3), draw.tau_effects,
    ),
    PaperFigure(
        "xi", 6, "Confidence against xi",
        "Confidence against the smallest xi of Definition 1 for PGD-AT+RR under PGD-10, at four "
        "temperatures. Theorem 1 holds above the line con = 1/(2 - xi).",
        (Evidence("pgdat-rr", _PGD_10),), (10.0, 3.0), draw.xi_against_confidence,
    ),
    PaperFigure(
        "tsne", 7, "t-SNE of features",
        "t-SNE of the features of clean test images after standard and after adversarial training. "
        "The paper finds adversarially learned features less regular, which breaks the assumptions "
        "of detectors that are fitted to features.",
        (Evidence("standard", ("clean",), True), Evidence("pgdat", ("clean",), True)),
        (8.4, 3.9), draw.tsne,
    ),
    PaperFigure(
        "reliability", 8, "Reliability diagrams",
        "Reliability diagrams of an adversarially trained net, with the expected calibration error "
        "(ECE, 15 bins). Wide bars are the accuracy of the images in a bin of confidence, narrow "
        "bars their share of all images.",
        (Evidence("pgdat", ("clean",)), Evidence("pgdat", _PGD_10)), (7.6, 4.3), draw.reliability,
    ),
)  # fmt: skip
FIGURES = {figure.name: figure for figure in _FIGURES}
