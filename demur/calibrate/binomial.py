"""Binomial tails, Clopper-Pearson bounds and Student's t, without SciPy, which is large."""

import math

import numpy as np
from numpy.typing import ArrayLike

from demur.metrics import FloatArray


def binomial_cdf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X <= k) for X ~ Binomial(n, p)."""
    return binomial_sf(np.asarray(n) - k, n, 1 - np.asarray(p))


def binomial_sf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X >= k) for X ~ Binomial(n, p)."""
    a, b = np.asarray(k), np.asarray(n) + 1 - k
    inner = (a > 0) & (b > 0)
    value = incomplete_beta(np.where(inner, a, 1), np.where(inner, b, 1), p)
    return np.where(inner, value, a <= 0)


def upper_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """Clopper-Pearson upper bound: the p with P(X <= k) = error; 1 for k = n."""
    return 1 - lower_bound(np.asarray(n) - k, n, error)


def lower_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """Clopper-Pearson lower bound: the p with P(X >= k) = error; 0 for k = 0."""
    k, n = np.asarray(k), np.asarray(n)
    return np.where(k > 0, _quantile(np.maximum(k, 1), np.maximum(n + 1 - k, 1), error), 0.0)


def student_t(level: float, freedom: float) -> float:
    """The t that |T| of Student's distribution exceeds with probability `level`."""
    u = float(_quantile(np.array(0.5), np.array(freedom / 2), 1 - level))
    return math.sqrt(freedom * u / (1 - u))


def student_p(t: float, freedom: float) -> float:
    """P(|T| > |t|) of Student's distribution."""
    return float(incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)))


def incomplete_beta(a: ArrayLike, b: ArrayLike, x: ArrayLike) -> FloatArray:
    """The regularised incomplete beta function I_x(a, b)."""
    return _beta(a, b, x)[0]


def _beta(a: ArrayLike, b: ArrayLike, x: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """I_x(a, b) by its continued fraction (Lentz), and its derivative times x (1 - x)."""
    a, b, x = (np.asarray(one, np.float64) for one in (a, b, x))
    n, high = a + b, x > (a + 1) / (a + b + 2)  # above the mean the other tail converges fast
    below = np.where(high, n * x - a, a - n * x)  # without the cancellation of 1 - x
    a, b, x = np.where(high, b, a), np.where(high, a, b), np.where(high, 1 - x, x)
    with np.errstate(divide="ignore", invalid="ignore"):  # log(0) = -inf is right at x = 0
        log_x = np.where(below < a / 2, np.log1p(-below / a), np.log(x * n / a))  # log(x n / a)
    power = a * log_x + b * np.log1p(below / b) + _stirling(n) - _stirling(a) - _stirling(b)
    d = 1 / (1 - n * x / (a + 1))
    c, value, change, m = np.ones_like(d), d, np.zeros_like(d), 0
    most = 100 + 10 * math.sqrt(np.max(n, initial=0))  # it needs a few times the root
    while np.any(np.abs(change - 1) > 1e-14) and (m := m + 1) < most:
        odd = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        for term in (odd, -(a + m) * (n + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d, c = 1 / (1 + term * d), 1 + term / c
            value = value * (change := c * d)
    front = np.exp(power) * np.sqrt(b / (2 * math.pi * n * a))
    return np.where(high, 1 - front * value, front * value), front * a


def _stirling(z: FloatArray) -> FloatArray:
    """Log of the gamma function minus Stirling's formula, (z - 1/2) log z - z + log(2 pi) / 2."""
    steps, w = z[..., None] + np.arange(16), (z + 16.0) ** -2
    series = np.sqrt(w) * (1 / 12 - w * (1 / 360 - w * (1 / 1260 - w / 1680)))
    return np.asarray(series + ((steps + 0.5) * np.log1p(1 / steps) - 1).sum(-1))


def _quantile(a: FloatArray, b: FloatArray, level: float) -> FloatArray:
    """The x where I_x(a, b) is the level, by Newton's method on the logs.

    log I is increasing and concave in log x, so that after the first step all steps go up.
    """
    x, step = a / (a + b), np.ones(1)
    for _ in range(100):
        if np.abs(step).max() < 1e-11:
            break
        value, slope = _beta(a, b, x)
        step = np.log(level / value) * value * (1 - x) / slope
        x = np.minimum(x * np.exp(step), 1 - 1e-16)
    return x
