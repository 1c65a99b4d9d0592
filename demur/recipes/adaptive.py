"""The paper's adaptive attacks: PGD on goals that are after the classifier and the rejector.

OBJECTIVES["ce-log-score"].attack(recipe, eta=10)               # CE + 10 log R-Con, as the paper
OBJECTIVES["con-rr"].attack(recipe, eta=10, rule=AcceptedError(...))    # kept by what gets past a rule
"""

from dataclasses import dataclass, replace
from typing import Literal

from demur.attacks import (
    CE,
    AcceptedError,
    Attack,
    Evasion,
    MinMargin,
    MultiTarget,
    Objective,
    RRLoss,
    ScoreObjective,
    TargetedConfidence,
    WrongConfidence,
)
from demur.errors import BadInput
from demur.recipes.threats import linf
from demur.recipes.training import Recipe

STEPS, RESTARTS = 500, 10  # the paper's


@dataclass(frozen=True)
class AdaptiveObjective:
    """What fools the classifier, and what is added to it, eta times, for the rejector."""

    base_objective: CE | WrongConfidence | TargetedConfidence
    rejector_term: Literal["trust", "score", "rr"]

    def suits(self, recipe: Recipe) -> bool:
        """Whether a net of this recipe has what it is after."""
        return self.rejector_term != "rr" or recipe.rr_head is not None

    def formula(self, recipe: Recipe) -> str:
        """The goal as the paper writes it."""
        name, _ = recipe.head_rejector
        lures = {"trust": f"log {name}", "score": name, "rr": "L_RR"}
        each = " of each class" if isinstance(self.base_objective, TargetedConfidence) else ""
        return f"{'CE' if self.base_objective == CE() else 'L_Con'}{each} + eta {lures[self.rejector_term]}"

    def objective(self, recipe: Recipe, eta: float) -> Objective:
        """The goal for a run of this recipe."""
        _, rejector = recipe.head_rejector
        if self.rejector_term == "trust":
            return Evasion(rejector, eta, self.base_objective)
        return self.base_objective + eta * (
            ScoreObjective(rejector) if self.rejector_term == "score" else rr_loss(recipe)
        )

    def attack(
        self,
        recipe: Recipe,
        eta: float = 1.0,
        steps: int = STEPS,
        restarts: int = RESTARTS,
        rule: AcceptedError | None = None,
    ) -> Attack:
        """PGD kept by the largest goal, as the paper has it, or by what gets past a rule."""
        pgd = replace(
            linf(recipe.data, steps), restarts=restarts, objective=self.objective(recipe, eta)
        )
        if rule is not None:
            pgd = replace(pgd, keep="success", criterion=rule)
        if not isinstance(self.base_objective, TargetedConfidence):
            return pgd
        if rule is not None:
            return MultiTarget(pgd, keep="success", rank_by=MinMargin(rule), criterion=rule)
        return MultiTarget(
            pgd, rank_by=replace(self, base_objective=WrongConfidence()).objective(recipe, eta)
        )


def rr_loss(recipe: Recipe) -> RRLoss:
    """The loss that the second output was trained by."""
    head = recipe.rr_head
    if head is None:
        raise BadInput("L_RR needs a net whose second output was trained by it; use head=RR()")
    return RRLoss(head.tau, head.construction, head.rr_loss)


ADAPTIVE_OBJECTIVES: dict[str, AdaptiveObjective] = {
    "ce-log-score": AdaptiveObjective(CE(), "trust"),
    "ce-rr": AdaptiveObjective(CE(), "rr"),
    "con-rr": AdaptiveObjective(WrongConfidence(), "rr"),
    "con-log-score": AdaptiveObjective(WrongConfidence(), "trust"),
    "targets-rr": AdaptiveObjective(TargetedConfidence(), "rr"),
    "ce-score": AdaptiveObjective(CE(), "score"),
}
ADAPTIVE_ATTACKS = {
    f"adaptive-{name}": objective for name, objective in ADAPTIVE_OBJECTIVES.items()
}  # as typed
