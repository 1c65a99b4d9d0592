"""Every metric against an example, a brute-force computation or scikit-learn."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from sklearn.metrics import roc_auc_score

from demur import metrics
from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray
from tests.scored_sets import FINITE, INF, SOME, WITH_NEVER, Set, images, sets

Statistic = Callable[[ArrayLike, ArrayLike], float]
RANKING_METRICS: list[Statistic] = [
    metrics.auroc,
    metrics.aurc,
    metrics.eaurc,
    metrics.augrc,
    metrics.fpr_at_tpr,
]


def auroc_by_pairs(score: FloatArray, correct: BoolArray) -> Fraction:
    pairs = list(itertools.product(score[correct], score[~correct]))
    won = sum((Fraction(1) if a > b else Fraction(int(a == b), 2)) for a, b in pairs)
    return Fraction(won, len(pairs)) if pairs else Fraction(1, 2)


def mean_risks(order: tuple[int, ...], correct: BoolArray) -> tuple[Fraction, Fraction]:
    n, wrong, selective, generalized = len(order), 0, Fraction(0), Fraction(0)
    for k, image in enumerate(order, 1):
        wrong += not correct[image]
        selective += Fraction(wrong, k)
        generalized += Fraction(wrong, n)
    return selective / n, generalized / n


def risks_by_permutations(
    score: FloatArray, correct: BoolArray
) -> tuple[Fraction, Fraction, Fraction]:
    orders = list(itertools.permutations(range(len(score))))
    ranked = [o for o in orders if all(score[a] >= score[b] for a, b in itertools.pairwise(o))]
    risks = [mean_risks(order, correct) for order in ranked]
    selective = sum((risk[0] for risk in risks), Fraction(0)) / len(risks)
    generalized = sum((risk[1] for risk in risks), Fraction(0)) / len(risks)
    best = min(mean_risks(order, correct)[0] for order in orders)
    return selective, selective - best, generalized


class TestRanking:
    @pytest.mark.parametrize(
        ("score", "correct", "expected"),
        [
            ([3, 2, 1], [1, 1, 0], 1.0),
            ([1, 2, 3], [1, 1, 0], 0.0),
            ([3, 2, 2, 1], [1, 1, 0, 0], 3.5 / 4),
            ([-INF, 1, -INF, -INF], [1, 1, 0, 0], 3 / 4),
            ([7, 7, 7], [1, 0, 0], 0.5),
            ([1, 2], [1, 1], 0.5),
            ([1, 2], [0, 0], 0.5),
            ([-INF], [1], 0.5),
        ],
    )
    def test_auroc_on_examples(
        self, score: list[float], correct: list[int], expected: float
    ) -> None:
        assert metrics.auroc(score, correct) == expected

    @SOME
    @given(WITH_NEVER)
    def test_auroc_equals_the_count_of_pairs(self, data: Set) -> None:
        assert metrics.auroc(*data) == float(auroc_by_pairs(*data))

    @pytest.mark.parametrize("step", [0.0, 0.01, 0.5, 2.0])
    def test_auroc_equals_scikit_learn(self, step: float) -> None:
        for seed in range(5):
            score, correct = images(500, seed, step)
            expected = roc_auc_score(correct, score)
            assert metrics.auroc(score, correct) == pytest.approx(expected, abs=1e-12)

    @SOME
    @given(FINITE)
    def test_auroc_of_the_negated_score_is_its_complement(self, data: Set) -> None:
        score, correct = data
        assert metrics.auroc(-score, correct) == pytest.approx(1 - metrics.auroc(score, correct))

    @pytest.mark.parametrize("statistic", RANKING_METRICS)
    @SOME
    @given(data=sets(st.integers(-20, 20).map(float)))
    def test_metrics_depend_on_the_ranking_alone(self, statistic: Statistic, data: Set) -> None:
        score, correct = data
        correct[0] = True
        expected = statistic(score, correct)
        for other in (score**3, np.exp(score / 4), 5 * score - 3):
            assert statistic(other, correct) == expected

    @SOME
    @given(WITH_NEVER, st.randoms(use_true_random=False))
    def test_metrics_do_not_depend_on_the_order_of_the_images(
        self, data: Set, random: Random
    ) -> None:
        score, correct = data
        rows = list(range(len(score)))
        random.shuffle(rows)
        for statistic in (metrics.auroc, metrics.aurc, metrics.augrc, metrics.paper_threshold):
            assert statistic(score[rows], correct[rows]) == statistic(score, correct)

    def test_float32_arrays_and_lists_give_equal_results(self) -> None:
        score, correct = images(200)
        narrow = score.astype(np.float32)
        assert metrics.auroc(narrow, correct) == metrics.auroc(
            narrow.astype(np.float64).tolist(), correct.astype(int).tolist()
        )
        threshold = metrics.threshold_at_tpr(narrow, correct)
        assert metrics.stats_at_threshold(narrow, correct, threshold).tpr >= 0.95


class TestGate:
    """A coupled score is -inf where its gate rejects."""

    def test_a_gate_that_rejects_wrong_predictions_improves_auroc(self) -> None:
        score, correct = np.array([0.9, 0.8, 0.7, 0.6]), np.array([False, True, True, False])
        coupled = np.array([-INF, 0.8, 0.7, 0.6])
        assert metrics.auroc(score, correct) == 0.5
        assert metrics.auroc(coupled, correct) == 1.0
        point = metrics.paper_stats(coupled, correct)
        assert (point.accepted, point.accuracy) == (1, 1.0)

    @SOME
    @given(WITH_NEVER, st.data())
    def test_a_threshold_on_a_coupled_score_is_the_conjunction(
        self, data: Set, draw: st.DataObject
    ) -> None:
        score, correct = data
        n = len(score)
        gate = np.array(draw.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=np.bool_)
        coupled = metrics.stats_at_threshold(np.where(gate, score, -INF), correct, 0.0)
        assert coupled == metrics.stats_of_verdicts((score >= 0) & gate, correct, 0.0)


class TestRisk:
    def test_curve_on_an_example(self) -> None:
        curve = metrics.risk_coverage([3, 2, 2, -INF], [1, 0, 1, 0])
        assert curve.coverage.tolist() == [1 / 4, 3 / 4, 1]
        assert curve.risk.tolist() == [0, 1 / 3, 1 / 2]
        assert curve.threshold.tolist() == [3, 2, -INF]

    @SOME
    @given(WITH_NEVER)
    def test_curve_consists_of_operating_points(self, data: Set) -> None:
        score, correct = data
        curve = metrics.risk_coverage(score, correct)
        assert curve.threshold.tolist() == sorted(set(score.tolist()), reverse=True)
        for coverage, risk, threshold in zip(*curve, strict=True):
            point = metrics.stats_at_threshold(score, correct, threshold)
            assert point.coverage == coverage
            assert 1 - point.accuracy == pytest.approx(risk)

    def test_areas_on_an_example(self) -> None:
        score, correct = [4, 3, 2, 1], [1, 0, 1, 0]
        assert metrics.aurc(score, correct) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
        assert metrics.eaurc(score, correct) == pytest.approx((1 / 2 + 1 / 3 - 1 / 3) / 4)
        assert metrics.augrc(score, correct) == pytest.approx((0 + 1 + 1 + 2) / 16)

    @SOME
    @given(sets(st.sampled_from([-INF, 0.0, 1.0]), most=5))
    def test_areas_equal_means_over_permutations(self, data: Set) -> None:
        selective, excess, generalized = risks_by_permutations(*data)
        assert metrics.aurc(*data) == pytest.approx(float(selective), abs=1e-12)
        assert metrics.eaurc(*data) == pytest.approx(float(excess), abs=1e-12)
        assert metrics.augrc(*data) == pytest.approx(float(generalized), abs=1e-12)

    @SOME
    @given(WITH_NEVER)
    def test_correct_predictions_first_have_no_excess_aurc(self, data: Set) -> None:
        _, correct = data
        assert metrics.eaurc(correct, correct) == 0.0

    @pytest.mark.parametrize(("correct", "risk"), [([1, 1, 1], 0.0), ([0, 0, 0], 1.0)])
    def test_areas_if_all_predictions_are_correct_or_all_wrong(
        self, correct: list[int], risk: float
    ) -> None:
        assert metrics.aurc([1, 2, 2], correct) == risk
        assert metrics.eaurc([1, 2, 2], correct) == 0.0
        assert metrics.augrc([1, 2, 2], correct) == pytest.approx(risk * 2 / 3)

    def test_aurc_of_ties_is_the_error_rate(self) -> None:
        assert metrics.aurc(np.zeros(8), [1, 1, 0, 1, 1, 1, 0, 1]) == pytest.approx(1 / 4)


class TestCalibration:
    def test_ece_on_an_example(self) -> None:
        confidence, correct = [0.1, 0.3, 0.6, 0.9], [0, 1, 1, 1]
        assert metrics.ece(confidence, correct, bins=2) == pytest.approx((0.6 + 0.5) / 4)
        assert metrics.ece(confidence, correct, bins=1) == pytest.approx(1.1 / 4)

    def test_an_edge_belongs_to_the_lower_bin(self) -> None:
        below = metrics.ece([0.2, 0.19], [1, 0], bins=15)
        above = metrics.ece([0.2, 0.21], [1, 0], bins=15)
        assert below == pytest.approx(abs(0.39 - 1) / 2)
        assert above == pytest.approx((0.8 + 0.21) / 2)

    def test_edges_are_the_nearest_doubles(self) -> None:
        edge = 23 / 30
        assert metrics.ece([edge, 0.76], [1, 0], bins=30) == pytest.approx((edge - 0.24) / 2)

    @pytest.mark.parametrize("bins", [1, 10, 15])
    def test_zero_and_one_are_in_bins(self, bins: int) -> None:
        assert metrics.ece([0.0, 1.0, 1.0], [0, 1, 1], bins) == 0.0
        assert metrics.ece([0.0, 1.0], [1, 0], bins) == (0.0 if bins == 1 else 1.0)

    @SOME
    @given(sets(st.floats(0, 1)), st.integers(1, 20))
    def test_ece_equals_a_loop(self, data: Set, bins: int) -> None:
        confidence, correct = data
        total = 0.0
        for b in range(bins):
            inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
            if b == 0:
                inside |= confidence == 0
            if inside.any():
                gap = abs(confidence[inside].mean() - correct[inside].mean())
                total += inside.mean() * gap
        assert metrics.ece(confidence, correct, bins) == pytest.approx(total, abs=1e-12)


FUNCTIONS: list[Callable[[ArrayLike, ArrayLike], object]] = [
    *RANKING_METRICS,
    metrics.paper_threshold,
    metrics.paper_stats,
    metrics.threshold_at_tpr,
    metrics.risk_coverage,
    metrics.ece,
    lambda score, correct: metrics.stats_at_threshold(score, correct, 0.5),
]


class TestBadInput:
    @pytest.mark.parametrize("function", FUNCTIONS)
    @pytest.mark.parametrize(
        ("score", "correct", "message"),
        [
            ([0.1, math.nan], [1, 0], "has a NaN"),
            ([0.1, 0.2], [1, 0, 1], "numbers of images differ"),
            ([], [], "is empty"),
            ([[0.1, 0.2]], [1, 0], "shape"),
            ([0.1, 0.2], [[1, 0]], "shape"),
            (0.1, 1, "shape"),
            ([0.1, 0.2], [3, 7], "other than true and false"),
            ([0.1, 0.2], [1, math.nan], "has a NaN"),
            (["cat", "dog"], [1, 0], "cannot be read"),
            ([[0.1], [0.2, 0.3]], [1, 0], "cannot be read"),
        ],
    )
    def test_bad_arrays_raise(
        self,
        function: Callable[[ArrayLike, ArrayLike], object],
        score: ArrayLike,
        correct: ArrayLike,
        message: str,
    ) -> None:
        with pytest.raises(BadInput, match=message):
            function(score, correct)

    @pytest.mark.parametrize("tpr", [0.0, -0.1, 1.01, 95, math.nan])
    def test_bad_tprs_raise(self, tpr: float) -> None:
        for function in (metrics.paper_threshold, metrics.threshold_at_tpr, metrics.fpr_at_tpr):
            with pytest.raises(BadInput, match="tpr is"):
                function([1, 2], [0, 1], tpr)

    @pytest.mark.parametrize("level", [0.0, 1.0, 95, math.nan])
    def test_bad_levels_raise(self, level: float) -> None:
        with pytest.raises(BadInput, match="level is"):
            metrics.wilson(1, 2, level)

    @pytest.mark.parametrize(("k", "n"), [(-1, 2), (3, 2), (0, -1)])
    def test_impossible_counts_raise(self, k: int, n: int) -> None:
        with pytest.raises(BadInput, match="impossible"):
            metrics.wilson(k, n)

    @pytest.mark.parametrize("confidence", [1.1, -0.1, -INF, INF])
    def test_confidence_outside_the_unit_interval_raises(self, confidence: float) -> None:
        with pytest.raises(BadInput, match="confidence has values outside"):
            metrics.ece([0.5, confidence], [1, 0])

    def test_other_bad_arguments_raise(self) -> None:
        with pytest.raises(BadInput, match="bins is 0"):
            metrics.ece([0.5], [1], bins=0)
        with pytest.raises(BadInput, match="threshold is NaN"):
            metrics.stats_at_threshold([0.5], [1], math.nan)
        with pytest.raises(BadInput, match="is empty"):
            metrics.accuracy([])
        with pytest.raises(BadInput, match="accepted 1, correct 2"):
            metrics.stats_of_verdicts([True], [True, False])

    @pytest.mark.parametrize("correct", [0, 1])
    @pytest.mark.parametrize("score", [-INF, 0.5])
    def test_one_image_gives_finite_results(self, score: float, correct: int) -> None:
        for statistic in (metrics.auroc, metrics.aurc, metrics.eaurc, metrics.augrc):
            assert 0 <= statistic([score], [correct]) <= 1
