"""Goals against a net that may refuse.

Evasion(RCon(), eta=10)                   # be wrong and be trusted: CE + 10 log R-Con
Evasion(RCon(), base_objective=WrongConfidence())          # be confident and be trusted
WrongConfidence() + 10 * RRLoss()              # be confident where A does not follow
ScoreObjective(RCon())                           # the score itself, without its log
XiObjective()                                    # take A far from what would make R-Con right
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demur.attacks.objectives.objective import Objective, WrappedObjective
from demur.attacks.objectives.untargeted import CE
from demur.field_types import NonNegative, Positive
from demur.output import Output, log_con, log_tcon, rectifier_logit, tcon
from demur.rectified import Construction, RRLossKind, rr_loss_per_image
from demur.rule import Rejector, Score, as_score
from demur.spec import later


@dataclass(frozen=True)
class Evasion(WrappedObjective):
    """Be wrong and be trusted at once: `fool` plus eta times the log of the rejector's score."""

    rejector: Rejector | Score
    eta: NonNegative = 1.0
    base_objective: Objective = CE()

    @property
    def inner(self) -> Objective:
        """What fools the classifier."""
        return self.base_objective

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The weighted sum of both aims."""
        return self.base_objective(out, y, *inputs) + self.eta * as_score(self.rejector).log_score(
            out
        )


@dataclass(frozen=True)
class ScoreObjective(Objective):
    """A rejector's score as it is."""

    rejector: Rejector | Score

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The score."""
        return as_score(self.rejector)(out)


@dataclass(frozen=True)
class RRLoss(Objective):
    """The loss that A was trained by, the paper's L_RR: R-Con away from T-Con, on either side."""

    tau: Positive = 1.0
    construction: Construction = field(default="product", metadata=later("product"))
    rr_loss: RRLossKind = field(default="bce", metadata=later("bce"))

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """How far R-Con is from the true confidence, which is held still."""
        true = tcon(out, y, self.tau).detach()
        return rr_loss_per_image(out, y, true, self.construction, self.rr_loss, self.tau)


@dataclass(frozen=True)
class XiObjective(Objective):
    """The xi-error 2|A - A*|: how far A is from making R-Con the true confidence."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The least xi of Definition 1."""
        log_a_star = log_tcon(out, y, self.tau) - log_con(out, self.tau)
        logit = rectifier_logit(out)
        # near 1 both are counted from 1: what is left keeps its digits and its gradient
        from_one = log_a_star.expm1() + (-logit).sigmoid()
        from_zero = log_a_star.exp() - logit.sigmoid()
        return 2 * torch.where(log_a_star > -math.log(2), from_one, from_zero).abs()
