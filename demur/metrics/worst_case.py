"""Accepted errors at every threshold, from the highest score of a wrong prediction per image.

    case = WorstCase.of(clean_score, worst_score)     # worst_score: -inf where none was found
    case.accepted_errors(0.5)                         # share of images wrong and accepted at 0.5
    case.augrc                                        # mean of it over the clean scores

The numbers are those of the attack that found the scores. A stronger attack can only raise them.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from demur.metrics.checks import FloatArray, check_share, floats, same_length
from demur.metrics.intervals import Difference, Interval
from demur.metrics.rejection import Curve


@dataclass(frozen=True, eq=False)
class WorstCase:
    """Scores of clean images, and the highest score of a wrong prediction in each one's ball.

    Accepted is score >= threshold. A threshold is a score of a clean image, so that coverage is
    the share of clean images accepted, correct or not.
    """

    clean: FloatArray  # N
    worst: FloatArray  # N; -inf where no wrong prediction was found

    @staticmethod
    def of(clean: ArrayLike, worst: ArrayLike) -> "WorstCase":
        """Check the scores; raise BadInput for other lengths or NaN."""
        values, wrong = floats(clean, "clean"), floats(worst, "worst")
        same_length(clean=values, worst=wrong)
        return WorstCase(values, wrong)

    def accepted_errors(self, threshold: float) -> float:
        """Share of all images with a wrong prediction that reaches the threshold."""
        return float((self.worst >= threshold).mean())

    @cached_property
    def curve(self) -> Curve:
        """Accepted errors as a share of all images, by ascending clean coverage."""
        thresholds = np.unique(self.clean)[::-1]
        coverage = _shares_at_least(self.clean, thresholds)
        return Curve(coverage, _shares_at_least(self.worst, thresholds), thresholds)

    @property
    def augrc(self) -> float:
        """Worst-case AUGRC: mean of the accepted errors with each clean score as threshold.

        It is the probability that the worst score of one image reaches the clean score of another.
        """
        return float(_shares_at_least(self.worst, self.clean).mean())

    @property
    def aurc(self) -> float:
        """Worst-case AURC: mean over the clean scores of the risk among the accepted.

        An image without an accepted error counts as accepted if its clean image is accepted; that
        one is then correct.
        """
        errors = _shares_at_least(self.worst, self.clean)
        both = _shares_at_least(np.minimum(self.clean, self.worst), self.clean)
        correct = _shares_at_least(self.clean, self.clean) - both
        return float((errors / (errors + correct)).mean())

    @property
    def _influence(self) -> FloatArray:
        """What each image adds to the AUGRC, by its worst score and as a threshold, N."""
        n = len(self.clean)
        as_image = np.searchsorted(np.sort(self.clean), self.worst, "right") / n
        values: FloatArray = as_image + _shares_at_least(self.worst, self.clean)
        return values

    def augrc_interval(self, level: float = 0.95) -> Interval:
        """Interval of the AUGRC, from the variance of the images' influence."""
        reach = _reach(self._influence, level)
        return Interval(max(0.0, self.augrc - reach), min(1.0, self.augrc + reach))

    def augrc_difference(self, other: "WorstCase", level: float = 0.95) -> Difference:
        """AUGRC of this minus that of another rejector on the same images, with its interval."""
        same_length(clean=self.clean, other=other.clean)
        gap, influence = self.augrc - other.augrc, self._influence - other._influence
        reach = _reach(influence, level)
        z = NormalDist().inv_cdf((1 + level) / 2)
        p = 2 * NormalDist().cdf(-abs(gap) * z / reach) if reach > 0 else float(gap == 0)
        return Difference(gap, max(-1.0, gap - reach), min(1.0, gap + reach), p)


def _shares_at_least(values: FloatArray, thresholds: FloatArray) -> FloatArray:
    """Share of the values that reach each threshold."""
    shares: FloatArray = 1 - np.searchsorted(np.sort(values), thresholds) / len(values)
    return shares


def _reach(influence: FloatArray, level: float) -> float:
    """Half the width of the interval of a mean of these values."""
    check_share("level", level)
    if len(influence) < 2:
        return 1.0
    z = NormalDist().inv_cdf((1 + level) / 2)
    return z * float(influence.std(ddof=1)) / math.sqrt(len(influence))
