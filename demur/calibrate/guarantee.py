"""Guarantees: a share of all images to come stays at or above (or below) a level.

The share is binomial: errors among the accepted (risk), accepted among the correct (TPR), or
accepted among all (coverage). For thresholds that are fixed beforehand its test is exact, with ties
or without.

upper_bound(2, 100, 0.05)   # 2 hits in 100 trials: the share is below 6.2%, with 95% confidence
"""

from abc import abstractmethod
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from demur.calibrate.threshold_path import Counts
from demur.metrics import FloatArray
from demur.metrics.checks import IntArray
from demur.rule import OperatingPoint

Quantity = Literal["risk", "tpr", "coverage"]


class Guarantee(OperatingPoint):
    """An operating point whose level `certify_threshold` can guarantee."""

    quantity: Quantity
    is_upper_bound: bool = False  # whether the share stays at or below `level`, else at or above
    level: float
    confidence: float = 0.95

    @property
    @abstractmethod
    def statement(self) -> str:
        """The guarantee in words."""

    @abstractmethod
    def describe_counts(self, hits: int, trials: int) -> str:
        """Observed counts of the share in words."""

    @abstractmethod
    def hits_and_trials(self, counts: Counts) -> tuple[IntArray, IntArray]:
        """Numerator and denominator of the share for each candidate on a path, K each."""

    def p_value(self, hits: IntArray | int, trials: IntArray | int) -> FloatArray:
        """Probability of such counts, or better ones, if the guarantee does not hold."""
        return (binomial_cdf if self.is_upper_bound else binomial_sf)(hits, trials, self.level)

    def bound(self, hits: int, trials: int, error: float) -> float:
        """Best level that can be guaranteed from these counts with probability 1 - error."""
        return float((upper_bound if self.is_upper_bound else lower_bound)(hits, trials, error))


def binomial_cdf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X <= k) for X ~ Binomial(n, p)."""
    hits, trials = np.asarray(k), np.asarray(n)
    inner = (hits >= 0) & (hits < trials)
    a, b = np.where(inner, hits + 1, 1), np.where(inner, trials - hits, 1)
    return np.where(inner, special.betaincc(a, b, p), hits >= trials)


def binomial_sf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X >= k) for X ~ Binomial(n, p)."""
    hits, trials = np.asarray(k), np.asarray(n)
    inner = (hits > 0) & (hits <= trials)
    a, b = np.where(inner, hits, 1), np.where(inner, trials - hits + 1, 1)
    return np.where(inner, special.betainc(a, b, p), hits <= 0)


def upper_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """Clopper-Pearson upper bound: the p with P(X <= k) = error; 1 for k = n."""
    hits, trials = np.asarray(k), np.asarray(n)
    inner = hits < trials
    a, b = np.where(inner, hits + 1, 1), np.where(inner, trials - hits, 1)
    return np.where(inner, special.betainccinv(a, b, error), 1.0)


def lower_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """Clopper-Pearson lower bound: the p with P(X >= k) = error; 0 for k = 0."""
    hits, trials = np.asarray(k), np.asarray(n)
    inner = hits > 0
    a, b = np.where(inner, hits, 1), np.where(inner, trials - hits + 1, 1)
    return np.where(inner, special.betaincinv(a, b, error), 0.0)


def percent(share: float) -> str:
    """Share as a percentage of at most four digits."""
    return f"{100 * share:.4g}%"
