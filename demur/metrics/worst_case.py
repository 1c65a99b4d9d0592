"""Accepted errors at every threshold, from the highest score of a wrong prediction per image.

The numbers are those of the attack that found the scores. A stronger attack can only raise them.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from demur.metrics.checks import FloatArray, floats, same_length
from demur.metrics.intervals import Difference, Interval, wilson
from demur.metrics.rejection import Curve

Z = NormalDist().inv_cdf((1 + 0.95) / 2)  # half-width of a 95% interval in standard errors
NEVER_ACCEPTED = -float(np.finfo(np.float64).max)  # a clean score that no threshold accepts


@dataclass(frozen=True, eq=False)
class WorstCase:
    """Scores of clean images, and the highest score of a wrong prediction in each one's ball.

    Accepted is score >= threshold. A threshold is a score of a clean image, so that coverage is
    the share of clean images accepted, correct or not. An image that a gate rejects has the clean
    score -inf; as a threshold it accepts every score past the gate.
    """

    clean: FloatArray  # N
    worst: FloatArray  # N; -inf where no wrong prediction was found

    @staticmethod
    def of(clean: ArrayLike, worst: ArrayLike) -> "WorstCase":
        """Check the scores; raise BadInput for other lengths or NaN."""
        values, wrong = floats(clean, "clean"), floats(worst, "worst")
        same_length(clean=values, worst=wrong)
        return WorstCase(np.maximum(values, NEVER_ACCEPTED), wrong)

    def accepted_errors(self, threshold: float) -> float:
        """Share of all images with a wrong prediction that reaches the threshold."""
        return self.count(threshold) / len(self.worst)

    def count(self, threshold: float) -> int:
        """Images with a wrong prediction that reaches the threshold."""
        return int((self.worst >= max(threshold, NEVER_ACCEPTED)).sum())

    def interval(self, threshold: float) -> Interval:
        return wilson(self.count(threshold), len(self.worst))

    @cached_property
    def curve(self) -> Curve:
        """Accepted errors as a share of all images, by ascending clean coverage."""
        thresholds = np.unique(self.clean[self.clean > NEVER_ACCEPTED])[::-1]
        coverage = _shares_at_least(self.clean, thresholds)
        return Curve(coverage, _shares_at_least(self.worst, thresholds), thresholds)

    @property
    def augrc(self) -> float:
        """Worst-case AUGRC: mean of the accepted errors with each clean score as threshold.

        It is the probability that the worst score of one image reaches the clean score of another.
        """
        return float(_shares_at_least(self.worst, self.clean).mean())

    @property
    def accepted(self) -> FloatArray:
        """Highest threshold at which an image is accepted under the attack, N.

        An image without an accepted error stays as it is: it counts as accepted if its clean image
        is accepted, and that one is then correct.
        """
        highest: FloatArray = np.maximum(self.clean, self.worst)
        return highest

    @property
    def aurc(self) -> float:
        """Worst-case AURC: mean over the clean scores of the wrong share of the `accepted`."""
        return float(self._risks[0].mean())

    @cached_property
    def _risks(self) -> tuple[FloatArray, FloatArray]:
        """Wrong share of the accepted, and the accepted share, with each clean score as threshold.

        Both have shape N.
        """
        kept = _shares_at_least(self.accepted, self.clean)
        return _shares_at_least(self.worst, self.clean) / kept, kept

    @property
    def _influence(self) -> FloatArray:
        """What each image adds to the AUGRC, by its worst score and as a threshold, N."""
        as_image = self._mean_up_to(self.worst, np.ones_like(self.clean))
        values: FloatArray = as_image + _shares_at_least(self.worst, self.clean)
        return values

    def _mean_up_to(self, values: FloatArray, weights: FloatArray) -> FloatArray:
        """Mean over the clean scores of the weights of those that each value reaches, N."""
        order = np.argsort(self.clean)
        sums = np.append(0.0, np.cumsum(weights[order])) / len(order)
        found: FloatArray = sums[np.searchsorted(self.clean[order], values, "right")]
        return found

    def augrc_interval(self) -> Interval:
        return _around(self.augrc, self._influence)

    def aurc_interval(self) -> Interval:
        risk, kept = self._risks
        errors = self._mean_up_to(self.worst, 1 / kept) + risk
        return _around(self.aurc, errors - self._mean_up_to(self.accepted, risk / kept))

    def augrc_difference(self, other: "WorstCase") -> Difference:
        """AUGRC of this minus that of another rejector on the same images, with its interval."""
        same_length(clean=self.clean, other=other.clean)
        gap, influence = self.augrc - other.augrc, self._influence - other._influence
        reach = _reach(influence)
        p = 2 * NormalDist().cdf(-abs(gap) * Z / reach) if reach > 0 else float(gap == 0)
        return Difference(gap, max(-1.0, gap - reach), min(1.0, gap + reach), p)


def _shares_at_least(values: FloatArray, thresholds: FloatArray) -> FloatArray:
    """Share of the values that reach each threshold."""
    shares: FloatArray = 1 - np.searchsorted(np.sort(values), thresholds) / len(values)
    return shares


def _around(value: float, influence: FloatArray) -> Interval:
    reach = _reach(influence)
    return Interval(max(0.0, value - reach), min(1.0, value + reach))


def _reach(influence: FloatArray) -> float:
    """Half the width of the 95% interval of a mean of these values."""
    if len(influence) < 2:
        return 1.0
    return Z * float(influence.std(ddof=1)) / math.sqrt(len(influence))
