"""What can be promised of a rule: that a share of all images to come keeps to a level.

Each promise is about a binomial share: the wrong among the accepted, the accepted among the right,
or the accepted among all. Thresholds fixed beforehand make its test exact, with ties or without.
"""

from abc import abstractmethod
from typing import Literal

from demur.calibrate.binomial import at_least, at_most, lower_bound, upper_bound
from demur.calibrate.threshold_path import Counts
from demur.metrics import FloatArray
from demur.metrics.checks import IntArray
from demur.rule import OperatingPoint

Quantity = Literal["risk", "tpr", "coverage"]


class Guarantee(OperatingPoint):
    """An operating point whose level can be certified."""

    quantity: Quantity
    is_upper_bound: bool = False  # the share stays at or below its level, else at or above
    level: float
    confidence: float = 0.95

    @property
    @abstractmethod
    def statement(self) -> str:
        """The promise in words."""

    @abstractmethod
    def broadcast(self, hits: int, trials: int) -> str:
        """Counts of the share in words."""

    @abstractmethod
    def hits_and_trials(self, counts: Counts) -> tuple[IntArray, IntArray]:
        """The hits and the trials of the share at each place of a path."""

    def p_value(self, hits: IntArray | int, trials: IntArray | int) -> FloatArray:
        """The p-values: how likely such counts, or better ones, are if the promise is false."""
        return (at_most if self.is_upper_bound else at_least)(hits, trials, self.level)

    def bound(self, hits: int, trials: int, error: float) -> float:
        """The best level that these counts allow to promise."""
        return float((upper_bound if self.is_upper_bound else lower_bound)(hits, trials, error))


def percent(share: float) -> str:
    """The share as a percentage of at most four digits."""
    return f"{100 * share:.4g}%"
