"""What an attacker raises, one value per image; goals add and scale.

CE()                                    # the usual: make the true label improbable
Evade(RCon(), eta=10)                   # be wrong and be trusted: CE + 10 log R-Con
Xi()                                    # take A far from what would make R-Con right
Margin() + 0.5 * Evade(Energy())        # any sum
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur.declared import NonNegative, Positive
from demur.output import Output, log_con, log_tcon, rectifier
from demur.rule import Rejector, Score, fitted
from demur.spec import Spec


@dataclass(frozen=True)
class Goal(Spec, ABC):
    """A function of a net's output and the true labels."""

    @abstractmethod
    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """One value per image; the attacker wants it large."""

    def __add__(self, other: "Goal") -> "Sum":
        return Sum((*_terms(self), *_terms(other)))

    def __mul__(self, factor: float) -> "Scaled":
        return Scaled(factor, self)

    __rmul__ = __mul__


@dataclass(frozen=True)
class CE(Goal):
    """Cross-entropy of the true label."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Minus the log of the true confidence."""
        return -log_tcon(out, y)


@dataclass(frozen=True)
class Margin(Goal):
    """The largest wrong logit minus the true one: positive exactly when the answer is wrong."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """The logit margin by which the answer is wrong."""
        true = one_hot(y, out.logits.shape[-1]).bool()
        wrong = out.logits.masked_fill(true, -torch.inf).amax(-1)
        return wrong - out.logits.gather(-1, y[:, None])[:, 0]


@dataclass(frozen=True)
class Evade(Goal):
    """Be wrong and be trusted at once: `fool` plus eta times the log of the rejector's score."""

    rejector: Rejector | Score
    eta: NonNegative = 1.0
    fool: Goal = CE()

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """The weighted sum of both aims."""
        return self.fool(out, y) + self.eta * fitted(self.rejector).trust(out)


@dataclass(frozen=True)
class Xi(Goal):
    """The xi-error 2|A - A*|: how far A is from making R-Con the true confidence."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """The least xi of Definition 1."""
        log_a_star = log_tcon(out, y, self.tau) - log_con(out, self.tau)
        logit = rectifier(out)
        # near 1 both are counted from 1: what is left keeps its digits and its gradient
        from_one = log_a_star.expm1() + (-logit).sigmoid()
        from_zero = log_a_star.exp() - logit.sigmoid()
        return 2 * torch.where(log_a_star > -math.log(2), from_one, from_zero).abs()


@dataclass(frozen=True)
class Sum(Goal):
    """Several goals added."""

    goals: tuple[Goal, ...]

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """The sum of the goals' values."""
        return torch.stack([goal(out, y) for goal in self.goals]).sum(0)


@dataclass(frozen=True)
class Scaled(Goal):
    """A goal times a factor; a negative one turns it round."""

    factor: float
    goal: Goal

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """The scaled value."""
        return self.factor * self.goal(out, y)


def _terms(goal: Goal) -> tuple[Goal, ...]:
    return goal.goals if isinstance(goal, Sum) else (goal,)
