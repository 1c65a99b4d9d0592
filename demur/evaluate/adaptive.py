"""The paper's adaptive evaluation: every objective at every eta, as the paper has it and deployed.

plan = Plan.of(recipe, etas=(1, 10), steps=50, restarts=2)
trials(plan, make, scoring)         # paper: a record each, kept by the largest goal
plan.worst                          # deploy: one attack, kept by what gets past the rejector
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from demur.attacks import AcceptedError, Attack, Chain, MinMargin, MultiTarget
from demur.calibrate import TPR
from demur.errors import BadInput, suggestion
from demur.evaluate.score import BASELINE, Protocol, Row, ScoredRecord, Scorer
from demur.recipes import ADAPTIVE_OBJECTIVES, Recipe
from demur.recipes.adaptive import RESTARTS, STEPS
from demur.rejectors import Con, Rejector
from demur.runs import Record

ETAS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # the paper's
KEPT = TPR(0.95)

Make = Callable[[str, Attack], Record]  # a label and an attack to its record
Measure = Literal["accuracy", "auroc"]
Mark = Literal["", "objective", "all"]  # least of its objective, or of all


@dataclass(frozen=True)
class AdaptivePlan:
    """Which objectives are tried on a run, at which weights, for how long."""

    recipe: Recipe
    objectives: tuple[str, ...]
    etas: tuple[float, ...]
    steps: int
    restarts: int

    @staticmethod
    def of(
        recipe: Recipe,
        objectives: Sequence[str] | None = None,  # None: all that suit the net
        etas: Sequence[float] = ETAS,
        steps: int = STEPS,
        restarts: int = RESTARTS,
    ) -> "AdaptivePlan":
        """The plan, after checking what was asked for."""
        asked = tuple(name for name in ADAPTIVE_OBJECTIVES if suits(name, recipe))
        if objectives is not None:
            asked = tuple(dict.fromkeys(_checked(name, recipe) for name in objectives))
        for eta in etas:
            if not (eta >= 0 and math.isfinite(eta)):
                raise BadInput(f"eta must be a number of at least 0, not {eta:g}")
        if not etas or not asked:
            raise BadInput("there is nothing to try; give an objective and an eta")
        plan = AdaptivePlan(recipe, asked, tuple(dict.fromkeys(map(float, etas))), steps, restarts)
        _ = plan.worst  # steps and restarts are checked where an attack is made
        return plan

    @property
    def rejectors(self) -> dict[str, Rejector]:
        """What is scored: confidence, and the rejector that is attacked."""
        return {BASELINE: Con(), **dict([self.recipe.head_rejector])}

    @property
    def plain(self) -> str:
        """PGD on the cross-entropy with the same budget, as the command names it."""
        return _label(
            f"pgd-{STEPS}", _changes(steps=(self.steps, STEPS), restarts=(self.restarts, 1))
        )

    @property
    def worst(self) -> Chain:
        """Each objective at each eta on what the others left, kept by what is wrong and accepted.

        The thresholds are frozen on clean cal images; attacks on each class come last.
        """
        rule = AcceptedError(self.recipe.head_rejector[1], KEPT)
        members = [
            ADAPTIVE_OBJECTIVES[name].attack(self.recipe, eta, self.steps, self.restarts, rule)
            for name in self.objectives
            for eta in self.etas
        ]
        members.sort(key=lambda attack: isinstance(attack, MultiTarget))
        return Chain(tuple(members), criterion=rule, rank_by=MinMargin(rule))

    @property
    def worst_label(self) -> str:
        """The label of its record: what is not the paper's is said."""
        all_of_them = tuple(name for name in ADAPTIVE_OBJECTIVES if suits(name, self.recipe))
        changes = _changes(
            objectives=("+".join(self.objectives), "+".join(all_of_them)),
            etas=("+".join(map(_number, self.etas)), "+".join(map(_number, ETAS))),
            steps=(self.steps, STEPS), restarts=(self.restarts, RESTARTS),
        )  # fmt: skip
        return _label("adaptive-worst", changes)

    def label(self, objective: str, eta: float) -> str:
        """One attack as the command names it."""
        changes = _changes(steps=(self.steps, STEPS), restarts=(self.restarts, RESTARTS))
        return _label(f"adaptive-{objective}", [f"eta={_number(eta)}", *changes])

    def attack(self, objective: str, eta: float) -> Attack:
        """The same, kept by the largest goal."""
        return ADAPTIVE_OBJECTIVES[objective].attack(self.recipe, eta, self.steps, self.restarts)


@dataclass(frozen=True)
class Trial:
    """What came of one objective at one eta."""

    objective: str
    formula: str
    eta: float
    scored: ScoredRecord

    def row(self, rejector: str, protocol: Protocol = "paper") -> Row:
        """The row of a rejector."""
        return row_of(self.scored, rejector, protocol)

    def value(self, rejector: str, measure: Measure) -> float:
        """A figure that an attacker wants small."""
        row = self.row(rejector)
        return row.point.accuracy if measure == "accuracy" else row.ranking.auroc

    def plain(self) -> dict[str, Any]:
        """The trial as JSON values."""
        return {
            "objective": self.objective,
            "formula": self.formula,
            "eta": self.eta,
            "attack": self.scored.summary.plain(),
            "rows": [row.plain() for row in self.scored.rows if row.protocol == "paper"],
        }


def trials(plan: AdaptivePlan, make: Make, scoring: Scorer) -> list[Trial]:
    """Every objective at every eta, in that order."""
    return [
        Trial(
            name, ADAPTIVE_OBJECTIVES[name].formula(plan.recipe), eta,
            scoring.scored(make(plan.label(name, eta), plan.attack(name, eta))),
        )
        for name in plan.objectives
        for eta in plan.etas
    ]  # fmt: skip


def marks(tried: Sequence[Trial], rejector: str, measure: Measure) -> list[Mark]:
    """For each trial whether its figure is the least of its objective, or of all."""
    values = [trial.value(rejector, measure) for trial in tried]
    least: dict[str, float] = {}
    for trial, value in zip(tried, values, strict=True):
        least[trial.objective] = min(value, least.get(trial.objective, math.inf))
    return [
        "all" if value == min(values) else "objective" if value == least[trial.objective] else ""
        for trial, value in zip(tried, values, strict=True)
    ]


def minima(tried: Sequence[Trial], rejector: str) -> dict[str, Any]:
    """The least figures over all trials, each with where it was reached, as JSON values."""
    found: dict[str, Any] = {}
    measures: tuple[Measure, ...] = ("accuracy", "auroc")
    for measure in measures:
        best = min(tried, key=lambda trial: trial.value(rejector, measure))
        where = {"objective": best.objective, "eta": best.eta}
        found[measure] = {"value": best.value(rejector, measure), **where}
    return found


def row_of(scored: ScoredRecord, rejector: str, protocol: Protocol) -> Row:
    """The row of a rejector in a protocol."""
    return next(r for r in scored.rows if (r.rejector, r.protocol) == (rejector, protocol))


def suits(objective: str, recipe: Recipe) -> bool:
    """Whether a net has all that an objective looks at."""
    return ADAPTIVE_OBJECTIVES[objective].suits(recipe)


def _checked(objective: str, recipe: Recipe) -> str:
    """The name of an objective, or BadInput."""
    if objective not in ADAPTIVE_OBJECTIVES:
        raise BadInput(
            f"no objective is called {objective!r}; {suggestion(objective, ADAPTIVE_OBJECTIVES)}"
        )
    if not suits(objective, recipe):
        raise BadInput(f"{objective} needs L_RR and a second output; use head=RR()")
    return objective


def _changes(**given: tuple[object, object]) -> list[str]:
    """What was asked for where it is not what is usual."""
    return [f"{key}={asked}" for key, (asked, usual) in given.items() if asked != usual]


def _label(name: str, changes: Sequence[str]) -> str:
    return f"{name}:{','.join(changes)}" if changes else name


def _number(value: float) -> str:
    """The number as people type it."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
