"""Wilson and paired intervals against published values and closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demur import metrics
from demur.metrics import Interval
from tests.scored_sets import SOME


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
