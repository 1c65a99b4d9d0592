"""Goals against nets that learned to refuse by a loss of their own.

CARLObjective()                # CARL: neither right nor abstaining (Laidlaw and Feizi 2019)
CARLMargin()          # the same as a margin of logits
RejectionHinge(0.3)     # ATRO: answered wrongly, or refused at a cost (Kato et al. 2020)

The first auxiliary output is the logit of abstaining for CARL and of answering for ATRO.
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

Form = Literal["paper", "authors"]  # of a loss: as the R-Con paper ran it, as its authors have it


@dataclass(frozen=True)
class CARLObjective(Objective):
    """Minus the log of the probability of answering rightly or abstaining."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The loss."""
        abstain = rectifier_logit(out)
        logits = out.logits.to(abstain)
        everything = torch.logaddexp(logits.logsumexp(-1), abstain)
        return everything - torch.logaddexp(label_entry(logits, y), abstain)


@dataclass(frozen=True)
class CARLMargin(Objective):
    """The largest wrong logit less the larger of the true one and that of abstaining."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The margin."""
        return best_wrong(out.logits, y) - torch.maximum(
            label_entry(out.logits, y), rectifier_logit(out)
        )


@dataclass(frozen=True)
class RejectionHinge(Objective):
    """The larger of the price of a wrong answer and that of a refusal, which costs `cost`.

    authors: a squared hinge on logits. paper: on probabilities, neither squared nor cut at zero.
    """

    cost: UnitInterval = 0.3
    form: Form = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost >= 0.5:
            raise BadInput(f"a refusal must cost less than 0.5, a coin's mistakes; not {self.cost}")

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The price."""
        r = rectifier_logit(out).tanh()
        by_class = log_probabilities(out).exp() if self.form == "paper" else out.logits
        sides = 2 * one_hot(y, by_class.shape[-1]).to(by_class) - 1
        wrong = (1 + (r[:, None] - sides * by_class) / 2).mean(-1)
        refused = self.cost * (1 - r / (1 - 2 * self.cost))
        price = torch.maximum(wrong, refused)
        return price if self.form == "paper" else price.clamp_min(0).square()
