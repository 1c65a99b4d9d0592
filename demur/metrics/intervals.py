"""Confidence intervals: Wilson, and paired differences over shared resamples of the images."""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from demur.errors import BadInput
from demur.metrics.checks import BoolArray, FloatArray, as_decimal, check_share, flags, scored_pair

RESAMPLES = 500
BLOCK_SIZE = 200_000  # entries of one array that fits into the processor's cache
SPREAD = 4  # standard deviations of the TPR that the first search covers
CountArray = NDArray[np.float32]  # integers below 2**24 and their sums are exact


class Interval(NamedTuple):
    """A confidence interval, both ends included."""

    lo: float
    hi: float


class Difference(NamedTuple):
    """A statistic of one score minus that of another, its interval and its two-sided p-value."""

    value: float
    lo: float
    hi: float
    p: float


def wilson(k: float, n: int, level: float = 0.95) -> Interval:
    """Wilson score interval of k successes in n trials; (0, 1) without trials."""
    check_share("level", level)
    if not 0 <= k <= n:
        raise BadInput(f"{k} successes in {n} trials are impossible; give 0 <= k <= n")
    if n == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    # for k = 0 and k = n the ends are exactly 0 and 1, which rounding would miss
    return Interval(centre - half if k > 0 else 0.0, centre + half if k < n else 1.0)


def resampled_difference(value: float, gaps: FloatArray, level: float = 0.95) -> Difference:
    """Difference with its interval and p-value from the differences on the resamples."""
    # counting the sample itself as one more resample keeps p above 0
    other_side = 1 + min(int((gaps <= 0).sum()), int((gaps >= 0).sum()))
    p = min(1.0, 2 * other_side / (1 + len(gaps)))
    return Difference(value, *percentiles(gaps, level), p)


def percentiles(values: FloatArray, level: float) -> Interval:
    """Interval of the values without the same number of extremes at both ends."""
    check_share("level", level)
    ranked = np.sort(values)
    # observed values, not interpolated ones, since a threshold may be infinite
    cut = math.floor((1 - as_decimal(level)) / 2 * len(ranked))
    return Interval(float(ranked[cut]), float(ranked[-1 - cut]))


@dataclass(frozen=True)
class Resamples:
    """How often each image occurs in each resample.

    Scores are sorted once. A threshold is searched near that of the whole sample, and sums over all
    other images are one matrix product.
    """

    counts: CountArray  # images, resamples
    copies: int = 1  # values per image: those of all images once, then again

    @staticmethod
    @lru_cache(maxsize=2)
    def of(n: int, resamples: int = RESAMPLES, seed: int = 0) -> "Resamples":
        generator = np.random.default_rng(seed)
        drawn = (generator.integers(n, size=n) for _ in range(resamples))
        counts = np.stack([np.bincount(d, minlength=n).astype(np.float32) for d in drawn])
        return Resamples(np.ascontiguousarray(counts.T))

    def paper_accuracies(self, score: ArrayLike, correct: ArrayLike, tpr: float) -> FloatArray:
        """`paper_stats(...).accuracy` of each resample, with the threshold chosen on it."""
        levels = _Levels.of(*scored_pair(score, correct))
        everything = np.arange(self.counts.shape[1])
        accuracies, certain = self._search(levels, levels.near(tpr), tpr, everything)
        uncertain = np.flatnonzero(~certain)
        block, whole = max(1, BLOCK_SIZE // len(levels.order)), slice(0, len(levels.first) - 1)
        for start in range(0, len(uncertain), block):
            columns = uncertain[start : start + block]
            accuracies[columns] = self._search(levels, whole, tpr, columns)[0]
        return accuracies

    def shares(self, part: ArrayLike, whole: ArrayLike) -> FloatArray:
        """Share of the images in `whole` that are also in `part`, per resample; 0 for none."""
        in_part, in_whole = flags(part, "part"), flags(whole, "whole")
        n_part, n_whole = self._sums(in_part & in_whole, in_whole)
        shares: FloatArray = n_part / np.maximum(n_whole, 1)
        return shares

    def _sums(self, *members: BoolArray) -> FloatArray:
        """Number of members in each resample; len(members), resamples."""
        weights = np.stack(members).reshape(len(members), self.copies, -1).sum(1, np.float32)
        sums: FloatArray = (weights @ self.counts).astype(np.float64)
        return sums

    def _search(
        self, levels: "_Levels", near: slice, tpr: float, columns: NDArray[np.intp]
    ) -> tuple[FloatArray, BoolArray]:
        """Accuracies strictly above the threshold of `rejection.paper_level_index`.

        Of the resamples `columns`, if their thresholds are among the levels `near`, and whether
        they surely are: the TPR falls from level to level, so a TPR that is nearer than those at
        both ends is the nearest of all.
        """
        n_correct, n = levels.counts(self, near, columns)
        before = levels.order[: levels.first[near.start]]
        is_before = np.zeros(len(levels.order), dtype=np.bool_)
        is_before[before] = True
        members = levels.correct, levels.correct & is_before, is_before
        total, correct_before, accepted_before = self._sums(*members)[:, columns]
        cumulative = correct_before + np.cumsum(n_correct, axis=0)
        distance = np.abs(cumulative / np.maximum(total, 1) - tpr)
        corner, ends = _corners(n_correct, n)
        end_distance = np.where(ends, distance, np.inf).min(0)
        is_whole = near.stop - near.start == len(levels.first) - 1
        distance = np.where(corner | ends if is_whole else corner, distance, np.inf)
        level, column = np.argmin(distance, axis=0), np.arange(len(columns))
        smallest = distance[level, column]
        accepted_correct = (cumulative - n_correct)[level, column]
        accepted = accepted_before + (np.cumsum(n, axis=0) - n)[level, column]
        # at threshold +inf the TPR is 0, and it comes first: it wins ties
        accepts_any = (smallest < tpr) & (total > 0)
        accuracy = np.where(accepts_any, accepted_correct / np.maximum(accepted, 1), 0.0)
        return accuracy, smallest < end_distance


class _Levels(NamedTuple):
    """Images by descending score; those with the same score share a level."""

    order: NDArray[np.intp]
    correct: BoolArray  # in the given order
    first: NDArray[np.intp]  # position of each level in `order`, and its length

    @staticmethod
    def of(score: FloatArray, correct: BoolArray) -> "_Levels":
        order = np.argsort(-score)
        ranked = score[order]
        is_new = np.append(ranked[1:] != ranked[:-1], True)
        return _Levels(order, correct, np.append(0, np.flatnonzero(is_new) + 1))

    def near(self, tpr: float) -> slice:
        """Levels where the TPR of nearly every resample is closest to `tpr`."""
        n_correct = np.cumsum(self.correct[self.order])[self.first[1:] - 1]
        total = n_correct[-1]
        spread = SPREAD * math.sqrt(tpr * (1 - tpr) * total)
        first, last = np.searchsorted(n_correct, [tpr * total - spread, tpr * total + spread])
        return slice(max(0, int(first) - 5), min(len(n_correct), int(last) + 6))

    def counts(
        self, resamples: Resamples, near: slice, columns: NDArray[np.intp]
    ) -> tuple[CountArray, CountArray]:
        """Correct and all images drawn at each of the levels `near`; levels, columns."""
        first = self.first[near.start : near.stop + 1]
        images = self.order[first[0] : first[-1]]
        rows = images % len(resamples.counts)
        drawn = resamples.counts[np.ix_(rows, columns)]
        levels = first[:-1] - first[0]
        n_correct = np.add.reduceat(drawn * self.correct[images, None], levels, axis=0)
        return n_correct, np.add.reduceat(drawn, levels, axis=0)


def _corners(n_correct: CountArray, n: CountArray) -> tuple[BoolArray, BoolArray]:
    """Drawn levels that are not midway between their neighbours, and the first and last drawn."""
    drawn, index = n > 0, np.arange(len(n))[:, None]
    none = len(n)
    after = np.where(drawn, index, none)
    after = np.minimum.accumulate(after[::-1], axis=0)[::-1]  # this or the next drawn level
    following = np.append(after[1:], np.full((1, after.shape[1]), none), axis=0)
    ends = drawn & ((index == after[:1]) | (following == none))
    following = np.minimum(following, none - 1)
    same = [np.take_along_axis(c, following, 0) == c for c in (n_correct, n)]
    return drawn & ~ends & ~(same[0] & same[1]), ends
