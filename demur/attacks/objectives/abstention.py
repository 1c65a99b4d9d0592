"""Objectives of CARL and ATRO, methods with a rejection loss of their own.

    CARLObjective()         # CARL's loss: neither correct nor abstaining (Laidlaw and Feizi 2019)
    CARLMargin()            # the same as a logit margin
    RejectionHinge(0.3)     # ATRO's loss: wrong, or rejected at a cost (Kato et al. 2020)

The first auxiliary output is the logit of abstaining for CARL and of accepting for ATRO.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur.attacks.objectives.objective import Objective
from demur.attacks.objectives.untargeted import best_wrong
from demur.errors import BadInput
from demur.field_types import UnitInterval
from demur.output import Output, label_entry, log_probabilities, rectifier_logit

Form = Literal["paper", "authors"]  # as the R-Con paper ran a method, or as its authors did


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
