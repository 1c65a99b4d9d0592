"""The thresholds that will be tested, set by pilot images alone: a path from strict to loose.

    path = thresholds(scores[pilot], correct[pilot])            # K, D
    counted(path, scores[~pilot], correct[~pilot]).accepted     # K: grows along the path

Two scores span a grid. One nested path through it, along which the pilot's right answers come in
before its wrong ones, leaves a single order to test and no correction for how many pairs there are.
"""

from typing import NamedTuple

import numpy as np

from demur.metrics import BoolArray, FloatArray
from demur.metrics.checks import IntArray

# Every score but -inf. In float32, as nets answer: a smaller double would be rounded to -inf there.
ANY_SCORE = -float(np.finfo(np.float32).max)

STEPS = 240  # on the path of one score
KNOTS, PARTS = 12, 10  # of each of two scores: few knots to choose a path by, finer steps on it
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
    area = [[0.0] * KNOTS for _ in range(KNOTS)]
    looser: dict[tuple[int, int], tuple[int, int]] = {}
    for i in range(KNOTS):
        for j in range(KNOTS):
            ways = [(a, b) for a, b in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if min(a, b) >= 0]
            # the area under the wrong answers let in, over the right ones: 1 - AUROC of the path
            areas = [
                area[a][b] + (right[a][b] - right[i][j]) * (wrong[a][b] + wrong[i][j])
                for a, b in ways
            ]
            if ways:
                area[i][j] = min(areas)
                looser[i, j] = ways[areas.index(area[i][j])]
    way = [(KNOTS - 1, KNOTS - 1)]
    while way[-1] in looser:
        way.append(looser[way[-1]])
    return way


def _table(knots: list[FloatArray], scores: FloatArray) -> list[list[int]]:
    """How many images reach both thresholds, for each pair of knots."""
    first, second = (
        np.searchsorted(knot, column, side="right")
        for knot, column in zip(knots, scores.T, strict=True)
    )
    cells = np.bincount(first * (KNOTS + 1) + second, minlength=(KNOTS + 1) ** 2)
    cells = cells.reshape(KNOTS + 1, KNOTS + 1)[1:, 1:]
    table: list[list[int]] = cells[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1].tolist()
    return table


def _filled(way: list[tuple[int, int]]) -> IntArray:
    """The way in steps of a rung, from the strictest rungs on."""
    knots = PARTS * np.array(way)  # W, 2
    back = np.arange(PARTS)[:, None]
    onset = knots[0] + back[:0:-1]
    between = (knots[:-1, None] - back * np.sign(knots[:-1] - knots[1:])[:, None]).reshape(-1, 2)
    return np.concatenate([onset, between, knots[-1:]])
