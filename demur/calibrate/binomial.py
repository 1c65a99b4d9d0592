"""Exact binomial tails and Clopper-Pearson bounds, vectorised over arrays.

binomial_cdf(2, 100, 0.05)       # P(X <= 2) for X ~ Binomial(100, 0.05): 0.118
upper_bound(2, 100, 0.05)   # 2 hits in 100 trials: the share is below 6.2%, with 95% confidence

A tail is its largest term times a sum of products of ratios. All terms are positive, so the sum is
as exact as the largest term, which Loader's saddle-point form (2000) gives to the last digits.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from demur.metrics import FloatArray

SERIES_FROM = 16  # from here on five terms of Stirling's series are exact in double precision
SERIES_BELOW = 0.1  # relative gap below which the deviance is computed by a series
CHUNK = 64  # terms of a tail that are summed at once
NEGLIGIBLE = 1e-17
MAX_STEPS, TOLERANCE = 100, 1e-12


class Trials(NamedTuple):
    """Hits k, trials n and probability p of a hit, broadcast to one shape."""

    k: FloatArray
    n: FloatArray
    p: FloatArray

    @staticmethod
    def of(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> "Trials":
        """Convert to doubles and broadcast."""
        arrays = (np.asarray(part, dtype=np.float64) for part in (k, n, p))
        return Trials(*np.broadcast_arrays(*arrays))


def binomial_cdf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X <= k) for X ~ Binomial(n, p)."""
    given = Trials.of(k, n, p)
    certain = (given.k >= given.n) | ((given.p <= 0) & (given.k >= 0))
    inner = ~certain & (given.k >= 0) & (given.p < 1)
    probability = np.zeros(given.k.shape)
    probability[certain] = 1
    if not inner.any():
        return probability
    hits, trials, share = (part[inner] for part in given)
    # sum the tail on the side of k away from the mean; the other one is its complement
    below = hits <= trials * share
    tail = _lower_tail(
        np.where(below, hits, trials - hits - 1), trials, np.where(below, share, 1 - share)
    )
    probability[inner] = np.where(below, tail, 1 - tail)
    return probability


def binomial_sf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X >= k) for X ~ Binomial(n, p)."""
    given = Trials.of(k, n, p)
    return binomial_cdf(given.n - given.k, given.n, 1 - given.p)


def upper_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """Clopper-Pearson upper bound: the p with P(X <= k) = error; 1 for k = n."""
    given = Trials.of(k, n, error)
    bound = np.ones(given.k.shape)
    inner = given.k < given.n
    if inner.any():
        bound[inner] = _solve_at_most(given.k[inner], given.n[inner], error)
    return bound


def lower_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """Clopper-Pearson lower bound: the p with P(X >= k) = error; 0 for k = 0."""
    given = Trials.of(k, n, error)
    return 1 - upper_bound(given.n - given.k, given.n, error)


def _solve_at_most(k: FloatArray, n: FloatArray, error: float) -> FloatArray:
    """The p with binomial_cdf(k, n, p) = error, by Newton's method inside a bracket."""
    low, high = k / n, np.ones(k.shape)
    z2 = NormalDist().inv_cdf(error) ** 2
    share = (k + z2 / 2 + np.sqrt(z2 * (k * (n - k) / n + z2 / 4))) / (n + z2)  # Wilson's bound
    for _ in range(MAX_STEPS):
        tail = binomial_cdf(k, n, share)
        low, high = np.where(tail > error, share, low), np.where(tail > error, high, share)
        # Newton on the log of the tail, which is nearly linear; the tail's derivative is
        # -n P(X = k) for n - 1 trials
        with np.errstate(divide="ignore", invalid="ignore"):
            step = share + tail * np.log(tail / error) / (n * _mass(k, n - 1, share))
        moved = np.where(step < 1, np.clip(step, low, high), (low + high) / 2)
        converged = np.abs(moved - share) <= TOLERANCE * moved
        share = moved
        if converged.all():
            break
    return share


def _lower_tail(k: FloatArray, n: FloatArray, p: FloatArray) -> FloatArray:
    """P(X <= k) for 0 <= k <= n p and k < n, summed from the largest term down."""
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
    """P(X = k) for 0 <= k <= n and 0 < p < 1."""
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


_STIRLING_ERRORS = np.array(  # of n = 1, 2, ...
    [
        math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
        for n in range(1, SERIES_FROM)
    ]
)


def _stirling_error(n: FloatArray) -> FloatArray:
    """log n! minus the log of Stirling's formula, for whole n >= 1."""
    large = np.maximum(n, SERIES_FROM)
    s = 1 / (large * large)
    series = (1 / 12 - s * (1 / 360 - s * (1 / 1260 - s * (1 / 1680 - s / 1188)))) / large
    small = _STIRLING_ERRORS[np.minimum(n, SERIES_FROM - 1).astype(np.int64) - 1]
    error: FloatArray = np.where(n < SERIES_FROM, small, series)
    return error


def _deviance(x: FloatArray, mean: FloatArray) -> FloatArray:
    """x log(x / mean) + mean - x, without cancellation for x near the mean."""
    gap = (x - mean) / (x + mean)
    near = np.abs(gap) < SERIES_BELOW
    v = np.where(near, gap, 0.0)
    series = np.zeros(v.shape)
    for power in range(19, 1, -2):  # of log((1 + v) / (1 - v)) / 2v - 1
        series = (series + 1 / power) * v * v
    deviance: FloatArray = np.where(
        near, (x - mean) * v + 2 * x * v * series, x * np.log(x / mean) + mean - x
    )
    return deviance
