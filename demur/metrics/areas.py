"""How sure an AUROC is, and the difference of two on the same images (DeLong et al. 1988).

    auroc_interval(score, correct)
    auroc_difference(rcon, con, correct)

Exact under ties and much faster than redrawing: every image's own part of the area is known.
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from demur.metrics.checks import BoolArray, FloatArray, check_share, scored_pair
from demur.metrics.intervals import Difference, Interval, wilson
from demur.metrics.rejection import auroc


def auroc_interval(score: ArrayLike, correct: ArrayLike, level: float = 0.95) -> Interval:
    """The interval of the AUROC, on the scale of its log odds; (0, 1) if a group is empty."""
    check_share("level", level)
    values, right = scored_pair(score, correct)
    smaller = int(min(right.sum(), (~right).sum()))
    if smaller == 0:
        return Interval(0.0, 1.0)
    area = auroc(values, right)
    if area in (0.0, 1.0) or smaller == 1:  # no image contradicts it, yet it is not certain
        hits = round(area * smaller)
        return wilson(hits, smaller, level)
    spread = math.sqrt(_variance(*_parts(values, right))) / (area * (1 - area))
    odds, z = math.log(area / (1 - area)), NormalDist().inv_cdf((1 + level) / 2)
    return Interval(*(1 / (1 + math.exp(-odds - sign * z * spread)) for sign in (-1, 1)))


def auroc_difference(
    score_a: ArrayLike, score_b: ArrayLike, correct: ArrayLike, level: float = 0.95
) -> Difference:
    """AUROC(a) - AUROC(b) on the same images; of any size where a group has no two images."""
    check_share("level", level)
    a, right = scored_pair(score_a, correct, "score_a")
    b, _ = scored_pair(score_b, correct, "score_b")
    gap = auroc(a, right) - auroc(b, right)
    if min(right.sum(), (~right).sum()) < 2:
        return Difference(gap, -1.0, 1.0, 1.0)
    pairs = zip(_parts(a, right), _parts(b, right), strict=True)
    spread = math.sqrt(_variance(*(one - other for one, other in pairs)))
    if spread == 0:
        return Difference(gap, gap, gap, 1.0 if gap == 0 else 0.0)
    reach = NormalDist().inv_cdf((1 + level) / 2) * spread
    p = 2 * NormalDist().cdf(-abs(gap) / spread)
    return Difference(gap, max(-1.0, gap - reach), min(1.0, gap + reach), p)


def _parts(score: FloatArray, right: BoolArray) -> tuple[FloatArray, FloatArray]:
    """For each right answer the share of wrong ones below it, and the other way round."""
    above, below = score[right], score[~right]
    return _shares_below(above, below), 1 - _shares_below(below, above)


def _shares_below(values: FloatArray, others: FloatArray) -> FloatArray:
    """The share of others below each value, ties half."""
    ranked = np.sort(others)
    below, at_most = np.searchsorted(ranked, values), np.searchsorted(ranked, values, "right")
    shares: FloatArray = (below + at_most) / (2 * len(others))
    return shares


def _variance(of_right: FloatArray, of_wrong: FloatArray) -> float:
    return float(of_right.var(ddof=1) / len(of_right) + of_wrong.var(ddof=1) / len(of_wrong))
