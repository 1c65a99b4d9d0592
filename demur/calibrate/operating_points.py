"""Operating points: the promises a threshold can be chosen for.

TPR(0.95).threshold(score, correct)     # the largest that keeps 95% of these right answers
Risk(0.05).threshold(score, correct)    # certified: at most 5% wrong, with 95% confidence

TPR and Coverage choose on the images they are given; certify makes a promise of them. Median is
no promise: it is what the paper's C&W has to reach.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from demur.calibrate.certificate import certify
from demur.calibrate.guarantee import Guarantee, percent
from demur.calibrate.threshold_path import Counts
from demur.field_types import Condition, UnitInterval
from demur.metrics import BoolArray, FloatArray, threshold_at_tpr
from demur.metrics.checks import IntArray
from demur.rule import OperatingPoint
from demur.spec import Spec

Inside = Annotated[float, Condition(lambda v: 0 < v < 1, "above 0 and below 1")]


@dataclass(frozen=True)
class TPR(Spec, Guarantee):
    """Keep at least this share of the right answers.

    Where a gate refuses more than the rest by itself, the threshold is the lowest score past it:
    the gate then decides alone and the share it keeps stands in the row.
    """

    level: UnitInterval
    quantity = "tpr"

    @property
    def statement(self) -> str:
        """The promise in words."""
        return f"at least {percent(self.level)} of the right answers accepted"

    def broadcast(self, hits: int, trials: int) -> str:
        """Counts of the share in words."""
        return f"{hits:,} of {trials:,} right answers accepted"

    def hits_and_trials(self, counts: Counts) -> tuple[IntArray, IntArray]:
        """The accepted among the right."""
        return counts.kept, np.full_like(counts.kept, counts.right)

    def threshold(self, score: FloatArray, correct: BoolArray) -> float:
        """The largest threshold that keeps `level` of the right answers."""
        return _past_the_gate(threshold_at_tpr(score, correct, self.level), score)


@dataclass(frozen=True)
class Coverage(Spec, Guarantee):
    """Answer at least this share of the images; a gate that refuses more decides alone."""

    level: UnitInterval
    quantity = "coverage"

    @property
    def statement(self) -> str:
        """The promise in words."""
        return f"at least {percent(self.level)} of the images accepted"

    def broadcast(self, hits: int, trials: int) -> str:
        """Counts of the share in words."""
        return f"{hits:,} of {trials:,} images accepted"

    def hits_and_trials(self, counts: Counts) -> tuple[IntArray, IntArray]:
        """The accepted among all."""
        return counts.accepted, np.full_like(counts.accepted, counts.n)

    def threshold(self, score: FloatArray, correct: BoolArray) -> float:
        """The largest threshold that `level` of the images reach."""
        everyone = np.ones(len(correct), dtype=np.bool_)
        return _past_the_gate(threshold_at_tpr(score, everyone, self.level), score)


@dataclass(frozen=True)
class Risk(Spec, Guarantee):
    """At most this share wrong among the accepted, with this confidence."""

    level: Inside
    confidence: Inside = 0.95
    quantity = "risk"
    is_upper_bound = True

    @property
    def statement(self) -> str:
        """The promise in words."""
        return f"at most {percent(self.level)} wrong among the accepted"

    def broadcast(self, hits: int, trials: int) -> str:
        """Counts of the share in words."""
        return f"{hits:,} of {trials:,} accepted answers wrong"

    def hits_and_trials(self, counts: Counts) -> tuple[IntArray, IntArray]:
        """The wrong among the accepted."""
        return counts.wrong, counts.accepted

    def threshold(self, score: FloatArray, correct: BoolArray) -> float:
        """The certified threshold of the largest coverage; Uncertified if there is none."""
        return certify(score, correct, self).thresholds[0]


@dataclass(frozen=True)
class Median(Spec, OperatingPoint):
    """What half of the right answers reach, on the images that were learned from unless told."""

    split: Literal["fit", "cal"] = "fit"

    def threshold(self, score: FloatArray, correct: BoolArray) -> float:
        """The largest threshold that half of the right answers reach."""
        return _past_the_gate(threshold_at_tpr(score, correct, 0.5), score)


def _past_the_gate(found: float, score: FloatArray) -> float:
    """The threshold, but never one that lets in what a gate has refused."""
    finite = score[np.isfinite(score)]
    return found if np.isfinite(found) or len(finite) == 0 else float(finite.min())


OPERATING_POINTS: tuple[type[Spec], ...] = (TPR, Coverage, Risk, Median)
