"""Which batch sizes are recorded: a few in haste, and one with care where an attack is long.

    rooms = BatchBuckets(1024, fits=True)
    rooms.room(key, 477)        # 512 at first; 480, with kernels chosen by trial, when that pays

Recording with care is dear; so are padding and kernels taken untried. Whoever pays for the first
only when the second have cost as much never pays more than twice the least.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple

SMALLEST = 16  # images: below that a padded batch costs no more
WIDEST = 64  # times the smallest room is the largest
GRAIN = 16  # images that a fitting room is a multiple of
DEAR = 60.0  # looks that a recording with care costs
UNTRIED = 0.07  # of a look, that kernels taken untried cost


class Bucket(NamedTuple):
    """A batch size, and whether kernels are tried before it is recorded."""

    size: int
    tuned: bool


class BatchBuckets:
    """Rooms for batches of at most `largest` images, chosen for each kind of look by itself.

    Where sizes are compiled for themselves none `fits`: no waste would pay for that.
    """

    def __init__(self, largest: int, fits: bool) -> None:
        self.largest, self.fits = largest, fits
        self.regrets: defaultdict[Hashable, float] = defaultdict(float)  # in looks, by kind
        self.fitting: set[tuple[Hashable, int]] = set()

    def bucket_for(self, kind: Hashable, count: int) -> Bucket:
        """The room for so many images now; more than the largest are taken as they are."""
        usual = self.usual(count)
        if not self.fits:
            return Bucket(usual, True)
        least = min(-(-max(count, 1) // GRAIN) * GRAIN, usual)
        if (kind, least) not in self.fitting:
            self.regrets[kind] += 1 - (1 - UNTRIED) * least / usual
            if self.regrets[kind] < DEAR:
                return Bucket(usual, False)
            self.fitting.add((kind, least))
            self.regrets[kind] = 0
        return Bucket(least, True)

    def usual(self, count: int) -> int:
        """The largest halved, or 3/4 of that."""
        if count > self.largest:
            return count
        count = max(count, 1)
        bucket, least = self.largest, max(count, SMALLEST, self.largest // WIDEST)
        while bucket // 2 >= least:
            bucket //= 2
        return less if (less := 3 * bucket // 4) >= least else bucket

    def forget(self) -> None:
        """Begin anew: what was recorded is gone."""
        self.regrets.clear()
        self.fitting.clear()
