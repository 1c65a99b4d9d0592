"""Objectives of the class logits: towards any wrong class, or towards a target.

    CE()                  # cross-entropy of the true label
    UntargetedMargin()    # largest wrong logit - true logit
    DLR()                 # the margin, invariant to the scale of the logits (Croce and Hein 2020)
    GAMA(), KL()          # compare the output with an earlier one

`MultiTarget` provides the target class of `TargetedMargin`, `TargetedDLR`, `TargetedConfidence`.
"""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from demur.attacks.objectives.objective import AttackStart, Objective, ObjectiveState
from demur.output import Output, label_entry, log_probabilities, log_tcon, mask_label
from demur.spec.field_types import NonNegative, Positive, PositiveInt

GAP_OFFSET = 1e-12  # added to the gap of logits that divides, as in the reference code


@dataclass(frozen=True)
class CE(Objective):
    """Cross-entropy of the true label, -log T-Con."""

    seeks_misclassification: ClassVar[bool] = True

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return -log_tcon(out, y)


@dataclass(frozen=True)
class UntargetedMargin(Objective):
    """The largest wrong logit minus the true logit: positive exactly where misclassified."""

    seeks_misclassification: ClassVar[bool] = True

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return best_wrong(out.logits, y) - label_entry(out.logits, y)


@dataclass(frozen=True)
class DLR(Objective):
    """Difference of logits ratio: the margin divided by z_1 - z_3, with sorted logits z.

    With two classes there is no z_3 and the margin is not divided.
    """

    seeks_misclassification: ClassVar[bool] = True

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        margin = best_wrong(out.logits, y) - label_entry(out.logits, y)
        if out.logits.shape[-1] < 3:
            return margin
        first, _, third = out.logits.topk(3).values.unbind(-1)
        return margin / (first - third + GAP_OFFSET)


@dataclass(frozen=True)
class WrongConfidence(Objective):
    """The log of the largest wrong probability: the paper's L_Con."""

    seeks_misclassification: ClassVar[bool] = True

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return best_wrong(log_probabilities(out, self.tau), y)


def best_wrong(table: Tensor, y: Tensor) -> Tensor:
    """Return the largest entry of each row of an N, K table, without the true label."""
    return mask_label(table, y).amax(-1)


@dataclass(frozen=True)
class Targeted(Objective, ABC):
    """Base class of objectives with a target class per image."""

    seeks_misclassification: ClassVar[bool] = True

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
        return margin / (first - sum(rest[1:], rest[0]) / len(rest) + GAP_OFFSET)


@dataclass(frozen=True)
class TargetedConfidence(Targeted):
    """The log probability of the target: the paper's L_Con for one class."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return label_entry(log_probabilities(out, self.tau), inputs[0])


@dataclass(frozen=True)
class GAMA(Objective):
    """GAMA: max wrong probability - true probability + w_t * ||p(x_start) - p(x_adv)||^2.

    The distance gives a gradient where the margin alone has none.

    Args:
        weight: w_0, the weight of the distance at the first step.
        fade: The number of steps over which w_t falls linearly to 0.
    """

    seeks_misclassification: ClassVar[bool] = True

    weight: NonNegative = 50.0
    fade: PositiveInt = 25

    @property
    def n_inputs(self) -> int:
        return 2

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        start = log_probabilities(start_point.output(start_point.x_start)).exp()
        return start, start.new_zeros(len(start))  # the zeros become w_t in at_step

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        start, zeros = objective_state
        return start, zeros + self.weight * max(0.0, 1 - step / self.fade)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        start, weight = inputs
        now = log_probabilities(out).exp()
        return best_wrong(now, y) - label_entry(now, y) + weight * ((start - now) ** 2).sum(-1)


@dataclass(frozen=True)
class KL(Objective):
    """TRADES' objective: KL(p(x) || p(x_adv)), with the clean prediction p(x) fixed."""

    @property
    def n_inputs(self) -> int:
        return 1

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        return (log_probabilities(start_point.output(start_point.x)),)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return divergence(inputs[0], log_probabilities(out))


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) per row, from log probabilities of shape N, K."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
