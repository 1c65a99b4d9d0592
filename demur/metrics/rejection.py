"""What a rejector is worth: ranking, operating points, risk curves and calibration.

`score` holds one number per image, higher = more trusted, -inf = never; `correct` says whether
the classifier was right there.

    point = paper_operating_point(score, correct)
    f"{point.accuracy:.1%} right, answering {point.coverage:.1%}; AUROC {auroc(score, correct):.3f}"
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from demur.errors import BadInput
from demur.metrics.checks import (
    BoolArray,
    FloatArray,
    IntArray,
    as_decimal,
    check_share,
    flags,
    same_length,
    scored_pair,
)
from demur.metrics.intervals import Interval, wilson


class OperatingStats(NamedTuple):
    """What a rejector does at one threshold; the Wilson intervals are at the 95% level.

    accuracy is among the accepted and 0.0 when none is; tpr and fpr are the shares accepted of the
    right and of the wrong answers, 1.0 and 0.0 when there is no such answer; accepted_wrong is the
    share of all n images both accepted and wrong.
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
        """The interval of the accuracy among the accepted, for a threshold fixed beforehand."""
        return wilson(round(self.accuracy * self.accepted), self.accepted)

    @property
    def coverage_interval(self) -> Interval:
        """The interval of the share accepted."""
        return wilson(self.accepted, self.n)

    @property
    def accepted_wrong_interval(self) -> Interval:
        """The interval of the share both accepted and wrong."""
        return wilson(round(self.accepted_wrong * self.n), self.n)


class Curve(NamedTuple):
    """The risk of accepting score >= threshold at each distinct score, coverage ascending."""

    coverage: FloatArray
    risk: FloatArray
    threshold: FloatArray


def score_levels(score: FloatArray, correct: BoolArray) -> tuple[FloatArray, IntArray, IntArray]:
    """The distinct scores, best first, with the right and the wrong answers at or above each."""
    order = np.argsort(-score)
    ranked = score[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    right = np.cumsum(correct[order], dtype=np.int64)[last]
    return ranked[last], right, last + 1 - right


def accuracy(correct: ArrayLike) -> float:
    """The share of right answers when every image is answered."""
    return float(flags(correct, "correct").mean())


def auroc(score: ArrayLike, correct: ArrayLike) -> float:
    """The chance that a right answer outranks a wrong one, ties half; 0.5 if a group is empty."""
    _, right, wrong = score_levels(*scored_pair(score, correct))
    pairs = int(right[-1]) * int(wrong[-1])
    if pairs == 0:
        return 0.5
    # Integers up to the last division keep ties exact.
    rights, wrongs = np.diff(right, prepend=0), np.diff(wrong, prepend=0)
    halves = int(np.sum(rights * (2 * (wrong[-1] - wrong) + wrongs)))
    return halves / (2 * pairs)


def stats_at_threshold(
    score: ArrayLike, correct: ArrayLike, threshold: float, strict: bool = False
) -> OperatingStats:
    """The operating point that accepts score >= threshold, or score > threshold if strict."""
    values, right = scored_pair(score, correct)
    if math.isnan(threshold):
        raise BadInput("the threshold is NaN; give a number, or -inf to accept every image")
    return stats_of_verdicts(
        values > threshold if strict else values >= threshold, right, threshold
    )


def stats_of_verdicts(
    accepted: ArrayLike, correct: ArrayLike, threshold: float = math.nan
) -> OperatingStats:
    """The operating point of verdicts already taken; the threshold is only carried along."""
    kept, right = flags(accepted, "accepted"), flags(correct, "correct")
    same_length(accepted=kept, correct=right)
    n, taken, rights = len(right), int(kept.sum()), int(right.sum())
    taken_right = int((kept & right).sum())
    taken_wrong = taken - taken_right
    return OperatingStats(
        threshold=float(threshold),
        # reference code: its baselines script pads the denominator, so refusing all scores 0.
        accuracy=taken_right / taken if taken else 0.0,
        coverage=taken / n,
        tpr=taken_right / rights if rights else 1.0,
        fpr=taken_wrong / (n - rights) if rights < n else 0.0,
        accepted_wrong=taken_wrong / n,
        n=n,
        accepted=taken,
    )


def paper_threshold(score: ArrayLike, correct: ArrayLike, tpr: float = 0.95) -> float:
    """The threshold of the paper's TPR-95 columns; +inf, accepting none, without right answers."""
    check_share("tpr", tpr, whole=True)
    threshold, right, wrong = score_levels(*scored_pair(score, correct))
    place = paper_level_index(right, wrong, tpr)
    return math.inf if place is None else float(threshold[place])


def paper_level_index(right: IntArray, wrong: IntArray, tpr: float) -> int | None:
    """Where on a ladder the paper's threshold stands; None above all of it."""
    if right[-1] == 0:
        # reference code: every TPR is NaN, argmin takes the first point, whose threshold is +inf.
        return None
    # reference code: scikit-learn's roc_curve drops points midway between their neighbours, which
    # moves the nearest TPR: a perfect ranking keeps only its first and last right answers.
    corner = np.ones(len(right), dtype=np.bool_)
    corner[1:-1] = (np.diff(right, 2) != 0) | (np.diff(wrong, 2) != 0)
    places = np.flatnonzero(corner)
    # reference code: scikit-learn >= 1.3 opens the curve at +inf, where nothing is accepted.
    kept = np.append(0, right[places]) / right[-1]
    # reference code: the nearest TPR may lie below the level, and the first of equals wins.
    best = int(np.argmin(np.abs(kept - tpr)))
    return None if best == 0 else int(places[best - 1])


def paper_stats(score: ArrayLike, correct: ArrayLike, tpr: float = 0.95) -> OperatingStats:
    """The operating point of the paper's tables, its threshold taken from this very set."""
    # reference code: strict > also drops the images that sit on the threshold.
    return stats_at_threshold(score, correct, paper_threshold(score, correct, tpr), strict=True)


def threshold_at_tpr(score: ArrayLike, correct: ArrayLike, tpr: float = 0.95) -> float:
    """The largest threshold with at least `tpr` of the right answers at or above it."""
    check_share("tpr", tpr, whole=True)
    values, right = scored_pair(score, correct)
    kept = values[right]
    if len(kept) == 0:
        raise BadInput("calibration needs right answers; add images the classifier gets right")
    place = len(kept) - math.ceil(as_decimal(tpr) * len(kept))
    return float(np.partition(kept, place)[place])


def fpr_at_tpr(score: ArrayLike, correct: ArrayLike, tpr: float = 0.95) -> float:
    """The share of wrong answers at or above `threshold_at_tpr`; 0.0 when none is wrong."""
    return stats_at_threshold(score, correct, threshold_at_tpr(score, correct, tpr)).fpr


def risk_coverage(score: ArrayLike, correct: ArrayLike) -> Curve:
    """The selective risk at every coverage that a threshold can reach."""
    threshold, right, wrong = score_levels(*scored_pair(score, correct))
    accepted = right + wrong
    return Curve(accepted / accepted[-1], wrong / accepted, threshold)


def aurc(score: ArrayLike, correct: ArrayLike) -> float:
    """The mean over k = 1..n of the risk of the k most trusted, tied images in random order."""
    errors = _expected_errors(*scored_pair(score, correct))
    return float(np.mean(errors / np.arange(1, len(errors) + 1)))


def eaurc(score: ArrayLike, correct: ArrayLike) -> float:
    """The AURC in excess of that of an order with every right answer first."""
    values, right = scored_pair(score, correct)
    # Rounding alone could take a perfect order below zero.
    return max(0.0, aurc(values, right) - aurc(right, right))


def augrc(score: ArrayLike, correct: ArrayLike) -> float:
    """The mean over k = 1..n of the wrong among the k most trusted, as a share of all n."""
    errors = _expected_errors(*scored_pair(score, correct))
    return float(np.mean(errors)) / len(errors)


def ece(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """The expected calibration error over equal bins (a, b] of [0, 1], the first with its 0."""
    values, right = scored_pair(confidence, correct, "confidence")
    if bins < 1:
        raise BadInput(f"bins is {bins}; ask for one bin or more")
    if values.min() < 0 or values.max() > 1:
        raise BadInput("confidence leaves [0, 1]; give probabilities, not logits or percentages")
    # Dividing rounds every edge once; a multiplied step (linspace) misses 23/30, among others.
    edges = np.arange(1, bins + 1) / bins
    gaps = np.bincount(np.searchsorted(edges, values), weights=values - right)
    return float(np.abs(gaps).sum() / len(values))


def _expected_errors(score: FloatArray, correct: BoolArray) -> FloatArray:
    """The expected wrong answers among the k most trusted, k = 1..n, tied images shuffled."""
    _, right, wrong = score_levels(score, correct)
    # Shuffling spreads a tied group's errors evenly: the expectation is linear inside the group.
    knots = np.append(0, right + wrong)
    errors: FloatArray = np.interp(np.arange(1, len(score) + 1), knots, np.append(0, wrong))
    return errors
