"""Guarantees by simulation: promises are kept as often as they say, and not by refusing."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from scipy import stats

from demur.calibrate import (
    TPR,
    Certificate,
    Coverage,
    Guarantee,
    Risk,
    Uncertified,
    at_most,
    certify,
)
from demur.calibrate.threshold_path import ANY_SCORE, counted, thresholds
from demur.metrics import BoolArray, FloatArray, risk_coverage
from demur.metrics.checks import IntArray

DELTA = 0.05
INF = math.inf
Draw = tuple[FloatArray, BoolArray]


# --------------------------------------------------------------------------------- simulations


@dataclass(frozen=True)
class Population:
    """Uniform scores; an answer is wrong with chance sum of height * (1 - score) ** power."""

    heights: tuple[float, ...]
    powers: tuple[float, ...]
    ties: int = 0  # distinct values of each score, when not 0

    def draw(self, n: int, rng: np.random.Generator) -> Draw:
        scores = rng.random((n, len(self.powers)))
        p_value = (np.array(self.heights) * (1 - scores) ** np.array(self.powers)).sum(axis=1)
        correct = rng.random(n) >= p_value
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
    population: Population, guarantee: Guarantee, n: int, runs: int, order: Sorting | None = None
) -> list[Certificate | None]:
    rng, found = np.random.default_rng(n + runs), list[Certificate | None]()
    for run in range(runs):
        scores, correct = population.draw(n, rng)
        if order is not None:
            rows = order((scores, correct))
            scores, correct = scores[rows], correct[rows]
        try:
            found.append(certify(scores, correct, guarantee, seed=0 if order else run))
        except Uncertified:
            found.append(None)
    return found


def broken(population: Population, found: list[Certificate | None]) -> float:
    """The share of runs that promise what the population does not keep."""
    false = 0
    for one in found:
        if one is not None:
            true, level = (
                population.truth(one.guarantee.quantity, one.thresholds),
                one.guarantee.level,
            )
            false += true > level + 1e-12 if one.guarantee.is_upper_bound else true < level - 1e-12
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

    @pytest.mark.parametrize("guarantee", [Risk(0.05), TPR(0.95)])
    def test_promise_and_intervals_hold_together(self, guarantee: Guarantee) -> None:
        found = certificates(TWO, guarantee, 2000, 100)
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
