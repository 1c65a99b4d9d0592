"""Theorem 2 (difficulty of learning A), the temperature, and randomised predictions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demur.errors import BadInput
from demur.metrics.checks import FloatArray, IntArray
from demur.paper import theorems as theory
from demur.paper.theory import TOYS, toy_values
from tests.test_theory import SHARES, SOME


def geometric_bin(a: FloatArray, xi: float, rho: float) -> IntArray:
    """Bin of each value; those below rho share bin 0, two in another bin satisfy bound (i)."""
    last = math.ceil(theory.class_counts(xi, rho)[0] * (1 - theory.SLACK)) - 1
    steps = np.log(np.maximum(a, rho) / rho) / math.log(2 / (2 - xi))
    return np.where(a < rho, 0, np.minimum(1 + np.floor(steps).astype(np.int64), last))


class TestDifficulty:
    def test_the_papers_example_has_twenty_classes(self) -> None:
        assert theory.n_sub(0.1, 0.01) == 20
        assert theory.class_counts(0.5, 1 / 16) == pytest.approx(
            (math.log(16) / math.log(4 / 3) + 1, 4)
        )

    @pytest.mark.parametrize("count", [2, 3, 6, 7, 10, 20, 30, 49, 100, 300])
    def test_whole_counts_are_not_rounded_up(self, count: int) -> None:
        if count > 2:
            assert theory.n_sub(2 / count, 0.01) == count
        assert theory.n_sub(1.999 / count, 0.01) == count + 1

    @SOME
    @given(st.floats(0.005, 0.999), st.floats(0.001, 0.999))
    def test_rounding_before_or_after_the_minimum_is_the_same(self, xi: float, rho: float) -> None:
        n1, n2 = theory.class_counts(xi, rho)
        if min(abs(n - round(n)) for n in (n1, n2)) > 1e-6:
            assert theory.n_sub(xi, rho) == min(math.ceil(n1), math.ceil(n2))
        if rho <= 1 / math.e:
            assert n2 <= n1 + 1e-9, "N1 never matters for rho <= 1/e"

    @SOME
    @given(SHARES, SHARES, st.floats(0.02, 0.99), st.floats(0.001, 0.5))
    def test_two_values_in_one_bin_satisfy_the_bound(
        self, a: float, b: float, xi: float, rho: float
    ) -> None:
        pair = np.array([a, b])
        n1, n2 = theory.class_counts(xi, rho)
        first, second = theory.arithmetic_bin(pair, xi).tolist()
        assert 0 <= min(first, second) <= max(first, second) < math.ceil(n2)
        if first == second:
            assert 2 * abs(a - b) <= xi + 1e-9
        first, second = geometric_bin(pair, xi, rho).tolist()
        assert 0 <= min(first, second) <= max(first, second) < math.ceil(n1)
        if first == second and min(a, b) >= rho:
            assert theory.xi_geometric(pair[:1], pair[1:])[0] <= xi + 1e-9

    def test_below_rho_bin_zero_violates_the_geometric_bound(self) -> None:
        a, b = np.array([0.001]), np.array([0.009])
        assert geometric_bin(a, 0.1, 0.01) == geometric_bin(b, 0.1, 0.01)
        assert theory.xi_geometric(a, b)[0] > 0.1

    @pytest.mark.parametrize(("xi", "rho"), [(0, 0.1), (1, 0.1), (0.1, 0), (0.1, 1), (2, 0.1)])
    def test_bad_xi_or_rho_raises(self, xi: float, rho: float) -> None:
        with pytest.raises(BadInput, match="between 0 and 1"):
            theory.n_sub(xi, rho)


class TestTemperatureAndRandomisedPredictions:
    def test_toy_examples(self) -> None:
        e = math.e
        wrong, confidence = TOYS
        assert toy_values(wrong, 1) == pytest.approx((1 / (1 + e**3), 1 / (1 + 2 * e**2)))
        assert toy_values(wrong, 2) == pytest.approx((1 / (1 + e**1.5), 1 / (1 + 2 * e)))
        for toy in (wrong, confidence):
            (low, high), (more, less) = (toy_values(toy, tau) for tau in (1, 2))
            assert low < high
            assert more > less

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 1.0, 4.0]))
    def test_sampled_accuracy_agrees_with_its_formula(self, seed: int, tau: float) -> None:
        g = np.random.default_rng(seed)
        p, y = theory.probabilities(2 * g.normal(size=(300, 5)), tau), g.integers(0, 5, 300)
        tcon = p[np.arange(300), y]
        gap = theory.sampled_accuracy(p, y, 40, seed) - theory.randomised_accuracy(tcon)
        assert abs(gap) <= 6 * theory.sampling_error(tcon, 40)

    def test_randomised_accuracy_at_temperature_zero_is_the_accuracy(self) -> None:
        logits = np.random.default_rng(0).normal(size=(200, 6))
        y = np.arange(200) % 6
        inputs = theory.theory_inputs_at(logits, y, np.ones(200), 0.0)
        assert theory.randomised_accuracy(inputs.tcon) == inputs.correct.mean()
        warm = theory.theory_inputs_at(logits, y, np.ones(200), 1e-6)
        assert theory.randomised_accuracy(warm.tcon) == pytest.approx(inputs.correct.mean())

    def test_randomised_predictions_may_be_correct_where_the_argmax_never_is(self) -> None:
        logits = [[1.0, 0.0, 0.0]] * 3
        cold, warm = (
            theory.theory_inputs_at(logits, [1, 2, 1], np.ones(3), tau) for tau in (0.0, 1.0)
        )
        assert theory.randomised_accuracy(cold.tcon) == 0
        assert theory.randomised_accuracy(warm.tcon) > 0.2

    def test_calibrated_accuracy_on_an_example(self) -> None:
        con = np.array([0.4, 0.6, 0.8])
        assert theory.calibrated_accuracy(con, 0.0) == pytest.approx(0.6)
        assert theory.calibrated_accuracy(con, 0.6) == pytest.approx(0.7)
        assert theory.calibrated_accuracy(con, 0.9) == 0.0

    @SOME
    @given(st.lists(st.floats(0.1, 1), min_size=1, max_size=30), st.floats(0, 1))
    def test_calibrated_accuracy_is_at_least_t(self, con: list[float], t: float) -> None:
        found = theory.calibrated_accuracy(np.array(con), t)
        assert found >= t - 1e-12 or max(con) < t

    def test_a_calibrated_classifier_has_the_calibrated_accuracy(self) -> None:
        g = np.random.default_rng(1)
        con = g.uniform(0.2, 1, 100_000)
        correct = g.random(len(con)) < con
        for t in (0.3, 0.6, 0.9):
            measured = correct[con >= t].mean()
            assert measured == pytest.approx(theory.calibrated_accuracy(con, t), abs=0.01)
