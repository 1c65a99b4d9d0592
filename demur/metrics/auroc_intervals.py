"""Confidence intervals of an AUROC, and of the difference of two on the same images.

    auroc_interval(score, correct)
    auroc_difference(rcon, con, correct)

DeLong et al. (1988) give the variance in closed form, ties included, so no bootstrap is needed.
Their interval is too narrow for small groups. There each end is the wider one of theirs and that
of Newcombe (2006).
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from demur.metrics.checks import BoolArray, FloatArray, check_share, scored_pair
from demur.metrics.intervals import Difference, Interval
from demur.metrics.rejection import auroc

SMALL_GROUP = 300  # images of the smaller group, below which Newcombe's interval counts


def auroc_interval(score: ArrayLike, correct: ArrayLike, level: float = 0.95) -> Interval:
    """Confidence interval of the AUROC; (0, 1) if no prediction is correct or none is wrong."""
    check_share("level", level)
    values, is_correct = scored_pair(score, correct)
    groups = int(is_correct.sum()), int((~is_correct).sum())
    if min(groups) == 0:
        return Interval(0.0, 1.0)
    area, z = auroc(values, is_correct), NormalDist().inv_cdf((1 + level) / 2)
    if min(groups) < SMALL_GROUP:
        newcombe = _newcombe(area, *groups, z)
        if min(groups) == 1 or area in (0.0, 1.0):
            return newcombe
        delong = _delong(area, _variance(*_placements(values, is_correct)), z)
        return Interval(min(newcombe.lo, delong.lo), max(newcombe.hi, delong.hi))
    if area in (0.0, 1.0):
        return _newcombe(area, *groups, z)
    return _delong(area, _variance(*_placements(values, is_correct)), z)


def auroc_difference(
    score_a: ArrayLike, score_b: ArrayLike, correct: ArrayLike, level: float = 0.95
) -> Difference:
    """AUROC(a) - AUROC(b) on the same images, with interval and p-value.

    The interval combines both AUROC intervals and the correlation of the two (Zou and Donner).
    """
    check_share("level", level)
    a, is_correct = scored_pair(score_a, correct, "score_a")
    b, _ = scored_pair(score_b, correct, "score_b")
    gap = auroc(a, is_correct) - auroc(b, is_correct)
    if min(is_correct.sum(), (~is_correct).sum()) < 2:
        return Difference(gap, -1.0, 1.0, 1.0)
    placements_a, placements_b = _placements(a, is_correct), _placements(b, is_correct)
    if all(
        np.array_equal(one, other) for one, other in zip(placements_a, placements_b, strict=True)
    ):
        return Difference(0.0, 0.0, 0.0, 1.0)
    correlation = _correlation(placements_a, placements_b)
    below, above = (
        _lower_reach(
            auroc_interval(one, is_correct, level), auroc(one, is_correct),
            auroc_interval(other, is_correct, level), auroc(other, is_correct), correlation,
        )
        for one, other in ((a, b), (b, a))
    )  # fmt: skip
    z = NormalDist().inv_cdf((1 + level) / 2)
    toward_zero = below if gap > 0 else above
    p = 2 * NormalDist().cdf(-abs(gap) * z / toward_zero) if toward_zero > 0 else 1.0
    return Difference(gap, max(-1.0, gap - below), min(1.0, gap + above), p)


def _lower_reach(
    one: Interval, area: float, other: Interval, other_area: float, correlation: float
) -> float:
    """Distance of area - other_area to its lower bound (Zou and Donner's square-and-add)."""
    below, above = area - one.lo, other.hi - other_area
    return math.sqrt(max(0.0, below**2 + above**2 - 2 * correlation * below * above))


def _delong(area: float, variance: float, z: float) -> Interval:
    """DeLong's interval, on the scale of the log odds."""
    spread = math.sqrt(variance) / (area * (1 - area))
    log_odds = math.log(area / (1 - area))
    return Interval(*(1 / (1 + math.exp(-log_odds - sign * z * spread)) for sign in (-1, 1)))


def _newcombe(area: float, n_correct: int, n_wrong: int, z: float) -> Interval:
    """True areas within z Hanley-McNeil standard deviations of the observed one."""
    half = (n_correct + n_wrong) / 2 - 1

    def excess(true: float) -> float:
        near = (1 - true) / (2 - true) + true / (1 + true)
        variance = true * (1 - true) * (1 + half * near) / (n_correct * n_wrong)
        return abs(area - true) - z * math.sqrt(variance)

    return Interval(_bisect(excess, 0.0, area), _bisect(excess, 1.0, area))


def _bisect(excess: Callable[[float], float], outer: float, inner: float) -> float:
    """Root of `excess`, which is positive at `outer` and negative at `inner`; `outer` if not."""
    if excess(outer) <= 0:
        return outer
    for _ in range(60):
        middle = (outer + inner) / 2
        outer, inner = (middle, inner) if excess(middle) > 0 else (outer, middle)
    return outer


def _placements(score: FloatArray, is_correct: BoolArray) -> tuple[FloatArray, FloatArray]:
    """DeLong's placements: the share of wrong scores below each correct one, and vice versa."""
    above, below = score[is_correct], score[~is_correct]
    return _shares_below(above, below), 1 - _shares_below(below, above)


def _shares_below(values: FloatArray, others: FloatArray) -> FloatArray:
    """Share of `others` below each value; ties count half."""
    ranked = np.sort(others)
    below, at_most = np.searchsorted(ranked, values), np.searchsorted(ranked, values, "right")
    shares: FloatArray = (below + at_most) / (2 * len(others))
    return shares


def _variance(of_correct: FloatArray, of_wrong: FloatArray) -> float:
    """DeLong's variance of the AUROC."""
    return float(of_correct.var(ddof=1) / len(of_correct) + of_wrong.var(ddof=1) / len(of_wrong))


def _correlation(a: tuple[FloatArray, FloatArray], b: tuple[FloatArray, FloatArray]) -> float:
    """Correlation of two AUROCs on the same images, from their placements."""
    covariances = [
        float(np.cov(one, other)[0, 1]) / len(one) for one, other in zip(a, b, strict=True)
    ]
    spread = math.sqrt(_variance(*a) * _variance(*b))
    return max(-1.0, min(1.0, sum(covariances) / spread)) if spread > 0 else 0.0
