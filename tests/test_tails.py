"""Binomial tails and Clopper-Pearson bounds: examples, and agreement with SciPy's distributions."""

import numpy as np
import pytest
from scipy import special, stats

from demur.calibrate import binomial_cdf, binomial_sf, lower_bound, upper_bound
from demur.metrics.intervals import incomplete_beta, student_p, student_t


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
    assert binomial_cdf(0, 2, 0.5) == pytest.approx(0.25, rel=1e-14)
    assert binomial_cdf([0, 1, 2], 2, 0.5).tolist() == pytest.approx([0.25, 0.75, 1])
    assert binomial_sf([0, 1, 2], 2, 0.5).tolist() == pytest.approx([1, 0.75, 0.25])
    assert upper_bound(0, 59, 0.05) < 0.05 < upper_bound(0, 58, 0.05)  # the rule of 59
    assert lower_bound(20, 20, 0.05) == pytest.approx(0.05 ** (1 / 20))


def test_impossible_and_certain_events() -> None:
    k, n, p = [-1, 0, 4, 4, 3, 0], [3, 0, 4, 4, 4, 4], [0.5, 0.5, 0.5, 1, 1, 0]
    assert binomial_cdf(k, n, p).tolist() == [0, 1, 1, 1, 0, 1]
    assert binomial_sf([0, 5, 4, 1], 4, [0.5, 0.5, 1, 0]).tolist() == [1, 0, 1, 0]
    assert [float(bound(0, 0, 0.05)) for bound in (lower_bound, upper_bound)] == [0, 1]


def test_the_incomplete_beta_function_is_scipys_in_both_tails() -> None:
    generator = np.random.default_rng(0)
    a, b = 10 ** generator.uniform(-0.5, 5, (2, 300))
    mean = a / (a + b)
    spread = np.sqrt(mean * (1 - mean) / (a + b + 1))
    x = np.clip(mean + spread * generator.normal(0, 4, 300), 1e-9, 1 - 1e-9)
    x[:50] = generator.uniform(0, 1, 50)
    expected = special.betainc(a, b, x)
    shown = expected > 1e-250
    assert incomplete_beta(a, b, x)[shown] == pytest.approx(expected[shown], rel=1e-9)
    assert incomplete_beta(2.5, 3.0, [0, 1]).tolist() == [0, 1]


@pytest.mark.parametrize("freedom", [1, 2, 2.7, 30, 1e4, 1e7])
def test_student_equals_scipys(freedom: float) -> None:
    assert student_t(0.05, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-8)
    for t in (0.0, 0.3, -1.9, 2.0, 7.0):
        expected = 2 * stats.t.sf(abs(t), freedom)
        assert student_p(t, freedom) == pytest.approx(expected, rel=1e-7)
