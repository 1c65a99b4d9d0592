"""A training method: a framework and a head. Soft labels.

The *head-only subset* is a fixed share of the training images. The auxiliary loss uses these images
alone and the classification loss uses the others alone, so that the head is trained on images that
the classifier has not been fitted to. Batch norm sees all of them. Soft labels replace the label in
the classification loss; the attack and the auxiliary loss of a head use the label itself.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import one_hot

from demur import noise
from demur.errors import BadInput
from demur.methods.frameworks import BatchOutputs, Framework, scaled_attack, subset_weights
from demur.methods.heads import Head, NoHead
from demur.noise import Stream
from demur.output import Output, label_entry, log_probabilities
from demur.spec import Spec, later
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
        logits = teacher.logits / _annealed(self.temperature, progress)
        p = log_probabilities(teacher._replace(logits=logits)).exp()
        excess = p.amax(-1) - label_entry(p, y)
        share = (_annealed(self.weight, progress) - excess).clamp(0, 1)[:, None]
        return share * p + (1 - share) * one_hot(y, classes)


def _annealed(ends: tuple[float, float], progress: Progress) -> Progress:
    """Return the value of a cosine schedule from the first to the last value."""
    first, last = ends
    angle = progress * math.pi
    cosine = angle.cos() if isinstance(angle, Tensor) else math.cos(angle)
    return last + (first - last) * (1 + cosine) / 2


HEAD_ONLY_SEED = 0x5BA6ED  # fixed, so that every run has the same head-only subset


@dataclass(frozen=True)
class Method(Spec):
    """A framework's classification loss plus a head's auxiliary loss.

        loss = mean(classification loss + auxiliary loss)

    Args:
        framework: How training images are attacked and classified.
        head: The auxiliary module and its loss.
        head_only: Share of the images in the head-only subset, in [0, 1). It needs
            `RR(gradient_to="head")` and a framework with one loss per image.

    Raises:
        BadInput: If the framework and the head cannot be combined.

    Example:
        >>> from demur import PGDAT, RR, Method
        >>> method = Method(PGDAT(), RR(gradient_to="head"), head_only=0.2)
    """

    framework: Framework
    head: Head = NoHead()
    head_only: UnitInterval = field(default=0.0, metadata=later(neutral=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head.adapt_framework(self.framework)  # raises if they cannot be combined
        if self.head_only == 1:
            raise BadInput("head_only=1 leaves the classifier no images; use less than 1")
        if self.head_only and not self.head.spares_backbone:
            raise BadInput(
                "head_only images train the head alone, so its loss must not reach the backbone; "
                "use head=RR(gradient_to=head)"
            )
        if self.head_only and not self.framework.one_loss_per_image:
            raise BadInput(
                "head_only needs a framework with one loss per attacked image; use PGDAT"
            )

    def scaled(self, factor: float) -> "Method":
        """Method whose attack, if it has one, has `factor` times the eps."""
        framework: Any = self.framework
        if hasattr(framework, "attack"):
            framework = replace(framework, attack=scaled_attack(framework.attack, factor))
        return replace(self, framework=framework)

    def loss(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """Attack a batch and return its mean training loss; arguments as of `Framework.craft`."""
        x_adv = self.craft(net, x, y, index, stream)
        return self.batch_loss(net, x, x_adv, y, self.head_only_mask(index))

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """Adversarial examples of a batch (N, C, H, W); arguments as in `loss`."""
        return self.head.adapt_framework(self.framework).craft(net, x, y, index, stream)

    def head_only_mask(self, index: Tensor) -> Tensor | None:
        """1.0 for images of the head-only subset and 0.0 for others (N); None without a subset."""
        if self.head_only == 0:
            return None
        return (noise.uniform(HEAD_ONLY_SEED, index, 0, (1,))[:, 0] < self.head_only).float()

    def batch_loss(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor,
        head_only_mask: Tensor | None = None, target: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Mean training loss of a batch whose adversarial examples `x_adv` are given."""
        return self.reduce_loss(self.outputs(net, x, x_adv, y, target), head_only_mask)

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, target: Tensor | None = None
    ) -> BatchOutputs:
        """Forward passes of a training step, in train mode; `target`: soft labels, N, K."""
        if self.head.needs_input_gradient:
            x = x.detach().requires_grad_()
        outputs = self.framework.outputs(net, x, x_adv, y, self.head.needs_clean)
        return outputs if target is None else outputs.with_target(target)

    def reduce_loss(self, outputs: BatchOutputs, head_only_mask: Tensor | None = None) -> Tensor:
        """Mean training loss of the outputs, in fp32 or better."""
        loss_per_image = self.framework.classification_loss(outputs)
        if head_only_mask is None:
            return self.head.loss(loss_per_image, outputs)
        auxiliary = self.head.auxiliary_loss(outputs)
        assert auxiliary is not None, "a head-only subset needs a head with an auxiliary loss"
        return (
            subset_weights(1 - head_only_mask) * loss_per_image
            + subset_weights(head_only_mask) * auxiliary
        ).mean()
