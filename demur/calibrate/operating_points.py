"""Operating points: rules for choosing a threshold.

TPR and Coverage choose by the images they are given; `certify_threshold` guarantees their level for
images to come. Median is the threshold that the paper's C&W attack has to reach.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from demur.calibrate.certificate import Guarantee, certify_threshold
from demur.metrics import BoolArray, FloatArray, threshold_at_tpr
from demur.rejectors.rule import OperatingPoint
from demur.spec import Spec, later
from demur.spec.field_types import Condition, UnitInterval

OpenUnitInterval = Annotated[float, Condition(lambda v: 0 < v < 1, "above 0 and below 1")]


@dataclass(frozen=True)
class TPR(Spec, Guarantee):
    """Accept at least this share of the correct predictions.

        threshold = max t with P(score >= t | correct) >= level

    If the gate of a coupled score rejects too many by itself, the threshold is the lowest score
    that passes the gate, and the TPR stays below the level.

    Args:
        level: The true positive rate, in [0, 1].
        split: Split whose clean images choose the threshold before an attack. "test" is for nets
            that were trained on all other images (split="paper"); it guarantees nothing.

    Example:
        >>> import numpy as np
        >>> from demur import TPR
        >>> TPR(0.5).threshold(np.array([0.1, 0.6, 0.9]), np.array([False, True, True]))
        0.9
    """

    level: UnitInterval
    split: Literal["cal", "test"] = field(default="cal", metadata=later(neutral="cal"))
    quantity = "tpr"
    claim = "at least {} of the correct predictions accepted"
    observation = "{} of {} correct predictions accepted"

    def threshold(self, score: FloatArray, correct: BoolArray) -> float:
        return _finite_threshold(threshold_at_tpr(score, correct, self.level), score)


@dataclass(frozen=True)
class Coverage(Spec, Guarantee):
    """Accept at least this share of all images.

        threshold = max t with P(score >= t) >= level

    If the gate of a coupled score rejects too many by itself, the threshold is the lowest score
    that passes the gate.

    Example:
        >>> import numpy as np
        >>> from demur import Coverage
        >>> Coverage(0.5).threshold(np.array([0.1, 0.6, 0.9]), np.array([False, True, True]))
        0.6
    """

    level: UnitInterval
    quantity = "coverage"
    claim = "at least {} of the images accepted"
    observation = "{} of {} images accepted"

    def threshold(self, score: FloatArray, correct: BoolArray) -> float:
        everyone = np.ones(len(correct), dtype=np.bool_)
        return _finite_threshold(threshold_at_tpr(score, everyone, self.level), score)


@dataclass(frozen=True)
class Risk(Spec, Guarantee):
    """Accept with at most this share of errors among the accepted, with a confidence.

        P(wrong | score >= threshold) <= level

    The threshold is the one that `certify_threshold` gives, with the largest coverage that passes.

    Args:
        level: The selective risk, in (0, 1).
        confidence: Probability that the guarantee holds, in (0, 1).

    Raises:
        Uncertified: In `threshold`, if no threshold can be certified.

    Example:
        >>> import numpy as np
        >>> from demur import Risk
        >>> threshold = Risk(0.05).threshold(np.arange(500.0), np.arange(500) > 100)
    """

    level: OpenUnitInterval
    confidence: OpenUnitInterval = 0.95
    quantity = "risk"
    is_upper_bound = True
    claim = "at most {} wrong among the accepted"
    observation = "{} of {} accepted predictions wrong"

    def threshold(self, score: FloatArray, correct: BoolArray) -> float:
        return certify_threshold(score, correct, self).thresholds[0]


@dataclass(frozen=True)
class Median(Spec, OperatingPoint):
    """The median score of the correct predictions, by default of the fit split."""

    split: Literal["fit", "cal"] = "fit"

    def threshold(self, score: FloatArray, correct: BoolArray) -> float:
        return _finite_threshold(threshold_at_tpr(score, correct, 0.5), score)


def _finite_threshold(threshold: float, score: FloatArray) -> float:
    """The threshold, or the lowest finite score for -inf, which would accept gated images."""
    finite = score[np.isfinite(score)]
    return threshold if np.isfinite(threshold) or len(finite) == 0 else float(finite.min())


OPERATING_POINTS: tuple[type[Spec], ...] = (TPR, Coverage, Risk, Median)
