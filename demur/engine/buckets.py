"""Batch sizes that attacks pad to, so that few CUDA graphs cover all batch sizes.

    buckets = BatchBuckets(1024, tune_later=True)
    buckets.bucket_for(key, 477)    # size 512, untuned; later size 480, tuned

A tuned graph (tight size, cuDNN benchmark) is slow to capture; padding and untuned kernels are
slow to replay. Capture a tuned graph only after padding has wasted as much time as the capture
costs (the ski-rental rule: at most twice the optimum). In eval mode padding changes no other row.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple

MIN_BUCKET = 16  # images; a smaller batch takes as long
MAX_RATIO = 64  # largest bucket divided by smallest bucket
GRANULARITY = 16  # a tuned bucket is a multiple of this many images
CAPTURE_COST = 60.0  # cost of a tuned capture, in replays at the coarse size
UNTUNED_OVERHEAD = 0.07  # share of a replay lost to kernels picked without cuDNN benchmark


class Bucket(NamedTuple):
    """A padded batch size, and whether its graph is captured with cuDNN benchmark."""

    size: int
    tuned: bool


class BatchBuckets:
    """Choose buckets for batches of at most `largest` images, for each kind of work separately.

    `tune_later` starts with coarse, untuned buckets and switches to tight, tuned ones when that
    pays. Without it every bucket is coarse and tuned: if each size needs its own torch.compile,
    another size never pays.
    """

    def __init__(self, largest: int, tune_later: bool) -> None:
        self.largest, self.tune_later = largest, tune_later
        self.wasted: defaultdict[Hashable, float] = defaultdict(float)  # in replays, by kind
        self.tuned: set[tuple[Hashable, int]] = set()

    def bucket_for(self, kind: Hashable, count: int) -> Bucket:
        """Return the bucket for `count` images; a batch above `largest` keeps its size."""
        coarse = self.coarse_size(count)
        if not self.tune_later:
            return Bucket(coarse, True)
        tight = min(-(-max(count, 1) // GRANULARITY) * GRANULARITY, coarse)
        if (kind, tight) not in self.tuned:
            self.wasted[kind] += 1 - (1 - UNTUNED_OVERHEAD) * tight / coarse
            if self.wasted[kind] < CAPTURE_COST:
                return Bucket(coarse, False)
            self.tuned.add((kind, tight))
            self.wasted[kind] = 0
        return Bucket(tight, True)

    def coarse_size(self, count: int) -> int:
        """Return the smallest of largest / 2**k and 3/4 of that which holds `count` images."""
        if count > self.largest:
            return count
        count = max(count, 1)
        bucket, least = self.largest, max(count, MIN_BUCKET, self.largest // MAX_RATIO)
        while bucket // 2 >= least:
            bucket //= 2
        return smaller if (smaller := 3 * bucket // 4) >= least else bucket

    def reset(self) -> None:
        """Start again with coarse buckets, after all captured graphs were dropped."""
        self.wasted.clear()
        self.tuned.clear()
