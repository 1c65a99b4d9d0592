"""Attacks, the goals they raise and the criteria they are judged by."""

from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack, Clean
from demur.attacks.criteria import Criterion, Refused, Slips, Wrong
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
from demur.attacks.targets import EachTarget

ATTACKS: tuple[type[Attack], ...] = (Clean, PGD, FrankWolfe, EachTarget, APGD)
CRITERIA: tuple[type[Criterion], ...] = (Wrong, Slips, Refused)

__all__ = [
    "APGD", "ATTACKS", "CE", "CRITERIA", "DLR", "GOALS", "PGD", "Attack", "Clean", "Criterion",
    "EachTarget", "Evade", "FrankWolfe", "Goal", "Margin", "RRLoss", "Raise", "Refused", "Relaxed",
    "Scaled", "Slips", "Sum", "Toward", "TowardCon", "TowardDLR", "Wrong", "WrongCon", "Xi",
]  # fmt: skip
