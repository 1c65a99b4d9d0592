"""Untargeted objectives: towards any wrong class.

CE()                  # cross-entropy of the true label
UntargetedMargin()         # largest wrong logit - true logit
DLR()                 # the margin, invariant to the scale of the logits (Croce and Hein 2020)
WrongConfidence()     # log of the largest wrong probability
"""

from dataclasses import dataclass

from torch import Tensor

from demur.attacks.objectives.objective import Objective
from demur.field_types import Positive
from demur.output import Output, label_entry, log_probabilities, log_tcon, mask_label

TINY = 1e-12


@dataclass(frozen=True)
class CE(Objective):
    """Cross-entropy of the true label, -log T-Con."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return -log_tcon(out, y)


@dataclass(frozen=True)
class UntargetedMargin(Objective):
    """The largest wrong logit minus the true logit: positive exactly where misclassified."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return best_wrong(out.logits, y) - label_entry(out.logits, y)


@dataclass(frozen=True)
class DLR(Objective):
    """Difference of logits ratio: the margin divided by z_1 - z_3, with sorted logits z.

    With two classes there is no z_3 and the margin is not divided.
    """

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        margin = best_wrong(out.logits, y) - label_entry(out.logits, y)
        if out.logits.shape[-1] < 3:
            return margin
        first, _, third = out.logits.topk(3).values.unbind(-1)
        return margin / (first - third + TINY)


@dataclass(frozen=True)
class WrongConfidence(Objective):
    """The log of the largest wrong probability: the paper's L_Con."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return best_wrong(log_probabilities(out, self.tau), y)


def best_wrong(table: Tensor, y: Tensor) -> Tensor:
    """Return the largest entry of each row of an N, K table, without the true label."""
    return mask_label(table, y).amax(-1)
