"""Attacks, the goals they raise and the criteria they are judged by."""

from demur.attacks.attack import Attack, Clean
from demur.attacks.criteria import Criterion, Refused, Slips, Wrong
from demur.attacks.goals import CE, Evade, Goal, Margin, Scaled, Sum, Xi
from demur.attacks.pgd import PGD

ATTACKS: tuple[type[Attack], ...] = (Clean, PGD)
GOALS: tuple[type[Goal], ...] = (CE, Margin, Evade, Xi, Sum, Scaled)
CRITERIA: tuple[type[Criterion], ...] = (Wrong, Slips, Refused)

__all__ = [
    "ATTACKS", "CE", "CRITERIA", "GOALS", "PGD", "Attack", "Clean", "Criterion", "Evade", "Goal",
    "Margin", "Refused", "Scaled", "Slips", "Sum", "Wrong", "Xi",
]  # fmt: skip
