"""Values of several seeds: means, deviations and paired differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from demur.calibrate.binomial import student_p, student_t
from demur.metrics import Difference, Interval

Z = NormalDist().inv_cdf(0.975)  # half-width of a 95% interval in standard errors


@dataclass(frozen=True)
class Mean:
    """A mean over seeds."""

    value: float
    spread: float | None  # standard deviation over seeds; None for a single seed
    interval: Interval | None = None  # 95% interval, only for a single seed


def mean_of(values: Sequence[float], interval: Interval | None = None) -> Mean:
    """The mean; `interval` is that of the first value and applies if it is the only one."""
    if len(values) == 1:
        return Mean(values[0], None, interval)
    return Mean(fmean(values), stdev(values))


def paired(differences: Sequence[Difference]) -> Difference:
    """The mean of the differences of several seeds, all measured on the same images.

    The variance has two parts: that of the images, which more seeds do not reduce, and that of the
    seeds, divided by their number. The interval uses Student's t.
    """
    if len(differences) == 1:
        return differences[0]
    value = fmean(difference.value for difference in differences)
    image_variance = fmean(((d.hi - d.lo) / (2 * Z)) ** 2 for d in differences)
    seed_variance = stdev(d.value for d in differences) ** 2 / len(differences)
    error = math.sqrt(image_variance + seed_variance)
    if error == 0:
        return Difference(value, value, value, float(value == 0))
    # Satterthwaite: only the seed variance is estimated from few samples. Its floor limits the
    # degrees of freedom to about 10^7, where Student's t is the normal distribution.
    share = max(seed_variance / error**2, 3e-4)
    freedom = (len(differences) - 1) / share**2
    margin, p = student_t(0.05, freedom) * error, student_p(value / error, freedom)
    return Difference(value, value - margin, value + margin, p)
