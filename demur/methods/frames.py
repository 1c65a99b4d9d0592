"""Adversarial training frames: which images the net sees and how they teach the classifier.

    PGDAT(PGD(Linf(8/255), steps=10, step=2/255))       # Madry et al. 2018, as in the paper
    TRADES(beta=6)                                      # Zhang et al. 2019

A frame crafts images, looks at them, and says how they teach the classifier; the head adds its
own term. Crafting and teaching are apart, so that an engine may do each in its own fast way.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.attacks import CE, KL, PGD, Attack
from demur.attacks.goals import divergence
from demur.balls import Linf
from demur.declared import NonNegative
from demur.errors import BadInput
from demur.noise import Stream
from demur.output import Output, log_probabilities
from demur.spec import Spec

BatchNorm = Literal["train", "batch", "eval"]


class Views(NamedTuple):
    """What the net made of a batch: of the images as they are, where asked, and attacked."""

    x: Tensor
    x_adv: Tensor
    clean: Output | None
    attacked: Output


@dataclass(frozen=True)
class Frame(Spec, ABC):
    """How images are crafted and what the classifier learns from them."""

    @abstractmethod
    def crafted(
        self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream
    ) -> Tensor:
        """The images to teach with."""

    @abstractmethod
    def views(self, net: nn.Module, x: Tensor, x_adv: Tensor) -> Views:
        """The outputs the losses look at."""

    @abstractmethod
    def term(self, views: Views, y: Tensor) -> Tensor:
        """The classification loss of each image."""


@dataclass(frozen=True)
class Standard(Frame):
    """Cross-entropy on the images as they are."""

    def crafted(
        self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream
    ) -> Tensor:
        """The images themselves."""
        return x

    def views(self, net: nn.Module, x: Tensor, x_adv: Tensor) -> Views:
        """One look at the clean images."""
        out = net(x)
        return Views(x, x, out, out)

    def term(self, views: Views, y: Tensor) -> Tensor:
        """Cross-entropy."""
        return CE()(views.attacked, y)


@dataclass(frozen=True)
class PGDAT(Frame):
    """Cross-entropy on attacked images; `bn` is the batch-norm mode while they are crafted.

    train: by the batch's statistics, and running statistics move with every look of the attack;
    batch: by the batch's statistics, but running statistics learn from the finished images alone;
    eval: by the running statistics.
    """

    attack: Attack = PGD(Linf(8 / 255), steps=10, step=2 / 255)
    bn: BatchNorm = "train"  # reference code: train mode, so crafting moves running statistics

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bn != "eval" and getattr(self.attack, "keep", "") == "criterion":
            raise BadInput(
                "an attack with keep=criterion drops images from the batch, which batch norm by "
                "its statistics would feel; use bn=eval or keep=largest"
            )

    def crafted(
        self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream
    ) -> Tensor:
        """Attacked images, with batch norm in the frame's mode."""
        with crafting(net, self.bn):
            return self.attack.perturbed(net, x, y, index, stream)

    def views(self, net: nn.Module, x: Tensor, x_adv: Tensor) -> Views:
        """One look at the attacked images, in train mode."""
        return Views(x, x_adv, None, net(x_adv))

    def term(self, views: Views, y: Tensor) -> Tensor:
        """Cross-entropy."""
        return CE()(views.attacked, y)


@dataclass(frozen=True)
class TRADES(Frame):
    """Cross-entropy on the images as they are, and a price on changing the answer under attack.

    Zhang et al. 2019. Crafted in eval mode. The answer to the clean images learns from both terms.
    """

    beta: NonNegative = 6.0
    attack: Attack = PGD(Linf(8 / 255), steps=10, step=2 / 255, start="near", goal=KL())

    def crafted(
        self, net: nn.Module, x: Tensor, y: Tensor, index: Tensor, stream: Stream
    ) -> Tensor:
        """Images whose answer is as far from the clean one as can be."""
        with crafting(net, "eval"):
            return self.attack.perturbed(net, x, y, index, stream)

    def views(self, net: nn.Module, x: Tensor, x_adv: Tensor) -> Views:
        """One look at the attacked images, then one at the clean ones, each a batch of its own."""
        attacked = net(x_adv)
        return Views(x, x_adv, net(x), attacked)

    def term(self, views: Views, y: Tensor) -> Tensor:
        """Cross-entropy of the clean answer plus beta times the divergence of the attacked one."""
        assert views.clean is not None
        clean, attacked = (log_probabilities(out) for out in (views.clean, views.attacked))
        return CE()(views.clean, y) + self.beta * divergence(clean, attacked)


@contextmanager
def crafting(net: nn.Module, bn: BatchNorm) -> Iterator[None]:
    """The net in a batch-norm mode and with its weights held still, then as it was."""
    mode, learning = net.training, [p for p in net.parameters() if p.requires_grad]
    net.train(bn != "eval")
    for parameter in learning:
        parameter.requires_grad_(False)  # no gradient is computed for what no attack may change
    try:
        with _statistics_held(net) if bn == "batch" else nullcontext():
            yield
    finally:
        net.train(mode)
        for parameter in learning:
            parameter.requires_grad_(True)


def _batch_norms(net: nn.Module) -> list[_BatchNorm]:
    """Those of a net, or those that an engine's stand-in for it names."""
    named = getattr(net, "batch_norms", None)
    if named is not None:
        found: list[_BatchNorm] = named()
        return found
    return [module for module in net.modules() if isinstance(module, _BatchNorm)]


@contextmanager
def _statistics_held(net: nn.Module) -> Iterator[None]:
    """Batch norm by the batch's statistics, of which nothing is remembered."""
    norms = _batch_norms(net)
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
