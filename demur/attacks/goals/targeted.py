"""Goals that take an image to one wrong class; `EachTarget` says to which.

Toward()       # that class's logit less the true one (Gowal et al. 2019)
TowardDLR()    # the same, whatever the scale of the logits (Croce and Hein 2020)
TowardCon()    # be confident in that class
"""

from abc import ABC
from dataclasses import dataclass

from torch import Tensor

from demur.attacks.goals.goal import Goal, Kept, Moment
from demur.attacks.goals.untargeted import TINY
from demur.declared import Positive
from demur.output import Output, at, log_probabilities


@dataclass(frozen=True)
class Targeted(Goal, ABC):
    """A goal that is given a target for each image."""

    @property
    def arity(self) -> int:
        """The target."""
        return 1

    def begin(self, moment: Moment) -> Kept:
        """The target."""
        return (moment.aim(),)


@dataclass(frozen=True)
class Toward(Targeted):
    """The target's logit minus the true one."""

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The logit margin of the target."""
        return at(out.logits, given[0]) - at(out.logits, y)


@dataclass(frozen=True)
class TowardDLR(Targeted):
    """The target's margin over the distance of the first logit to the third and fourth."""

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The ratio; with three classes to the third, with two the margin as it is."""
        margin = at(out.logits, given[0]) - at(out.logits, y)
        classes = out.logits.shape[-1]
        if classes < 3:
            return margin
        first, _, *rest = out.logits.topk(min(classes, 4)).values.unbind(-1)
        return margin / (first - sum(rest[1:], rest[0]) / len(rest) + TINY)


@dataclass(frozen=True)
class TowardCon(Targeted):
    """Log of the target's probability: the paper's L_Con, one class at a time."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The log probability of the target."""
        return at(log_probabilities(out, self.tau), given[0])
