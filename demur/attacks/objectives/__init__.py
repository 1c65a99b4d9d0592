"""Attack objectives: what an attack maximises, one value per image.

CE()                                          # cross-entropy of the true label
Evasion(RCon(), eta=10)                       # CE + 10 log R-Con: wrong and accepted
LogitMargin() + 0.5 * Evasion(Energy())       # objectives add and scale
"""

from demur.attacks.objectives.abstention import CARLMargin, CARLObjective, Form, RejectionHinge
from demur.attacks.objectives.accepted_error import (
    MarginProduct,
    MinMargin,
    RejectionObjective,
    SingleMargin,
)
from demur.attacks.objectives.objective import AttackStart, Objective, ObjectiveState, Scaled, Sum
from demur.attacks.objectives.reference import GAMA, KL, divergence
from demur.attacks.objectives.rejector import Evasion, RRLoss, ScoreObjective, XiObjective
from demur.attacks.objectives.targeted import TargetedConfidence, TargetedDLR, TargetedMargin
from demur.attacks.objectives.untargeted import CE, DLR, LogitMargin, WrongConfidence

OBJECTIVES: tuple[type[Objective], ...] = (
    CE, LogitMargin, DLR, WrongConfidence, TargetedMargin, TargetedDLR, TargetedConfidence, Evasion,
    ScoreObjective, RRLoss, XiObjective, GAMA, KL, MinMargin, SingleMargin, MarginProduct,
    RejectionObjective, CARLObjective, CARLMargin, RejectionHinge, Sum, Scaled,
)  # fmt: skip

__all__ = [
    "CE", "DLR", "GAMA", "KL", "OBJECTIVES", "AttackStart", "CARLMargin", "CARLObjective",
    "Evasion", "Form", "LogitMargin", "MarginProduct", "MinMargin", "Objective", "ObjectiveState",
    "RRLoss", "RejectionHinge", "RejectionObjective", "Scaled", "ScoreObjective", "SingleMargin",
    "Sum", "TargetedConfidence", "TargetedDLR", "TargetedMargin", "WrongConfidence", "XiObjective",
    "divergence",
]  # fmt: skip
