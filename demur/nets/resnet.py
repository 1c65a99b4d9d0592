"""Pre-activation ResNets: 18 and WideResNet-34-10 of the paper, and 8 for 8x8 images.

ResNet18().build(CIFAR10().domain, RR())    # 11,304,267 weights, 11,172,170 without the head
"""

from dataclasses import dataclass

from torch import nn

from demur.errors import BadInput
from demur.field_types import PositiveInt
from demur.images import Domain
from demur.nets.block import ResidualTrunk
from demur.nets.net import NetSpec, RejectingNet

LARGE = 96  # pixels from which images get the stem of ImageNet


@dataclass(frozen=True)
class ResNet18(NetSpec):
    """Pre-activation ResNet-18: four stages of two blocks.

    The "ResNet-18" of the reference code is this pre-activation net, with width 64. Images from
    96 pixels on get the usual stem of ImageNet (7x7 and max pool), smaller ones that of CIFAR.

    Args:
        width: channels of the first stage; the later stages have 2, 4 and 8 times as many.

    Example:
        >>> import torch
        >>> from demur import CIFAR10, RR, ResNet18
        >>> net = ResNet18(width=4).build(CIFAR10().domain, RR())
        >>> net(torch.rand(2, 3, 32, 32)).logits.shape
        torch.Size([2, 10])
    """

    width: PositiveInt = 64

    def trunk(self, channels: int) -> ResidualTrunk:
        return self._trunk(channels, large=False)

    def trunk_for(self, domain: Domain) -> ResidualTrunk:
        return self._trunk(domain.shape[0], large=min(domain.shape[1:]) >= LARGE)

    def _trunk(self, channels: int, large: bool) -> ResidualTrunk:
        widths = [self.width * factor for factor in (1, 2, 4, 8)]
        return ResidualTrunk(channels, self.width, widths, depth=2, large=large)


@dataclass(frozen=True)
class ResNet8(NetSpec):
    """Pre-activation ResNet-8: three stages of one block; 78 thousand weights by default.

    Args:
        width: channels of the first stage; the later stages have 2 and 4 times as many.

    Example:
        >>> from demur import RR, Digits, ResNet8
        >>> ResNet8(width=4).build(Digits().domain, RR()).trunk.dims
        (4, 8, 16)
    """

    width: PositiveInt = 16

    def trunk(self, channels: int) -> ResidualTrunk:
        return ResidualTrunk(channels, self.width, [self.width * f for f in (1, 2, 4)], depth=1)


@dataclass(frozen=True)
class WideResNet(NetSpec):
    """WideResNet: three stages of (depth - 4) / 6 blocks with 16, 32, 64 times `widen` channels.

    Args:
        depth: number of layers, 6n + 4; another depth raises BadInput.
        widen: factor of the channels; 10 in the paper.

    Example:
        >>> from demur import CIFAR10, RR, WideResNet
        >>> WideResNet(depth=10, widen=1).build(CIFAR10().domain, RR()).trunk.dims
        (16, 32, 64)
    """

    depth: PositiveInt = 34
    widen: PositiveInt = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 10 or (self.depth - 4) % 6:
            raise BadInput(
                f"WideResNet needs a depth of 6n + 4, such as 28 or 34, not {self.depth}"
            )

    def trunk(self, channels: int) -> ResidualTrunk:
        widths = [16 * self.widen * f for f in (1, 2, 4)]
        return ResidualTrunk(channels, 16, widths, depth=(self.depth - 4) // 6)

    def initialise(self, net: RejectingNet) -> None:
        # as in the reference code of WideResNet
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
