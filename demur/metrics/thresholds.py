"""Thresholds of a score at a true-positive rate: the share of correct predictions accepted."""

import math

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
