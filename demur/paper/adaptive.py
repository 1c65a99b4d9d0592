"""The paper's adaptive evaluation: every adaptive objective at every weight eta, and its table.

plan = AdaptivePlan.of(recipe, etas=(1, 10), steps=50, restarts=2)
trials(plan, make, evaluation)          # paper protocol: one record per objective and eta
plan.worst                          # deploy protocol: one attack, the worst case over all of them
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from demur.attacks import (
    CE,
    AcceptedError,
    Attack,
    Chain,
    MinMargin,
    MultiTarget,
    TargetedConfidence,
)
from demur.calibrate import TPR
from demur.errors import BadInput, suggestion
from demur.evaluate.score import BASELINE, Protocol, RejectorEvaluation, Row, ScoredRecord
from demur.recipes import ADAPTIVE_OBJECTIVES, Recipe
from demur.recipes.attacks import RESTARTS, STEPS, AdaptiveObjective
from demur.rejectors import Con, Rejector
from demur.report.terminal import percent, plain_table, show_scores, show_table, terminal
from demur.runs import Record

ETAS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # the paper's
OPERATING_POINT = TPR(0.95)

Make = Callable[[str, Attack], Record]  # a label and an attack to its record
Measure = Literal["accuracy", "auroc"]
Mark = Literal["", "objective", "all"]  # smallest value of its objective, or of all
STARS: dict[Mark, str] = {"": "", "objective": "* ", "all": "** "}
CAPTION = (
    "percent and AUROC, with 95% intervals; * the minimum of its objective, ** the minimum of "
    "all; a minimum of many noisy figures is biased downwards"
)


def formula(objective: AdaptiveObjective, recipe: Recipe) -> str:
    """The objective as the paper writes it, with the name of the recipe's rejector."""
    name, _ = recipe.head_rejector
    base = "CE" if objective.base_objective == CE() else "L_Con"
    if isinstance(objective.base_objective, TargetedConfidence):
        base += " of each class"
    term = {"log-score": f"log {name}", "score": name, "rr": "L_RR"}[objective.rejector_term]
    return f"{base} + eta {term}"


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
            name, formula(ADAPTIVE_OBJECTIVES[name], plan.recipe), eta,
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
    needs_head = ADAPTIVE_OBJECTIVES[objective].rejector_term == "rr"
    return not needs_head or recipe.method.head.attack_objective() is not None


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
class AdaptiveResults:
    """Results of the adaptive evaluation of a run."""

    rejector: str  # the one under attack
    plain: ScoredRecord  # PGD on the cross-entropy with the same budget
    tried: Sequence[Trial]  # paper protocol; empty where it is not evaluated
    worst: ScoredRecord | None  # deploy protocol

    @property
    def rejectors(self) -> list[str]:
        """The rejector under attack, then confidence."""
        return list(dict.fromkeys([self.rejector, BASELINE]))

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        entries: dict[str, Any] = {"rejector": self.rejector, "plain": _plain(self.plain)}
        if self.tried:
            least = {name: minima(self.tried, name) for name in self.rejectors}
            trials = [trial.to_json() for trial in self.tried]
            entries["paper"] = {"trials": trials, "least": least}
        if self.worst is not None:
            entries["deploy"] = _plain(self.worst)
        return entries


def show_adaptive(results: AdaptiveResults) -> None:
    """Print the table of the paper protocol, then that of the deploy protocol."""
    if results.tried:
        show_table(paper_table(results))
    if results.worst is not None:
        show_scores([results.plain, results.worst], ["deploy"])
        terminal().print(worst_case_sentence(results), soft_wrap=True)


def paper_table(results: AdaptiveResults) -> Table:
    """Return a table of objectives and etas in the paper protocol, with the minima marked."""
    title = "paper: TPR-95 threshold chosen with labels on each scored set (strict >)"
    figures = ("accuracy of accepted", "AUROC")
    headers = [f"{name}: {figure}" for name in results.rejectors for figure in figures]
    table = plain_table(title, "objective, eta", "accuracy", *headers, caption=CAPTION)
    table.add_row(results.plain.summary.attack, *_cells(results.plain, results.rejectors, None))
    for trial, stars in zip(results.tried, _stars(results), strict=True):
        if trial.eta == results.tried[0].eta:
            table.add_section()
            table.add_row(f"{trial.objective}: {trial.formula}", style="bold")
        table.add_row(f"  {trial.eta:g}", *_cells(trial.scored, results.rejectors, stars))
    return table


def worst_case_sentence(results: AdaptiveResults) -> str:
    """Return the accepted errors in the worst case, in one sentence."""
    assert results.worst is not None
    rows = [row_of(scored, results.rejector, "deploy") for scored in (results.plain, results.worst)]
    plain, worst = (percent(row.point.accepted_wrong, row.accepted_wrong_interval) for row in rows)
    return (
        f"wrong and accepted by {results.rejector} at its frozen threshold, of {rows[0].point.n} "
        f"images: {worst}% under the worst of all objectives and etas for each image, {plain}% "
        f"under {results.plain.summary.attack}"
    )


def _stars(results: AdaptiveResults) -> list[list[str]]:
    """Return the marks of every trial, in the order of the columns."""
    measures: tuple[Measure, ...] = ("accuracy", "auroc")
    columns = [
        marks(results.tried, name, measure) for name in results.rejectors for measure in measures
    ]
    return [[STARS[mark] for mark in line] for line in zip(*columns, strict=True)]


def _cells(
    scored: ScoredRecord, rejectors: Sequence[str], stars: Sequence[str] | None
) -> list[str]:
    rows = [row_of(scored, name, "paper") for name in rejectors]
    figures = [figure for row in rows for figure in _figures(row)]
    marked = zip(stars or [""] * len(figures), figures, strict=True)
    return [percent(scored.summary.accuracy), *(star + figure for star, figure in marked)]


def _figures(row: Row) -> tuple[str, str]:
    area, (lo, hi) = row.ranking.auroc, row.ranking.auroc_interval
    return percent(row.point.accuracy, row.accuracy_interval), f"{area:.3f} [{lo:.3f}, {hi:.3f}]"


def _plain(scored: ScoredRecord) -> dict[str, Any]:
    return {"attack": scored.summary.to_json(), "rows": [row.to_json() for row in scored.rows]}
