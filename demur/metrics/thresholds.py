"""Thresholds of a score at a true-positive rate, and a path of candidates from strict to loose.

The true-positive rate is the share of correct predictions accepted. Two scores span a grid of
threshold pairs. One nested path through it, along which correct pilot predictions are accepted
before wrong ones, gives a single order to test.
"""

import math
from itertools import product
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
    scored_pair,
)


def score_levels(score: FloatArray, correct: BoolArray) -> tuple[FloatArray, IntArray, IntArray]:
    """Distinct scores in descending order, with the correct and wrong counts at or above each."""
    order = np.argsort(-score)
    ranked = score[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    n_correct = np.cumsum(correct[order], dtype=np.int64)[last]
    return ranked[last], n_correct, last + 1 - n_correct


def paper_threshold(score: ArrayLike, correct: ArrayLike, tpr: float = 0.95) -> float:
    """Threshold of the paper's TPR-95 columns; +inf (reject all) without a correct prediction."""
    check_share("tpr", tpr, allow_one=True)
    threshold, n_correct, n_wrong = score_levels(*scored_pair(score, correct))
    index = paper_level_index(n_correct, n_wrong, tpr)
    return math.inf if index is None else float(threshold[index])


def paper_level_index(n_correct: IntArray, n_wrong: IntArray, tpr: float) -> int | None:
    """Index of the paper's threshold among the levels of `score_levels`; None for +inf."""
    if n_correct[-1] == 0:
        # reference code: every TPR is NaN, and argmin takes the first point, at threshold +inf
        return None
    # reference code: scikit-learn's roc_curve drops points midway between their neighbours, which
    # changes the nearest TPR: a perfect ranking keeps its first and last correct predictions only
    corner = np.ones(len(n_correct), dtype=np.bool_)
    corner[1:-1] = (np.diff(n_correct, 2) != 0) | (np.diff(n_wrong, 2) != 0)
    corners = np.flatnonzero(corner)
    # reference code: scikit-learn >= 1.3 starts the curve at +inf, where nothing is accepted
    tprs = np.append(0, n_correct[corners]) / n_correct[-1]
    # reference code: the nearest TPR may be below the level, and the first of equals wins
    best = int(np.argmin(np.abs(tprs - tpr)))
    return None if best == 0 else int(corners[best - 1])


def threshold_at_tpr(score: ArrayLike, correct: ArrayLike, tpr: float = 0.95) -> float:
    """Largest threshold that at least the share `tpr` of the correct predictions reaches.

    Raises:
        BadInput: If no prediction is correct.
    """
    check_share("tpr", tpr, allow_one=True)
    values, is_correct = scored_pair(score, correct)
    scores = values[is_correct]
    if len(scores) == 0:
        raise BadInput(
            "calibration needs correct predictions; add images that are classified correctly"
        )
    index = len(scores) - math.ceil(as_decimal(tpr) * len(scores))
    return float(np.partition(scores, index)[index])


# Accepts every score but -inf. In fp32, as scores are: a smaller double would round to -inf there.
ANY_SCORE = -float(np.finfo(np.float32).max)

STEPS = 240  # candidates on the path of one score
# For two scores: few knots per score to choose the path by, so that it does not follow single
# images, and finer steps between them. In simulations, one chain of tests per gate threshold with
# divided error had less coverage: by 1 to 4% of the optimum where both scores matter, by 18% where
# only the gate does.
KNOTS, STEPS_PER_KNOT = 12, 10
LOOSE_EXPONENT = 1.5  # above 1: closer steps where few are rejected, as a TPR of 95% needs
Pair = tuple[int, int]  # indices of the thresholds of two scores, 0 for the loosest


class Counts(NamedTuple):
    """Decisions on a set of images for each of K candidates on a path."""

    n: int
    correct: int
    accepted: IntArray  # K
    accepted_wrong: IntArray  # K

    @property
    def accepted_correct(self) -> IntArray:
        return self.accepted - self.accepted_wrong


def count_decisions(
    path: FloatArray, scores: FloatArray, correct: BoolArray, wrong: FloatArray | None = None
) -> Counts:
    """Count the accepted images, and the wrong ones among them, for each candidate of a path.

    An image is wrong where its score of `wrong` (N, D) is accepted, by default where not correct.
    """
    wrong = scores[~correct] if wrong is None else wrong
    n, right = len(correct), int(correct.sum())
    return Counts(n, right, _reached(path, scores), _reached(path, wrong))


def _reached(path: FloatArray, scores: FloatArray) -> IntArray:
    """Number of images that reach all thresholds of each candidate, K."""
    # thresholds decrease along a path, so an image is accepted from some candidate on
    entry = np.zeros(len(scores), dtype=np.int64)
    for column, thresholds in enumerate(path.T):
        entry = np.maximum(entry, np.searchsorted(-thresholds, -scores[:, column]))
    # the last bin is for images never accepted
    return np.cumsum(np.bincount(entry, minlength=len(path) + 1))[:-1]


def build_path(scores: FloatArray, correct: BoolArray) -> FloatArray:
    """Candidates (K, D) for scores (N, D) of pilot images, D = 1 or 2, strictest first."""
    if scores.shape[1] == 1:
        path = _candidate_thresholds(scores[:, 0], STEPS)[::-1, None]
    else:
        grid = [_candidate_thresholds(column, KNOTS * STEPS_PER_KNOT) for column in scores.T]
        knots = [thresholds[::STEPS_PER_KNOT] for thresholds in grid]
        indices = _interpolate(_best_staircase(knots, scores, correct))
        path = np.stack([t[index] for t, index in zip(grid, indices.T, strict=True)], axis=1)
    repeated = (path[1:] == path[:-1]).all(axis=1)
    return np.asarray(path[np.append(True, ~repeated)])


def _candidate_thresholds(score: FloatArray, steps: int) -> FloatArray:
    """`steps` ascending thresholds: ANY_SCORE, then quantiles of the pilot scores."""
    finite = np.sort(score[np.isfinite(score)])
    if len(finite) == 0:
        return np.full(steps, ANY_SCORE)
    shares = (np.arange(steps) / steps) ** LOOSE_EXPONENT
    thresholds = finite[(shares * len(finite)).astype(np.int64)]
    thresholds[0] = ANY_SCORE
    return thresholds


def _best_staircase(knots: list[FloatArray], scores: FloatArray, correct: BoolArray) -> list[Pair]:
    """Pairs of knots from strictest to loosest, along the path with the best pilot AUROC."""
    n_correct, n_wrong = _count_grid(knots, scores[correct]), _count_grid(knots, scores[~correct])
    size = len(knots[0])
    area = {(0, 0): 0}
    best_looser: dict[Pair, Pair] = {}
    for i, j in list(product(range(size), repeat=2))[1:]:
        here_correct, here_wrong = n_correct[i][j], n_wrong[i][j]
        around = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
        # area under accepted errors over accepted correct predictions: 1 - AUROC of the path
        area[i, j], best_looser[i, j] = min(
            (area[a, b] + (n_correct[a][b] - here_correct) * (n_wrong[a][b] + here_wrong), (a, b))
            for a, b in around
            if min(a, b) >= 0
        )
    staircase = [(size - 1, size - 1)]
    while staircase[-1] != (0, 0):
        staircase.append(best_looser[staircase[-1]])
    return staircase


def _count_grid(knots: list[FloatArray], scores: FloatArray) -> list[list[int]]:
    """Number of images that reach both thresholds, for each pair of knots."""
    side = len(knots[0]) + 1
    first, second = (
        np.searchsorted(knot, column, side="right")
        for knot, column in zip(knots, scores.T, strict=True)
    )
    cells = np.bincount(first * side + second, minlength=side**2).reshape(side, side)[1:, 1:]
    table: list[list[int]] = cells[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1].tolist()
    return table


def _interpolate(staircase: list[Pair]) -> IntArray:
    """Indices into the fine thresholds (K, 2), one step at a time, from the strictest on."""
    knots = STEPS_PER_KNOT * np.array(staircase)  # W, 2
    offset = np.arange(STEPS_PER_KNOT)[:, None]
    before_first = knots[0] + offset[:0:-1]
    direction = np.sign(knots[:-1] - knots[1:])
    between = (knots[:-1, None] - offset * direction[:, None]).reshape(-1, 2)
    return np.concatenate([before_first, between, knots[-1:]])
