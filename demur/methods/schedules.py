"""Learning rate as a function of progress, the share of all steps done after the coming one.

Piecewise(0.1)(progress)        # the paper: x0.1 at 10/11 and at 21/22 of the run
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from demur.field_types import Positive, UnitInterval
from demur.spec import Spec


@dataclass(frozen=True)
class Schedule(Spec, ABC):
    """A learning rate for every moment of a run."""

    peak: Positive = 0.1

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """The learning rate when `progress` of the steps will have been done."""


@dataclass(frozen=True)
class Piecewise(Schedule):
    """Constant, times `factor` at each of `drops`."""

    # paper: epochs 100 and 105 of 110; the step that reaches a drop already takes the lower rate
    milestones: tuple[UnitInterval, ...] = (10 / 11, 21 / 22)
    gamma: Positive = 0.1

    def __call__(self, progress: float) -> float:
        """The peak, lowered once for each drop that is reached."""
        return self.peak * self.gamma ** sum(progress >= drop for drop in self.milestones)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Straight up to the peak during `warm` of the run, then straight down to nothing."""

    warmup: UnitInterval = 0.3

    def __call__(self, progress: float) -> float:
        """The height of the triangle."""
        up = progress / self.warmup if self.warmup > 0 else 1.0
        down = (1 - progress) / (1 - self.warmup) if self.warmup < 1 else 1.0
        return self.peak * max(0.0, min(up, down))
