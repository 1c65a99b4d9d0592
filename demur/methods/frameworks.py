"""Adversarial training frames: which images the net sees and how they teach the classifier.

    PGDAT(PGD(Linf(8/255), steps=10, step_size=2/255))       # Madry et al. 2018, as in the paper
    TRADES(beta=6)                                      # Zhang et al. 2019

A frame crafts images, looks at them, and says how they teach the classifier; the head adds its
own term. Crafting and teaching are apart, so that an engine may do each in its own fast way.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from demur.attacks import CE, KL, PGD, Attack, Objective
from demur.attacks.objectives import divergence
from demur.balls import Linf
from demur.errors import BadInput
from demur.field_types import NonNegative
from demur.methods.batch_norm_mode import BatchNorm, check_keeps_batch, crafting
from demur.methods.outputs import BatchOutputs, LabelledOutput
from demur.noise import Stream
from demur.output import log_probabilities
from demur.spec import Spec


@dataclass(frozen=True)
class Framework(Spec, ABC):
    """How images are crafted and what the classifier learns from them."""

    @abstractmethod
    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """The images to teach with."""

    @abstractmethod
    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        """The answers that the losses look at, clean images among them where asked."""

    @abstractmethod
    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        """The classification loss of each image."""

    @property
    def one_loss_per_image(self) -> bool:
        """Whether its loss has one value for each attacked image."""
        return True

    def with_objective(self, objective: Objective, bn: BatchNorm | None = None) -> "Framework":
        """The frame with images crafted for another goal, and in another batch-norm mode."""
        raise BadInput(
            f"{type(self).__name__} learns from images crafted for its own goal, and this head "
            "brings another; use PGDAT"
        )


@dataclass(frozen=True)
class Standard(Framework):
    """Cross-entropy on the images as they are."""

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """The images themselves."""
        return x

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        """One look at the clean images, which stand for attacked ones too."""
        seen = LabelledOutput(x, y, net(x))
        return BatchOutputs(seen, seen)

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        """Cross-entropy."""
        return CE()(outputs.attacked.out, outputs.attacked.y)

    def with_objective(self, objective: Objective, bn: BatchNorm | None = None) -> "Standard":
        """The same: nothing is crafted."""
        return self


@dataclass(frozen=True)
class PGDAT(Framework):
    """Cross-entropy on attacked images; `bn` is the batch-norm mode while they are crafted.

    train: by the batch's statistics, and running statistics move with every look of the attack;
    batch: by the batch's statistics, but running statistics learn from the finished images alone;
    eval: by the running statistics.
    """

    attack: Attack = PGD(Linf(8 / 255), steps=10, step_size=2 / 255)
    bn: BatchNorm = "train"  # reference code: train mode, so crafting moves running statistics

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keeps_batch(self.attack, self.bn)

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """Attacked images, with batch norm in the frame's mode."""
        with crafting(net, self.bn):
            return self.attack.perturb(net, x, y, index, stream)

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        """One look at the attacked images, in train mode, then one at the clean if asked."""
        attacked = LabelledOutput(x_adv, y, net(x_adv))
        return BatchOutputs(attacked, LabelledOutput(x, y, net(x)) if clean else None)

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        """Cross-entropy."""
        return CE()(outputs.attacked.out, outputs.attacked.y)

    def with_objective(self, objective: Objective, bn: BatchNorm | None = None) -> "PGDAT":
        """The same attack on another goal."""
        return replace(self, attack=_aimed(self.attack, objective), bn=bn or self.bn)


@dataclass(frozen=True)
class TRADES(Framework):
    """Cross-entropy on the images as they are, and a price on changing the answer under attack.

    Zhang et al. 2019. Crafted in eval mode. The answer to the clean images learns from both terms.
    """

    beta: NonNegative = 6.0
    attack: Attack = PGD(Linf(8 / 255), steps=10, step_size=2 / 255, start="near", objective=KL())

    def craft(self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        """Images whose answer is as far from the clean one as can be."""
        with crafting(net, "eval"):
            return self.attack.perturb(net, x, y, index, stream)

    def outputs(
        self, net: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, clean: bool
    ) -> BatchOutputs:
        """One look at the attacked images, then one at the clean ones, each a batch of its own."""
        attacked = LabelledOutput(x_adv, y, net(x_adv))
        return BatchOutputs(attacked, LabelledOutput(x, y, net(x)))

    def classification_loss(self, outputs: BatchOutputs) -> Tensor:
        """Cross-entropy of the clean answer plus beta times the divergence of the attacked one."""
        clean_outputs = outputs.clean_outputs()
        clean, attacked = (
            log_probabilities(seen.out) for seen in (clean_outputs, outputs.attacked)
        )
        return CE()(clean_outputs.out, clean_outputs.y) + self.beta * divergence(clean, attacked)


def _aimed(attack: Attack, objective: Objective) -> Attack:
    """The attack on another goal."""
    if not hasattr(attack, "objective"):
        raise BadInput(f"{type(attack).__name__} has no goal that a head could change; use PGD")
    changes: dict[str, Any] = {"objective": objective}
    return replace(attack, **changes)
