"""Images redrawn once and shared by all that is measured on them, so that comparisons are paired.

    redraws = Redraws.of(len(correct))
    percentiles(redraws.paper_accuracies(score, correct, 0.95), 0.95)

Scores are sorted once; a redraw only changes how often each image counts. Many redraws are worked
out at a time, as many as a processor keeps at hand.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from demur.metrics.checks import FloatArray, flags, scored_pair

RESAMPLES = 500
AT_HAND = 200_000  # numbers of one array
Counts = NDArray[np.int32]


@dataclass(frozen=True)
class Resamples:
    """How often each image counts in each redraw."""

    counts: Counts  # resamples, n

    @staticmethod
    @lru_cache(maxsize=2)
    def of(n: int, resamples: int = RESAMPLES, seed: int = 0) -> "Resamples":
        """The redraws of n images."""
        generator = np.random.default_rng(seed)
        drawn = (generator.integers(n, size=n) for _ in range(resamples))
        return Resamples(np.stack([np.bincount(d, minlength=n) for d in drawn]).astype(np.int32))

    def paper_accuracies(self, score: ArrayLike, correct: ArrayLike, tpr: float) -> FloatArray:
        """The paper's accuracy among the accepted in each redraw, the threshold chosen anew."""
        values, right = scored_pair(score, correct)
        order = np.argsort(-values)
        ranked, right = values[order], right[order]
        rungs = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))  # where each begins
        found, some = np.empty(len(self.counts)), max(1, AT_HAND // len(order))
        for first in range(0, len(found), some):
            drawn = self.counts[first : first + some, order]
            rights, drawn = _summed(drawn * right, rungs), _summed(drawn, rungs)
            found[first : first + some] = _paper_accuracies(rights, drawn, tpr)
        return found

    def shares(self, part: ArrayLike, whole: ArrayLike) -> FloatArray:
        """How many of `whole` are in `part`, in each redraw; 0 of nothing."""
        inside, all_of_them = flags(part, "part"), flags(whole, "whole")
        below = self.counts @ all_of_them.astype(np.int64)
        above = self.counts @ (inside & all_of_them).astype(np.int64)
        found: FloatArray = above / np.maximum(below, 1)
        return found


def _summed(each: Counts, rungs: NDArray[np.intp]) -> Counts:
    """The sum over every rung, which is mostly one image."""
    return each if each.shape[1] == len(rungs) else np.add.reduceat(each, rungs, axis=1)


def _paper_accuracies(right: Counts, drawn: Counts, tpr: float) -> FloatArray:
    """Right among those strictly above the paper's threshold, by what stands on each rung.

    The threshold is that of `rejection.paper_place`, in every row at once. It is looked for near
    the share `tpr`, and on the whole ladder where no rung near there is surely the nearest.
    """
    rights = np.cumsum(right, axis=1, dtype=np.int32)
    reached = (rights < tpr * rights[:, -1:]).sum(1)
    margin = right.shape[1] // 50 + 5
    near = slice(max(0, reached.min() - margin), reached.max() + margin)
    found, sure = _among(right, drawn, rights, near, tpr)
    if not sure.all():
        left, whole = ~sure, slice(0, right.shape[1])
        found[left] = _among(right[left], drawn[left], rights[left], whole, tpr)[0]
    return found


def _among(
    right: Counts, drawn: Counts, rights: Counts, near: slice, tpr: float
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """The accuracies if the thresholds are among these rungs, and whether they surely are."""
    total, accepted_before = rights[:, -1], drawn[:, : near.start].sum(1)
    whole = near.stop - near.start == right.shape[1]
    right, drawn, rights = right[:, near], drawn[:, near], rights[:, near]
    off = np.abs(rights / np.maximum(total, 1)[:, None] - tpr)
    corner, ends = _corners(right, drawn)
    at_ends = np.where(ends, off, np.inf).min(1)
    off = np.where(corner | ends if whole else corner, off, np.inf)
    place = np.argmin(off, axis=1)
    row = np.arange(len(place))
    least = off[row, place]
    accepted = accepted_before + np.where(np.arange(off.shape[1]) < place[:, None], drawn, 0).sum(1)
    rights_above = rights[row, place] - right[row, place]
    # where nothing is accepted a share of 0 is kept, and the first of equals wins
    some = (least < tpr) & (total > 0)
    return np.where(some, rights_above / np.maximum(accepted, 1), 0.0), least < at_ends


def _corners(right: Counts, drawn: Counts) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Rungs with something drawn that are not midway between their neighbours; and the two ends."""
    here, places = drawn > 0, np.arange(drawn.shape[1])
    beyond = len(places)
    after = np.where(here, places, beyond)
    after = np.minimum.accumulate(after[:, ::-1], axis=1)[:, ::-1]  # the next one drawn, or itself
    following = np.append(after[:, 1:], np.full((len(after), 1), beyond), axis=1)
    ends = here & ((places == after[:, :1]) | (following == beyond))
    following = np.minimum(following, beyond - 1)
    same = [np.take_along_axis(each, following, 1) == each for each in (right, drawn)]
    return here & ~ends & ~(same[0] & same[1]), ends
