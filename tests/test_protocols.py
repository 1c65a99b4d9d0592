"""Operating points and both protocols against hand-computed cases and scikit-learn."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_curve

from demur import metrics
from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray
from tests.scored_sets import FINITE, INF, MANY, SOME, TIED, WITH_NEVER, Set, images, sets

LEVELS = st.sampled_from([0.05, 0.1, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0])


def sklearn_threshold(score: FloatArray, correct: BoolArray, level: float) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, tpr, thresholds = roc_curve(correct, score)
    return float(thresholds[np.argmin(np.abs(tpr - level))])


class TestOperatingStats:
    SCORE = (0.9, 0.8, 0.8, 0.4, 0.1)
    CORRECT = (1, 1, 0, 1, 0)

    def test_by_hand(self) -> None:
        point = metrics.stats_at_threshold(self.SCORE, self.CORRECT, 0.8)
        assert point == (0.8, 2 / 3, 3 / 5, 2 / 3, 1 / 2, 1 / 5, 5, 3)
        assert metrics.accuracy(self.CORRECT) == 3 / 5

    def test_strict_rejects_a_score_equal_to_the_threshold(self) -> None:
        point = metrics.stats_at_threshold(self.SCORE, self.CORRECT, 0.8, strict=True)
        assert point == (0.8, 1.0, 1 / 5, 1 / 3, 0.0, 0.0, 5, 1)

    def test_minus_infinity_is_accepted_only_if_all_are(self) -> None:
        score, correct = [-INF, -INF, 1.0], [0, 0, 1]
        assert metrics.stats_at_threshold(score, correct, -INF).accepted == 3
        assert metrics.stats_at_threshold(score, correct, -INF, strict=True).accepted == 1

    def test_rejecting_all_images_gives_zeros(self) -> None:
        point = metrics.stats_at_threshold(self.SCORE, self.CORRECT, INF)
        assert point == (INF, 0.0, 0.0, 0.0, 0.0, 0.0, 5, 0)
        assert point.accuracy_interval == (0, 1)

    def test_empty_groups(self) -> None:
        wrong = metrics.stats_at_threshold([1, 2], [0, 0], 2)
        assert (wrong.tpr, wrong.fpr, wrong.accuracy) == (1.0, 0.5, 0.0)
        right = metrics.stats_at_threshold([1, 2], [1, 1], 2)
        assert (right.tpr, right.fpr, right.accuracy) == (0.5, 0.0, 1.0)

    def test_accept_decisions_without_a_threshold(self) -> None:
        point = metrics.stats_of_verdicts([1, 1, 1, 0, 0], self.CORRECT)
        assert math.isnan(point.threshold)
        assert point[1:] == metrics.stats_at_threshold(self.SCORE, self.CORRECT, 0.8)[1:]

    @SOME
    @given(WITH_NEVER, st.one_of(TIED, st.just(-INF), st.just(INF)), st.booleans())
    def test_intervals_are_those_of_the_counts(
        self, data: Set, threshold: float, strict: bool
    ) -> None:
        score, correct = data
        accept = score > threshold if strict else score >= threshold
        right, n = int((accept & correct).sum()), len(score)
        point = metrics.stats_at_threshold(score, correct, threshold, strict)
        accepted = int(accept.sum())
        assert (point.accepted, point.n) == (accepted, n)
        assert point.accuracy_interval == metrics.wilson(right, accepted)
        assert point.coverage_interval == metrics.wilson(accepted, n)
        assert point.accepted_wrong_interval == metrics.wilson(accepted - right, n)


class TestPaperProtocol:
    @MANY
    @given(FINITE, LEVELS)
    def test_threshold_and_accuracy_are_sklearns(self, data: Set, level: float) -> None:
        score, correct = data
        expected = sklearn_threshold(score, correct, level)
        assert metrics.paper_threshold(score, correct, level) == expected
        point = metrics.paper_stats(score, correct, level)
        accepted = correct[score > expected]
        assert point.accepted == len(accepted)
        assert point.accuracy == (accepted.mean() if len(accepted) else 0.0)

    @pytest.mark.parametrize("step", [0.0, 0.02, 0.3])
    @pytest.mark.parametrize("n", [10, 100, 3000])
    def test_larger_sets(self, n: int, step: float) -> None:
        for seed in range(10):
            score, correct = images(n, seed, step)
            for level in (0.95, 0.99):
                expected = sklearn_threshold(score, correct, level)
                assert metrics.paper_threshold(score, correct, level) == expected

    @SOME
    @given(sets(st.one_of(TIED, st.just(-INF))), LEVELS)
    def test_minus_infinity_is_the_lowest_score(self, data: Set, level: float) -> None:
        score, correct = data
        lowest = np.where(np.isneginf(score), -9.0, score)
        expected = sklearn_threshold(lowest, correct, level)
        threshold = metrics.paper_threshold(score, correct, level)
        assert threshold == (-INF if expected == -9 else expected)

    def test_collinear_points_are_dropped(self) -> None:
        score = np.arange(40.0)
        correct = score >= 20
        assert metrics.threshold_at_tpr(score, correct) == 21
        assert metrics.paper_threshold(score, correct) == 20
        assert metrics.paper_stats(score, correct).tpr == 19 / 20

    def test_the_nearest_tpr_may_be_below_the_level(self) -> None:
        score, correct = np.arange(44.0), np.arange(44) % 2 == 0
        assert metrics.paper_threshold(score, correct, 0.93) == 4
        assert metrics.stats_at_threshold(score, correct, 4).tpr == 20 / 22
        assert metrics.threshold_at_tpr(score, correct, 0.93) == 2

    def test_without_correct_predictions_nothing_is_accepted(self) -> None:
        assert metrics.paper_threshold([1, 2, 3], [0, 0, 0]) == INF
        point = metrics.paper_stats([1, 2, 3], [0, 0, 0])
        assert point == (INF, 0.0, 0.0, 1.0, 0.0, 0.0, 3, 0)

    def test_without_wrong_predictions_the_smallest_threshold_is_used(self) -> None:
        assert metrics.paper_threshold(np.arange(100.0), np.ones(100)) == 0
        assert metrics.paper_stats(np.arange(100.0), np.ones(100)).accepted == 99

    @pytest.mark.parametrize("correct", [[0], [1]])
    def test_a_single_image_is_rejected(self, correct: list[int]) -> None:
        point = metrics.paper_stats([0.3], correct)
        assert (point.accepted, point.accuracy, point.coverage) == (0, 0.0, 0.0)


class TestDeployProtocol:
    @pytest.mark.parametrize(
        ("n", "level", "kept"),
        [(20, 0.95, 19), (10, 0.1, 1), (100, 0.07, 7), (30, 0.7, 21), (3, 0.95, 3), (7, 1.0, 7)],
    )
    def test_exact_count(self, n: int, level: float, kept: int) -> None:
        score = np.arange(float(n))
        assert metrics.threshold_at_tpr(score, np.ones(n), level) == n - kept

    @SOME
    @given(WITH_NEVER, LEVELS)
    def test_the_largest_threshold_that_reaches_the_level(self, data: Set, level: float) -> None:
        score, correct = data
        correct[0] = True
        threshold = metrics.threshold_at_tpr(score, correct, level)
        right = score[correct]
        asked = Fraction(str(level)) * len(right)
        assert np.sum(right >= threshold) >= asked
        assert all(np.sum(right >= t) < asked for t in score if t > threshold)
        assert metrics.stats_at_threshold(score, correct, threshold).tpr >= level

    def test_ties_at_the_threshold_are_accepted(self) -> None:
        score, correct = [2, 1, 1, 1, 0], [1, 1, 1, 0, 0]
        assert metrics.threshold_at_tpr(score, correct, 0.5) == 1
        assert metrics.fpr_at_tpr(score, correct, 0.5) == 1 / 2
        assert metrics.fpr_at_tpr([2, 1], [1, 1]) == 0.0

    def test_a_threshold_needs_correct_predictions(self) -> None:
        with pytest.raises(BadInput, match="calibration needs correct predictions"):
            metrics.threshold_at_tpr([1, 2], [0, 0])
