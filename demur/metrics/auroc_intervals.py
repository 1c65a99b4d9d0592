"""How sure an AUROC is, and the difference of two on the same images.

    auroc_interval(score, correct)
    auroc_difference(rcon, con, correct)

By DeLong et al. (1988): every image's own part of the area is known, ties included, so nothing is
redrawn. Where a group is small its interval is too narrow; Newcombe's (2006), which asks what area
could have given the one seen, is then taken if it reaches further.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from demur.metrics.checks import BoolArray, FloatArray, check_share, scored_pair
from demur.metrics.intervals import Difference, Interval
from demur.metrics.rejection import auroc

FEW = 300  # images of the smaller group


def auroc_interval(score: ArrayLike, correct: ArrayLike, level: float = 0.95) -> Interval:
    """The interval of the AUROC; (0, 1) if a group is empty."""
    check_share("level", level)
    values, right = scored_pair(score, correct)
    groups = int(right.sum()), int((~right).sum())
    if min(groups) == 0:
        return Interval(0.0, 1.0)
    area, z = auroc(values, right), NormalDist().inv_cdf((1 + level) / 2)
    if min(groups) < FEW:
        newcombe = _newcombe(area, *groups, z)
        if min(groups) == 1 or area in (0.0, 1.0):
            return newcombe
        delong = _delong(area, _variance(*_parts(values, right)), z)
        return Interval(min(newcombe.lo, delong.lo), max(newcombe.hi, delong.hi))
    if area in (0.0, 1.0):
        return _newcombe(area, *groups, z)
    return _delong(area, _variance(*_parts(values, right)), z)


def auroc_difference(
    score_a: ArrayLike, score_b: ArrayLike, correct: ArrayLike, level: float = 0.95
) -> Difference:
    """AUROC(a) - AUROC(b) on the same images, from both intervals and how the two go together."""
    check_share("level", level)
    a, right = scored_pair(score_a, correct, "score_a")
    b, _ = scored_pair(score_b, correct, "score_b")
    gap = auroc(a, right) - auroc(b, right)
    if min(right.sum(), (~right).sum()) < 2:
        return Difference(gap, -1.0, 1.0, 1.0)
    parts_a, parts_b = _parts(a, right), _parts(b, right)
    if all(np.array_equal(one, other) for one, other in zip(parts_a, parts_b, strict=True)):
        return Difference(0.0, 0.0, 0.0, 1.0)
    together = _correlation(parts_a, parts_b)
    down, up = (
        _reach(auroc_interval(one, right, level), auroc(one, right),
               auroc_interval(other, right, level), auroc(other, right), together)
        for one, other in ((a, b), (b, a))
    )  # fmt: skip
    z = NormalDist().inv_cdf((1 + level) / 2)
    against = down if gap > 0 else up
    p = 2 * NormalDist().cdf(-abs(gap) * z / against) if against > 0 else 1.0
    return Difference(gap, max(-1.0, gap - down), min(1.0, gap + up), p)


def _reach(one: Interval, area: float, other: Interval, base: float, together: float) -> float:
    """How far below itself area - base may lie (Zou and Donner's square-and-add)."""
    below, above = area - one.lo, other.hi - base
    return math.sqrt(max(0.0, below**2 + above**2 - 2 * together * below * above))


def _delong(area: float, variance: float, z: float) -> Interval:
    """On the scale of the log odds."""
    spread = math.sqrt(variance) / (area * (1 - area))
    odds = math.log(area / (1 - area))
    return Interval(*(1 / (1 + math.exp(-odds - sign * z * spread)) for sign in (-1, 1)))


def _newcombe(area: float, rights: int, wrongs: int, z: float) -> Interval:
    """The areas whose Hanley-McNeil spread just reaches the one seen."""
    half = (rights + wrongs) / 2 - 1

    def beyond(true: float) -> float:
        near = (1 - true) / (2 - true) + true / (1 + true)
        variance = true * (1 - true) * (1 + half * near) / (rights * wrongs)
        return abs(area - true) - z * math.sqrt(variance)

    return Interval(_border(beyond, 0.0, area), _border(beyond, 1.0, area))


def _border(beyond: Callable[[float], float], outer: float, inner: float) -> float:
    """Where `beyond` turns from positive to negative between its ends."""
    if beyond(outer) <= 0:
        return outer
    for _ in range(60):
        middle = (outer + inner) / 2
        outer, inner = (middle, inner) if beyond(middle) > 0 else (outer, middle)
    return outer


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


def _correlation(a: tuple[FloatArray, FloatArray], b: tuple[FloatArray, FloatArray]) -> float:
    """Of two areas of the same images."""
    both = [float(np.cov(one, other)[0, 1]) / len(one) for one, other in zip(a, b, strict=True)]
    spread = math.sqrt(_variance(*a) * _variance(*b))
    return max(-1.0, min(1.0, sum(both) / spread)) if spread > 0 else 0.0
