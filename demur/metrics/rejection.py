"""Metrics of a rejector: AUROC with intervals, AURC and AUGRC, operating points, calibration.

`score` has one value per image, higher for images to accept and -inf for images never accepted;
`correct` says whether the prediction is correct. `WorstCase` has the accepted errors at every
threshold, from the highest score of a wrong prediction per image. Its numbers are those of the
attack that found the scores. A stronger attack can only raise them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from demur.errors import BadInput
from demur.metrics.checks import (
    BoolArray,
    FloatArray,
    check_share,
    flags,
    floats,
    same_length,
    scored_pair,
)
from demur.metrics.intervals import Difference, Interval, wilson
from demur.metrics.thresholds import paper_threshold, score_levels, threshold_at_tpr

SMALL_GROUP = 300  # images of the smaller group, below which Newcombe's interval counts


class OperatingStats(NamedTuple):
    """Statistics of a rejector at one threshold, with Wilson intervals at the 95% level.

    accuracy: correct share of the accepted predictions; 0.0 if none is accepted.
    coverage: accepted share of all n images.
    tpr, fpr: accepted shares of the correct and of the wrong predictions; 1.0 and 0.0 if there
        are none.
    accepted_wrong: share of all n images that are accepted and misclassified.
    """

    threshold: float
    accuracy: float
    coverage: float
    tpr: float
    fpr: float
    accepted_wrong: float
    n: int
    accepted: int

    @property
    def accuracy_interval(self) -> Interval:
        """Interval of the accuracy among the accepted, for a threshold chosen on other images."""
        return wilson(round(self.accuracy * self.accepted), self.accepted)

    @property
    def coverage_interval(self) -> Interval:
        return wilson(self.accepted, self.n)

    @property
    def accepted_wrong_interval(self) -> Interval:
        return wilson(round(self.accepted_wrong * self.n), self.n)


class Curve(NamedTuple):
    """Risk-coverage curve: risk of accepting score >= threshold, by ascending coverage."""

    coverage: FloatArray
    risk: FloatArray
    threshold: FloatArray


def accuracy(correct: ArrayLike) -> float:
    """Accuracy without rejection."""
    return float(flags(correct, "correct").mean())


def auroc(score: ArrayLike, correct: ArrayLike) -> float:
    """Probability that a correct prediction scores above a wrong one; ties count half.

    0.5 if no prediction is correct or none is wrong.
    """
    _, n_correct, n_wrong = score_levels(*scored_pair(score, correct))
    pairs = int(n_correct[-1]) * int(n_wrong[-1])
    if pairs == 0:
        return 0.5
    # integers up to the last division keep ties exact
    level_correct, level_wrong = np.diff(n_correct, prepend=0), np.diff(n_wrong, prepend=0)
    halves = int(np.sum(level_correct * (2 * (n_wrong[-1] - n_wrong) + level_wrong)))
    return halves / (2 * pairs)


def stats_at_threshold(
    score: ArrayLike, correct: ArrayLike, threshold: float, strict: bool = False
) -> OperatingStats:
    """Statistics of accepting score >= threshold, or score > threshold if `strict`."""
    values, is_correct = scored_pair(score, correct)
    if math.isnan(threshold):
        raise BadInput("the threshold is NaN; give a number, or -inf to accept every image")
    accepted = values > threshold if strict else values >= threshold
    return stats_of_verdicts(accepted, is_correct, threshold)


def stats_of_verdicts(
    accepted: ArrayLike, correct: ArrayLike, threshold: float = math.nan
) -> OperatingStats:
    """Statistics of given decisions; `threshold` is only copied into the result."""
    is_accepted, is_correct = flags(accepted, "accepted"), flags(correct, "correct")
    same_length(accepted=is_accepted, correct=is_correct)
    n, n_accepted, n_correct = len(is_correct), int(is_accepted.sum()), int(is_correct.sum())
    accepted_correct = int((is_accepted & is_correct).sum())
    accepted_wrong = n_accepted - accepted_correct
    return OperatingStats(
        threshold=float(threshold),
        # reference code: its baselines script pads the denominator, so rejecting all gives 0
        accuracy=accepted_correct / n_accepted if n_accepted else 0.0,
        coverage=n_accepted / n,
        tpr=accepted_correct / n_correct if n_correct else 1.0,
        fpr=accepted_wrong / (n - n_correct) if n_correct < n else 0.0,
        accepted_wrong=accepted_wrong / n,
        n=n,
        accepted=n_accepted,
    )


def paper_stats(score: ArrayLike, correct: ArrayLike, tpr: float = 0.95) -> OperatingStats:
    """Statistics of the paper's tables, whose threshold is chosen on the same images."""
    # reference code: a strict > also rejects the images at the threshold
    return stats_at_threshold(score, correct, paper_threshold(score, correct, tpr), strict=True)


def fpr_at_tpr(score: ArrayLike, correct: ArrayLike, tpr: float = 0.95) -> float:
    """Share of wrong predictions at or above `threshold_at_tpr`; 0.0 if none is wrong."""
    return stats_at_threshold(score, correct, threshold_at_tpr(score, correct, tpr)).fpr


def risk_coverage(score: ArrayLike, correct: ArrayLike) -> Curve:
    """Selective risk at every coverage that a threshold can give."""
    threshold, n_correct, n_wrong = score_levels(*scored_pair(score, correct))
    accepted = n_correct + n_wrong
    return Curve(accepted / accepted[-1], n_wrong / accepted, threshold)


def risk_at_coverage(score: ArrayLike, correct: ArrayLike, coverage: float = 0.8) -> float:
    """Selective risk of the highest threshold that accepts at least this share of the images."""
    check_share("coverage", coverage, allow_one=True)
    curve = risk_coverage(score, correct)
    return float(curve.risk[np.searchsorted(curve.coverage, coverage)])


def coverage_at_risk(score: ArrayLike, correct: ArrayLike, risk: float = 0.05) -> float:
    """Largest coverage at which at most this share of the accepted is wrong; 0.0 if there is none.

    The threshold is chosen on these labels: `certify_threshold` gives one that holds for others.
    """
    check_share("risk", risk)
    curve = risk_coverage(score, correct)
    return float(curve.coverage[curve.risk <= risk].max(initial=0.0))


def aurc(score: ArrayLike, correct: ArrayLike) -> float:
    """AURC: mean over k = 1..n of the risk of the k highest scores, ties in random order."""
    errors = _expected_errors(*scored_pair(score, correct))
    return float(np.mean(errors / np.arange(1, len(errors) + 1)))


def eaurc(score: ArrayLike, correct: ArrayLike) -> float:
    """Excess AURC: AURC minus that of a ranking with every correct prediction first."""
    values, is_correct = scored_pair(score, correct)
    # rounding could make a perfect ranking negative
    return max(0.0, aurc(values, is_correct) - aurc(is_correct, is_correct))


def augrc(score: ArrayLike, correct: ArrayLike) -> float:
    """AUGRC: mean over k = 1..n of the errors among the k highest scores, as a share of all n."""
    errors = _expected_errors(*scored_pair(score, correct))
    return float(np.mean(errors)) / len(errors)


def ece(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """Expected calibration error over equal bins (a, b] of [0, 1]; the first bin includes 0."""
    values, is_correct = scored_pair(confidence, correct, "confidence")
    if bins < 1:
        raise BadInput(f"bins is {bins}; give 1 or more")
    if values.min() < 0 or values.max() > 1:
        raise BadInput(
            "confidence has values outside [0, 1]; give probabilities, not logits or percentages"
        )
    # a division rounds every edge once; a multiplied step (linspace) misses 23/30 and others
    edges = np.arange(1, bins + 1) / bins
    gaps = np.bincount(np.searchsorted(edges, values), weights=values - is_correct)
    return float(np.abs(gaps).sum() / len(values))


def _expected_errors(score: FloatArray, correct: BoolArray) -> FloatArray:
    """Expected errors among the k highest scores for k = 1..n, ties in random order."""
    _, n_correct, n_wrong = score_levels(score, correct)
    # ties in random order spread their errors evenly: the expectation is linear inside a tie
    knots = np.append(0, n_correct + n_wrong)
    return np.asarray(np.interp(np.arange(1, len(score) + 1), knots, np.append(0, n_wrong)))


def auroc_interval(score: ArrayLike, correct: ArrayLike, level: float = 0.95) -> Interval:
    """Confidence interval of the AUROC; (0, 1) if no prediction is correct or none is wrong.

    DeLong et al. (1988) give the variance in closed form, ties included, so no bootstrap is
    needed. Their interval is too narrow for small groups. There each end is the wider one of
    theirs and that of Newcombe (2006).
    """
    check_share("level", level)
    values, is_correct = scored_pair(score, correct)
    groups = int(is_correct.sum()), int((~is_correct).sum())
    if min(groups) == 0:
        return Interval(0.0, 1.0)
    area, z = auroc(values, is_correct), NormalDist().inv_cdf((1 + level) / 2)
    newcombe = _newcombe(area, *groups, z)
    if min(groups) == 1 or area in (0.0, 1.0):
        return newcombe
    delong = _delong(area, _variance(*_placements(values, is_correct)), z)
    if min(groups) >= SMALL_GROUP:
        return delong
    return Interval(min(newcombe.lo, delong.lo), max(newcombe.hi, delong.hi))


def auroc_difference(
    score_a: ArrayLike, score_b: ArrayLike, correct: ArrayLike, level: float = 0.95
) -> Difference:
    """AUROC(a) - AUROC(b) on the same images, with interval and p-value.

    The interval combines both AUROC intervals and the correlation of the two (Zou and Donner).
    """
    check_share("level", level)
    a, is_correct = scored_pair(score_a, correct, "score_a")
    b, _ = scored_pair(score_b, correct, "score_b")
    gap = auroc(a, is_correct) - auroc(b, is_correct)
    if min(is_correct.sum(), (~is_correct).sum()) < 2:
        return Difference(gap, -1.0, 1.0, 1.0)
    placements = [_placements(one, is_correct) for one in (a, b)]
    if all(map(np.array_equal, *placements)):
        return Difference(0.0, 0.0, 0.0, 1.0)
    correlation = _correlation(*placements)
    ranked = [(auroc_interval(one, is_correct, level), auroc(one, is_correct)) for one in (a, b)]
    below, above = (_lower_reach(*x, *y, correlation) for x, y in (ranked, ranked[::-1]))
    z = NormalDist().inv_cdf((1 + level) / 2)
    toward_zero = below if gap > 0 else above
    p = 2 * NormalDist().cdf(-abs(gap) * z / toward_zero) if toward_zero > 0 else 1.0
    return Difference(gap, max(-1.0, gap - below), min(1.0, gap + above), p)


def _lower_reach(
    one: Interval, area: float, other: Interval, other_area: float, correlation: float
) -> float:
    """Distance of area - other_area to its lower bound (Zou and Donner's square-and-add)."""
    below, above = area - one.lo, other.hi - other_area
    return math.sqrt(max(0.0, below**2 + above**2 - 2 * correlation * below * above))


def _delong(area: float, variance: float, z: float) -> Interval:
    """DeLong's interval, on the scale of the log odds."""
    spread = math.sqrt(variance) / (area * (1 - area))
    log_odds = math.log(area / (1 - area))
    return Interval(*(1 / (1 + math.exp(-log_odds - sign * z * spread)) for sign in (-1, 1)))


def _newcombe(area: float, n_correct: int, n_wrong: int, z: float) -> Interval:
    """True areas within z Hanley-McNeil standard deviations of the observed one."""
    half = (n_correct + n_wrong) / 2 - 1

    def excess(true: float) -> float:
        near = (1 - true) / (2 - true) + true / (1 + true)
        variance = true * (1 - true) * (1 + half * near) / (n_correct * n_wrong)
        return abs(area - true) - z * math.sqrt(variance)

    return Interval(_bisect(excess, 0.0, area), _bisect(excess, 1.0, area))


def _bisect(excess: Callable[[float], float], outer: float, inner: float) -> float:
    """Root of `excess`, which is positive at `outer` and negative at `inner`; `outer` if not."""
    if excess(outer) <= 0:
        return outer
    for _ in range(60):
        middle = (outer + inner) / 2
        outer, inner = (middle, inner) if excess(middle) > 0 else (outer, middle)
    return outer


def _placements(score: FloatArray, is_correct: BoolArray) -> tuple[FloatArray, FloatArray]:
    """DeLong's placements: the share of wrong scores below each correct one, and vice versa."""
    above, below = score[is_correct], score[~is_correct]
    return _shares_below(above, below), 1 - _shares_below(below, above)


def _shares_below(values: FloatArray, others: FloatArray) -> FloatArray:
    """Share of `others` below each value; ties count half."""
    order, ranked, shares = np.argsort(values), np.sort(others), np.empty(len(values))
    rising = values[order]  # a search for values in order stays in the processor's cache
    below, at_most = np.searchsorted(ranked, rising), np.searchsorted(ranked, rising, "right")
    shares[order] = (below + at_most) / (2 * len(others))
    return shares


def _variance(of_correct: FloatArray, of_wrong: FloatArray) -> float:
    return float(of_correct.var(ddof=1) / len(of_correct) + of_wrong.var(ddof=1) / len(of_wrong))


def _correlation(a: tuple[FloatArray, FloatArray], b: tuple[FloatArray, FloatArray]) -> float:
    """Correlation of two AUROCs on the same images, from their placements."""
    covariances = [np.cov(one, other)[0, 1] / len(one) for one, other in zip(a, b, strict=True)]
    spread = math.sqrt(_variance(*a) * _variance(*b))
    return max(-1.0, min(1.0, float(sum(covariances)) / spread)) if spread > 0 else 0.0


Z = NormalDist().inv_cdf((1 + 0.95) / 2)  # half-width of a 95% interval in standard errors
NEVER_ACCEPTED = -float(np.finfo(np.float64).max)  # a clean score that no threshold accepts


@dataclass(frozen=True, eq=False)
class WorstCase:
    """Scores of clean images, and the highest score of a wrong prediction in each one's ball.

    Accepted is score >= threshold. A threshold is a score of a clean image, so that coverage is
    the share of clean images accepted, correct or not. An image that a gate rejects has the clean
    score -inf; as a threshold it accepts every score past the gate.
    """

    clean: FloatArray  # N
    worst: FloatArray  # N; -inf where no wrong prediction was found

    @staticmethod
    def of(clean: ArrayLike, worst: ArrayLike) -> "WorstCase":
        """Check the scores; raise BadInput for other lengths or NaN."""
        values, wrong = floats(clean, "clean"), floats(worst, "worst")
        same_length(clean=values, worst=wrong)
        return WorstCase(np.maximum(values, NEVER_ACCEPTED), wrong)

    def accepted_errors(self, threshold: float) -> float:
        """Share of all images with a wrong prediction that reaches the threshold."""
        return self.count(threshold) / len(self.worst)

    def count(self, threshold: float) -> int:
        """Images with a wrong prediction that reaches the threshold."""
        return int((self.worst >= max(threshold, NEVER_ACCEPTED)).sum())

    def interval(self, threshold: float) -> Interval:
        return wilson(self.count(threshold), len(self.worst))

    @cached_property
    def curve(self) -> Curve:
        """Accepted errors as a share of all images, by ascending clean coverage."""
        thresholds = np.unique(self.clean[self.clean > NEVER_ACCEPTED])[::-1]
        coverage = _shares_at_least(self.clean, thresholds)
        return Curve(coverage, _shares_at_least(self.worst, thresholds), thresholds)

    @property
    def augrc(self) -> float:
        """Worst-case AUGRC: mean of the accepted errors with each clean score as threshold.

        It is the probability that the worst score of one image reaches the clean score of another.
        """
        return float(_shares_at_least(self.worst, self.clean).mean())

    @property
    def accepted(self) -> FloatArray:
        """Highest threshold at which an image is accepted under the attack, N.

        An image without an accepted error stays as it is: it counts as accepted if its clean image
        is accepted, and that one is then correct.
        """
        return np.asarray(np.maximum(self.clean, self.worst))

    @property
    def aurc(self) -> float:
        """Worst-case AURC: mean over the clean scores of the wrong share of the `accepted`."""
        return float(self._risks[0].mean())

    @cached_property
    def _risks(self) -> tuple[FloatArray, FloatArray]:
        """Wrong share of the accepted, and the accepted share, with each clean score as threshold.

        Both have shape N.
        """
        kept = _shares_at_least(self.accepted, self.clean)
        return _shares_at_least(self.worst, self.clean) / kept, kept

    @property
    def _influence(self) -> FloatArray:
        """What each image adds to the AUGRC, by its worst score and as a threshold, N."""
        as_image = self._mean_up_to(self.worst, np.ones_like(self.clean))
        return np.asarray(as_image + _shares_at_least(self.worst, self.clean))

    def _mean_up_to(self, values: FloatArray, weights: FloatArray) -> FloatArray:
        """Mean over the clean scores of the weights of those that each value reaches, N."""
        order = np.argsort(self.clean)
        sums = np.append(0.0, np.cumsum(weights[order])) / len(order)
        return np.asarray(sums[np.searchsorted(self.clean[order], values, "right")])

    def augrc_interval(self) -> Interval:
        return _around(self.augrc, self._influence)

    def aurc_interval(self) -> Interval:
        risk, kept = self._risks
        errors = self._mean_up_to(self.worst, 1 / kept) + risk
        return _around(self.aurc, errors - self._mean_up_to(self.accepted, risk / kept))

    def augrc_difference(self, other: "WorstCase") -> Difference:
        """AUGRC of this minus that of another rejector on the same images, with its interval."""
        same_length(clean=self.clean, other=other.clean)
        gap, influence = self.augrc - other.augrc, self._influence - other._influence
        reach = _reach(influence)
        p = 2 * NormalDist().cdf(-abs(gap) * Z / reach) if reach > 0 else float(gap == 0)
        return Difference(gap, max(-1.0, gap - reach), min(1.0, gap + reach), p)


def _shares_at_least(values: FloatArray, thresholds: FloatArray) -> FloatArray:
    """Share of the values that reach each threshold."""
    return np.asarray(1 - np.searchsorted(np.sort(values), thresholds) / len(values))


def _around(value: float, influence: FloatArray) -> Interval:
    reach = _reach(influence)
    return Interval(max(0.0, value - reach), min(1.0, value + reach))


def _reach(influence: FloatArray) -> float:
    """Half the width of the 95% interval of a mean of these values."""
    if len(influence) < 2:
        return 1.0
    return Z * float(influence.std(ddof=1)) / math.sqrt(len(influence))
