"""PGD with the usual radii and step sizes of a data set."""

from demur.attacks import PGD
from demur.balls import L2, Linf
from demur.data import Dataset


def linf(data: Dataset, steps: int) -> PGD:
    """PGD in the usual Linf ball of a data set."""
    return PGD(Linf(data.threat.linf), steps=steps, step_size=data.threat.linf_step)


def l2(data: Dataset, steps: int) -> PGD:
    """PGD in the usual L2 ball of a data set."""
    return PGD(L2(data.threat.l2), steps=steps, step_size=data.threat.l2_step)
