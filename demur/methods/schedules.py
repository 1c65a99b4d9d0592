"""Learning-rate schedules: functions of progress, the share of all steps done after the next one.

Piecewise(0.1)(progress)        # the paper: times 0.1 at 10/11 and at 21/22 of the run
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from demur.field_types import Positive, UnitInterval
from demur.spec import Spec


@dataclass(frozen=True)
class Schedule(Spec, ABC):
    """A learning rate for every step of a run; `peak` is the largest."""

    peak: Positive = 0.1

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """Learning rate of the step after which `progress` (0 to 1) of all steps are done."""


@dataclass(frozen=True)
class Piecewise(Schedule):
    """Constant learning rate, multiplied by `gamma` at each of `milestones`."""

    # paper: epochs 100 and 105 of 110; the step that reaches a milestone has the lower rate
    milestones: tuple[UnitInterval, ...] = (10 / 11, 21 / 22)
    gamma: Positive = 0.1

    def __call__(self, progress: float) -> float:
        return self.peak * self.gamma ** sum(progress >= share for share in self.milestones)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Linear increase to the peak during the share `warmup` of the run, then linear decay to 0."""

    warmup: UnitInterval = 0.3

    def __call__(self, progress: float) -> float:
        up = progress / self.warmup if self.warmup > 0 else 1.0
        down = (1 - progress) / (1 - self.warmup) if self.warmup < 1 else 1.0
        return self.peak * max(0.0, min(up, down))
