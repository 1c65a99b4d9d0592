"""The thresholds that will be tested, set by pilot images alone: a path from strict to loose.

    path = thresholds(scores[pilot], correct[pilot])            # K, D
    counted(path, scores[~pilot], correct[~pilot]).accepted     # K: grows along the path

Two scores span a grid. One nested path through it, along which the pilot's right answers come in
before its wrong ones, leaves a single order to test and no correction for how many pairs there are.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from demur.metrics import BoolArray, FloatArray
from demur.metrics.checks import IntArray

# Every score but -inf. In float32, as nets answer: a smaller double would be rounded to -inf there.
ANY_SCORE = -float(np.finfo(np.float32).max)

STEPS = 240  # on the path of one score
# Of each of two scores: few knots to choose a path by, lest it follow single images; finer steps
# on it. A chain for each gate, with the error divided between them, gave less in every simulation:
# 1 to 4% of the oracle's coverage where both scores count, 18% where the gate alone does.
KNOTS, PARTS = 12, 10
TOWARDS_LOOSE = 1.5  # more than 1: closer steps where few are refused, as a TPR of 95% needs


class Counts(NamedTuple):
    """What a set of images says of each pair of thresholds on a path."""

    n: int
    right: int
    accepted: IntArray  # K
    wrong: IntArray  # K: accepted though wrong

    @property
    def kept(self) -> IntArray:
        """The right answers accepted."""
        return self.accepted - self.wrong


def counted(path: FloatArray, scores: FloatArray, correct: BoolArray) -> Counts:
    """How many images each place of a path accepts, and how many of them are wrong."""
    # thresholds only fall along a path, so an image is accepted from some place on
    entry = np.zeros(len(correct), dtype=np.int64)
    for column, falling in enumerate(path.T):
        entry = np.maximum(entry, np.searchsorted(-falling, -scores[:, column]))
    places = len(path) + 1  # the last is for images never accepted
    accepted = np.cumsum(np.bincount(entry, minlength=places))[:-1]
    wrong = np.cumsum(np.bincount(entry[~correct], minlength=places))[:-1]
    return Counts(len(correct), int(correct.sum()), accepted, wrong)


def thresholds(scores: FloatArray, correct: BoolArray) -> FloatArray:
    """The path of one or two scores, strictest thresholds first."""
    if scores.shape[1] == 1:
        path = _rungs(scores[:, 0], STEPS)[::-1, None]
    else:
        rungs = [_rungs(column, KNOTS * PARTS) for column in scores.T]
        places = _filled(_staircase([rung[::PARTS] for rung in rungs], scores, correct))
        path = np.stack([rung[place] for rung, place in zip(rungs, places.T, strict=True)], axis=1)
    repeated = (path[1:] == path[:-1]).all(axis=1)
    kept: FloatArray = path[np.append(True, ~repeated)]
    return kept


def _rungs(score: FloatArray, steps: int) -> FloatArray:
    """`steps` thresholds from the one that any score reaches up; the others are pilot scores."""
    finite = np.sort(score[np.isfinite(score)])
    if len(finite) == 0:
        return np.full(steps, ANY_SCORE)
    shares = (np.arange(steps) / steps) ** TOWARDS_LOOSE
    rungs = finite[(shares * len(finite)).astype(np.int64)]
    rungs[0] = ANY_SCORE
    return rungs


def _staircase(
    knots: list[FloatArray], scores: FloatArray, correct: BoolArray
) -> list[tuple[int, int]]:
    """The places of the pairs of knots on the best way from strictest to loosest."""
    right, wrong = _table(knots, scores[correct]), _table(knots, scores[~correct])
    size = len(knots[0])
    area = {(0, 0): 0}
    looser: dict[tuple[int, int], tuple[int, int]] = {}
    for here, ways in _ways(size):
        kept, let_in = right[here[0]][here[1]], wrong[here[0]][here[1]]
        # the area under the wrong answers let in, over the right ones: 1 - AUROC of the path
        area[here], looser[here] = min(
            (area[a, b] + (right[a][b] - kept) * (wrong[a][b] + let_in), (a, b)) for a, b in ways
        )
    way = [(size - 1, size - 1)]
    while way[-1] != (0, 0):
        way.append(looser[way[-1]])
    return way


@cache
def _ways(size: int) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Every pair of knots but the loosest with the next looser ones, these always before it."""
    pairs = [(i, j) for i in range(size) for j in range(size)][1:]
    steps = [[(i - 1, j - 1), (i - 1, j), (i, j - 1)] for i, j in pairs]
    inside = [[way for way in ways if min(way) >= 0] for ways in steps]
    return list(zip(pairs, inside, strict=True))


def _table(knots: list[FloatArray], scores: FloatArray) -> list[list[int]]:
    """How many images reach both thresholds, for each pair of knots."""
    side = len(knots[0]) + 1
    first, second = (
        np.searchsorted(knot, column, side="right")
        for knot, column in zip(knots, scores.T, strict=True)
    )
    cells = np.bincount(first * side + second, minlength=side**2).reshape(side, side)[1:, 1:]
    table: list[list[int]] = cells[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1].tolist()
    return table


def _filled(way: list[tuple[int, int]]) -> IntArray:
    """The way in steps of a rung, from the strictest rungs on."""
    knots = PARTS * np.array(way)  # W, 2
    back = np.arange(PARTS)[:, None]
    onset = knots[0] + back[:0:-1]
    between = (knots[:-1, None] - back * np.sign(knots[:-1] - knots[1:])[:, None]).reshape(-1, 2)
    return np.concatenate([onset, between, knots[-1:]])
