"""Binomial tails and Clopper-Pearson bounds: examples, and agreement with SciPy's distributions."""

import numpy as np
import pytest
from scipy import stats

from demur.calibrate import binomial_cdf, binomial_sf, lower_bound, upper_bound


def test_tails_and_bounds_equal_scipy_distributions() -> None:
    k, n = np.array([0, 3, 60, 900, 7]), np.array([900, 900, 4000, 30_000, 7])
    assert binomial_cdf(k, n, 0.05) == pytest.approx(stats.binom.cdf(k, n, 0.05), rel=1e-11)
    assert binomial_sf(k, n, 0.05) == pytest.approx(stats.binom.sf(k - 1, n, 0.05), rel=1e-11)
    for error in (0.05, 1e-6):
        for bound, side in ((upper_bound, "less"), (lower_bound, "greater")):
            for hits, trials in zip(k.tolist(), n.tolist(), strict=True):
                exact = stats.binomtest(hits, trials, alternative=side)
                end = exact.proportion_ci(1 - error, "exact")
                expected = end.high if side == "less" else end.low
                assert bound(hits, trials, error) == pytest.approx(expected, abs=1e-11)


def test_examples() -> None:
    assert binomial_cdf(0, 2, 0.5) == 0.25
    assert binomial_cdf([0, 1, 2], 2, 0.5).tolist() == pytest.approx([0.25, 0.75, 1])
    assert binomial_sf([0, 1, 2], 2, 0.5).tolist() == pytest.approx([1, 0.75, 0.25])
    assert upper_bound(0, 59, 0.05) < 0.05 < upper_bound(0, 58, 0.05)  # the rule of 59
    assert lower_bound(20, 20, 0.05) == pytest.approx(0.05 ** (1 / 20))


def test_impossible_and_certain_events() -> None:
    k, n, p = [-1, 0, 4, 4, 3, 0], [3, 0, 4, 4, 4, 4], [0.5, 0.5, 0.5, 1, 1, 0]
    assert binomial_cdf(k, n, p).tolist() == [0, 1, 1, 1, 0, 1]
    assert binomial_sf([0, 5, 4, 1], 4, [0.5, 0.5, 1, 0]).tolist() == [1, 0, 1, 0]
    assert [float(bound(0, 0, 0.05)) for bound in (lower_bound, upper_bound)] == [0, 1]
