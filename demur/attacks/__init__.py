"""Attacks, the goals they raise and the criteria they are judged by."""

from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack, Clean
from demur.attacks.criteria import Criterion, Refused, Slips, Wrong
from demur.attacks.cw import CW
from demur.attacks.fab import FAB
from demur.attacks.goals import (
    CE,
    DLR,
    GOALS,
    Evade,
    Goal,
    Margin,
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
from demur.attacks.pgd import PGD, FrankWolfe
from demur.attacks.square import Square
from demur.attacks.targets import EachTarget

ATTACKS: tuple[type[Attack], ...] = (Clean, PGD, FrankWolfe, EachTarget, APGD, FAB, Square, CW)
CRITERIA: tuple[type[Criterion], ...] = (Wrong, Slips, Refused)

__all__ = [
    "APGD", "ATTACKS", "CE", "CRITERIA", "CW", "DLR", "FAB", "GOALS", "PGD", "Attack", "Clean",
    "Criterion", "EachTarget", "Evade", "FrankWolfe", "Goal", "Margin", "RRLoss", "Raise",
    "Refused", "Relaxed", "Scaled", "Slips", "Square", "Sum", "Toward", "TowardCon", "TowardDLR",
    "Wrong", "WrongCon", "Xi",
]  # fmt: skip
