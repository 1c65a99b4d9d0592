"""Attacks, rejectors and nets compared in pairs, by image or by seed; means over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import torch

from demur.calibrate import binomial_cdf
from demur.errors import BadInput, suggestion
from demur.evaluate.record_scores import can_score
from demur.evaluate.recording import LoadedRun
from demur.evaluate.score import RejectorEvaluation
from demur.metrics import BoolArray, Difference, Interval
from demur.metrics.intervals import student_p, student_t
from demur.recipes import AnyName, rejectors_named
from demur.rejectors.image_scores import image_rejectors
from demur.rejectors.rule import Rejector
from demur.runs import Record, Run

AnyRun = str | Run | LoadedRun


def paired_shares(first: BoolArray, second: BoolArray) -> Difference:
    """Share of the first minus share of the second outcome (N each) of the same images.

    The 95% interval is that of Bonett and Price (2012), which has a width even where no image
    differs; p is exact, by McNemar's test.
    """
    n, b, c = len(first), int((first & ~second).sum()), int((second & ~first).sum())
    p, q = (b + 1) / (n + 2), (c + 1) / (n + 2)
    reach = NormalDist().inv_cdf(0.975) * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    exact = min(1.0, 2 * float(binomial_cdf(min(b, c), b + c, 0.5)))
    return Difference((b - c) / n, max(-1.0, p - q - reach), min(1.0, p - q + reach), exact)


class PairedCounts(NamedTuple):
    """Images of which something is true on both sides of a comparison, or on one side only."""

    what: str
    first: str
    second: str
    n: int
    both: int
    only_first: int
    only_second: int
    difference: Difference  # of the shares, first minus second, with a 95% interval and exact p

    @staticmethod
    def of(what: str, names: Sequence[str], first: BoolArray, second: BoolArray) -> "PairedCounts":
        """Counts of two outcomes (N each) of the same images."""
        parts = (first & second, first & ~second, second & ~first)
        both, one, other = (int(part.sum()) for part in parts)
        gap = paired_shares(first, second)
        return PairedCounts(what, names[0], names[1], len(first), both, one, other, gap)


def compare(
    run: AnyRun, attacks: str | Sequence[str], rejectors: AnyName | Sequence[AnyName] = (),
    against: AnyRun | None = None, tpr: float = 0.95, split: str = "test",
) -> list[PairedCounts]:  # fmt: skip
    """Compare two attacks, two rejectors or two nets on the same images, from stored records.

    Args:
        run: A run or its name.
        attacks: One attack, or two to compare.
        rejectors: None, to count wrong predictions only; one, or two to compare.
        against: Another run to compare with.
        tpr: Share of the correct predictions on clean cal images that each threshold accepts.
        split: Split whose records are read.

    Returns:
        Counts of wrong predictions, and with rejectors of accepted errors and false rejections.
        BadInput is raised if a record is missing, or if the records are of different images.

    Example:
        >>> (wrong,) = compare("digits-pgdat-rr", ["clean", "pgd-3"])
        >>> wrong.only_first <= wrong.only_second
        True
    """
    texts = [attacks] if isinstance(attacks, str) else [*attacks]
    given = [Run.open(one) if isinstance(one, str) else one for one in (run, against) if one]
    nets = [LoadedRun(one, "auto") if isinstance(one, Run) else one for one in given]
    named = [rejectors_named(rejectors, net.run.recipe) for net in nets]
    names = [*named[0]] or [""]
    if len(texts) > 2 or len(names) > 2:
        raise BadInput("two sides are compared; give one or two attacks, and at most two rejectors")
    sides = [(str(nets[at].run.path), texts[at], names[at]) for at in (0, -1)]
    differing = [place for place in range(3) if sides[0][place] != sides[1][place]]
    if not differing:
        raise BadInput("both sides are the same; give two attacks, two rejectors or another run")
    shown = [", ".join(side[place] for place in differing) for side in sides]
    pair = _same_images(*(_records(nets[at], texts[at], split) for at in (0, -1)))
    found = []
    if differing != [2]:  # not the rejector alone
        found.append(PairedCounts.of("wrong", shown, *(~one.correct for one in pair)))
    if named[0]:
        accepted = [
            _accepts(nets[at], names[at], named[at][names[at]], tpr, pair[at]) for at in (0, -1)
        ]
        both = list(zip(accepted, (one.correct for one in pair), strict=True))
        errors, rejected = ((a & ~c for a, c in both), (c & ~a for a, c in both))
        found.append(PairedCounts.of("wrong and accepted", shown, *errors))
        found.append(PairedCounts.of("correct and rejected", shown, *rejected))
    return found


def _accepts(net: LoadedRun, name: str, spec: Rejector, tpr: float, record: Record) -> BoolArray:
    """Which images a rejector accepts at its frozen threshold; N."""
    evaluation = RejectorEvaluation.of(net, tpr, {name: spec}, [record])
    record = net.with_scores(record, image_rejectors(tuple(evaluation.scores.values())))
    if name not in evaluation.thresholds:
        reason = evaluation.unavailable.get(name, "no cal images were held out for a threshold")
        raise BadInput(f"{name} cannot decide on {net.run.path}: {reason}")
    if not can_score(evaluation.score_for(name, record), record):
        raise BadInput(f"the record of {record.label} lacks what {name} needs; attack again")
    return evaluation.accepted(name, record)


def _records(net: LoadedRun, label: str, split: str) -> list[Record]:
    """Records of an attack; BadInput without one."""
    records = net.usable_records(net.split_by_name(split))
    if found := [record for record in records if record.label == label]:
        return found
    known = suggestion(label, {record.label for record in records}) if records else "attack it"
    raise BadInput(f"{net.run.path} has no record of {label} on {split} images; {known}")


def _same_images(first: Sequence[Record], second: Sequence[Record]) -> tuple[Record, Record]:
    """The pair of records of the same images that has most of them; BadInput without any."""
    pairs = [
        (one, other)
        for one, other in product(first, second)
        if one.metadata["data"] == other.metadata["data"]
        and torch.equal(one.arrays["index"], other.arrays["index"])
    ]
    if not pairs:
        sizes = (
            " or ".join(dict.fromkeys(f"{len(one.y)}" for one in side)) for side in (first, second)
        )
        raise BadInput(
            f"{first[0].label} and {second[0].label} attacked different images, "
            f"{' and '.join(sizes)} of them; attack the same ones with demur attack --n"
        )
    return max(pairs, key=lambda pair: len(pair[0].y))


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
