"""Images redrawn once and shared by all that is measured on them, so that comparisons are paired.

    redraws = Redraws.of(len(correct))
    percentiles(redraws.paper_accuracies(score, correct, 0.95), 0.95)

Scores are sorted once; a redraw only changes how often each image counts.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from demur.metrics.checks import FloatArray, flags, scored_pair
from demur.metrics.rejection import paper_place

RESAMPLES = 500


@dataclass(frozen=True)
class Redraws:
    """How often each image counts in each redraw."""

    counts: NDArray[np.int32]  # resamples, n

    @staticmethod
    @lru_cache(maxsize=2)
    def of(n: int, resamples: int = RESAMPLES, seed: int = 0) -> "Redraws":
        """The redraws of n images."""
        generator = np.random.default_rng(seed)
        drawn = (generator.integers(n, size=n) for _ in range(resamples))
        return Redraws(np.stack([np.bincount(d, minlength=n) for d in drawn]).astype(np.int32))

    def paper_accuracies(self, score: ArrayLike, correct: ArrayLike, tpr: float) -> FloatArray:
        """The paper's accuracy among the accepted in each redraw, the threshold chosen anew."""
        values, right = scored_pair(score, correct)
        order = np.argsort(-values)
        ranked, right = values[order], right[order]
        last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
        found = np.empty(len(self.counts))
        for place, counts in enumerate(self.counts):
            drawn = counts[order]
            rights, accepted = np.cumsum(drawn * right)[last], np.cumsum(drawn)[last]
            found[place] = _paper_accuracy(rights, accepted, tpr)
        return found

    def shares(self, part: ArrayLike, whole: ArrayLike) -> FloatArray:
        """How many of `whole` are in `part`, in each redraw; 0 of nothing."""
        inside, all_of_them = flags(part, "part"), flags(whole, "whole")
        below = self.counts @ all_of_them.astype(np.int64)
        above = self.counts @ (inside & all_of_them).astype(np.int64)
        found: FloatArray = above / np.maximum(below, 1)
        return found


def _paper_accuracy(right: NDArray[np.int64], accepted: NDArray[np.int64], tpr: float) -> float:
    """Right among those strictly above the paper's threshold, by what stands at or above each."""
    drawn = np.diff(accepted, prepend=0) > 0
    right, accepted = right[drawn], accepted[drawn]
    place = paper_place(right, accepted - right, tpr)
    if not place:  # nothing lies strictly above
        return 0.0
    return float(right[place - 1] / accepted[place - 1])
