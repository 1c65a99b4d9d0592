"""Guards: classifiers with a calibrated rule that accepts or rejects each prediction."""

from demur.guards.core import Guard, guard
from demur.guards.decision import GuardResult

__all__ = ["Guard", "GuardResult", "guard"]
