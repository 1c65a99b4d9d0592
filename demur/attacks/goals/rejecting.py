"""Goals against a net that may refuse.

Evade(RCon(), eta=10)                   # be wrong and be trusted: CE + 10 log R-Con
Evade(RCon(), fool=WrongCon())          # be confident and be trusted
WrongCon() + 10 * RRLoss()              # be confident where A does not follow
Raise(RCon())                           # the score itself, without its log
Xi()                                    # take A far from what would make R-Con right
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demur.attacks.goals.goal import Around, Goal
from demur.attacks.goals.untargeted import CE
from demur.declared import NonNegative, Positive
from demur.output import Output, log_con, log_tcon, rectifier, tcon
from demur.rectified import Construction, Objective, misfit
from demur.rule import Rejector, Score, fitted
from demur.spec import later


@dataclass(frozen=True)
class Evade(Around):
    """Be wrong and be trusted at once: `fool` plus eta times the log of the rejector's score."""

    rejector: Rejector | Score
    eta: NonNegative = 1.0
    fool: Goal = CE()

    @property
    def inner(self) -> Goal:
        """What fools the classifier."""
        return self.fool

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The weighted sum of both aims."""
        return self.fool(out, y, *given) + self.eta * fitted(self.rejector).trust(out)


@dataclass(frozen=True)
class Raise(Goal):
    """A rejector's score as it is."""

    rejector: Rejector | Score

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The score."""
        return fitted(self.rejector)(out)


@dataclass(frozen=True)
class RRLoss(Goal):
    """The loss that A was trained by, the paper's L_RR: R-Con away from T-Con, on either side."""

    tau: Positive = 1.0
    construction: Construction = field(default="product", metadata=later("product"))
    objective: Objective = field(default="bce", metadata=later("bce"))

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """How far R-Con is from the true confidence, which is held still."""
        true = tcon(out, y, self.tau).detach()
        return misfit(out, y, true, self.construction, self.objective, self.tau)


@dataclass(frozen=True)
class Xi(Goal):
    """The xi-error 2|A - A*|: how far A is from making R-Con the true confidence."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The least xi of Definition 1."""
        log_a_star = log_tcon(out, y, self.tau) - log_con(out, self.tau)
        logit = rectifier(out)
        # near 1 both are counted from 1: what is left keeps its digits and its gradient
        from_one = log_a_star.expm1() + (-logit).sigmoid()
        from_zero = log_a_star.exp() - logit.sigmoid()
        return 2 * torch.where(log_a_star > -math.log(2), from_one, from_zero).abs()
