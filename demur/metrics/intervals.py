"""Confidence intervals and exact tests of shares: Wilson, resamples, binomial tails, chance level.

Differences are paired over shared resamples of the images. The tails, Clopper-Pearson bounds and
Student's t are computed without SciPy, which is large.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from demur.errors import BadInput
from demur.metrics.checks import (
    BoolArray,
    FloatArray,
    IntArray,
    as_decimal,
    check_share,
    flags,
    scored_pair,
)

RESAMPLES = 500
BLOCK_SIZE = 200_000  # entries of one array that fits into the processor's cache
MOST_COUNTS = 2**25  # entries of the counts of one block of resamples: 128 MiB
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
        return Resamples._drawn(np.random.default_rng(seed), n, resamples)

    @staticmethod
    def blocks(n: int, resamples: int = RESAMPLES, seed: int = 0) -> "Iterator[Resamples]":
        """The resamples of `of`, some at a time, so that memory grows with n alone."""
        if (width := max(1, MOST_COUNTS // n)) >= resamples:
            yield Resamples.of(n, resamples, seed)
            return
        generator = np.random.default_rng(seed)
        for start in range(0, resamples, width):
            yield Resamples._drawn(generator, n, min(width, resamples - start))

    @staticmethod
    def _drawn(generator: np.random.Generator, n: int, resamples: int) -> "Resamples":
        counts = np.empty((n, resamples), np.float32, order="F")
        for column in counts.T:
            column[:] = np.bincount(generator.integers(n, size=n), minlength=n)
        return Resamples(counts)

    def _accuracies(self, levels: "_Levels", tpr: float) -> FloatArray:
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
        n_part, n_whole = self._sums(in_part & in_whole, in_whole, counts=self.counts)
        return np.asarray(n_part / np.maximum(n_whole, 1))

    def _sums(self, *members: BoolArray, counts: CountArray) -> FloatArray:
        """Number of members in each resample of `counts`; len(members), resamples."""
        weights = np.stack(members).reshape(len(members), self.copies, -1).sum(1, np.float32)
        return np.asarray((weights @ counts).astype(np.float64))

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
        every = len(columns) == self.counts.shape[1]
        counts = self.counts if every else self.counts[:, columns]
        total, correct_before, accepted_before = self._sums(*members, counts=counts)
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


Statistic = Callable[[Resamples], FloatArray]  # one value per resample


def paper_accuracy(score: ArrayLike, correct: ArrayLike, tpr: float) -> Statistic:
    """`paper_stats(...).accuracy` of each resample, with the threshold chosen on it.

    The score is sorted once for all blocks.
    """
    levels = _Levels.of(*scored_pair(score, correct))
    return lambda drawn: drawn._accuracies(levels, tpr)


def resampled(n: int, statistics: Sequence[Statistic]) -> list[FloatArray]:
    """Each statistic on all resamples of n images, which are drawn once for all of them."""
    parts = [[one(drawn) for one in statistics] for drawn in Resamples.blocks(n)]
    return [np.concatenate(values) for values in zip(*parts, strict=True)]


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
        drawn = resamples.counts.T[np.ix_(columns, rows)].T  # a resample lies together in memory
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


def binomial_cdf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X <= k) for X ~ Binomial(n, p)."""
    return binomial_sf(np.asarray(n) - k, n, 1 - np.asarray(p))


def binomial_sf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> FloatArray:
    """P(X >= k) for X ~ Binomial(n, p)."""
    a, b = np.asarray(k), np.asarray(n) + 1 - k
    inner = (a > 0) & (b > 0)
    value = incomplete_beta(np.where(inner, a, 1), np.where(inner, b, 1), p)
    return np.where(inner, value, a <= 0)


def upper_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """Clopper-Pearson upper bound: the p with P(X <= k) = error; 1 for k = n."""
    return 1 - lower_bound(np.asarray(n) - k, n, error)


def lower_bound(k: ArrayLike, n: ArrayLike, error: float) -> FloatArray:
    """Clopper-Pearson lower bound: the p with P(X >= k) = error; 0 for k = 0."""
    k, n = np.asarray(k), np.asarray(n)
    return np.where(k > 0, _quantile(np.maximum(k, 1), np.maximum(n + 1 - k, 1), error), 0.0)


def student_t(level: float, freedom: float) -> float:
    """The t that |T| of Student's distribution exceeds with probability `level`."""
    u = float(_quantile(np.array(0.5), np.array(freedom / 2), 1 - level))
    return math.sqrt(freedom * u / (1 - u))


def student_p(t: float, freedom: float) -> float:
    """P(|T| > |t|) of Student's distribution."""
    return float(incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)))


def incomplete_beta(a: ArrayLike, b: ArrayLike, x: ArrayLike) -> FloatArray:
    """The regularised incomplete beta function I_x(a, b)."""
    return _beta(a, b, x)[0]


def _beta(a: ArrayLike, b: ArrayLike, x: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """I_x(a, b) by its continued fraction (Lentz), and its derivative times x (1 - x)."""
    a, b, x = (np.asarray(one, np.float64) for one in (a, b, x))
    n, high = a + b, x > (a + 1) / (a + b + 2)  # above the mean the other tail converges fast
    below = np.where(high, n * x - a, a - n * x)  # without the cancellation of 1 - x
    a, b, x = np.where(high, b, a), np.where(high, a, b), np.where(high, 1 - x, x)
    with np.errstate(divide="ignore", invalid="ignore"):  # log(0) = -inf is right at x = 0
        log_x = np.where(below < a / 2, np.log1p(-below / a), np.log(x * n / a))  # log(x n / a)
    power = a * log_x + b * np.log1p(below / b) + _stirling(n) - _stirling(a) - _stirling(b)
    d = 1 / (1 - n * x / (a + 1))
    c, value, change, m = np.ones_like(d), d, np.zeros_like(d), 0
    most = 100 + 10 * math.sqrt(np.max(n, initial=0))  # it needs a few times the root
    while np.any(np.abs(change - 1) > 1e-14) and (m := m + 1) < most:
        odd = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        for term in (odd, -(a + m) * (n + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d, c = 1 / (1 + term * d), 1 + term / c
            value = value * (change := c * d)
    front = np.exp(power) * np.sqrt(b / (2 * math.pi * n * a))
    return np.where(high, 1 - front * value, front * value), front * a


def _stirling(z: FloatArray) -> FloatArray:
    """Log of the gamma function minus Stirling's formula, (z - 1/2) log z - z + log(2 pi) / 2."""
    steps, w = z[..., None] + np.arange(16), (z + 16.0) ** -2
    series = np.sqrt(w) * (1 / 12 - w * (1 / 360 - w * (1 / 1260 - w / 1680)))
    return np.asarray(series + ((steps + 0.5) * np.log1p(1 / steps) - 1).sum(-1))


def _quantile(a: FloatArray, b: FloatArray, level: float) -> FloatArray:
    """The x where I_x(a, b) is the level, by Newton's method on the logs.

    log I is increasing and concave in log x, so that after the first step all steps go up.
    """
    x, step = a / (a + b), np.ones(1)
    for _ in range(100):
        if np.abs(step).max() < 1e-11:
            break
        value, slope = _beta(a, b, x)
        step = np.log(level / value) * value * (1 - x) / slope
        x = np.minimum(x * np.exp(step), 1 - 1e-16)
    return x


CHANCE_LEVEL = 0.01  # of the one-sided test: of nets at chance one in a hundred passes
REMEDY = (
    "check the labels, add images, train longer (epochs=60) or with a smaller eps; "
    "images-standard-small shows what the net learns without attacks"
)


class ChanceTest(NamedTuple):
    """Correct predictions of clean images, beside chance and the largest class among them."""

    right: int
    images: int
    classes: int
    majority: int  # images of the largest class
    split: str

    @staticmethod
    def of(right: int, y: IntArray, classes: int, split: str) -> "ChanceTest":
        """Test of `right` correct predictions for images with the labels `y`."""
        return ChanceTest(right, len(y), classes, int(np.bincount(y).max()), split)

    @property
    def passed(self) -> bool:
        """Whether so many correct predictions are improbable at either baseline."""
        baseline = max(1 / self.classes, self.majority / self.images)
        return bool(binomial_sf(self.right, self.images, baseline) <= CHANCE_LEVEL)

    @property
    def sentence(self) -> str:
        """Accuracy beside both baselines."""
        above = "above" if self.passed else "not shown to be better than"
        return (
            f"{100 * self.right / self.images:.1f}% of {self.images} {self.split} images are "
            f"right, {above} chance ({100 / self.classes:.1f}%) and the largest class "
            f"({100 * self.majority / self.images:.1f}%)"
        )

    @property
    def advice(self) -> str:
        """The sentence, and what to try with a net of one's own."""
        return f"{self.sentence}; {REMEDY}"

    def to_json(self) -> dict[str, Any]:
        """What a guard stores."""
        return {**self._asdict(), "passed": self.passed, "sentence": self.sentence}
