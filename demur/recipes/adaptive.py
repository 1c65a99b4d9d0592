"""The paper's adaptive attacks: PGD on goals that are after the classifier and the rejector.

OBJECTIVES["ce-trust"].attack(recipe, eta=10)               # CE + 10 log R-Con, as the paper
OBJECTIVES["con-rr"].attack(recipe, eta=10, rule=Slips(...))    # kept by what gets past a rule
"""

from dataclasses import dataclass, replace
from typing import Literal

from demur.attacks import (
    CE,
    Attack,
    EachTarget,
    Evade,
    Goal,
    Least,
    Raise,
    RRLoss,
    Slips,
    TowardCon,
    WrongCon,
)
from demur.errors import BadInput
from demur.recipes.training import Recipe
from demur.recipes.usual import linf

STEPS, RESTARTS = 500, 10  # the paper's


@dataclass(frozen=True)
class Objective:
    """What fools the classifier, and what is added to it, eta times, for the rejector."""

    fool: CE | WrongCon | TowardCon
    lure: Literal["trust", "score", "rr"]

    def suits(self, recipe: Recipe) -> bool:
        """Whether a net of this recipe has what it is after."""
        return self.lure != "rr" or recipe.rectifying is not None

    def formula(self, recipe: Recipe) -> str:
        """The goal as the paper writes it."""
        name, _ = recipe.own
        lures = {"trust": f"log {name}", "score": name, "rr": "L_RR"}
        each = " of each class" if isinstance(self.fool, TowardCon) else ""
        return f"{'CE' if self.fool == CE() else 'L_Con'}{each} + eta {lures[self.lure]}"

    def goal(self, recipe: Recipe, eta: float) -> Goal:
        """The goal for a run of this recipe."""
        _, rejector = recipe.own
        if self.lure == "trust":
            return Evade(rejector, eta, self.fool)
        return self.fool + eta * (Raise(rejector) if self.lure == "score" else rr_loss(recipe))

    def attack(
        self,
        recipe: Recipe,
        eta: float = 1.0,
        steps: int = STEPS,
        restarts: int = RESTARTS,
        rule: Slips | None = None,
    ) -> Attack:
        """PGD kept by the largest goal, as the paper has it, or by what gets past a rule."""
        pgd = replace(linf(recipe.data, steps), restarts=restarts, goal=self.goal(recipe, eta))
        if rule is not None:
            pgd = replace(pgd, keep="criterion", criterion=rule)
        if not isinstance(self.fool, TowardCon):
            return pgd
        if rule is not None:
            return EachTarget(pgd, keep="criterion", by=Least(rule), criterion=rule)
        return EachTarget(pgd, by=replace(self, fool=WrongCon()).goal(recipe, eta))


def rr_loss(recipe: Recipe) -> RRLoss:
    """The loss that the second output was trained by."""
    head = recipe.rectifying
    if head is None:
        raise BadInput("L_RR needs a net whose second output was trained by it; use head=RR()")
    return RRLoss(head.tau, head.construction, head.objective)


OBJECTIVES: dict[str, Objective] = {
    "ce-trust": Objective(CE(), "trust"),
    "ce-rr": Objective(CE(), "rr"),
    "con-rr": Objective(WrongCon(), "rr"),
    "con-trust": Objective(WrongCon(), "trust"),
    "targets-rr": Objective(TowardCon(), "rr"),
    "ce-score": Objective(CE(), "score"),
}
WEIGHED = {f"adaptive-{name}": objective for name, objective in OBJECTIVES.items()}  # as typed
