"""Adaptive objectives: they use the score of a rejector or an auxiliary output.

PlusLogScore(RCon(), eta=10)            # CE + 10 log R-Con
WrongConfidence() + 10 * RRLoss()       # confidently wrong where A is wrong
XiObjective()                           # the error of A, Definition 1
CARLObjective(), CARLMargin()           # CARL's loss (Laidlaw and Feizi 2019), and as a margin
RejectionHinge(0.3)                     # ATRO's loss: wrong, or rejected at a cost
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur.attacks.objectives.classification import CE, best_wrong
from demur.attacks.objectives.objective import Objective, WrappedObjective
from demur.errors import BadInput
from demur.field_types import NonNegative, Positive, UnitInterval
from demur.output import (
    Output,
    label_entry,
    log_con,
    log_probabilities,
    log_tcon,
    rectifier_logit,
    tcon,
)
from demur.rectified import Construction, RRLossKind, rr_loss_per_image
from demur.rule import Rejector, Score, as_score
from demur.spec import later

Form = Literal["paper", "authors"]  # as the R-Con paper ran a method, or as its authors did


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


@dataclass(frozen=True)
class CARLObjective(Objective):
    """CARL's loss: minus the log probability of the true class or abstaining."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        abstain = rectifier_logit(out)
        logits = out.logits.to(abstain)
        total = torch.logaddexp(logits.logsumexp(-1), abstain)
        return total - torch.logaddexp(label_entry(logits, y), abstain)


@dataclass(frozen=True)
class CARLMargin(Objective):
    """The largest wrong logit minus the larger of the true and the abstain logit."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return best_wrong(out.logits, y) - torch.maximum(
            label_entry(out.logits, y), rectifier_logit(out)
        )


@dataclass(frozen=True)
class RejectionHinge(Objective):
    """ATRO's loss: the larger of the loss of a wrong prediction and the loss of a rejection.

    Args:
        cost: The cost of a rejection, below 0.5.
        form: "authors" is a squared hinge on logits. "paper" uses probabilities, without the
            square and without clamping at zero.
    """

    cost: UnitInterval = 0.3
    form: Form = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost >= 0.5:
            raise BadInput(
                f"RejectionHinge.cost must be below 0.5, the error rate of a coin, not {self.cost}"
            )

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        r = rectifier_logit(out).tanh()
        by_class = log_probabilities(out).exp() if self.form == "paper" else out.logits
        signs = 2 * one_hot(y, by_class.shape[-1]).to(by_class) - 1
        wrong = (1 + (r[:, None] - signs * by_class) / 2).mean(-1)
        rejected = self.cost * (1 - r / (1 - 2 * self.cost))
        loss = torch.maximum(wrong, rejected)
        return loss if self.form == "paper" else loss.clamp_min(0).square()
