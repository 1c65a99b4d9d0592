"""The shape of every net: normalise, trunk, classifier, and the auxiliary module it is given.

    net = Small().build(Digits().domain, RR())
    net(x).logits, net(x).aux

A trunk returns the pooled features of each stage, earliest first; the last one feeds the linear
classifier, and the auxiliary module sees them all. The net never asks which head it carries.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from demur.errors import BadInput
from demur.images import Domain
from demur.nets.conv import Conv3x3
from demur.output import Output
from demur.spec import Spec


class AuxiliaryHead(Protocol):
    """What a training head tells a net: the module to put beside the classifier."""

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """A module from the list of pooled stages to (N, A)."""
        ...


class Trunk(nn.Module, ABC):
    """Images to pooled stage features; `dims` are their widths."""

    dims: tuple[int, ...]

    @abstractmethod
    def forward(self, x: Tensor) -> list[Tensor]:
        """The pooled features of each stage."""


class Normalise(nn.Module):
    """Shift and scale of each channel, so that pixels stay in [0, 1] outside the net."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised images."""
        return (x - self.mean) / self.std


class RejectingNet(nn.Module):
    """A classifier with a second, auxiliary output."""

    def __init__(self, domain: Domain, trunk: Trunk, aux: nn.Module) -> None:
        super().__init__()
        self.domain = domain
        self.normalise = Normalise(domain.mean, domain.std)
        self.trunk = trunk
        self.classify = nn.Linear(trunk.dims[-1], domain.classes)
        self.aux = aux
        self.frozen = False

    def forward(self, x: Tensor) -> Output:
        """Logits, the last pooled feature, and the auxiliary output."""
        if x.shape[1:] != self.domain.shape or x.dtype != self.normalise.mean.dtype:
            raise BadInput(
                f"this net takes images of shape N, {', '.join(map(str, self.domain.shape))} in "
                f"{self.normalise.mean.dtype}, not {tuple(x.shape)} in {x.dtype}"
            )
        stages = self.trunk(self.normalise(x))
        with torch.autocast(x.device.type, enabled=False):  # heads are cheap: never below fp32
            return Output(self.classify(stages[-1]), stages[-1], self.aux(stages))

    def freeze(self) -> None:
        """Hold the classifier still for good: nothing but the auxiliary module learns."""
        self.frozen = True
        self.trunk.requires_grad_(False)
        self.classify.requires_grad_(False)
        self.train(self.training)

    def freeze_for_inference(self) -> None:
        """Say that nothing learns any more: convolutions may prepare for that."""
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Conv3x3):
                module.still = True

    def train(self, mode: bool = True) -> "RejectingNet":
        """Train or eval mode; a frozen classifier stays in the latter."""
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self

    def classifier(self) -> nn.Module:
        """The net as other libraries want it: images to logits alone."""
        return LogitsOnly(self)


class LogitsOnly(nn.Module):
    """A net that forgets all but its logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.net(x).logits
        return logits


@dataclass(frozen=True)
class NetSpec(Spec, ABC):
    """A frozen description of a net."""

    @abstractmethod
    def trunk(self, channels: int) -> Trunk:
        """A fresh trunk for images with this many channels."""

    def build(self, domain: Domain, head: AuxiliaryHead, seed: int = 0) -> RejectingNet:
        """A fresh net for a kind of images, with the auxiliary module of a head."""
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator only
            torch.default_generator.manual_seed(seed)
            trunk = self.trunk(domain.shape[0])
            aux = head.build(trunk.dims, domain.classes)
            net = RejectingNet(domain, trunk, aux)
            self.initialise(net)
            return net

    def initialise(self, net: RejectingNet) -> None:
        """Weights to begin with, where they are not each layer's own."""
