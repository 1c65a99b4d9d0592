"""Guarantees by simulation: they hold with their confidence, at close to optimal coverage.

Scores are uniform and the error probability is a sum of powers of them, so the true risk, TPR and
coverage at any thresholds are known exactly.
"""

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
    binomial_cdf,
    certify_threshold,
)
from demur.metrics import BoolArray, FloatArray, risk_coverage
from demur.metrics.checks import IntArray
from demur.metrics.thresholds import ANY_SCORE, build_path, count_decisions
from tests.samples import Samples

DELTA = 0.05
INF = math.inf
Sample = tuple[FloatArray, BoolArray]


# --------------------------------------------------------------------------------- simulations


@dataclass(frozen=True)
class Population:
    """Uniform scores; P(wrong) is the sum of height * (1 - score) ** power."""

    heights: tuple[float, ...]
    powers: tuple[float, ...]
    ties: int = 0  # distinct values of each score, when not 0

    def draw(self, n: int, rng: np.random.Generator) -> Sample:
        scores = rng.random((n, len(self.powers)))
        p_wrong = (np.array(self.heights) * (1 - scores) ** np.array(self.powers)).sum(axis=1)
        correct = rng.random(n) >= p_wrong
        return (np.floor(scores * self.ties) / self.ties if self.ties else scores), correct

    def shares(self, *at: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Shares of all images that are accepted, and that are accepted errors."""
        cuts = [np.clip(np.asarray(t, dtype=np.float64), 0, 1) for t in at]
        if self.ties:
            cuts = [np.ceil(cut * self.ties - 1e-9) / self.ties for cut in cuts]
        accepted = np.prod(np.broadcast_arrays(*[1 - cut for cut in cuts]), axis=0)
        terms = zip(self.heights, self.powers, cuts, strict=True)
        risk = sum(h * (1 - cut) ** power / (power + 1) for h, power, cut in terms)
        return accepted, accepted * risk

    def true_share(self, quantity: str, at: tuple[float, ...]) -> float:
        accepted, wrong = self.shares(*at)
        total, total_wrong = self.shares(*(0.0 for _ in at))
        whole = {"risk": accepted, "tpr": total - total_wrong, "coverage": total}[quantity]
        part = {"risk": wrong, "tpr": accepted - wrong, "coverage": accepted}[quantity]
        return float(part / whole) if whole else 0.0

    def optimal_coverage(self, risk: float) -> float:
        """Largest coverage with at most this risk."""
        grid = np.arange(self.ties or 2000) / (self.ties or 2000)
        at = np.meshgrid(*[grid for _ in self.powers])
        accepted, wrong = self.shares(*at)
        return float(accepted[wrong <= risk * accepted + 1e-12].max())


ONE = Population((0.9,), (8,))  # accuracy 90%; at a risk of 5% the optimal coverage is 92%
TWO = Population((0.45, 0.45), (8, 8))  # needs both scores; optimal coverage 84%
FLAT = Population((0.0505,), (0,))  # an uninformative score with a risk just above 5%
# with ties: one step below full coverage the risk is 5.2% and the TPR 86.9%
TIED_ONE = Population((0.64,), (4,), ties=5)
TIED_TWO = Population((0.32, 0.32), (4, 4), ties=5)
Order = Callable[[Sample], IntArray]
SIMULATIONS = 1000  # of each guarantee in `make exhaustive`


def certificates(
    population: Population, guarantee: Guarantee, n: int, runs: int, order: Order | None = None
) -> list[Certificate | None]:
    rng, found = np.random.default_rng(n + runs), list[Certificate | None]()
    for run in range(runs):
        scores, correct = population.draw(n, rng)
        if order is not None:
            rows = order((scores, correct))
            scores, correct = scores[rows], correct[rows]
        try:
            found.append(certify_threshold(scores, correct, guarantee, seed=0 if order else run))
        except Uncertified:
            found.append(None)
    return found


def failure_rate(population: Population, found: list[Certificate | None]) -> float:
    """Share of the runs whose guarantee does not hold in the population."""
    false = 0
    for one in found:
        if one is not None:
            true = population.true_share(one.guarantee.quantity, one.thresholds)
            level = one.guarantee.level
            false += true > level + 1e-12 if one.guarantee.is_upper_bound else true < level - 1e-12
    return false / len(found)


def allowed_rate(runs: int) -> float:
    """DELTA plus three standard deviations of a rate over so many runs."""
    return DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / runs)


def mean_coverage(population: Population, found: list[Certificate | None]) -> float:
    return float(
        np.mean([population.true_share("coverage", f.thresholds) if f else 0.0 for f in found])
    )


class TestGuarantees:
    @pytest.mark.parametrize(
        ("population", "n"), [(ONE, 4000), (TWO, 4000), (TIED_ONE, 1000), (TIED_TWO, 2000)]
    )
    def test_a_risk_holds_at_near_optimal_coverage(
        self, population: Population, n: int, samples: Samples
    ) -> None:
        found = certificates(population, Risk(0.05), n, samples(80, SIMULATIONS))
        assert failure_rate(population, found) <= allowed_rate(len(found))
        counts = np.array([(f.accepted_wrong, f.accepted) for f in found if f])
        assert stats.binom.cdf(counts[:, 0], counts[:, 1], 0.05).max() <= 0.9 * DELTA
        ratio = mean_coverage(population, found) / population.optimal_coverage(0.05)
        assert ratio >= (0.9 if n == 4000 else 0.75)

    @pytest.mark.parametrize(
        ("population", "level", "n", "runs"),
        [(ONE, 0.95, 1000, 100), (TIED_ONE, 0.873, 1000, 200), (TWO, 0.95, 1500, 100)],
    )
    def test_a_tpr_holds_and_is_barely_exceeded(
        self, population: Population, level: float, n: int, runs: int, samples: Samples
    ) -> None:
        found = certificates(population, TPR(level), n, samples(runs, SIMULATIONS))
        assert None not in found
        assert failure_rate(population, found) <= allowed_rate(len(found))
        mean_tpr = np.mean([population.true_share("tpr", f.thresholds) for f in found if f])
        assert level < mean_tpr < (level + 0.025 if not population.ties else 1)

    def test_a_coverage_holds(self, samples: Samples) -> None:
        found = certificates(TWO, Coverage(0.8), 1000, samples(100, SIMULATIONS))
        assert failure_rate(TWO, found) <= allowed_rate(len(found))
        assert 0.8 < mean_coverage(TWO, found) < 0.84

    @pytest.mark.parametrize("guarantee", [Risk(0.05), TPR(0.95)])
    def test_the_guarantee_and_all_intervals_hold_together(
        self, guarantee: Guarantee, samples: Samples
    ) -> None:
        found = certificates(TWO, guarantee, 2000, samples(30, SIMULATIONS))
        false = 0
        for one in found:
            assert one is not None
            intervals = (one.risk_interval, one.tpr_interval, one.coverage_interval)
            true = [TWO.true_share(name, one.thresholds) for name in ("risk", "tpr", "coverage")]
            covered = [low <= t <= high for t, (low, high) in zip(true, intervals, strict=True)]
            false += not all(covered)
            assert max(high - low for low, high in intervals) < 0.12
        assert false / len(found) <= allowed_rate(len(found))

    @pytest.mark.parametrize("columns", [1, 2])
    def test_an_uninformative_score_is_not_tested_until_it_passes(
        self, columns: int, samples: Samples
    ) -> None:
        """No certificate is true here; tests without error control give many."""
        flat = Population(tuple(0.0505 / columns for _ in range(columns)), (0,) * columns)
        found = certificates(flat, Risk(0.05), 900, samples(60, SIMULATIONS))
        assert failure_rate(flat, found) <= allowed_rate(len(found))
        rng, uncorrected = np.random.default_rng(0), 0
        for _ in range(120):
            scores, correct = flat.draw(900, rng)
            path = build_path(scores[:300], correct[:300])
            tests = count_decisions(path, scores[300:], correct[300:])
            uncorrected += bool(
                (binomial_cdf(tests.accepted_wrong, tests.accepted, 0.05) <= DELTA).any()
            )
        assert uncorrected / 120 > allowed_rate(120)

    def test_an_empirical_risk_of_5_percent_is_often_exceeded(self) -> None:
        rng, uncorrected = np.random.default_rng(0), 0
        for _ in range(300):
            scores, correct = ONE.draw(1000, rng)
            curve = risk_coverage(scores[:, 0], correct)
            at = float(curve.threshold[np.flatnonzero(curve.risk <= 0.05)[-1]])
            uncorrected += ONE.true_share("risk", (at,)) > 0.05
        assert uncorrected / 300 > 0.3

    @pytest.mark.parametrize("falling", [True, False])
    def test_the_order_of_the_images_does_not_matter(self, falling: bool, samples: Samples) -> None:
        """Sorted by score or with errors first, and the same pilot indices in every run."""

        def order(sample: Sample) -> IntArray:
            scores, correct = sample
            return np.argsort(-scores[:, 0]) if falling else np.argsort(correct, kind="stable")

        found = certificates(ONE, Risk(0.05), 1000, samples(100, SIMULATIONS), order)
        assert failure_rate(ONE, found) <= allowed_rate(len(found))
        assert mean_coverage(ONE, found) > 0.85 * ONE.optimal_coverage(0.05)


class TestExtremes:
    def test_a_nearly_perfect_classifier_accepts_everything(self) -> None:
        found = certificates(Population((0.002,), (0,)), Risk(0.05), 500, 60)
        assert all(f is not None and f.accepted == f.n for f in found)
        assert all(f is not None and f.thresholds == (ANY_SCORE,) for f in found)

    @pytest.mark.parametrize("columns", [1, 2])
    def test_a_classifier_with_high_risk_is_never_certified(self, columns: int) -> None:
        high_risk = Population(tuple(0.6 / columns for _ in range(columns)), (0,) * columns)
        assert certificates(high_risk, Risk(0.05), 500, 80) == [None] * 80
        scores, correct = high_risk.draw(500, np.random.default_rng(0))
        with pytest.raises(Uncertified, match="more images would not help at that rate") as error:
            certify_threshold(scores, correct, Risk(0.05))
        assert error.value.shortfall.needed is None

    def test_a_good_classifier_needs_no_score(self) -> None:
        good = Population((0.03,), (0,))
        found = certificates(good, Risk(0.05), 4000, 40)
        assert mean_coverage(good, found) > 0.9

    def test_errors_at_the_highest_scores_do_not_stop_the_test(self) -> None:
        """The 3% of the highest scores are all wrong, and the total risk is 3%."""
        score = np.arange(4000.0)
        found = certify_threshold(score, score < 3880, Risk(0.05))
        assert found.accepted == found.n

    def test_a_score_of_minus_infinity_is_never_accepted(self) -> None:
        rng = np.random.default_rng(0)
        correct = rng.random(1000) < 0.7
        gated = np.where(correct, rng.random(1000), -INF)
        found = certify_threshold(gated, correct, Risk(0.05))
        assert (found.thresholds, found.accepted_wrong, found.accepted_correct) == (
            (ANY_SCORE,),
            0,
            found.correct,
        )
        with pytest.raises(Uncertified, match="more images would not help"):
            certify_threshold(gated, correct, Coverage(0.9))
        both = certify_threshold(np.stack([np.full(1000, INF), gated], axis=1), correct, Risk(0.05))
        assert (both.thresholds, both.accepted_wrong) == ((ANY_SCORE, ANY_SCORE), 0)
        with pytest.raises(Uncertified, match="too few to test any"):
            certify_threshold(np.full(1000, -INF), correct, Risk(0.05))

    def test_any_score_is_not_minus_infinity_in_float32(self) -> None:
        scores = torch.tensor([-INF, -3e38, 0, INF])
        assert (scores >= ANY_SCORE).tolist() == [False, True, True, True]
