"""The paper's adaptive evaluation: every adaptive objective at every weight eta;
and the smallest changes that make images wrong, and wrong and accepted.

plan = AdaptivePlan.of(recipe, etas=(1, 10), steps=50, restarts=2)
trials(plan, make, evaluation)          # paper protocol: one record per objective and eta
plan.worst                          # deploy protocol: one attack, the worst case over all of them
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from demur import metrics
from demur.attacks import CW, AcceptedError, Attack, Chain, MinMargin, MultiTarget
from demur.attacks.criteria import RuleCriterion
from demur.calibrate import TPR
from demur.errors import BadInput, suggestion
from demur.evaluate.record_scores import JsonFields
from demur.evaluate.score import BASELINE, Protocol, RejectorEvaluation, Row, ScoredRecord
from demur.evaluate.thresholds import CleanRecord, resolve_thresholds
from demur.metrics import BoolArray, FloatArray, Interval
from demur.recipes import ADAPTIVE_OBJECTIVES, Recipe
from demur.recipes import attack as attack_named
from demur.recipes.attacks import RESTARTS, STEPS
from demur.rejectors import Con, Rejector
from demur.runs import Record

ETAS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # the paper's
OPERATING_POINT = TPR(0.95)

Make = Callable[[str, Attack], Record]  # a label and an attack to its record
Measure = Literal["accuracy", "auroc"]
Mark = Literal["", "objective", "all"]  # smallest value of its objective, or of all
NORMAL = "normal"
Norm = Literal["L2", "Linf", "Linf-adam"]


@dataclass(frozen=True)
class AdaptivePlan:
    """Objectives to try on a run, with their weights and the budget of each attack."""

    recipe: Recipe
    objectives: tuple[str, ...]
    etas: tuple[float, ...]
    steps: int
    restarts: int

    @staticmethod
    def of(
        recipe: Recipe,
        objectives: Sequence[str] | None = None,  # None: all that the net has outputs for
        etas: Sequence[float] = ETAS,
        steps: int = STEPS,
        restarts: int = RESTARTS,
    ) -> "AdaptivePlan":
        """Make a plan; BadInput if an objective or a number is invalid."""
        names = tuple(name for name in ADAPTIVE_OBJECTIVES if supports(name, recipe))
        if objectives is not None:
            names = tuple(dict.fromkeys(_checked_name(name, recipe) for name in objectives))
        for eta in etas:
            if not (eta >= 0 and math.isfinite(eta)):
                raise BadInput(f"eta must be a number of at least 0, not {eta:g}")
        if not etas or not names:
            raise BadInput("there is nothing to try; give an objective and an eta")
        plan = AdaptivePlan(recipe, names, tuple(dict.fromkeys(map(float, etas))), steps, restarts)
        _ = plan.worst  # constructing the attacks checks steps and restarts
        return plan

    @property
    def rejectors(self) -> dict[str, Rejector]:
        """Rejectors to score: confidence and the rejector that is attacked."""
        return {BASELINE: Con(), **dict([self.recipe.head_rejector])}

    @property
    def baseline_label(self) -> str:
        """Name of PGD on the cross-entropy with the same budget, as the command takes it."""
        return _label(
            f"pgd-{STEPS}", _changes(steps=(self.steps, STEPS), restarts=(self.restarts, 1))
        )

    @property
    def worst(self) -> Chain:
        """Chain of every objective at every eta; success is a wrong prediction that is accepted.

        Each attack continues with the images that the others did not break. Attacks on every target
        class come last, since they take longest.
        """
        rule = AcceptedError(self.recipe.head_rejector[1], OPERATING_POINT)
        members = [
            ADAPTIVE_OBJECTIVES[name].attack(self.recipe, eta, self.steps, self.restarts, rule)
            for name in self.objectives
            for eta in self.etas
        ]
        members.sort(key=lambda attack: isinstance(attack, MultiTarget))
        return Chain(tuple(members), criterion=rule, rank_by=MinMargin(rule))

    @property
    def worst_label(self) -> str:
        """Label of the record of `worst`, with the settings that differ from the paper's."""
        all_names = tuple(name for name in ADAPTIVE_OBJECTIVES if supports(name, self.recipe))
        changes = _changes(
            objectives=("+".join(self.objectives), "+".join(all_names)),
            etas=("+".join(map(_number, self.etas)), "+".join(map(_number, ETAS))),
            steps=(self.steps, STEPS), restarts=(self.restarts, RESTARTS),
        )  # fmt: skip
        return _label("adaptive-worst", changes)

    def label(self, objective: str, eta: float) -> str:
        """Name of one attack, as the command takes it."""
        changes = _changes(steps=(self.steps, STEPS), restarts=(self.restarts, RESTARTS))
        return _label(f"adaptive-{objective}", [f"eta={_number(eta)}", *changes])

    def attack(self, objective: str, eta: float) -> Attack:
        """One attack; of each image it returns the example with the largest objective."""
        return ADAPTIVE_OBJECTIVES[objective].attack(self.recipe, eta, self.steps, self.restarts)


@dataclass(frozen=True)
class Trial:
    """Results of one objective at one eta."""

    objective: str
    formula: str
    eta: float
    scored: ScoredRecord

    def row(self, rejector: str, protocol: Protocol = "paper") -> Row:
        """Row of a rejector."""
        return row_of(self.scored, rejector, protocol)

    def value(self, rejector: str, measure: Measure) -> float:
        """Accuracy or AUROC of a rejector; smaller is better for the attacker."""
        row = self.row(rejector)
        return row.point.accuracy if measure == "accuracy" else row.ranking.auroc

    def to_json(self) -> dict[str, Any]:
        """The trial as JSON values."""
        return {
            "objective": self.objective,
            "formula": self.formula,
            "eta": self.eta,
            "attack": self.scored.summary.to_json(),
            "rows": [row.to_json() for row in self.scored.rows if row.protocol == "paper"],
        }


def trials(plan: AdaptivePlan, make: Make, evaluation: RejectorEvaluation) -> list[Trial]:
    """Run and score every objective at every eta, in that order."""
    return [
        Trial(
            name, ADAPTIVE_OBJECTIVES[name].formula(plan.recipe), eta,
            evaluation.score_record(make(plan.label(name, eta), plan.attack(name, eta))),
        )
        for name in plan.objectives
        for eta in plan.etas
    ]  # fmt: skip


def marks(tried: Sequence[Trial], rejector: str, measure: Measure) -> list[Mark]:
    """Mark the trials with the smallest value of their objective, or of all."""
    values = [trial.value(rejector, measure) for trial in tried]
    smallest: dict[str, float] = {}
    for trial, value in zip(tried, values, strict=True):
        smallest[trial.objective] = min(value, smallest.get(trial.objective, math.inf))
    return [
        "all" if value == min(values)
        else "objective" if value == smallest[trial.objective]
        else ""
        for trial, value in zip(tried, values, strict=True)
    ]  # fmt: skip


def minima(tried: Sequence[Trial], rejector: str) -> dict[str, Any]:
    """Smallest accuracy and AUROC over all trials, with their objective and eta, as JSON values."""
    found: dict[str, Any] = {}
    measures: tuple[Measure, ...] = ("accuracy", "auroc")
    for measure in measures:
        best = min(tried, key=lambda trial: trial.value(rejector, measure))
        where = {"objective": best.objective, "eta": best.eta}
        found[measure] = {"value": best.value(rejector, measure), **where}
    return found


def row_of(scored: ScoredRecord, rejector: str, protocol: Protocol) -> Row:
    """Row of a rejector in a protocol."""
    return next(r for r in scored.rows if (r.rejector, r.protocol) == (rejector, protocol))


def supports(objective: str, recipe: Recipe) -> bool:
    """Whether the net has the outputs that an objective needs."""
    return ADAPTIVE_OBJECTIVES[objective].supports(recipe)


def _checked_name(objective: str, recipe: Recipe) -> str:
    """Name of an objective; BadInput if it is unknown or does not suit the net."""
    if objective not in ADAPTIVE_OBJECTIVES:
        raise BadInput(
            f"no objective is called {objective!r}; {suggestion(objective, ADAPTIVE_OBJECTIVES)}"
        )
    if not supports(objective, recipe):
        raise BadInput(f"{objective} needs L_RR and a second output; use head=RR()")
    return objective


def _changes(**settings: tuple[object, object]) -> list[str]:
    """Settings, given as (value, default), that differ from their default."""
    return [f"{key}={value}" for key, (value, default) in settings.items() if value != default]


def _label(name: str, changes: Sequence[str]) -> str:
    return f"{name}:{','.join(changes)}" if changes else name


def _number(value: float) -> str:
    """Shortest text of a number that reads back as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


@dataclass(frozen=True)
class Distances(JsonFields):
    """Distances that one minimal-distortion attack needed on one record.

    They are squared for L2 and times 255 for Linf. A mean over no images is None.
    """

    attack: str
    norm: Norm
    rejector_name: str  # the rejector that must accept, or normal
    threshold: float | None
    n: int
    unbroken: int  # images that the attack could not break, which `mean` and `median` leave out
    broken: float  # share of all images, including those broken without a change
    broken_interval: Interval
    broken_clean: float  # share of all images that were broken without a change
    mean: float | None  # over the images that a change broke
    mean_interval: Interval | None
    median: float | None
    paper_mean: float | None  # over all images, see `counted_distances`; None without normal
    ratio_to_normal: float | None  # mean divided by that of normal, on the images that both broke
    record: str


@dataclass(frozen=True)
class DistortionVerdicts:
    """A record with the success and the distance of each image."""

    record: Record
    attack: CW
    threshold: float | None
    broken: BoolArray
    distance: FloatArray
    correct_clean: BoolArray  # correct before the attack

    @property
    def moved(self) -> BoolArray:
        """Which images a change broke; N."""
        return self.broken & (self.distance > 0)


def default_attacks(recipe: Recipe) -> list[str]:
    """Attacks of the paper's table: both norms, normal, adaptive for Con and for the head."""
    name, _ = recipe.head_rejector
    on_confidence = [] if name == "Con" else [":rejector=Con()"]
    return [
        label
        for norm in ("", "-linf")
        for label in (f"cw{norm}", *(f"cw-adaptive{norm}{c}" for c in (*on_confidence, "")))
    ]


def distortion_attack(text: str, recipe: Recipe) -> CW:
    """Attack of that name; BadInput if it does not minimise the distortion."""
    found: Attack = attack_named(text, recipe)
    if not isinstance(found, CW):
        raise BadInput(f"{text} does not minimise the distortion; use cw, cw-linf or cw-adaptive")
    return found


def distortion_verdicts(
    record: Record, attack: CW, clean: CleanRecord, correct_clean: BoolArray
) -> DistortionVerdicts:
    """Which images of a record are broken, and the distance of each.

    normal: the prediction is wrong. adaptive: it is wrong, and its score reaches the median
    score of correct predictions on clean training images. An image is broken if the search
    changed it, or if it needs no change: no second verdict is taken so near the boundary.
    """
    bound = resolve_thresholds(attack, clean).spec
    distance = distances_of(record, attack)
    broken = (distance > 0) | bound.criterion(record.output, record.y).numpy()
    at = bound.criterion.threshold if isinstance(bound.criterion, RuleCriterion) else None
    t = at if isinstance(at, float) else None
    return DistortionVerdicts(record, attack, t, broken, distance, correct_clean)


def counted_distances(
    distance: FloatArray, correct_clean: BoolArray, normal: FloatArray | None = None
) -> FloatArray:
    """Distances as the paper averages them over all images; N.

    Where an adaptive attack fails, its image is the one that normal C&W returned, so the distance
    of that counts. A failure of normal C&W counts as 0, and so do images misclassified before.

    Args:
        distance: Of the attack; 0 where it changed nothing, N.
        correct_clean: Which images are correct before the attack, N.
        normal: Distances of normal C&W in the same norm for an adaptive attack, N.
    """
    rest = np.zeros_like(distance) if normal is None else normal
    return np.where(correct_clean, np.where(distance > 0, distance, rest), 0.0)


def paper_mean_distance(record: Record, normal: Record, attack: CW) -> float | None:
    """Mean distance as the paper counts, from records alone; None if `normal` lacks an image.

    `normal` is the record of normal C&W in the same norm: `record` itself, or another.
    """
    known = {int(index): row for row, index in enumerate(normal.arrays["index"])}
    indices = [int(index) for index in record.arrays["index"]]
    if not known.keys() >= set(indices):
        return None
    rows = [known[index] for index in indices]
    of_normal = distances_of(normal, attack)[rows]
    correct_clean = (of_normal > 0) | normal.correct[rows]
    return float(counted_distances(distances_of(record, attack), correct_clean, of_normal).mean())


def distances(
    found: Sequence[DistortionVerdicts], rejectors: Mapping[str, Rejector]
) -> list[Distances]:
    """Distances of each attack, compared with the normal attack in the same norm if any."""
    normal = {one.attack.norm: one for one in reversed(found) if not _has_rejector(one.attack)}
    return [_distances(one, normal.get(one.attack.norm), rejectors) for one in found]


def _distances(
    one: DistortionVerdicts, normal: DistortionVerdicts | None, rejectors: Mapping[str, Rejector]
) -> Distances:
    far = one.distance[one.moved]
    adaptive = _has_rejector(one.attack)
    return Distances(
        attack=one.record.label,
        norm=one.attack.norm,
        rejector_name=_rejector_name(one.attack, rejectors),
        threshold=one.threshold,
        n=len(one.broken),
        unbroken=int((~one.broken).sum()),
        broken=float(one.broken.mean()),
        broken_interval=metrics.wilson(int(one.broken.sum()), len(one.broken)),
        broken_clean=float((one.broken & ~one.moved).mean()),
        mean=float(far.mean()) if len(far) else None,
        mean_interval=metrics.bootstrap(lambda part: float(part.mean()), far) if len(far) else None,
        median=float(np.median(far)) if len(far) else None,
        paper_mean=_paper_mean(one, normal if adaptive else one),
        ratio_to_normal=_ratio(one, normal) if normal and adaptive else None,
        record=one.record.digest,
    )


def _paper_mean(one: DistortionVerdicts, normal: DistortionVerdicts | None) -> float | None:
    """Mean as the paper counts; None if an adaptive attack failed and there is no normal one."""
    if normal is None and (one.broken | ~one.correct_clean).all():
        normal = one
    if normal is None:
        return None
    return float(counted_distances(one.distance, one.correct_clean, normal.distance).mean())


def _ratio(one: DistortionVerdicts, other: DistortionVerdicts) -> float | None:
    """Ratio of the mean distances on the images that a change broke in both."""
    both = one.moved & other.moved
    return float(one.distance[both].mean() / other.distance[both].mean()) if both.any() else None


def distances_of(record: Record, attack: CW) -> FloatArray:
    """Distance of each image in the units of the paper; N."""
    sizes = record.arrays["size_l2" if attack.norm == "L2" else "size_linf"].double().numpy()
    found: FloatArray = sizes**2 if attack.norm == "L2" else 255 * sizes
    return found


def _has_rejector(attack: CW) -> bool:
    return isinstance(attack.criterion, RuleCriterion)


def _rejector_name(attack: CW, rejectors: Mapping[str, Rejector]) -> str:
    """Name of the rejector that must accept, or normal."""
    criterion = attack.criterion
    if not isinstance(criterion, RuleCriterion):
        return NORMAL
    known = (name for name, rejector in rejectors.items() if rejector == criterion.rejector)
    return next(known, str(criterion.rejector))
