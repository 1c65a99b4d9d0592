"""Wilson, bootstrap and paired intervals against published values and closed forms."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demur import metrics
from demur.metrics import FloatArray, Interval
from tests.scored_sets import INF, SOME, images


class TestIntervals:
    def test_wilson_equals_published_values(self) -> None:
        # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3: 81/263 and 15/148.
        assert metrics.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
        assert metrics.wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
        assert metrics.wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)

    def test_wilson_without_trials_is_the_unit_interval(self) -> None:
        assert metrics.wilson(0, 0) == Interval(0.0, 1.0)

    @SOME
    @given(st.integers(1, 500), st.data(), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
    def test_wilson_ends_solve_the_score_equation(
        self, n: int, draw: st.DataObject, level: float
    ) -> None:
        k = draw.draw(st.integers(0, n))
        lo, hi = metrics.wilson(k, n, level)
        assert 0 <= lo <= k / n <= hi <= 1
        assert metrics.wilson(n - k, n, level) == pytest.approx((1 - hi, 1 - lo))
        for end in (lo, hi):
            if 0 < end < 1:
                deviation = abs(k / n - end) / math.sqrt(end * (1 - end) / n)
                assert math.erf(deviation / math.sqrt(2)) == pytest.approx(level)
        assert (lo == 0) == (k == 0)
        assert (hi == 1) == (k == n)

    def test_bootstrap_is_deterministic_and_contains_the_estimate(self) -> None:
        score, correct = images(300)
        found = metrics.bootstrap(metrics.auroc, score, correct, resamples=300)
        assert found == metrics.bootstrap(metrics.auroc, score, correct, resamples=300)
        assert found != metrics.bootstrap(metrics.auroc, score, correct, resamples=300, seed=1)
        assert found.lo < metrics.auroc(score, correct) < found.hi
        assert found.hi - found.lo < 0.2

    def test_bootstrap_does_not_use_the_global_generator(self) -> None:
        state = np.random.get_state(legacy=False)["state"]["key"].copy()
        metrics.bootstrap(metrics.accuracy, [0, 1, 1], resamples=10)
        assert np.array_equal(state, np.random.get_state(legacy=False)["state"]["key"])

    def test_bootstrap_of_a_mean_is_close_to_the_normal_interval(self) -> None:
        correct = np.arange(400) % 4 != 0
        lo, hi = metrics.bootstrap(metrics.accuracy, correct, resamples=2000)
        half = 1.96 * math.sqrt(0.75 * 0.25 / 400)
        assert (lo, hi) == pytest.approx((0.75 - half, 0.75 + half), abs=0.008)

    def test_bootstrap_resamples_all_arrays_with_the_same_indices(self) -> None:
        def mismatch(a: FloatArray, b: FloatArray) -> float:
            assert len(a) == 50
            return float(np.abs(a + b).max())

        left = np.arange(50.0)
        assert metrics.bootstrap(mismatch, left, -left, resamples=20) == (0, 0)

    def test_bootstrap_cuts_equal_numbers_at_both_ends(self) -> None:
        draws = iter(range(100))
        found = metrics.bootstrap(
            lambda _: float(next(draws)), [0.0, 1.0], level=0.9, resamples=100
        )
        assert found == (5, 94)

    def test_bootstrap_accepts_infinite_statistics(self) -> None:
        found = metrics.bootstrap(metrics.paper_threshold, [1.0, 2.0], [0, 1], resamples=200)
        assert found.hi == INF

    def test_a_bootstrap_of_ten_thousand_images_is_fast(self) -> None:
        score, correct = images(10_000)
        start = time.perf_counter()
        metrics.bootstrap(metrics.auroc, score, correct, resamples=100)
        assert time.perf_counter() - start < 2
