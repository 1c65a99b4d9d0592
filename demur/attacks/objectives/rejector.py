"""Adaptive objectives: they use the score of a rejector or the rectifier A.

PlusLogScore(RCon(), eta=10)                              # CE + 10 log R-Con
PlusLogScore(RCon(), base_objective=WrongConfidence())    # confidently wrong with a high R-Con
WrongConfidence() + 10 * RRLoss()                    # confidently wrong where A is wrong
ScoreObjective(RCon())                               # the score without the log
XiObjective()                                        # the error of A, Definition 1
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
class PlusLogScore(WrappedObjective):
    """Wrong and accepted at once: base objective + eta * log score.

    Args:
        rejector: The rejector or its score.
        eta: The weight of the log score.
        base_objective: The objective that makes the prediction wrong.
    """

    rejector: Rejector | Score
    eta: NonNegative = 1.0
    base_objective: Objective = CE()

    @property
    def inner(self) -> Objective:
        return self.base_objective

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        log_score = as_score(self.rejector).log_score(out)
        return self.base_objective(out, y, *inputs) + self.eta * log_score


@dataclass(frozen=True)
class ScoreObjective(Objective):
    """The score of a rejector, without the log of `PlusLogScore`."""

    rejector: Rejector | Score

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return as_score(self.rejector)(out)


@dataclass(frozen=True)
class RRLoss(Objective):
    """The training loss of A, Eq. 7: L_RR = BCE(R-Con, T-Con), with T-Con fixed.

    Maximising it moves R-Con away from T-Con in either direction.

    Args:
        tau: The temperature of the softmax.
        construction: How R-Con is built from the confidence and A, as in `methods.RR`.
        rr_loss: The loss between R-Con and T-Con, as in `methods.RR`.
    """

    tau: Positive = 1.0
    construction: Construction = field(default="product", metadata=later("product"))
    rr_loss: RRLossKind = field(default="bce", metadata=later("bce"))

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        true_confidence = tcon(out, y, self.tau).detach()
        return rr_loss_per_image(out, y, true_confidence, self.construction, self.rr_loss, self.tau)


@dataclass(frozen=True)
class XiObjective(Objective):
    """The xi-error of Definition 1, 2 |A - A*|, where A* makes R-Con equal T-Con."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        log_a_star = log_tcon(out, y, self.tau) - log_con(out, self.tau)
        logit = rectifier_logit(out)
        # Near 1, subtract both from 1 first: the difference keeps its digits and its gradient.
        from_one = log_a_star.expm1() + (-logit).sigmoid()
        from_zero = log_a_star.exp() - logit.sigmoid()
        return 2 * torch.where(log_a_star > -math.log(2), from_one, from_zero).abs()
