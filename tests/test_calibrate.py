"""Thresholds with promises: paths, and guarantees counted over simulated draws.

Simulated scores are uniform and an answer's chance to be wrong is a sum of powers of them, so the
population's shares at any thresholds are known exactly. The pilot is drawn by the place of an
image alone; a draw of images in any order is a draw, so their order changes nothing.
"""

import json
import math
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy import stats

from demur.calibrate import (
    OPERATING_POINTS,
    TPR,
    Coverage,
    Guarantee,
    Risk,
    Shortfall,
    Uncertified,
    certify,
    threshold_path,
)
from demur.calibrate.sequential_test import last_passing
from demur.calibrate.threshold_path import ANY_SCORE, counted, thresholds
from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray
from demur.recipes import VOCABULARY
from demur.spec import read, show
from tests.test_guarantees import ONE

DELTA = 0.05
INF = math.inf
Draw = tuple[FloatArray, BoolArray]


# --------------------------------------------------------------------------------------- paths


def some_scores(n: int, seed: int = 0, step: float = 0.0) -> Draw:
    """Two related scores with ties and some images never to be trusted."""
    rng = np.random.default_rng(seed)
    correct = rng.random(n) < 0.8
    first = rng.normal(correct * 1.2, 1)
    scores = np.stack([first, 0.5 * first + rng.normal(correct * 1.2, 0.8)], axis=1)
    scores = np.round(scores / step) * step if step else scores
    scores[rng.random(n) < 0.03, 1] = -INF
    return scores, correct


def reached(scores: FloatArray, at: ArrayLike) -> BoolArray:
    below = (scores < np.asarray(at)).sum(axis=1, dtype=np.int64)
    accepted: BoolArray = below == 0
    return accepted


class TestPath:
    @pytest.mark.parametrize("columns", [1, 2])
    @pytest.mark.parametrize("step", [0.0, 0.5])
    @pytest.mark.parametrize("n", [1, 2, 30, 500])
    def test_from_strict_to_every_score(self, n: int, step: float, columns: int) -> None:
        scores, correct = some_scores(n, step=step)
        scores = scores[:, -columns:]
        path = thresholds(scores, correct)
        assert (np.diff(path, axis=0) <= 0).all()
        assert (np.diff(path, axis=0) < 0).any(axis=1).all()
        assert (path[-1] == ANY_SCORE).all()
        assert np.isin(path, [*scores.ravel(), ANY_SCORE]).all(), "thresholds are pilot scores"

    @pytest.mark.parametrize("step", [0.0, 0.5])
    def test_counts_are_those_of_the_verdicts(self, step: float) -> None:
        scores, correct = some_scores(300, step=step)
        path = thresholds(scores[:100], correct[:100])
        counts = counted(path, scores, correct)
        assert (counts.n, counts.right) == (300, correct.sum())
        for place, at in enumerate(path):
            accepted = reached(scores, at)
            assert counts.accepted[place] == accepted.sum()
            assert counts.wrong[place] == (accepted & ~correct).sum()
            assert counts.kept[place] == (accepted & correct).sum()

    def test_two_scores_take_the_way_of_the_best_area(self) -> None:
        def area(way: list[tuple[int, int]]) -> float:
            at = [[rungs[0][i], rungs[1][j]] for i, j in way]
            accepted = [reached(scores, t) for t in at]
            right = [int((a & correct).sum()) for a in accepted]
            wrong = [int((a & ~correct).sum()) for a in accepted]
            steps = zip(pairwise(right), pairwise(wrong), strict=True)
            return sum((r1 - r0) * (w0 + w1) for (r0, r1), (w0, w1) in steps)

        def ways(i: int, j: int) -> list[list[tuple[int, int]]]:
            if i == j == 0:
                return [[(0, 0)]]
            looser = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
            return [[(i, j), *way] for a, b in looser if min(a, b) >= 0 for way in ways(a, b)]

        for seed in range(5):
            scores, correct = some_scores(80, seed)
            rungs = [threshold_path._rungs(column, 4) for column in scores.T]
            found = threshold_path._staircase(rungs, scores, correct)
            assert area(found) == min(area(way) for way in ways(3, 3))

    def test_a_useless_gate_is_left_open(self) -> None:
        rng = np.random.default_rng(0)
        score = rng.random(4000)
        correct = rng.random(4000) < score
        path = thresholds(np.stack([rng.random(4000), score], axis=1), correct)
        middle = path[np.abs(path[:, 1] - 0.5).argmin()]
        assert middle[0] < 0.2


class TestWalk:
    def test_by_hand(self) -> None:
        p_value, some = np.array([0.001, 0.02, 0.04, 0.3, 0.01, 0.001]), 0.03
        everything_first = np.array([0.05, 0, 0, 0, 0, 0])
        assert last_passing(p_value, everything_first) == 2
        assert last_passing(p_value, np.array([some, 0, 0.02, 0, 0, 0])) == 2, "shares carry over"
        assert last_passing(p_value, np.array([some, 0, 0, 0, 0.02, 0])) == 5, "a new start"
        assert last_passing(p_value, np.array([some, 0, 0, 0, 0.005, 0])) == 1, (
            "which must pass itself"
        )
        assert last_passing(p_value, np.array([0, 0, 0, 0.05, 0, 0])) is None, "a failure loses all"
        assert last_passing(np.array([0.0]), np.array([0.0])) is None

    @pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
    def test_false_promises_stay_within_the_error(self, shared: float) -> None:
        """All are false, their tests independent or one and the same."""
        rng, runs = np.random.default_rng(0), 4000
        false = 0
        for _ in range(runs):
            p_value = np.where(rng.random(12) < shared, rng.random(), rng.random(12))
            false += last_passing(p_value, 0.2 * rng.dirichlet(np.full(12, 0.3))) is not None
        assert false / runs <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / runs)


# --------------------------------------------------------------------------------- by hand


class TestCertificate:
    @pytest.mark.parametrize("columns", [1, 2])
    @pytest.mark.parametrize("guarantee", [TPR(0.9), Coverage(0.7)])
    def test_the_fewest_wrong_of_those_that_pass(self, guarantee: Guarantee, columns: int) -> None:
        scores, correct = some_scores(1500)
        scores = scores[:, :columns]
        found = certify(scores, correct, guarantee, seed=3)
        pilot = np.zeros(1500, dtype=np.bool_)
        pilot[np.random.default_rng(3).permutation(1500)[: found.pilot]] = True
        tests, right = scores[~pilot], correct[~pilot]
        among = right if isinstance(guarantee, TPR) else np.ones(len(right), dtype=np.bool_)
        passing = [
            (int((reached(tests, at) & ~right).sum()), tuple(at.tolist()))
            for at in thresholds(scores[pilot], correct[pilot])
            if stats.binom.sf((reached(tests, at) & among).sum() - 1, among.sum(), guarantee.level)
            <= 0.9 * DELTA
        ]
        assert found.wrong == min(passing)[0]
        assert found.thresholds == passing[0][1], "the strictest of them"
        accepted = reached(tests, found.thresholds)
        assert (found.n, found.right) == (len(right), right.sum())
        assert (found.accepted, found.kept) == (accepted.sum(), (accepted & right).sum())

    def test_intervals_by_hand(self) -> None:
        scores, correct = some_scores(1500)
        found = certify(scores, correct, Risk(0.06))
        each = 0.1 * DELTA / 6 / found.candidates
        low = stats.beta.ppf(each, found.kept, found.right - found.kept + 1)
        high = stats.beta.isf(each, found.kept + 1, found.right - found.kept)
        assert found.tpr_interval == pytest.approx((low, high), abs=1e-10)
        assert found.risk_interval.hi == 0.06, "the promise ends it"
        assert certify(scores, correct, TPR(0.9)).tpr_interval.lo == 0.9
        assert found.coverage_interval.lo < found.accepted / found.n < found.coverage_interval.hi

    def test_same_seed_same_certificate(self) -> None:
        scores, correct = some_scores(900)
        one, two = (certify(scores, correct, TPR(0.9), seed=5) for _ in range(2))
        assert one == two
        assert certify(scores, correct, TPR(0.9), seed=6) != one

    @pytest.mark.parametrize("guarantee", [Risk(0.08), TPR(0.9), Coverage(0.7)])
    def test_only_the_order_of_scores_counts(self, guarantee: Guarantee) -> None:
        scores, correct = some_scores(900, step=0.25)
        found, other = (certify(s, correct, guarantee) for s in (scores, scores**3 + scores))
        assert replace(other, thresholds=found.thresholds) == found
        raised = [t if t == ANY_SCORE else t**3 + t for t in found.thresholds]
        assert list(other.thresholds) == raised

    def test_one_score_may_be_a_column(self) -> None:
        scores, correct = some_scores(900)
        flat, column = scores[:, 0], scores[:, :1]
        assert certify(flat, correct, TPR(0.9)) == certify(column, correct, TPR(0.9))

    def test_more_confidence_is_dearer(self) -> None:
        scores, correct = some_scores(2000)
        sure, surer = (certify(scores, correct, TPR(0.9), c) for c in (0.8, 0.999))
        assert (sure.confidence, surer.confidence) == (0.8, 0.999)
        assert sure.accepted < surer.accepted
        assert certify(scores, correct, Risk(0.1, confidence=0.8)).confidence == 0.8
        assert certify(scores, correct, Risk(0.1, confidence=0.8), 0.9).confidence == 0.9

    def test_in_words_and_as_json(self) -> None:
        scores, correct = some_scores(1500)
        found = certify(scores, correct, Risk(0.06))
        assert found.sentence.startswith("at most 6% wrong among the accepted with 95% confidence")
        describe_counts = json.loads(json.dumps(found.plain()))
        assert describe_counts["guarantee"] == "Risk(0.06)"
        assert describe_counts["thresholds"] == list(found.thresholds)
        assert describe_counts["risk_interval"]["hi"] == 0.06
        everything = certify(np.zeros(900), np.ones(900), Risk(0.05))
        assert everything.sentence.endswith("accepting every score")


class TestShortfall:
    def test_too_few_images_by_hand(self) -> None:
        """32 right answers of 32 tested; 0.95^m <= 0.0225 from m = 74 on."""
        with pytest.raises(Uncertified) as refusal:
            certify(np.zeros(40), np.ones(40), Risk(0.05))
        short = refusal.value.shortfall
        assert (short.hits, short.trials, short.images) == (0, 32, 40)
        assert short.error == pytest.approx(0.9 * DELTA / 2)
        assert short.needed == 93  # 40 * 74 / 32, rounded up
        assert short.possible == math.ceil(1e4 * (1 - 0.0225 ** (1 / 32))) / 1e4
        assert str(refusal.value) == (
            "no threshold gives at most 5% wrong among the accepted with 95% confidence: the most "
            "promising had 0 of 32 accepted answers wrong (0%); give about 93 images instead of "
            "40, or promise at most 11.19%"
        )
        certify(np.zeros(93), np.ones(93), Risk(0.05))

    @pytest.mark.parametrize(
        ("hits", "needed"), [(0, 74), (1, 150), (2, 240), (3, 500), (5, None), (9, None)]
    )
    def test_how_many_images_at_that_rate(self, hits: int, needed: int | None) -> None:
        """Of 100 trials in 100 images; the counts go up in whole wrong answers."""
        short = Shortfall(Risk(0.05), 0.95, (0.5,), 100, hits, 100, 0.0225)
        assert short.needed == needed
        if needed is not None:
            assert stats.binom.cdf(math.ceil(hits * needed / 100), needed, 0.05) <= 0.0225

    @pytest.mark.parametrize(("guarantee", "level"), [(TPR(0.95), TPR), (Coverage(0.97), Coverage)])
    def test_what_it_says_can_be_promised_can_be(
        self, guarantee: Guarantee, level: type[TPR] | type[Coverage]
    ) -> None:
        score, correct = np.where(np.arange(60) % 20 == 0, -INF, 1.0), np.ones(60)
        with pytest.raises(Uncertified) as refusal:
            certify(score, correct, guarantee)
        possible = refusal.value.shortfall.possible
        assert certify(score, correct, level(possible)).thresholds
        with pytest.raises(Uncertified):
            certify(score, correct, level(possible + 0.0001))

    def test_all_of_them_can_never_be_promised(self) -> None:
        with pytest.raises(Uncertified, match="more images would not help"):
            certify(np.arange(500.0), np.ones(500), TPR(1.0))

    def test_it_is_a_wrong_request_and_travels(self) -> None:
        with pytest.raises(BadInput) as refusal:
            certify(np.zeros(40), np.ones(40), Risk(0.05))
        again = pickle.loads(pickle.dumps(refusal.value))
        assert isinstance(again, Uncertified)
        assert str(again) == str(refusal.value)
        assert "\n" not in str(again)


class TestRefusals:
    @pytest.mark.parametrize(
        ("scores", "correct", "words"),
        [
            ([0.1, math.nan], [1, 0], "has a NaN"),
            ([0.1, 0.2, 0.3], [1, 0], "numbers of images differ"),
            ([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]], [1, 0], "one or two scores"),
            ([[0.1, math.nan], [0.1, 0.2]], [1, 0], "score 2 has a NaN"),
            ([], [], "is empty"),
            ([0.5], [1], "at least two"),
            (0.5, [1], "shape"),
            ([[[0.1]], [[0.2]]], [1, 0], "shape"),
            (["cat", "dog"], [1, 0], "cannot be read"),
            ([0.1, 0.2], [1, 7], "other than true and false"),
        ],
    )
    def test_bad_sets(self, scores: ArrayLike, correct: ArrayLike, words: str) -> None:
        with pytest.raises(BadInput, match=words):
            certify(scores, correct, TPR(0.5))

    @pytest.mark.parametrize("confidence", [0.0, 1.0, 95, math.nan])
    def test_bad_confidence(self, confidence: float) -> None:
        with pytest.raises(BadInput, match="confidence is"):
            certify([1, 2], [1, 1], TPR(0.5), confidence)

    @pytest.mark.parametrize(
        "text", ["Risk(0)", "Risk(1)", "Risk(0.05, confidence=1)", "Coverage(1.2)", "TPR(-1)"]
    )
    def test_bad_levels(self, text: str) -> None:
        with pytest.raises(BadInput, match="must be a number"):
            read(text, VOCABULARY)
        with pytest.raises(BadInput, match="level is 0"):
            certify([1, 2], [1, 1], Coverage(0))


class TestOperatingPoints:
    def test_all_are_listed_and_read(self) -> None:
        assert [c.__name__ for c in OPERATING_POINTS] == ["TPR", "Coverage", "Risk", "Median"]
        for text in ("TPR(0.95)", "Coverage(0.9)", "Risk(0.05)", "Risk(0.05, confidence=0.9)"):
            assert show(read(text, VOCABULARY)) == text

    @pytest.mark.parametrize(("level", "kept"), [(0.9, 9), (0.1, 1), (1.0, 10), (0.85, 9)])
    def test_coverage_is_the_largest_threshold_that_reaches_it(
        self, level: float, kept: int
    ) -> None:
        score, correct = np.arange(10.0), np.zeros(10, dtype=np.bool_)
        assert Coverage(level).threshold(score, correct) == 10 - kept
        tied = np.array([3.0, 2, 2, 2, 1])
        assert Coverage(0.6).threshold(tied, correct[:5]) == 2

    def test_a_closed_gate_decides_alone(self) -> None:
        score, correct = np.array([-INF, -INF, 0.3, 0.5]), np.ones(4, dtype=np.bool_)
        assert Coverage(0.9).threshold(score, correct) == 0.3
        assert TPR(0.9).threshold(score, correct) == 0.3

    def test_a_risk_is_certified(self) -> None:
        scores, correct = ONE.draw(2000, np.random.default_rng(0))
        score = scores[:, 0]
        t = Risk(0.05).threshold(score, correct)
        assert (t,) == certify(score, correct, Risk(0.05)).thresholds
        assert Risk(0.05, confidence=0.6).threshold(score, correct) < t
        with pytest.raises(Uncertified):
            Risk(0.0001).threshold(score, correct)
