"""Attacks, the objectives they maximise and their success criteria."""

from demur.attacks.apgd import APGD
from demur.attacks.attack import (
    AcceptedError,
    Attack,
    AttackBatch,
    Clean,
    Criterion,
    FalseRejection,
    Misclassified,
    Rejected,
)
from demur.attacks.autoattack import (
    AutoAttackEnsemble,
    Chain,
    Ensemble,
    ForceRejectionEnsemble,
    MeanChain,
    MultiTarget,
    RejectAutoAttackEnsemble,
)
from demur.attacks.corruption import Corruption
from demur.attacks.cw import CW
from demur.attacks.decision import HopSkipJump, RayS
from demur.attacks.fab import FAB
from demur.attacks.margins import MaxMinMargin, OrthogonalAPGD
from demur.attacks.objectives.classification import (
    CE,
    DLR,
    GAMA,
    KL,
    Objective,
    Scaled,
    Sum,
    TargetedConfidence,
    TargetedDLR,
    TargetedMargin,
    UntargetedMargin,
    WrongConfidence,
)
from demur.attacks.objectives.rejector import (
    CARLMargin,
    CARLObjective,
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
from demur.attacks.pgd import EOTPGD, PGD, FrankWolfe
from demur.attacks.square import Square
from demur.attacks.worst_score import WorstScore

ATTACKS: list[type[Attack]] = [
    Clean, PGD, FrankWolfe, MultiTarget, APGD, EOTPGD, MaxMinMargin, OrthogonalAPGD, FAB, Square,
    HopSkipJump, RayS, CW, WorstScore, Corruption, Chain, MeanChain, AutoAttackEnsemble,
    RejectAutoAttackEnsemble,
    ForceRejectionEnsemble,
]  # fmt: skip
OBJECTIVES: list[type[Objective]] = [
    CE, UntargetedMargin, DLR, WrongConfidence, TargetedMargin, TargetedDLR, TargetedConfidence,
    PlusLogScore, ScoreObjective, RRLoss, XiObjective, GAMA, KL, MinMargin, SingleMargin,
    MarginProduct, RejectionObjective, TargetedScore, CARLObjective, CARLMargin,
    RejectionHinge, SuccessProbability, Sum, Scaled,
]  # fmt: skip
CRITERIA: list[type[Criterion]] = [Misclassified, AcceptedError, FalseRejection, Rejected]

__all__ = [
    "APGD", "ATTACKS", "CE", "CRITERIA", "CW", "DLR", "EOTPGD", "FAB", "GAMA", "KL", "OBJECTIVES",
    "PGD", "AcceptedError", "Attack", "AttackBatch", "AutoAttackEnsemble", "Chain", "Clean",
    "Corruption", "Criterion", "Ensemble", "FalseRejection", "ForceRejectionEnsemble",
    "FrankWolfe", "HopSkipJump", "MarginProduct", "MaxMinMargin", "MeanChain", "MinMargin",
    "Misclassified", "MultiTarget", "Objective", "OrthogonalAPGD", "PlusLogScore", "RRLoss",
    "RayS", "RejectAutoAttackEnsemble", "Rejected", "RejectionObjective", "Scaled",
    "ScoreObjective", "SingleMargin", "Square", "SuccessProbability", "Sum", "TargetedConfidence",
    "TargetedDLR", "TargetedMargin", "TargetedScore", "UntargetedMargin", "WorstScore",
    "WrongConfidence", "XiObjective",
]  # fmt: skip
