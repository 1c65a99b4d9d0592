"""Attacks, the goals they raise and the criteria they are judged by."""

from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack, Clean
from demur.attacks.autoattack import AutoAttack
from demur.attacks.balanced import Balanced
from demur.attacks.chain import Chain, Ensemble
from demur.attacks.criteria import Criterion, Refused, Slips, Unanswered, Wrong
from demur.attacks.cw import CW
from demur.attacks.fab import FAB
from demur.attacks.goals import (
    CE,
    DLR,
    GOALS,
    KL,
    Doubt,
    Evade,
    Goal,
    Least,
    Margin,
    One,
    Product,
    Raise,
    Relaxed,
    RRLoss,
    Scaled,
    Sum,
    Toward,
    TowardCon,
    TowardDLR,
    WrongCon,
    Xi,
)
from demur.attacks.orthogonal import OrthogonalAPGD
from demur.attacks.pgd import PGD, FrankWolfe
from demur.attacks.rejecting import ForceRefusal, RejectAutoAttack
from demur.attacks.square import Square
from demur.attacks.targets import EachTarget

ATTACKS: tuple[type[Attack], ...] = (
    Clean, PGD, FrankWolfe, EachTarget, APGD, Balanced, OrthogonalAPGD, FAB, Square, CW,
    Chain, AutoAttack, RejectAutoAttack, ForceRefusal,
)  # fmt: skip
CRITERIA: tuple[type[Criterion], ...] = (Wrong, Slips, Refused, Unanswered)

__all__ = [
    "APGD", "ATTACKS", "CE", "CRITERIA", "CW", "DLR", "FAB", "GOALS", "KL", "PGD", "Attack",
    "AutoAttack", "Balanced", "Chain", "Clean", "Criterion", "Doubt", "EachTarget", "Ensemble",
    "Evade", "ForceRefusal", "FrankWolfe", "Goal", "Least", "Margin", "One", "OrthogonalAPGD",
    "Product", "RRLoss", "Raise", "Refused", "RejectAutoAttack", "Relaxed", "Scaled", "Slips",
    "Square", "Sum", "Toward", "TowardCon", "TowardDLR", "Unanswered", "Wrong", "WrongCon", "Xi",
]  # fmt: skip
