"""Thresholds chosen on held-out clean images and frozen before any attacked image is seen.

t = TPR(0.95).threshold(score, correct)     # keeps at least 95% of the right answers
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from demur.declared import Share
from demur.metrics import threshold_at_tpr
from demur.rule import OperatingPoint
from demur.spec import Spec


@dataclass(frozen=True)
class TPR(Spec, OperatingPoint):
    """Keep at least this share of the right answers.

    Where a gate refuses more than the rest by itself, the threshold is the lowest score past it:
    the gate then decides alone and the share it keeps stands in the row.
    """

    level: Share

    def threshold(self, score: NDArray[np.float64], correct: NDArray[np.bool_]) -> float:
        """The largest threshold that keeps `level` of the right answers."""
        found = threshold_at_tpr(score, correct, self.level)
        finite = score[np.isfinite(score)]
        return found if np.isfinite(found) or len(finite) == 0 else float(finite.min())


OPERATING_POINTS: tuple[type[Spec], ...] = (TPR,)
