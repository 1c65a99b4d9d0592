"""Attack objectives: what an attack maximises, one value per image.

CE()                                          # cross-entropy of the true label
PlusLogScore(RCon(), eta=10)                       # CE + 10 log R-Con: wrong and accepted
UntargetedMargin() + 0.5 * PlusLogScore(Energy())       # objectives add and scale
"""

from demur.attacks.objectives.classification import (
    CE,
    DLR,
    GAMA,
    KL,
    AttackStart,
    Objective,
    ObjectiveState,
    Scaled,
    Sum,
    TargetedConfidence,
    TargetedDLR,
    TargetedMargin,
    UntargetedMargin,
    WrongConfidence,
    divergence,
    wrong_classes,
)
from demur.attacks.objectives.rejector import (
    CARLMargin,
    CARLObjective,
    Form,
    MarginProduct,
    MinMargin,
    PlusLogScore,
    RejectionHinge,
    RejectionObjective,
    RRLoss,
    ScoreObjective,
    SingleMargin,
    SuccessProbability,
    TargetedScore,
    XiObjective,
)

OBJECTIVES: list[type[Objective]] = [
    CE, UntargetedMargin, DLR, WrongConfidence, TargetedMargin, TargetedDLR, TargetedConfidence,
    PlusLogScore, ScoreObjective, RRLoss, XiObjective, GAMA, KL, MinMargin, SingleMargin,
    MarginProduct, RejectionObjective, TargetedScore, CARLObjective, CARLMargin,
    RejectionHinge, SuccessProbability, Sum, Scaled,
]  # fmt: skip

__all__ = [
    "CE", "DLR", "GAMA", "KL", "OBJECTIVES", "AttackStart", "CARLMargin", "CARLObjective", "Form",
    "MarginProduct", "MinMargin", "Objective", "ObjectiveState", "PlusLogScore", "RRLoss",
    "RejectionHinge", "RejectionObjective", "Scaled", "ScoreObjective", "SingleMargin",
    "SuccessProbability", "Sum", "TargetedConfidence", "TargetedDLR", "TargetedMargin",
    "TargetedScore", "UntargetedMargin", "WrongConfidence", "XiObjective",
    "divergence", "wrong_classes",
]  # fmt: skip
