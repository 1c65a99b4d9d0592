"""Averages over the seeds of a recipe: means, standard deviations, paired differences to Con."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from scipy.stats import t

from demur.evaluate import Protocol, Row
from demur.metrics import Difference, Interval
from demur.paper.measure import TrainingResult

Z = NormalDist().inv_cdf(0.975)  # half-width of a 95% interval in standard errors


@dataclass(frozen=True)
class Mean:
    """A mean over seeds."""

    value: float
    spread: float | None  # standard deviation over seeds; None for a single seed
    interval: Interval | None = None  # 95% interval, only for a single seed


@dataclass(frozen=True)
class SeedAverage:
    """One rejector of one entry under one attack in one protocol, averaged over seeds."""

    entry: str
    attack: str
    rejector: str
    protocol: Protocol
    seeds: int
    n: int
    all: Mean  # accuracy on all images
    right: Mean  # accuracy on accepted images
    right_vs_con: Difference
    coverage: Mean
    accepted_wrong: Mean
    auroc: Mean
    auroc_vs_con: Difference


def average_seeds(results: Iterable[TrainingResult]) -> list[SeedAverage]:
    """Average over seeds: one result per entry, attack, rejector, protocol and image count."""
    groups: dict[tuple[str, str, str, Protocol, int], list[tuple[TrainingResult, Row]]] = {}
    for result in results:
        for row in result.rows:  # records of another number of images are not averaged
            key = (result.entry, row.attack, row.rejector, row.protocol, row.point.n)
            groups.setdefault(key, []).append((result, row))
    return [_average(*key, members) for key, members in groups.items()]


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
    # Satterthwaite: only the seed variance is estimated from few samples
    freedom = math.inf
    if seed_variance:
        freedom = (len(differences) - 1) * (error**2 / seed_variance) ** 2
    margin = float(t.ppf(0.975, freedom)) * error
    p = 2 * float(t.sf(abs(value) / error, freedom))
    return Difference(value, value - margin, value + margin, p)


def _average(
    entry: str,
    attack: str,
    rejector: str,
    protocol: Protocol,
    n: int,
    members: list[tuple[TrainingResult, Row]],
) -> SeedAverage:
    rows = [row for _, row in members]
    accuracy = [result.accuracy[attack] for result, _ in members if result.accuracy is not None]
    return SeedAverage(
        entry, attack, rejector, protocol, len(rows), n,
        _mean(accuracy),
        _mean([row.point.accuracy for row in rows], rows[0].accuracy_interval),
        paired([row.accuracy_vs_con for row in rows]),
        _mean([row.point.coverage for row in rows], rows[0].coverage_interval),
        _mean([row.point.accepted_wrong for row in rows], rows[0].accepted_wrong_interval),
        _mean([row.ranking.auroc for row in rows], rows[0].ranking.auroc_interval),
        paired([row.ranking.auroc_vs_con for row in rows]),
    )  # fmt: skip


def _mean(values: Sequence[float], interval: Interval | None = None) -> Mean:
    """The mean; `interval` is that of the first value and applies if it is the only one."""
    if len(values) == 1:
        return Mean(values[0], None, interval)
    return Mean(fmean(values), stdev(values))
