"""The paper's adaptive attacks: PGD on objectives against the classifier and the rejector.

ADAPTIVE_OBJECTIVES["ce-log-score"].attack(recipe, eta=10)      # CE + 10 log R-Con, as in the paper
ADAPTIVE_OBJECTIVES["con-rr"].attack(recipe, eta=10, criterion=AcceptedError(...))  # keep=success
"""

from dataclasses import dataclass, replace
from typing import Literal

from demur.attacks import (
    CE,
    AcceptedError,
    Attack,
    MinMargin,
    MultiTarget,
    Objective,
    PlusLogScore,
    ScoreObjective,
    TargetedConfidence,
    WrongConfidence,
)
from demur.errors import BadInput
from demur.recipes.training import Recipe, linf

STEPS, RESTARTS = 500, 10  # the paper's


@dataclass(frozen=True)
class AdaptiveObjective:
    """base_objective + eta * rejector_term: misclassification plus a term for the rejector."""

    base_objective: CE | WrongConfidence | TargetedConfidence
    rejector_term: Literal["log-score", "score", "rr"]

    def supports(self, recipe: Recipe) -> bool:
        """Whether a net of this recipe has the outputs that the objective needs."""
        return self.rejector_term != "rr" or recipe.method.head.attack_objective() is not None

    def formula(self, recipe: Recipe) -> str:
        """Objective as the paper writes it."""
        name, _ = recipe.head_rejector
        base = "CE" if self.base_objective == CE() else "L_Con"
        if isinstance(self.base_objective, TargetedConfidence):
            base += " of each class"
        term = {"log-score": f"log {name}", "score": name, "rr": "L_RR"}[self.rejector_term]
        return f"{base} + eta {term}"

    def objective(self, recipe: Recipe, eta: float) -> Objective:
        """Objective for a net of this recipe."""
        _, rejector = recipe.head_rejector
        if self.rejector_term == "log-score":
            return PlusLogScore(rejector, eta, self.base_objective)
        return self.base_objective + eta * (
            ScoreObjective(rejector) if self.rejector_term == "score" else rr_loss(recipe)
        )

    def attack(
        self,
        recipe: Recipe,
        eta: float = 1.0,
        steps: int = STEPS,
        restarts: int = RESTARTS,
        criterion: AcceptedError | None = None,
    ) -> Attack:
        """PGD on this objective; a targeted one runs against every wrong class.

        Args:
            recipe: The recipe of the attacked net.
            eta: Weight of the rejector's term.
            steps: Gradient steps per restart.
            restarts: Random restarts.
            criterion: Keep adversarial examples that succeed by it. None keeps those with
                the largest objective, as in the paper.
        """
        pgd = replace(
            linf(recipe.data, steps), restarts=restarts, objective=self.objective(recipe, eta)
        )
        if criterion is not None:
            pgd = replace(pgd, keep="success", criterion=criterion)
        if not isinstance(self.base_objective, TargetedConfidence):
            return pgd
        if criterion is not None:
            return MultiTarget(
                pgd, keep="success", rank_by=MinMargin(criterion), criterion=criterion
            )
        return MultiTarget(
            pgd, rank_by=replace(self, base_objective=WrongConfidence()).objective(recipe, eta)
        )


def rr_loss(recipe: Recipe) -> Objective:
    """L_RR with the options that A was trained with; raises BadInput without an RR head."""
    objective = recipe.method.head.attack_objective()
    if objective is None:
        raise BadInput("L_RR needs a net whose auxiliary output was trained by it; use head=RR()")
    return objective


ADAPTIVE_OBJECTIVES: dict[str, AdaptiveObjective] = {
    "ce-log-score": AdaptiveObjective(CE(), "log-score"),
    "ce-rr": AdaptiveObjective(CE(), "rr"),
    "con-rr": AdaptiveObjective(WrongConfidence(), "rr"),
    "con-log-score": AdaptiveObjective(WrongConfidence(), "log-score"),
    "targets-rr": AdaptiveObjective(TargetedConfidence(), "rr"),
    "ce-score": AdaptiveObjective(CE(), "score"),
}
ADAPTIVE_ATTACKS = {f"adaptive-{name}": made for name, made in ADAPTIVE_OBJECTIVES.items()}
