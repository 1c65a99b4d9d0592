"""Targeted objectives: towards one wrong class per image, which `MultiTarget` provides.

TargetedMargin()        # target logit - true logit (Gowal et al. 2019)
TargetedDLR()           # the margin, invariant to the scale of the logits (Croce and Hein 2020)
TargetedConfidence()    # log probability of the target
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
    """Base class of objectives with a target class per image."""

    @property
    def n_inputs(self) -> int:
        return 1

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        return (start_point.required_target(),)


@dataclass(frozen=True)
class TargetedMargin(Targeted):
    """The target logit minus the true logit."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return label_entry(out.logits, inputs[0]) - label_entry(out.logits, y)


@dataclass(frozen=True)
class TargetedDLR(Targeted):
    """The targeted margin divided by z_1 - (z_3 + z_4) / 2, with sorted logits z.

    With three classes the divisor is z_1 - z_3; with two classes the margin is not divided.
    """

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        margin = label_entry(out.logits, inputs[0]) - label_entry(out.logits, y)
        classes = out.logits.shape[-1]
        if classes < 3:
            return margin
        first, _, *rest = out.logits.topk(min(classes, 4)).values.unbind(-1)
        return margin / (first - sum(rest[1:], rest[0]) / len(rest) + TINY)


@dataclass(frozen=True)
class TargetedConfidence(Targeted):
    """The log probability of the target: the paper's L_Con for one class."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return label_entry(log_probabilities(out, self.tau), inputs[0])
