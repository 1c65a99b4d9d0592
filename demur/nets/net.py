"""The parts of every net: normalisation, trunk, linear classifier and auxiliary head.

A trunk returns the pooled features of each stage, the first stage first. The classifier reads the
last one, the auxiliary head reads all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from demur.errors import BadInput
from demur.images import Domain
from demur.nets.layers import Conv3x3
from demur.output import Output
from demur.spec import Spec


class AuxiliaryHead(Protocol):
    """A training head, as far as a net needs it: the builder of the auxiliary module."""

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Return a module from the list of pooled stages, of widths `dims`, to (N, A)."""
        ...


class Trunk(nn.Module, ABC):
    """Images to pooled features of each stage; `dims` are their widths."""

    dims: tuple[int, ...]

    @abstractmethod
    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the pooled features of each stage, (N, dims[i])."""


class Normalise(nn.Module):
    """Standardise each channel inside the net, so that images stay in [0, 1] outside of it."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class RejectingNet(nn.Module):
    """A classifier with an auxiliary output that rejectors can read.

    `trunk` maps images to pooled features, `aux` the list of pooled features to (N, A).
    """

    def __init__(self, domain: Domain, trunk: Trunk, aux: nn.Module) -> None:
        super().__init__()
        self.domain = domain
        self.normalise = Normalise(domain.mean, domain.std)
        self.trunk = trunk
        self.classify = nn.Linear(trunk.dims[-1], domain.classes)
        self.aux = aux
        self.frozen = False

    def forward(self, x: Tensor) -> Output:
        """Return logits (N, K), the last pooled feature (N, D) and the auxiliary output (N, A)."""
        self.check_images(x)
        stages = self.trunk(self.normalise(x))
        with torch.autocast(x.device.type, enabled=False):  # heads are cheap: fp32 at least
            return Output(self.classify(stages[-1]), stages[-1], self.aux(stages))

    def check_images(self, x: Tensor) -> None:
        """Raise BadInput if shape or dtype of the images are not those of the net."""
        if x.shape[1:] != self.domain.shape or x.dtype != self.normalise.mean.dtype:
            raise BadInput(
                f"this net takes images of shape N, {', '.join(map(str, self.domain.shape))} in "
                f"{self.normalise.mean.dtype}, not {tuple(x.shape)} in {x.dtype}"
            )

    def freeze(self) -> None:
        """Freeze trunk and classifier for good; only the auxiliary head trains."""
        self.frozen = True
        self.trunk.requires_grad_(False)
        self.classify.requires_grad_(False)
        self.train(self.training)

    def freeze_for_inference(self) -> None:
        """Freeze all weights, so that convolutions may cache what they derive from them."""
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Conv3x3):
                module.frozen_weight = True

    def train(self, mode: bool = True) -> "RejectingNet":
        """Set train or eval mode; a frozen trunk stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self

    def classifier(self) -> nn.Module:
        """Return a module from images to logits alone, as other libraries expect it."""
        return LogitsOnly(self)


class LogitsOnly(nn.Module):
    """A net that returns only its logits, (N, K)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.training = net.training

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x).logits
        return logits


@dataclass(frozen=True)
class NetSpec(Spec, ABC):
    """The specification of a net."""

    @property
    def trains_head_alone(self) -> bool:
        """Whether trunk and classifier come with weights that training leaves alone."""
        return False

    @abstractmethod
    def trunk(self, domain: Domain) -> Trunk:
        """Return a new trunk for images of a domain."""

    def check(self, domain: Domain) -> None:
        """Raise BadInput if the net cannot be built for these images; it always can by default."""

    def build(self, domain: Domain, head: AuxiliaryHead, seed: int = 0) -> RejectingNet:
        """Return a new net for images of a domain; the seed determines its weights.

        The head builds the auxiliary module. The global random state does not change.
        """
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator only
            torch.default_generator.manual_seed(seed)
            trunk = self.trunk(domain)
            aux = head.build(trunk.dims, domain.classes)
            net = RejectingNet(domain, trunk, aux)
            self.initialise(net)
            return net

    def initialise(self, net: RejectingNet) -> None:
        """Change the initial weights of the layers; does nothing by default."""
