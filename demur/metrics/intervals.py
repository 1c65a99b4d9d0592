"""Confidence intervals: Wilson, bootstrap, and paired differences.

wilson(380, 400)                                # of a share
bootstrap(auroc, score, correct)                # of any statistic, over resamples of the images
paired_difference(auroc, rcon, con, correct)    # of two rejectors on the same images
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
    """A statistic of one score minus that of another, its interval and its two-sided p-value."""

    value: float
    lo: float
    hi: float
    p: float


def wilson(k: int, n: int, level: float = 0.95) -> Interval:
    """Wilson score interval of k successes in n trials; (0, 1) without trials."""
    check_share("level", level)
    if not 0 <= k <= n:
        raise BadInput(f"{k} successes in {n} trials are impossible; give 0 <= k <= n")
    if n == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    # for k = 0 and k = n the ends are exactly 0 and 1, which rounding would miss
    return Interval(centre - half if k > 0 else 0.0, centre + half if k < n else 1.0)


def bootstrap(
    statistic: Callable[..., float],
    *arrays: ArrayLike,
    within: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of statistic(*arrays) over resamples of the images.

    All arrays are resampled with the same indices. `within` stratifies: each of its groups is
    resampled by itself and keeps its size. A statistic that compares groups, such as AUROC, needs
    this, since it is undefined on a resample without a wrong prediction.

    Args:
        statistic: Function of the resampled arrays.
        *arrays: Arrays with one value per image.
        within: Group of each image, N.
        level: Confidence level.
        resamples: Number of resamples.
        seed: Seed of the resamples.

    Returns:
        The interval between the (1 - level) / 2 quantiles.
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
    """statistic(a) - statistic(b) on the same resamples; arguments as in `bootstrap`.

    The p-value is at least 2 / (1 + resamples).
    """

    def gap(one: FloatArray, other: FloatArray, is_correct: BoolArray) -> float:
        return statistic(one, is_correct) - statistic(other, is_correct)

    a, is_correct = scored_pair(score_a, correct, "score_a")
    b, _ = scored_pair(score_b, correct, "score_b")
    gaps = _resampled(gap, (a, b, is_correct), within, resamples, seed)
    return resampled_difference(float(gap(a, b, is_correct)), gaps, level)


def resampled_difference(value: float, gaps: FloatArray, level: float = 0.95) -> Difference:
    """Difference with its interval and p-value from the differences on the resamples."""
    # counting the sample itself as one more resample keeps p above 0
    other_side = 1 + min(int((gaps <= 0).sum()), int((gaps >= 0).sum()))
    p = min(1.0, 2 * other_side / (1 + len(gaps)))
    return Difference(value, *percentiles(gaps, level), p)


def _resampled(
    statistic: Callable[..., float],
    arrays: tuple[ArrayLike, ...],
    within: ArrayLike | None,
    resamples: int,
    seed: int,
) -> FloatArray:
    """Statistic of each resample of the images."""
    samples = {f"array {i}": np.asarray(array) for i, array in enumerate(arrays, 1)}
    if not samples or resamples < 1:
        raise BadInput("a bootstrap needs an array and a resample; give at least one of each")
    for name, sample in samples.items():
        check_shape(sample, name)
    groups = np.zeros(len(next(iter(samples.values())))) if within is None else np.asarray(within)
    same_length(**samples, within=groups)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    generator = np.random.default_rng(seed)
    values = np.empty(resamples)
    for i in range(resamples):
        rows = np.concatenate([m[generator.integers(len(m), size=len(m))] for m in members])
        values[i] = statistic(*(sample[rows] for sample in samples.values()))
    if np.isnan(values).any():
        raise BadInput("the statistic is NaN on a resample; use one defined for every resample")
    return values


def percentiles(values: FloatArray, level: float) -> Interval:
    """Interval of the values without the same number of extremes at both ends."""
    check_share("level", level)
    ranked = np.sort(values)
    # observed values, not interpolated ones, since a threshold may be infinite
    cut = math.floor((1 - as_decimal(level)) / 2 * len(ranked))
    return Interval(float(ranked[cut]), float(ranked[-1 - cut]))
