"""Binomial tails and Clopper-Pearson bounds against SciPy and on examples."""

import numpy as np
import pytest
from scipy import stats

from demur.calibrate import binomial_cdf, binomial_sf, lower_bound, upper_bound


class TestTails:
    @pytest.mark.parametrize("n", [1, 2, 7, 40, 1000, 30_000, 10**6])
    def test_tails_equal_scipy(self, n: int) -> None:
        rng = np.random.default_rng(n)
        k = rng.integers(0, n + 1, 60)
        spread = 4 * rng.normal(size=60) * np.sqrt((k + 1) * (n - k + 1)) / (n + 2) ** 1.5
        p = np.clip((k + 0.5) / (n + 1) + spread, 1e-6, 1 - 1e-6)
        assert np.abs(binomial_cdf(k, n, p) - stats.binom.cdf(k, n, p)).max() < 1e-11
        assert np.abs(binomial_sf(k, n, p) - stats.binom.sf(k - 1, n, p)).max() < 1e-11

    def test_small_tails_have_a_small_relative_error(self) -> None:
        k, n = np.array([0, 3, 60, 900]), np.array([900, 900, 4000, 30_000])
        expected = stats.binom.cdf(k, n, 0.05)
        assert expected.max() < 1e-15
        assert binomial_cdf(k, n, 0.05) == pytest.approx(expected, rel=1e-11)

    @pytest.mark.parametrize("error", [0.3, 0.05, 1e-3, 1e-6])
    @pytest.mark.parametrize("n", [1, 3, 50, 4000, 10**6])
    def test_bounds_equal_scipy(self, n: int, error: float) -> None:
        k = np.unique(np.linspace(0, n, 25).astype(int))
        upper = np.append(stats.beta.isf(error, k[:-1] + 1, n - k[:-1]), 1)
        lower = np.append(0, stats.beta.ppf(error, k[1:], n - k[1:] + 1))
        assert np.abs(upper_bound(k, n, error) - upper).max() < 1e-11
        assert np.abs(lower_bound(k, n, error) - lower).max() < 1e-11

    def test_examples(self) -> None:
        assert binomial_cdf(0, 2, 0.5) == 0.25
        assert binomial_cdf([0, 1, 2], 2, 0.5).tolist() == pytest.approx([0.25, 0.75, 1])
        assert binomial_sf([0, 1, 2], 2, 0.5).tolist() == pytest.approx([1, 0.75, 0.25])
        assert upper_bound(0, 59, 0.05) < 0.05 < upper_bound(0, 58, 0.05)  # the rule of 59
        assert lower_bound(20, 20, 0.05) == pytest.approx(0.05 ** (1 / 20))

    def test_impossible_and_certain_events(self) -> None:
        k, n, p = [-1, 0, 4, 4, 3, 0], [3, 0, 4, 4, 4, 4], [0.5, 0.5, 0.5, 1, 1, 0]
        assert binomial_cdf(k, n, p).tolist() == [0, 1, 1, 1, 0, 1]
        assert binomial_sf([0, 5, 4, 1], 4, [0.5, 0.5, 1, 0]).tolist() == [1, 0, 1, 0]
        assert [float(bound(0, 0, 0.05)) for bound in (lower_bound, upper_bound)] == [0, 1]
