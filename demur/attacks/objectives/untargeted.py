"""Goals that any wrong answer serves.

CE()           # make the true label improbable
LogitMargin()       # the best wrong logit less the true one
DLR()          # the margin, whatever the scale of the logits (Croce and Hein 2020)
WrongConfidence()     # be confident in a wrong answer
"""

from dataclasses import dataclass

from torch import Tensor

from demur.attacks.objectives.objective import Objective
from demur.field_types import Positive
from demur.output import Output, label_entry, log_probabilities, log_tcon, mask_label

TINY = 1e-12


@dataclass(frozen=True)
class CE(Objective):
    """Cross-entropy of the true label."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """Minus the log of the true confidence."""
        return -log_tcon(out, y)


@dataclass(frozen=True)
class LogitMargin(Objective):
    """The largest wrong logit minus the true one: positive exactly when the answer is wrong."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The logit margin by which the answer is wrong."""
        return best_wrong(out.logits, y) - label_entry(out.logits, y)


@dataclass(frozen=True)
class DLR(Objective):
    """The margin over the distance between the first and the third logit."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The ratio; with two classes there is no third and the margin stays as it is."""
        margin = best_wrong(out.logits, y) - label_entry(out.logits, y)
        if out.logits.shape[-1] < 3:
            return margin
        first, _, third = out.logits.topk(3).values.unbind(-1)
        return margin / (first - third + TINY)


@dataclass(frozen=True)
class WrongConfidence(Objective):
    """Log of the largest wrong probability: the paper's L_Con."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The log probability of the best wrong answer."""
        return best_wrong(log_probabilities(out, self.tau), y)


def best_wrong(table: Tensor, y: Tensor) -> Tensor:
    """The largest entry of each row outside the true label."""
    return mask_label(table, y).amax(-1)
