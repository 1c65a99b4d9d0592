"""The paper's adaptive evaluation: every adaptive objective at every weight eta.

plan = AdaptivePlan.of(recipe, etas=(1, 10), steps=50, restarts=2)
trials(plan, make, evaluation)          # paper protocol: one record per objective and eta
plan.worst                          # deploy protocol: one attack, the worst case over all of them
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from demur.attacks import AcceptedError, Attack, Chain, MinMargin, MultiTarget
from demur.calibrate import TPR
from demur.errors import BadInput, suggestion
from demur.evaluate.score import BASELINE, Protocol, RejectorEvaluation, Row, ScoredRecord
from demur.recipes import ADAPTIVE_OBJECTIVES, Recipe
from demur.recipes.attacks import RESTARTS, STEPS
from demur.rejectors import Con, Rejector
from demur.runs import Record

ETAS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # the paper's
OPERATING_POINT = TPR(0.95)

Make = Callable[[str, Attack], Record]  # a label and an attack to its record
Measure = Literal["accuracy", "auroc"]
Mark = Literal["", "objective", "all"]  # smallest value of its objective, or of all


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
