"""Soft labels: the target probabilities that replace the label in the classification loss.

The attack and the auxiliary loss of a head use the label itself.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import one_hot

from demur.errors import BadInput
from demur.output import Output, label_entry, log_probabilities
from demur.spec import Spec
from demur.spec.field_types import Positive, UnitInterval

Progress = float | Tensor  # share of all training steps, 0 to 1


@dataclass(frozen=True)
class Labels(Spec, ABC):
    """Targets of the classification loss."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the targets depend on the output of the averaged net."""
        return False

    @abstractmethod
    def targets(
        self, y: Tensor, classes: int, progress: Progress, teacher: Output | None
    ) -> Tensor | None:
        """Return target probabilities, N, K, or None for the labels themselves.

        `progress` is the share of the training steps that are done, `teacher` the output of the
        averaged net for the clean images, if `needs_teacher`.
        """


@dataclass(frozen=True)
class HardLabels(Labels):
    """The labels themselves."""

    def targets(self, y: Tensor, classes: int, progress: Progress, teacher: Output | None) -> None:
        return None


@dataclass(frozen=True)
class LabelSmoothing(Labels):
    """The label with probability 1 - amount, and `amount` spread evenly over all classes."""

    amount: UnitInterval = 0.1

    def targets(
        self, y: Tensor, classes: int, progress: Progress, teacher: Output | None
    ) -> Tensor:
        return (1 - self.amount) * one_hot(y, classes) + self.amount / classes


@dataclass(frozen=True)
class ADR(Labels):
    """Annealing self-distillation rectification (Wu et al. 2024): the averaged net is the teacher.

        p = softmax(teacher(x) / T)
        w = clip(weight - (max p - p_y), 0, 1)
        target = w p + (1 - w) one_hot(y)

    Temperature and weight follow a cosine from their first to their last value over the training.

    Args:
        temperature: First and last T; the defaults are the authors' for CIFAR-10 with AWP.
        weight: First and last value of the largest share of the teacher.
    """

    temperature: tuple[Positive, Positive] = (2.5, 1.5)
    weight: tuple[UnitInterval, UnitInterval] = (0.7, 0.85)

    @property
    def needs_teacher(self) -> bool:
        return True

    def targets(
        self, y: Tensor, classes: int, progress: Progress, teacher: Output | None
    ) -> Tensor:
        if teacher is None:
            raise BadInput("ADR needs the output of the averaged net; set ema, such as ema=0.995")
        p = log_probabilities(
            teacher._replace(logits=teacher.logits / _annealed(self.temperature, progress))
        ).exp()
        excess = p.amax(-1) - label_entry(p, y)
        share = (_annealed(self.weight, progress) - excess).clamp(0, 1)[:, None]
        return share * p + (1 - share) * one_hot(y, classes)


def _annealed(ends: tuple[float, float], progress: Progress) -> Progress:
    """Return the value of a cosine schedule from the first to the last value."""
    first, last = ends
    angle = progress * math.pi
    cosine = angle.cos() if isinstance(angle, Tensor) else math.cos(angle)
    return last + (first - last) * (1 + cosine) / 2
