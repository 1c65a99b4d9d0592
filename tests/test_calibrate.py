"""Certified thresholds: candidate paths, the sequential test, certificates and their failures."""

import json
import math
import pickle
from contextlib import suppress
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
    certify_threshold,
)
from demur.calibrate.certificate import last_passing
from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray, thresholds
from demur.metrics.thresholds import ANY_SCORE, build_path, count_decisions
from demur.recipes import VOCABULARY
from demur.spec import read, show
from tests.test_guarantees import ONE

DELTA = 0.05
INF = math.inf
Sample = tuple[FloatArray, BoolArray]


# --------------------------------------------------------------------------------------- paths


def two_scores(n: int, seed: int = 0, step: float = 0.0) -> Sample:
    """Two correlated scores, with ties if `step` is given, and some values of -inf."""
    rng = np.random.default_rng(seed)
    correct = rng.random(n) < 0.8
    first = rng.normal(correct * 1.2, 1)
    scores = np.stack([first, 0.5 * first + rng.normal(correct * 1.2, 0.8)], axis=1)
    scores = np.round(scores / step) * step if step else scores
    scores[rng.random(n) < 0.03, 1] = -INF
    return scores, correct


def accepted_by(scores: FloatArray, at: ArrayLike) -> BoolArray:
    below = (scores < np.asarray(at)).sum(axis=1, dtype=np.int64)
    accepted: BoolArray = below == 0
    return accepted


class TestPath:
    @pytest.mark.parametrize("columns", [1, 2])
    @pytest.mark.parametrize("step", [0.0, 0.5])
    @pytest.mark.parametrize("n", [1, 2, 30, 500])
    def test_a_path_is_nested_from_strict_to_every_score(
        self, n: int, step: float, columns: int
    ) -> None:
        scores, correct = two_scores(n, step=step)
        scores = scores[:, -columns:]
        path = build_path(scores, correct)
        assert (np.diff(path, axis=0) <= 0).all()
        assert (np.diff(path, axis=0) < 0).any(axis=1).all()
        assert (path[-1] == ANY_SCORE).all()
        assert np.isin(path, [*scores.ravel(), ANY_SCORE]).all(), "thresholds are pilot scores"

    @pytest.mark.parametrize("step", [0.0, 0.5])
    def test_counts_equal_those_of_the_decisions(self, step: float) -> None:
        scores, correct = two_scores(300, step=step)
        path = build_path(scores[:100], correct[:100])
        counts = count_decisions(path, scores, correct)
        assert (counts.n, counts.correct) == (300, correct.sum())
        for i, at in enumerate(path):
            accepted = accepted_by(scores, at)
            assert counts.accepted[i] == accepted.sum()
            assert counts.accepted_wrong[i] == (accepted & ~correct).sum()
            assert counts.accepted_correct[i] == (accepted & correct).sum()

    def test_the_path_of_two_scores_has_the_best_area(self) -> None:
        def area(staircase: list[tuple[int, int]]) -> float:
            at = [[knots[0][i], knots[1][j]] for i, j in staircase]
            accepted = [accepted_by(scores, t) for t in at]
            right = [int((a & correct).sum()) for a in accepted]
            wrong = [int((a & ~correct).sum()) for a in accepted]
            steps = zip(pairwise(right), pairwise(wrong), strict=True)
            return sum((r1 - r0) * (w0 + w1) for (r0, r1), (w0, w1) in steps)

        def staircases(i: int, j: int) -> list[list[tuple[int, int]]]:
            if i == j == 0:
                return [[(0, 0)]]
            looser = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
            inside = [pair for pair in looser if min(pair) >= 0]
            return [[(i, j), *rest] for pair in inside for rest in staircases(*pair)]

        for seed in range(5):
            scores, correct = two_scores(80, seed)
            knots = [thresholds._candidate_thresholds(column, 4) for column in scores.T]
            found = thresholds._best_staircase(knots, scores, correct)
            assert area(found) == min(area(staircase) for staircase in staircases(3, 3))

    def test_an_uninformative_gate_has_low_thresholds(self) -> None:
        rng = np.random.default_rng(0)
        score = rng.random(4000)
        correct = rng.random(4000) < score
        path = build_path(np.stack([rng.random(4000), score], axis=1), correct)
        middle = path[np.abs(path[:, 1] - 0.5).argmin()]
        assert middle[0] < 0.2


class TestSequentialTest:
    def test_examples(self) -> None:
        p_value, first = np.array([0.001, 0.02, 0.04, 0.3, 0.01, 0.001]), 0.03
        all_first = np.array([0.05, 0, 0, 0, 0, 0])
        assert last_passing(p_value, all_first) == 2
        assert last_passing(p_value, np.array([first, 0, 0.02, 0, 0, 0])) == 2, (
            "shares are handed on"
        )
        assert last_passing(p_value, np.array([first, 0, 0, 0, 0.02, 0])) == 5, "a restart"
        assert last_passing(p_value, np.array([first, 0, 0, 0, 0.005, 0])) == 1, (
            "a restart must pass with its own share"
        )
        assert last_passing(p_value, np.array([0, 0, 0, 0.05, 0, 0])) is None, (
            "a failure hands on nothing"
        )
        assert last_passing(np.array([0.0]), np.array([0.0])) is None

    @pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
    def test_the_family_wise_error_is_controlled(self, shared: float) -> None:
        """No guarantee holds; the tests are independent or equal."""
        rng, runs = np.random.default_rng(0), 4000
        false = 0
        for _ in range(runs):
            p_value = np.where(rng.random(12) < shared, rng.random(), rng.random(12))
            false += last_passing(p_value, 0.2 * rng.dirichlet(np.full(12, 0.3))) is not None
        assert false / runs <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / runs)


# --------------------------------------------------------------------------------- certificates


class TestCertificate:
    @pytest.mark.parametrize("columns", [1, 2])
    @pytest.mark.parametrize("guarantee", [TPR(0.9), Coverage(0.7)])
    def test_of_the_candidates_that_pass_the_strictest_is_chosen(
        self, guarantee: Guarantee, columns: int
    ) -> None:
        scores, correct = two_scores(1500)
        scores = scores[:, :columns]
        found = certify_threshold(scores, correct, guarantee, seed=3)
        pilot = np.zeros(1500, dtype=np.bool_)
        pilot[np.random.default_rng(3).permutation(1500)[: found.pilot]] = True
        tests, is_correct = scores[~pilot], correct[~pilot]
        counted = is_correct if isinstance(guarantee, TPR) else np.ones_like(is_correct)
        passing = [
            (int((accepted_by(tests, at) & ~is_correct).sum()), tuple(at.tolist()))
            for at in build_path(scores[pilot], correct[pilot])
            if stats.binom.sf(
                (accepted_by(tests, at) & counted).sum() - 1, counted.sum(), guarantee.level
            )
            <= 0.9 * DELTA
        ]
        assert found.accepted_wrong == min(passing)[0]
        assert found.thresholds == passing[0][1], "the strictest"
        accepted = accepted_by(tests, found.thresholds)
        assert (found.n, found.correct) == (len(is_correct), is_correct.sum())
        assert (found.accepted, found.accepted_correct) == (
            accepted.sum(),
            (accepted & is_correct).sum(),
        )

    def test_intervals_equal_scipy(self) -> None:
        scores, correct = two_scores(1500)
        found = certify_threshold(scores, correct, Risk(0.06))
        error = 0.1 * DELTA / 6 / found.candidates
        low = stats.beta.ppf(
            error, found.accepted_correct, found.correct - found.accepted_correct + 1
        )
        high = stats.beta.isf(
            error, found.accepted_correct + 1, found.correct - found.accepted_correct
        )
        assert found.tpr_interval == pytest.approx((low, high), abs=1e-10)
        assert found.risk_interval.hi == 0.06, "cut at the guaranteed level"
        assert certify_threshold(scores, correct, TPR(0.9)).tpr_interval.lo == 0.9
        assert found.coverage_interval.lo < found.accepted / found.n < found.coverage_interval.hi

    def test_the_same_seed_gives_the_same_certificate(self) -> None:
        scores, correct = two_scores(900)
        one, two = (certify_threshold(scores, correct, TPR(0.9), seed=5) for _ in range(2))
        assert one == two
        assert certify_threshold(scores, correct, TPR(0.9), seed=6) != one

    @pytest.mark.parametrize("guarantee", [Risk(0.08), TPR(0.9), Coverage(0.7)])
    def test_a_certificate_depends_on_the_ranking_alone(self, guarantee: Guarantee) -> None:
        scores, correct = two_scores(900, step=0.25)
        found, other = (
            certify_threshold(s, correct, guarantee) for s in (scores, scores**3 + scores)
        )
        assert replace(other, thresholds=found.thresholds) == found
        expected = [t if t == ANY_SCORE else t**3 + t for t in found.thresholds]
        assert list(other.thresholds) == expected

    def test_one_score_may_be_flat_or_a_column(self) -> None:
        scores, correct = two_scores(900)
        flat, column = scores[:, 0], scores[:, :1]
        assert certify_threshold(flat, correct, TPR(0.9)) == certify_threshold(
            column, correct, TPR(0.9)
        )

    def test_more_confidence_costs_strictness(self) -> None:
        scores, correct = two_scores(2000)
        less_sure, more_sure = (
            certify_threshold(scores, correct, TPR(0.9), c) for c in (0.8, 0.999)
        )
        assert (less_sure.confidence, more_sure.confidence) == (0.8, 0.999)
        assert less_sure.accepted < more_sure.accepted
        assert certify_threshold(scores, correct, Risk(0.1, confidence=0.8)).confidence == 0.8
        assert certify_threshold(scores, correct, Risk(0.1, confidence=0.8), 0.9).confidence == 0.9

    def test_the_sentence_and_the_json_values(self) -> None:
        scores, correct = two_scores(1500)
        found = certify_threshold(scores, correct, Risk(0.06))
        assert found.sentence.startswith("at most 6% wrong among the accepted with 95% confidence")
        values = json.loads(json.dumps(found.to_json()))
        assert values["guarantee"] == "Risk(0.06)"
        assert values["thresholds"] == list(found.thresholds)
        assert values["risk_interval"]["hi"] == 0.06
        everything = certify_threshold(np.zeros(900), np.ones(900), Risk(0.05))
        assert everything.sentence.endswith("accepting every score")


class TestShortfall:
    def test_too_few_images(self) -> None:
        """32 correct predictions of 32 tested; 0.95^m <= 0.0225 from m = 74 on."""
        with pytest.raises(Uncertified) as error:
            certify_threshold(np.zeros(40), np.ones(40), Risk(0.05))
        short = error.value.shortfall
        assert (short.hits, short.trials, short.images) == (0, 32, 40)
        assert short.error == pytest.approx(0.9 * DELTA / 2)
        assert short.needed == 93  # 40 * 74 / 32, rounded up
        assert short.possible == math.ceil(1e4 * (1 - 0.0225 ** (1 / 32))) / 1e4
        assert str(error.value) == (
            "no threshold gives at most 5% wrong among the accepted with 95% confidence: the most "
            "promising threshold had 0 of 32 accepted predictions wrong (0%) of the images "
            "that tested it; give about 93 images instead of 40 (an estimate), or ask for at most "
            "11.19% and give new images, since a level that these images suggested voids the "
            "confidence"
        )
        certify_threshold(np.zeros(93), np.ones(93), Risk(0.05))

    @pytest.mark.parametrize(
        ("hits", "needed"), [(0, 130), (1, 180), (2, 290), (3, 600), (5, None), (9, None)]
    )
    def test_needed_images_at_the_observed_rate(self, hits: int, needed: int | None) -> None:
        """100 trials in 100 images; expected errors are rounded up, and one is added to any."""
        short = Shortfall(Risk(0.05), 0.95, (0.5,), 100, hits, 100, hits / 100, 0.0225)
        assert short.needed == needed
        if needed is not None:
            errors = math.ceil(hits * needed / 100) + (hits > 0)
            assert stats.binom.cdf(errors, needed, 0.05) <= 0.0225

    @pytest.mark.parametrize(("guarantee", "level"), [(TPR(0.95), TPR), (Coverage(0.97), Coverage)])
    def test_the_possible_level_can_be_certified_and_no_better_one(
        self, guarantee: Guarantee, level: type[TPR] | type[Coverage]
    ) -> None:
        score, correct = np.where(np.arange(60) % 20 == 0, -INF, 1.0), np.ones(60)
        with pytest.raises(Uncertified) as error:
            certify_threshold(score, correct, guarantee)
        possible = error.value.shortfall.possible
        assert certify_threshold(score, correct, level(possible)).thresholds
        with pytest.raises(Uncertified):
            certify_threshold(score, correct, level(possible + 0.0001))

    @pytest.mark.parametrize(("level", "n"), [(0.01, 525), (0.02, 250), (0.05, 250)])
    def test_a_strict_threshold_that_would_do_is_found(self, level: float, n: int) -> None:
        """Of the 30% with the highest scores 0.1% are wrong, of the others 30%."""
        rng = np.random.default_rng(0)

        def draw(n: int) -> tuple[FloatArray, BoolArray]:
            score = rng.random(n)
            return score, rng.random(n) >= np.where(score < 0.7, 0.3, 0.001)

        helped = []
        for _ in range(20):
            with pytest.raises(Uncertified, match="give ") as error:
                certify_threshold(*draw(n), Risk(level))
            if needed := error.value.shortfall.needed:
                helped.append(False)
                with suppress(Uncertified):
                    helped[-1] = certify_threshold(*draw(needed), Risk(level)).accepted > 0
        assert len(helped) >= 15
        assert np.mean(helped) >= 0.8

    def test_a_tpr_of_one_can_never_be_certified(self) -> None:
        with pytest.raises(Uncertified, match="more images would not help"):
            certify_threshold(np.arange(500.0), np.ones(500), TPR(1.0))

    def test_uncertified_is_bad_input_and_can_be_pickled(self) -> None:
        with pytest.raises(BadInput) as error:
            certify_threshold(np.zeros(40), np.ones(40), Risk(0.05))
        copy = pickle.loads(pickle.dumps(error.value))
        assert isinstance(copy, Uncertified)
        assert str(copy) == str(error.value)
        assert "\n" not in str(copy)


class TestBadInput:
    @pytest.mark.parametrize(
        ("scores", "correct", "message"),
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
    def test_bad_arrays_raise(self, scores: ArrayLike, correct: ArrayLike, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            certify_threshold(scores, correct, TPR(0.5))

    @pytest.mark.parametrize("confidence", [0.0, 1.0, 95, math.nan])
    def test_bad_confidence_raises(self, confidence: float) -> None:
        with pytest.raises(BadInput, match="confidence is"):
            certify_threshold([1, 2], [1, 1], TPR(0.5), confidence)

    @pytest.mark.parametrize(
        "text", ["Risk(0)", "Risk(1)", "Risk(0.05, confidence=1)", "Coverage(1.2)", "TPR(-1)"]
    )
    def test_bad_levels_raise(self, text: str) -> None:
        with pytest.raises(BadInput, match="must be a number"):
            read(text, VOCABULARY)
        with pytest.raises(BadInput, match="level is 0"):
            certify_threshold([1, 2], [1, 1], Coverage(0))


class TestOperatingPoints:
    def test_operating_points_can_be_read_from_text(self) -> None:
        assert [c.__name__ for c in OPERATING_POINTS] == ["TPR", "Coverage", "Risk", "Median"]
        for text in ("TPR(0.95)", "Coverage(0.9)", "Risk(0.05)", "Risk(0.05, confidence=0.9)"):
            assert show(read(text, VOCABULARY)) == text

    @pytest.mark.parametrize(("level", "accepted"), [(0.9, 9), (0.1, 1), (1.0, 10), (0.85, 9)])
    def test_coverage_is_the_largest_threshold_that_reaches_it(
        self, level: float, accepted: int
    ) -> None:
        score, correct = np.arange(10.0), np.zeros(10, dtype=np.bool_)
        assert Coverage(level).threshold(score, correct) == 10 - accepted
        tied = np.array([3.0, 2, 2, 2, 1])
        assert Coverage(0.6).threshold(tied, correct[:5]) == 2

    def test_a_gate_that_rejects_too_many_gives_its_lowest_score(self) -> None:
        score, correct = np.array([-INF, -INF, 0.3, 0.5]), np.ones(4, dtype=np.bool_)
        assert Coverage(0.9).threshold(score, correct) == 0.3
        assert TPR(0.9).threshold(score, correct) == 0.3

    def test_the_threshold_of_a_risk_is_certified(self) -> None:
        scores, correct = ONE.draw(2000, np.random.default_rng(0))
        score = scores[:, 0]
        t = Risk(0.05).threshold(score, correct)
        assert (t,) == certify_threshold(score, correct, Risk(0.05)).thresholds
        assert Risk(0.05, confidence=0.6).threshold(score, correct) < t
        with pytest.raises(Uncertified):
            Risk(0.0001).threshold(score, correct)
