"""What counts as broken, for a classifier that may refuse.

Misclassified()                        # the answer is wrong, whether or not it would be given
AcceptedError(RCon(), TPR(0.95))       # wrong and accepted: what gets past the rejector
FalseRejection(RCon(), 0.5)           # right but refused
Rejected(RCon(), 0.5)        # refused, right or not: the attacker denies the service
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from demur.output import Output, prediction
from demur.rule import OperatingPoint, Rejector, Rule, Score, as_score
from demur.spec import Spec


@dataclass(frozen=True)
class Criterion(Spec, ABC):
    """A claim about each image, true when the attack has succeeded there."""

    @abstractmethod
    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which images are broken."""


@dataclass(frozen=True)
class Misclassified(Criterion):
    """The predicted label is not the true one."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which answers are wrong."""
        return prediction(out) != y


@dataclass(frozen=True)
class RuleCriterion(Criterion):
    """A criterion about a rule: a rejector's score against a threshold, or how to choose one."""

    rejector: Rejector | Score
    threshold: float | OperatingPoint

    @property
    def rule(self) -> Rule:
        """The rule in force."""
        if isinstance(self.threshold, float):
            return as_score(self.rejector).rule(self.threshold)
        raise TypeError(f"{self} has no threshold yet; evaluate.bind makes specs callable")


@dataclass(frozen=True)
class AcceptedError(RuleCriterion):
    """Wrong and accepted."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which wrong answers are given."""
        return (prediction(out) != y) & self.rule.accepted(out)


@dataclass(frozen=True)
class FalseRejection(RuleCriterion):
    """Right and refused."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which right answers are withheld."""
        return (prediction(out) == y) & ~self.rule.accepted(out)


@dataclass(frozen=True)
class Rejected(RuleCriterion):
    """Refused, whatever the answer would have been."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Which answers are withheld."""
        return ~self.rule.accepted(out)
