"""Bootstrap resamples shared by all metrics of the same images, so that comparisons are paired.

    resamples = Resamples.of(len(correct))
    percentiles(resamples.paper_accuracies(score, correct, 0.95), 0.95)

Scores are sorted once; a resample only changes how often each image counts. Resamples are processed
in blocks that fit into the processor's cache.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from demur.metrics.checks import FloatArray, flags, scored_pair

RESAMPLES = 500
BLOCK_SIZE = 200_000  # entries of one array
MAX_PASSES = 16  # over ties; reduceat takes as long as about so many
CountArray = NDArray[np.int32]


@dataclass(frozen=True)
class Resamples:
    """How often each image occurs in each resample."""

    counts: CountArray  # resamples, n

    @staticmethod
    @lru_cache(maxsize=2)
    def of(n: int, resamples: int = RESAMPLES, seed: int = 0) -> "Resamples":
        """Resamples of n images with replacement."""
        generator = np.random.default_rng(seed)
        drawn = (generator.integers(n, size=n) for _ in range(resamples))
        return Resamples(np.stack([np.bincount(d, minlength=n) for d in drawn]).astype(np.int32))

    def paper_accuracies(self, score: ArrayLike, correct: ArrayLike, tpr: float) -> FloatArray:
        """`paper_stats(...).accuracy` of each resample, with the threshold chosen on it."""
        values, is_correct = scored_pair(score, correct)
        order = np.argsort(-values)
        ranked, is_correct = values[order], is_correct[order]
        levels = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))  # first of each tie
        accuracies, block = np.empty(len(self.counts)), max(1, BLOCK_SIZE // len(order))
        for first in range(0, len(accuracies), block):
            drawn = self.counts[first : first + block, order]
            n_correct, n = _sum_ties(drawn * is_correct, levels), _sum_ties(drawn, levels)
            accuracies[first : first + block] = _paper_accuracies(n_correct, n, tpr)
        return accuracies

    def shares(self, part: ArrayLike, whole: ArrayLike) -> FloatArray:
        """Share of the images in `whole` that are also in `part`, per resample; 0 for none."""
        in_part, in_whole = flags(part, "part"), flags(whole, "whole")
        n_whole = self.counts[:, in_whole].sum(1)
        n_part = self.counts[:, in_part & in_whole].sum(1)
        shares: FloatArray = n_part / np.maximum(n_whole, 1)
        return shares


def _sum_ties(counts: CountArray, levels: NDArray[np.intp]) -> CountArray:
    """Counts summed over the images of each score level."""
    sizes = np.diff(np.append(levels, counts.shape[1]))
    if sizes.max() > MAX_PASSES:
        return np.add.reduceat(counts, levels, axis=1)
    summed = counts[:, levels]
    for position in range(1, sizes.max()):  # the second image of each level, the third, ...
        tied = sizes > position
        summed[:, tied] += counts[:, levels[tied] + position]
    return summed


def _paper_accuracies(n_correct: CountArray, n: CountArray, tpr: float) -> FloatArray:
    """Accuracy strictly above the paper's threshold, from the counts on each score level.

    The threshold is that of `rejection.paper_level_index`, for every row at once. The search
    starts near the share `tpr` and covers all levels where none of those is surely the nearest.
    """
    cumulative = np.cumsum(n_correct, axis=1, dtype=np.int32)
    reached = (cumulative < tpr * cumulative[:, -1:]).sum(1)
    margin = n_correct.shape[1] // 50 + 5
    near = slice(max(0, reached.min() - margin), reached.max() + margin)
    accuracies, certain = _search(n_correct, n, cumulative, near, tpr)
    if not certain.all():
        rows, everything = ~certain, slice(0, n_correct.shape[1])
        accuracies[rows] = _search(n_correct[rows], n[rows], cumulative[rows], everything, tpr)[0]
    return accuracies


def _search(
    n_correct: CountArray, n: CountArray, cumulative: CountArray, near: slice, tpr: float
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Accuracies if the thresholds are among the levels `near`, and whether they surely are."""
    total, accepted_before = cumulative[:, -1], n[:, : near.start].sum(1)
    is_whole = near.stop - near.start == n_correct.shape[1]
    n_correct, n, cumulative = n_correct[:, near], n[:, near], cumulative[:, near]
    distance = np.abs(cumulative / np.maximum(total, 1)[:, None] - tpr)
    corner, ends = _corners(n_correct, n)
    end_distance = np.where(ends, distance, np.inf).min(1)
    distance = np.where(corner | ends if is_whole else corner, distance, np.inf)
    level = np.argmin(distance, axis=1)
    row = np.arange(len(level))
    smallest = distance[row, level]
    above = np.arange(distance.shape[1]) < level[:, None]
    accepted = accepted_before + np.where(above, n, 0).sum(1)
    accepted_correct = cumulative[row, level] - n_correct[row, level]
    # at threshold +inf the TPR is 0, and it comes first: it wins ties
    accepts_any = (smallest < tpr) & (total > 0)
    accuracy = np.where(accepts_any, accepted_correct / np.maximum(accepted, 1), 0.0)
    return accuracy, smallest < end_distance


def _corners(n_correct: CountArray, n: CountArray) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Drawn levels that are not midway between their neighbours, and the first and last drawn."""
    drawn, index = n > 0, np.arange(n.shape[1])
    none = len(index)
    after = np.where(drawn, index, none)
    after = np.minimum.accumulate(after[:, ::-1], axis=1)[:, ::-1]  # this or the next drawn level
    following = np.append(after[:, 1:], np.full((len(after), 1), none), axis=1)
    ends = drawn & ((index == after[:, :1]) | (following == none))
    following = np.minimum(following, none - 1)
    same = [np.take_along_axis(c, following, 1) == c for c in (n_correct, n)]
    return drawn & ~ends & ~(same[0] & same[1]), ends
