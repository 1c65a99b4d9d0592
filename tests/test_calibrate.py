"""Thresholds with promises: exact tails, paths, and guarantees counted over simulated draws.

Simulated scores are uniform and an answer's chance to be wrong is a sum of powers of them, so the
population's shares at any thresholds are known exactly. The pilot is drawn by the place of an
image alone; a draw of images in any order is a draw, so their order changes nothing.
"""

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from scipy import stats

from demur.calibrate import (
    OPERATING_POINTS,
    TPR,
    Certificate,
    Coverage,
    Promise,
    Risk,
    Shortfall,
    Uncertified,
    at_least,
    at_most,
    certify,
    lower_bound,
    paths,
    upper_bound,
)
from demur.calibrate.paths import ANY_SCORE, counted, thresholds
from demur.calibrate.walk import furthest
from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray, risk_coverage
from demur.metrics.checks import IntArray
from demur.recipes import VOCABULARY
from demur.spec import read, show

DELTA = 0.05
INF = math.inf
Draw = tuple[FloatArray, BoolArray]


# ------------------------------------------------------------------------------------ binomial


class TestTails:
    @pytest.mark.parametrize("n", [1, 2, 7, 40, 1000, 30_000, 10**6])
    def test_against_scipy(self, n: int) -> None:
        rng = np.random.default_rng(n)
        k = rng.integers(0, n + 1, 60)
        spread = 4 * rng.normal(size=60) * np.sqrt((k + 1) * (n - k + 1)) / (n + 2) ** 1.5
        p = np.clip((k + 0.5) / (n + 1) + spread, 1e-6, 1 - 1e-6)
        assert np.abs(at_most(k, n, p) - stats.binom.cdf(k, n, p)).max() < 1e-11
        assert np.abs(at_least(k, n, p) - stats.binom.sf(k - 1, n, p)).max() < 1e-11

    def test_small_tails_keep_their_digits(self) -> None:
        k, n = np.array([0, 3, 60, 900]), np.array([900, 900, 4000, 30_000])
        expected = stats.binom.cdf(k, n, 0.05)
        assert expected.max() < 1e-15
        assert at_most(k, n, 0.05) == pytest.approx(expected, rel=1e-11)

    @pytest.mark.parametrize("error", [0.3, 0.05, 1e-3, 1e-6])
    @pytest.mark.parametrize("n", [1, 3, 50, 4000, 10**6])
    def test_bounds_against_scipy(self, n: int, error: float) -> None:
        k = np.unique(np.linspace(0, n, 25).astype(int))
        upper = np.append(stats.beta.isf(error, k[:-1] + 1, n - k[:-1]), 1)
        lower = np.append(0, stats.beta.ppf(error, k[1:], n - k[1:] + 1))
        assert np.abs(upper_bound(k, n, error) - upper).max() < 1e-11
        assert np.abs(lower_bound(k, n, error) - lower).max() < 1e-11

    def test_by_hand(self) -> None:
        assert at_most(0, 2, 0.5) == 0.25
        assert at_most([0, 1, 2], 2, 0.5).tolist() == pytest.approx([0.25, 0.75, 1])
        assert at_least([0, 1, 2], 2, 0.5).tolist() == pytest.approx([1, 0.75, 0.25])
        assert upper_bound(0, 59, 0.05) < 0.05 < upper_bound(0, 58, 0.05)  # the rule of 59
        assert lower_bound(20, 20, 0.05) == pytest.approx(0.05 ** (1 / 20))

    def test_ends(self) -> None:
        k, n, p = [-1, 0, 4, 4, 3, 0], [3, 0, 4, 4, 4, 4], [0.5, 0.5, 0.5, 1, 1, 0]
        assert at_most(k, n, p).tolist() == [0, 1, 1, 1, 0, 1]
        assert at_least([0, 5, 4, 1], 4, [0.5, 0.5, 1, 0]).tolist() == [1, 0, 1, 0]
        assert [float(bound(0, 0, 0.05)) for bound in (lower_bound, upper_bound)] == [0, 1]


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
            rungs = [paths._rungs(column, 4) for column in scores.T]
            found = paths._staircase(rungs, scores, correct)
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
        chance, some = np.array([0.001, 0.02, 0.04, 0.3, 0.01, 0.001]), 0.03
        everything_first = np.array([0.05, 0, 0, 0, 0, 0])
        assert furthest(chance, everything_first) == 2
        assert furthest(chance, np.array([some, 0, 0.02, 0, 0, 0])) == 2, "shares carry over"
        assert furthest(chance, np.array([some, 0, 0, 0, 0.02, 0])) == 5, "a new start"
        assert furthest(chance, np.array([some, 0, 0, 0, 0.005, 0])) == 1, "which must pass itself"
        assert furthest(chance, np.array([0, 0, 0, 0.05, 0, 0])) is None, "a failure loses all"
        assert furthest(np.array([0.0]), np.array([0.0])) is None

    @pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
    def test_false_promises_stay_within_the_error(self, shared: float) -> None:
        """All are false, their tests independent or one and the same."""
        rng, runs = np.random.default_rng(0), 4000
        false = 0
        for _ in range(runs):
            chance = np.where(rng.random(12) < shared, rng.random(), rng.random(12))
            false += furthest(chance, 0.2 * rng.dirichlet(np.full(12, 0.3))) is not None
        assert false / runs <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / runs)


# --------------------------------------------------------------------------------- simulations


@dataclass(frozen=True)
class Population:
    """Uniform scores; an answer is wrong with chance sum of height * (1 - score) ** power."""

    heights: tuple[float, ...]
    powers: tuple[float, ...]
    ties: int = 0  # distinct values of each score, when not 0

    def draw(self, n: int, rng: np.random.Generator) -> Draw:
        scores = rng.random((n, len(self.powers)))
        chance = (np.array(self.heights) * (1 - scores) ** np.array(self.powers)).sum(axis=1)
        correct = rng.random(n) >= chance
        return (np.floor(scores * self.ties) / self.ties if self.ties else scores), correct

    def shares(self, *at: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """The shares of all images that are accepted, and that are accepted and wrong."""
        cuts = [np.clip(np.asarray(t, dtype=np.float64), 0, 1) for t in at]
        if self.ties:
            cuts = [np.ceil(cut * self.ties - 1e-9) / self.ties for cut in cuts]
        accepted = np.prod(np.broadcast_arrays(*[1 - cut for cut in cuts]), axis=0)
        terms = zip(self.heights, self.powers, cuts, strict=True)
        risk = sum(h * (1 - cut) ** power / (power + 1) for h, power, cut in terms)
        return accepted, accepted * risk

    def truth(self, about: str, at: tuple[float, ...]) -> float:
        accepted, wrong = self.shares(*at)
        everything, all_wrong = self.shares(*(0.0 for _ in at))
        whole = {"risk": accepted, "tpr": everything - all_wrong, "coverage": everything}[about]
        part = {"risk": wrong, "tpr": accepted - wrong, "coverage": accepted}[about]
        return float(part / whole) if whole else 0.0

    def oracle(self, risk: float) -> float:
        """The largest coverage with at most this risk."""
        grid = np.arange(self.ties or 2000) / (self.ties or 2000)
        at = np.meshgrid(*[grid for _ in self.powers])
        accepted, wrong = self.shares(*at)
        return float(accepted[wrong <= risk * accepted + 1e-12].max())


ONE = Population((0.9,), (8,))  # 90% right; a risk of 5% allows to answer 92%
TWO = Population((0.45, 0.45), (8, 8))  # neither score alone is enough: 84%
FLAT = Population((0.0505,), (0,))  # a score that says nothing, a risk just above 5%
# with ties: one step below full coverage the risk is 5.2%, and 86.9% of the right answers are kept
TIED_ONE = Population((0.64,), (4,), ties=5)
TIED_TWO = Population((0.32, 0.32), (4, 4), ties=5)
Sorting = Callable[[Draw], IntArray]


def certificates(
    population: Population, promise: Promise, n: int, runs: int, order: Sorting | None = None
) -> list[Certificate | None]:
    rng, found = np.random.default_rng(n + runs), list[Certificate | None]()
    for run in range(runs):
        scores, correct = population.draw(n, rng)
        if order is not None:
            rows = order((scores, correct))
            scores, correct = scores[rows], correct[rows]
        try:
            found.append(certify(scores, correct, promise, seed=0 if order else run))
        except Uncertified:
            found.append(None)
    return found


def broken(population: Population, found: list[Certificate | None]) -> float:
    """The share of runs that promise what the population does not keep."""
    false = 0
    for one in found:
        if one is not None:
            true, level = population.truth(one.promise.about, one.thresholds), one.promise.level
            false += true > level + 1e-12 if one.promise.ceiling else true < level - 1e-12
    return false / len(found)


def allowed(runs: int) -> float:
    return DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / runs)


def mean_coverage(population: Population, found: list[Certificate | None]) -> float:
    return float(np.mean([population.truth("coverage", f.thresholds) if f else 0.0 for f in found]))


class TestGuarantees:
    @pytest.mark.parametrize(
        ("population", "n"), [(ONE, 4000), (TWO, 4000), (TIED_ONE, 1000), (TIED_TWO, 2000)]
    )
    def test_a_risk_is_kept_and_not_by_refusing(self, population: Population, n: int) -> None:
        found = certificates(population, Risk(0.05), n, 2000)
        assert broken(population, found) <= allowed(2000)
        counts = np.array([(f.wrong, f.accepted) for f in found if f])
        assert stats.binom.cdf(counts[:, 0], counts[:, 1], 0.05).max() <= 0.9 * DELTA
        ratio = mean_coverage(population, found) / population.oracle(0.05)
        assert ratio >= (0.9 if n == 4000 else 0.75)

    @pytest.mark.parametrize(
        ("population", "level", "n", "runs"),
        [(ONE, 0.95, 1000, 500), (TIED_ONE, 0.873, 1000, 1000), (TWO, 0.95, 1500, 600)],
    )
    def test_a_tpr_is_kept_and_barely_more(
        self, population: Population, level: float, n: int, runs: int
    ) -> None:
        found = certificates(population, TPR(level), n, runs)
        assert None not in found
        assert broken(population, found) <= allowed(runs)
        kept = np.mean([population.truth("tpr", f.thresholds) for f in found if f])
        assert level < kept < (level + 0.025 if not population.ties else 1)

    def test_a_coverage_is_kept(self) -> None:
        found = certificates(TWO, Coverage(0.8), 1000, 500)
        assert broken(TWO, found) <= allowed(500)
        assert 0.8 < mean_coverage(TWO, found) < 0.84

    @pytest.mark.parametrize("promise", [Risk(0.05), TPR(0.95)])
    def test_promise_and_intervals_hold_together(self, promise: Promise) -> None:
        found = certificates(TWO, promise, 2000, 100)
        false = 0
        for one in found:
            assert one is not None
            intervals = (one.risk_interval, one.tpr_interval, one.coverage_interval)
            true = [TWO.truth(about, one.thresholds) for about in ("risk", "tpr", "coverage")]
            held = [low <= t <= high for t, (low, high) in zip(true, intervals, strict=True)]
            false += not all(held)
            assert max(high - low for low, high in intervals) < 0.12
        assert false / len(found) <= allowed(100)

    @pytest.mark.parametrize("columns", [1, 2])
    def test_a_score_that_says_nothing_cannot_be_tried_until_it_passes(self, columns: int) -> None:
        """Every certificate is false here; without the order of testing many are given."""
        flat = Population(tuple(0.0505 / columns for _ in range(columns)), (0,) * columns)
        found = certificates(flat, Risk(0.05), 900, 600)
        assert broken(flat, found) <= allowed(600)
        rng, careless = np.random.default_rng(0), 0
        for _ in range(200):
            scores, correct = flat.draw(900, rng)
            tests = counted(thresholds(scores[:300], correct[:300]), scores[300:], correct[300:])
            careless += bool((at_most(tests.wrong, tests.accepted, 0.05) <= DELTA).any())
        assert careless / 200 > allowed(200)

    def test_a_risk_of_5_percent_on_the_same_images_promises_nothing(self) -> None:
        rng, careless = np.random.default_rng(0), 0
        for _ in range(300):
            scores, correct = ONE.draw(1000, rng)
            curve = risk_coverage(scores[:, 0], correct)
            at = float(curve.threshold[np.flatnonzero(curve.risk <= 0.05)[-1]])
            careless += ONE.truth("risk", (at,)) > 0.05
        assert careless / 300 > 0.3

    @pytest.mark.parametrize("falling", [True, False])
    def test_the_order_of_the_images_does_not_count(self, falling: bool) -> None:
        """Sorted by score or with the wrong answers first, and always the same pilot places."""

        def order(draw: Draw) -> IntArray:
            return np.argsort(-draw[0][:, 0]) if falling else np.argsort(draw[1], kind="stable")

        found = certificates(ONE, Risk(0.05), 1000, 500, order)
        assert broken(ONE, found) <= allowed(500)
        assert mean_coverage(ONE, found) > 0.85 * ONE.oracle(0.05)


class TestExtremes:
    def test_a_nearly_perfect_classifier_answers_everything(self) -> None:
        found = certificates(Population((0.002,), (0,)), Risk(0.05), 500, 200)
        assert all(f is not None and f.accepted == f.n for f in found)
        assert all(f is not None and f.thresholds == (ANY_SCORE,) for f in found)

    @pytest.mark.parametrize("columns", [1, 2])
    def test_a_hopeless_classifier_is_never_certified(self, columns: int) -> None:
        hopeless = Population(tuple(0.6 / columns for _ in range(columns)), (0,) * columns)
        assert certificates(hopeless, Risk(0.05), 500, 300) == [None] * 300
        scores, correct = hopeless.draw(500, np.random.default_rng(0))
        with pytest.raises(Uncertified, match="more images would not help at that rate") as refusal:
            certify(scores, correct, Risk(0.05))
        assert refusal.value.shortfall.needed is None

    def test_a_good_classifier_needs_no_score(self) -> None:
        good = Population((0.03,), (0,))
        found = certificates(good, Risk(0.05), 4000, 100)
        assert mean_coverage(good, found) > 0.9

    def test_wrong_answers_on_top_do_not_stop_the_walk(self) -> None:
        """The most trusted 3% are all wrong, yet the risk of all is 3%."""
        score = np.arange(4000.0)
        found = certify(score, score < 3880, Risk(0.05))
        assert found.accepted == found.n

    def test_never_stays_never(self) -> None:
        rng = np.random.default_rng(0)
        correct = rng.random(1000) < 0.7
        shut = np.where(correct, rng.random(1000), -INF)
        found = certify(shut, correct, Risk(0.05))
        assert (found.thresholds, found.wrong, found.kept) == ((ANY_SCORE,), 0, found.right)
        with pytest.raises(Uncertified, match="more images would not help"):
            certify(shut, correct, Coverage(0.9))
        both = certify(np.stack([np.full(1000, INF), shut], axis=1), correct, Risk(0.05))
        assert (both.thresholds, both.wrong) == ((ANY_SCORE, ANY_SCORE), 0)
        with pytest.raises(Uncertified, match="too few to test any"):
            certify(np.full(1000, -INF), correct, Risk(0.05))

    def test_any_score_is_not_minus_infinity_in_float32(self) -> None:
        scores = torch.tensor([-INF, -3e38, 0, INF])
        assert (scores >= ANY_SCORE).tolist() == [False, True, True, True]


# --------------------------------------------------------------------------------- by hand


class TestCertificate:
    @pytest.mark.parametrize("columns", [1, 2])
    @pytest.mark.parametrize("promise", [TPR(0.9), Coverage(0.7)])
    def test_the_fewest_wrong_of_those_that_pass(self, promise: Promise, columns: int) -> None:
        scores, correct = some_scores(1500)
        scores = scores[:, :columns]
        found = certify(scores, correct, promise, seed=3)
        pilot = np.zeros(1500, dtype=np.bool_)
        pilot[np.random.default_rng(3).permutation(1500)[: found.pilot]] = True
        tests, right = scores[~pilot], correct[~pilot]
        among = right if isinstance(promise, TPR) else np.ones(len(right), dtype=np.bool_)
        passing = [
            (int((reached(tests, at) & ~right).sum()), tuple(at.tolist()))
            for at in thresholds(scores[pilot], correct[pilot])
            if stats.binom.sf((reached(tests, at) & among).sum() - 1, among.sum(), promise.level)
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

    @pytest.mark.parametrize("promise", [Risk(0.08), TPR(0.9), Coverage(0.7)])
    def test_only_the_order_of_scores_counts(self, promise: Promise) -> None:
        scores, correct = some_scores(900, step=0.25)
        found, other = (certify(s, correct, promise) for s in (scores, scores**3 + scores))
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
        told = json.loads(json.dumps(found.plain()))
        assert told["promise"] == "Risk(0.06)"
        assert told["thresholds"] == list(found.thresholds)
        assert told["risk_interval"]["hi"] == 0.06
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

    @pytest.mark.parametrize(("promise", "level"), [(TPR(0.95), TPR), (Coverage(0.97), Coverage)])
    def test_what_it_says_can_be_promised_can_be(
        self, promise: Promise, level: type[TPR] | type[Coverage]
    ) -> None:
        score, correct = np.where(np.arange(60) % 20 == 0, -INF, 1.0), np.ones(60)
        with pytest.raises(Uncertified) as refusal:
            certify(score, correct, promise)
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
        assert [c.__name__ for c in OPERATING_POINTS] == ["TPR", "Coverage", "Risk"]
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
