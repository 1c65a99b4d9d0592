"""What counts as broken, for a classifier that may refuse.

Wrong()                        # the answer is wrong, whether or not it would be given
Slips(RCon(), TPR(0.95))       # wrong and accepted: what gets past the rejector
Refused(RCon(), 0.5)           # right but refused
Unanswered(RCon(), 0.5)        # refused, right or not: the attacker denies the service
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from demur.output import Output, prediction
from demur.rule import OperatingPoint, Rejector, Rule, Score, fitted
from demur.spec import Spec


@dataclass(frozen=True)
class Criterion(Spec, ABC):
    """A claim about each image, true when the attack has succeeded there."""

    @abstractmethod
    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which images are broken."""


@dataclass(frozen=True)
class Wrong(Criterion):
    """The predicted label is not the true one."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which answers are wrong."""
        return prediction(out) != y


@dataclass(frozen=True)
class Ruled(Criterion):
    """A criterion about a rule: a rejector's score against a threshold, or how to choose one."""

    rejector: Rejector | Score
    at: float | OperatingPoint

    @property
    def rule(self) -> Rule:
        """The rule in force."""
        if isinstance(self.at, float):
            return fitted(self.rejector).rule(self.at)
        raise TypeError(f"{self} has no threshold yet; evaluate.bind makes specs callable")


@dataclass(frozen=True)
class Slips(Ruled):
    """Wrong and accepted."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which wrong answers are given."""
        return (prediction(out) != y) & self.rule.accepted(out)


@dataclass(frozen=True)
class Refused(Ruled):
    """Right and refused."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which right answers are withheld."""
        return (prediction(out) == y) & ~self.rule.accepted(out)


@dataclass(frozen=True)
class Unanswered(Ruled):
    """Refused, whatever the answer would have been."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which answers are withheld."""
        return ~self.rule.accepted(out)
