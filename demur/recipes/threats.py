"""PGD in the balls that a data set is usually attacked in."""

from demur.attacks import PGD
from demur.balls import L2, Linf
from demur.data import Dataset


def linf(data: Dataset, steps: int) -> PGD:
    """PGD with the usual Linf radius and step."""
    return PGD(Linf(data.threat.linf), steps=steps, step_size=data.threat.linf_step)


def l2(data: Dataset, steps: int) -> PGD:
    """PGD with the usual L2 radius and step."""
    return PGD(L2(data.threat.l2), steps=steps, step_size=data.threat.l2_step)
