"""How sure a number is: Wilson and bootstrap intervals, and paired comparison.

wilson(380, 400)                                # of a share
bootstrap(auroc, score, correct)                # of any statistic, images redrawn jointly
paired_difference(auroc, rcon, con, correct)    # is one rejector better on the same images?
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from demur.errors import BadInput
from demur.metrics.checks import (
    BoolArray,
    FloatArray,
    as_decimal,
    check_shape,
    check_share,
    same_length,
    scored_pair,
)


class Interval(NamedTuple):
    """A confidence interval, both ends included."""

    lo: float
    hi: float


class Difference(NamedTuple):
    """A statistic of one score less that of another, its interval, and a two-sided p-value."""

    value: float
    lo: float
    hi: float
    p: float


def wilson(k: int, n: int, level: float = 0.95) -> Interval:
    """The Wilson score interval of k successes in n trials; (0, 1) when there are no trials."""
    check_share("level", level)
    if not 0 <= k <= n:
        raise BadInput(f"{k} successes in {n} trials is impossible; give 0 <= k <= n")
    if n == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    # At 0 and n the ends are exactly 0 and 1; rounding would miss them.
    return Interval(centre - half if k > 0 else 0.0, centre + half if k < n else 1.0)


def bootstrap(
    statistic: Callable[..., float],
    *arrays: ArrayLike,
    within: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """The percentile interval of statistic(*arrays), the images redrawn jointly in all arrays.

    With `within` each of its groups is redrawn by itself and keeps its size: for a statistic that
    compares the groups, such as AUROC, which a draw without a wrong answer would not define.
    """
    return percentiles(_resampled(statistic, arrays, within, resamples, seed), level)


def paired_difference(
    statistic: Callable[[FloatArray, BoolArray], float],
    score_a: ArrayLike,
    score_b: ArrayLike,
    correct: ArrayLike,
    *,
    within: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Difference:
    """statistic(a) - statistic(b) on the same images, redrawn jointly; p is never 0."""

    def gap(one: FloatArray, other: FloatArray, right: BoolArray) -> float:
        return statistic(one, right) - statistic(other, right)

    a, right = scored_pair(score_a, correct, "score_a")
    b, _ = scored_pair(score_b, correct, "score_b")
    gaps = _resampled(gap, (a, b, right), within, resamples, seed)
    return resampled_difference(float(gap(a, b, right)), gaps, level)


def resampled_difference(value: float, gaps: FloatArray, level: float = 0.95) -> Difference:
    """A difference with the interval and p-value that redrawing it gave."""
    # Counting the sample itself as one draw more keeps p above 0.
    against = 1 + min(int((gaps <= 0).sum()), int((gaps >= 0).sum()))
    p = min(1.0, 2 * against / (1 + len(gaps)))
    return Difference(value, *percentiles(gaps, level), p)


def _resampled(
    statistic: Callable[..., float],
    arrays: tuple[ArrayLike, ...],
    within: ArrayLike | None,
    resamples: int,
    seed: int,
) -> FloatArray:
    """The statistic on each resample of the images."""
    samples = {f"array {place}": np.asarray(array) for place, array in enumerate(arrays, 1)}
    if not samples or resamples < 1:
        raise BadInput("a bootstrap needs an array and a resample; give at least one of each")
    for name, sample in samples.items():
        check_shape(sample, name)
    groups = np.zeros(len(next(iter(samples.values())))) if within is None else np.asarray(within)
    same_length(**samples, within=groups)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    generator = np.random.default_rng(seed)
    values = np.empty(resamples)
    for place in range(resamples):
        rows = np.concatenate([m[generator.integers(len(m), size=len(m))] for m in members])
        values[place] = statistic(*(sample[rows] for sample in samples.values()))
    if np.isnan(values).any():
        raise BadInput("the statistic is NaN on a resample; use one defined for every draw")
    return values


def percentiles(values: FloatArray, level: float) -> Interval:
    """The interval left after cutting the same number of values off both ends."""
    check_share("level", level)
    ranked = np.sort(values)
    # Observed values, not interpolated ones: a threshold may be infinite.
    cut = math.floor((1 - as_decimal(level)) / 2 * len(ranked))
    return Interval(float(ranked[cut]), float(ranked[-1 - cut]))
