"""Goals that take an image to one wrong class; `MultiTarget` says to which.

TargetedMargin()       # that class's logit less the true one (Gowal et al. 2019)
TargetedDLR()    # the same, whatever the scale of the logits (Croce and Hein 2020)
TargetedConfidence()    # be confident in that class
"""

from abc import ABC
from dataclasses import dataclass

from torch import Tensor

from demur.attacks.objectives.objective import AttackStart, Objective, ObjectiveState
from demur.attacks.objectives.untargeted import TINY
from demur.field_types import Positive
from demur.output import Output, label_entry, log_probabilities


@dataclass(frozen=True)
class Targeted(Objective, ABC):
    """A goal that is given a target for each image."""

    @property
    def n_inputs(self) -> int:
        """The target."""
        return 1

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        """The target."""
        return (start_point.aim(),)


@dataclass(frozen=True)
class TargetedMargin(Targeted):
    """The target's logit minus the true one."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The logit margin of the target."""
        return label_entry(out.logits, inputs[0]) - label_entry(out.logits, y)


@dataclass(frozen=True)
class TargetedDLR(Targeted):
    """The target's margin over the distance of the first logit to the third and fourth."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The ratio; with three classes to the third, with two the margin as it is."""
        margin = label_entry(out.logits, inputs[0]) - label_entry(out.logits, y)
        classes = out.logits.shape[-1]
        if classes < 3:
            return margin
        first, _, *rest = out.logits.topk(min(classes, 4)).values.unbind(-1)
        return margin / (first - sum(rest[1:], rest[0]) / len(rest) + TINY)


@dataclass(frozen=True)
class TargetedConfidence(Targeted):
    """Log of the target's probability: the paper's L_Con, one class at a time."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The log probability of the target."""
        return label_entry(log_probabilities(out, self.tau), inputs[0])
