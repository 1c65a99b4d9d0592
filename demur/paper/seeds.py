"""Several trainings of one recipe as one line: means, spreads, and paired differences to Con."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from scipy.stats import t

from demur.evaluate import Protocol, Row
from demur.metrics import Difference, Interval
from demur.paper.measured import TrainingResult

Z = NormalDist().inv_cdf(0.975)  # of a 95% interval, from many


@dataclass(frozen=True)
class Mean:
    """A figure over seeds; the interval is that of the one seed where there is only one."""

    value: float
    spread: float | None  # standard deviation over seeds
    interval: Interval | None = None


@dataclass(frozen=True)
class SeedAverage:
    """One score of one entry under one attack in one protocol, over all seeds."""

    entry: str
    attack: str
    rejector: str
    protocol: Protocol
    seeds: int
    n: int
    all: Mean  # right of all
    right: Mean  # right of accepted
    right_vs_con: Difference
    coverage: Mean
    accepted_wrong: Mean
    auroc: Mean
    auroc_vs_con: Difference


def average_seeds(lines: Iterable[TrainingResult]) -> list[SeedAverage]:
    """One line for each entry, attack, score and protocol, in the order they came."""
    groups: dict[tuple[str, str, str, Protocol, int], list[tuple[TrainingResult, Row]]] = {}
    for line in lines:
        for row in line.rows:  # records of other images are another line
            key = (line.entry, row.attack, row.rejector, row.protocol, row.point.n)
            groups.setdefault(key, []).append((line, row))
    return [_combined(*key, members) for key, members in groups.items()]


def paired(differences: Sequence[Difference]) -> Difference:
    """The mean of differences that seeds found on the same images.

    Those images are one sample, however many seeds look at it: its share of the variance stays
    whole, that of the seeds is divided by their number.
    """
    if len(differences) == 1:
        return differences[0]
    value = fmean(each.value for each in differences)
    by_images = fmean(((each.hi - each.lo) / (2 * Z)) ** 2 for each in differences)
    by_seeds = stdev(each.value for each in differences) ** 2 / len(differences)
    error = math.sqrt(by_images + by_seeds)
    if error == 0:
        return Difference(value, value, value, float(value == 0))
    # few seeds say little about their own spread: degrees of freedom by Satterthwaite
    freedom = (len(differences) - 1) * (error**2 / by_seeds) ** 2 if by_seeds else math.inf
    way = float(t.ppf(0.975, freedom)) * error
    return Difference(value, value - way, value + way, 2 * float(t.sf(abs(value) / error, freedom)))


def _combined(
    entry: str,
    attack: str,
    rejector: str,
    protocol: Protocol,
    n: int,
    members: list[tuple[TrainingResult, Row]],
) -> SeedAverage:
    rows = [row for _, row in members]
    everything = [line.accuracy[attack] for line, _ in members if line.accuracy is not None]
    return SeedAverage(
        entry, attack, rejector, protocol, len(rows), n,
        _mean(everything),
        _mean([row.point.accuracy for row in rows], rows[0].accuracy_interval),
        paired([row.accuracy_vs_con for row in rows]),
        _mean([row.point.coverage for row in rows], rows[0].coverage_interval),
        _mean([row.point.accepted_wrong for row in rows], rows[0].accepted_wrong_interval),
        _mean([row.ranking.auroc for row in rows], rows[0].ranking.auroc_interval),
        paired([row.ranking.auroc_vs_con for row in rows]),
    )  # fmt: skip


def _mean(values: Sequence[float], of_the_first: Interval | None = None) -> Mean:
    if len(values) == 1:
        return Mean(values[0], None, of_the_first)
    return Mean(fmean(values), stdev(values))
