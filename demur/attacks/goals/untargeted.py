"""Goals that any wrong answer serves.

CE()           # make the true label improbable
Margin()       # the best wrong logit less the true one
DLR()          # the margin, whatever the scale of the logits (Croce and Hein 2020)
WrongCon()     # be confident in a wrong answer
"""

from dataclasses import dataclass

from torch import Tensor

from demur.attacks.goals.goal import Goal
from demur.declared import Positive
from demur.output import Output, at, elsewhere, log_probabilities, log_tcon

TINY = 1e-12


@dataclass(frozen=True)
class CE(Goal):
    """Cross-entropy of the true label."""

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """Minus the log of the true confidence."""
        return -log_tcon(out, y)


@dataclass(frozen=True)
class Margin(Goal):
    """The largest wrong logit minus the true one: positive exactly when the answer is wrong."""

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The logit margin by which the answer is wrong."""
        return best_wrong(out.logits, y) - at(out.logits, y)


@dataclass(frozen=True)
class DLR(Goal):
    """The margin over the distance between the first and the third logit."""

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The ratio; with two classes there is no third and the margin stays as it is."""
        margin = best_wrong(out.logits, y) - at(out.logits, y)
        if out.logits.shape[-1] < 3:
            return margin
        first, _, third = out.logits.topk(3).values.unbind(-1)
        return margin / (first - third + TINY)


@dataclass(frozen=True)
class WrongCon(Goal):
    """Log of the largest wrong probability: the paper's L_Con."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The log probability of the best wrong answer."""
        return best_wrong(log_probabilities(out, self.tau), y)


def best_wrong(table: Tensor, y: Tensor) -> Tensor:
    """The largest entry of each row outside the true label."""
    return elsewhere(table, y).amax(-1)
