"""Exact binomial tails and the Clopper-Pearson bounds that invert them, for whole arrays.

at_most(2, 100, 0.05)       # the chance of 2 or fewer hits in 100 trials at 5%: 0.118
upper_bound(2, 100, 0.05)   # 2 of 100 were hit: the share is below 6.2%, with 95% confidence

A tail is its largest term times a sum of products of ratios. All terms are positive, so the sum
is as exact as that term, which Loader's form of it (2000) gives to the last digits for any n.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from demur.metrics import FloatArray

SERIES_FROM = 16  # from here on five terms of Stirling's series are exact to a double
NEAR = 0.1
CHUNK = 64  # terms of a tail at a time
NEGLIGIBLE = 1e-17
MOST_STEPS, CLOSE = 100, 1e-12


class Trials(NamedTuple):
    """Numbers of hits in numbers of trials with a chance of each, all of one shape."""

    k: FloatArray
    n: FloatArray
    p: FloatArray

    @staticmethod
    def of(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> "Trials":
        """The three as doubles, stretched to one shape."""
        arrays = (np.asarray(part, dtype=np.float64) for part in (k, n, p))
        return Trials(*np.broadcast_arrays(*arrays))


def at_most(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X <= k) for X the hits in n trials with chance p."""
    asked = Trials.of(k, n, p)
    certain = (asked.k >= asked.n) | ((asked.p <= 0) & (asked.k >= 0))
    unsure = ~certain & (asked.k >= 0) & (asked.p < 1)
    p_value = np.zeros(asked.k.shape)
    p_value[certain] = 1
    if not unsure.any():
        return p_value
    hits, trials, share = (part[unsure] for part in asked)
    # summed from the nearer end; the other tail is what is left
    below = hits <= trials * share
    tail = _lower_tail(
        np.where(below, hits, trials - hits - 1), trials, np.where(below, share, 1 - share)
    )
    p_value[unsure] = np.where(below, tail, 1 - tail)
    return p_value


def at_least(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X >= k) for X the hits in n trials with chance p."""
    asked = Trials.of(k, n, p)
    return at_most(asked.n - asked.k, asked.n, 1 - asked.p)


def upper_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """The share above which k or fewer hits in n trials have less than `error` chance."""
    asked = Trials.of(k, n, error)
    bound = np.ones(asked.k.shape)
    unsure = asked.k < asked.n
    if unsure.any():
        bound[unsure] = _solved(asked.k[unsure], asked.n[unsure], error)
    return bound


def lower_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """The share below which k or more hits in n trials have less than `error` chance."""
    asked = Trials.of(k, n, error)
    return 1 - upper_bound(asked.n - asked.k, asked.n, error)


def _solved(k: FloatArray, n: FloatArray, error: float) -> FloatArray:
    """The chance at which at_most(k, n, chance) is `error`: Newton's steps inside a bracket."""
    low, high = k / n, np.ones(k.shape)
    z2 = NormalDist().inv_cdf(error) ** 2
    share = (k + z2 / 2 + np.sqrt(z2 * (k * (n - k) / n + z2 / 4))) / (n + z2)  # Wilson's end
    for _ in range(MOST_STEPS):
        tail = at_most(k, n, share)
        low, high = np.where(tail > error, share, low), np.where(tail > error, high, share)
        # the log of the tail bends little; the tail's own slope is -n P(X = k) in n - 1 trials
        with np.errstate(divide="ignore", invalid="ignore"):
            step = share + tail * np.log(tail / error) / (n * _mass(k, n - 1, share))
        moved = np.where(step < 1, np.clip(step, low, high), (low + high) / 2)
        close = np.abs(moved - share) <= CLOSE * moved
        share = moved
        if close.all():
            break
    return share


def _lower_tail(k: FloatArray, n: FloatArray, p: FloatArray) -> FloatArray:
    """P(X <= k) where 0 <= k <= np and k < n, from the largest term down."""
    last = _mass(k, n, p)
    total = last.copy()
    odds = (1 - p) / p
    for start in range(0, int(k.max()) + 1, CHUNK):
        down = np.arange(start, start + CHUNK)
        ratios = np.maximum(k[:, None] - down, 0) / ((n - k + 1)[:, None] + down)
        terms = last[:, None] * np.cumprod(ratios * odds[:, None], axis=1)
        total += terms.sum(axis=1)
        last = terms[:, -1]
        if (last <= NEGLIGIBLE * total).all():
            break
    return total


def _mass(k: FloatArray, n: FloatArray, p: FloatArray) -> FloatArray:
    """P(X = k) where 0 <= k <= n and 0 < p < 1."""
    inner = (k > 0) & (k < n)
    hits, trials = np.where(inner, k, 1.0), np.where(inner, n, 2.0)
    misses = trials - hits
    log = (
        _stirling_error(trials) - _stirling_error(hits) - _stirling_error(misses)
        - _deviance(hits, trials * p) - _deviance(misses, trials * (1 - p))
    )  # fmt: skip
    between = np.sqrt(trials / (2 * math.pi * hits * misses)) * np.exp(log)
    ends = np.exp(n * np.where(k == 0, np.log1p(-p), np.log(p)))
    mass: FloatArray = np.where(inner, between, ends)
    return mass


_SMALL = np.array(  # of 1, 2, ...
    [
        math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
        for n in range(1, SERIES_FROM)
    ]
)


def _stirling_error(n: FloatArray) -> FloatArray:
    """The log of n! less that of Stirling's formula, for whole n of at least 1."""
    large = np.maximum(n, SERIES_FROM)
    s = 1 / (large * large)
    series = (1 / 12 - s * (1 / 360 - s * (1 / 1260 - s * (1 / 1680 - s / 1188)))) / large
    small = _SMALL[np.minimum(n, SERIES_FROM - 1).astype(np.int64) - 1]
    error: FloatArray = np.where(n < SERIES_FROM, small, series)
    return error


def _deviance(x: FloatArray, mean: FloatArray) -> FloatArray:
    """x log(x / mean) + mean - x, without cancellation where x is near the mean."""
    gap = (x - mean) / (x + mean)
    near = np.abs(gap) < NEAR
    v = np.where(near, gap, 0.0)
    series = np.zeros(v.shape)
    for power in range(19, 1, -2):  # of log((1 + v) / (1 - v)) / 2v - 1
        series = (series + 1 / power) * v * v
    deviance: FloatArray = np.where(
        near, (x - mean) * v + 2 * x * v * series, x * np.log(x / mean) + mean - x
    )
    return deviance
