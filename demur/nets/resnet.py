"""Pre-activation ResNets: 18 and WideResNet-34-10 of the paper, and 8 for 8x8 images."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu

from demur.errors import BadInput
from demur.images import Domain
from demur.nets.net import Conv1x1, Conv3x3, NetSpec, Norm2d, RejectingNet, Trunk
from demur.spec import later
from demur.spec.field_types import PositiveInt

LARGE = 96  # pixels from which images get the stem of ImageNet
Activation = Literal["relu", "silu"]
ACTIVATIONS = {"relu": relu, "silu": silu}


class Block(nn.Module):
    """A pre-activation residual block: maps N, C, H, W to N, width, H / stride, W / stride.

    Batch norm, activation, 3x3 convolution, twice, plus a shortcut (He et al. 2016). The shortcut
    is the identity if the shapes agree, otherwise a 1x1 convolution of the activated input, as in
    the reference code.
    """

    def __init__(
        self, width_in: int, width: int, stride: int, activation: Activation = "relu"
    ) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[activation]
        self.norm1 = Norm2d(width_in)
        self.conv1 = Conv3x3(width_in, width, stride)
        self.norm2 = Norm2d(width)
        self.conv2 = Conv3x3(width, width)
        same = stride == 1 and width_in == width
        self.shortcut = None if same else Conv1x1(width_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = self.activate(self.norm1(x))
        skip: Tensor = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.conv2(self.activate(self.norm2(self.conv1(active))))
        return out + skip


class ResidualTrunk(Trunk):
    """A stem convolution, then one stage of `depth` blocks per width.

    Every stage but the first halves height and width. `large` is the stem for large images: a 7x7
    convolution and a max pool, each of stride 2, instead of a 3x3 convolution.
    """

    def __init__(
        self, channels: int, stem: int, widths: Sequence[int], depth: int, large: bool = False,
        activation: Activation = "relu",
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        self.dims = tuple(widths)
        self.large = large
        self.stem: nn.Module
        if large:  # as for ImageNet, but without a norm, which the pre-activation form has later
            conv = nn.Conv2d(channels, stem, 7, stride=2, padding=3, bias=False)
            self.stem = nn.Sequential(conv, nn.MaxPool2d(3, stride=2, padding=1))
        else:
            self.stem = Conv3x3(channels, stem)
        self.stages = nn.ModuleList()
        for i, width in enumerate(widths):
            width_in = widths[i - 1] if i else stem
            blocks = [Block(width_in, width, 2 if i else 1, activation)]
            blocks += [Block(width, width, 1, activation) for _ in range(depth - 1)]
            self.stages.append(nn.Sequential(*blocks))
        self.norm = Norm2d(widths[-1])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(global_average_pool(x))
        return [*features[:-1], global_average_pool(ACTIVATIONS[self.activation](self.norm(x)))]


def global_average_pool(maps: Tensor) -> Tensor:
    """Return the mean over height and width (N, C), in fp32 or fp64."""
    return maps.mean((2, 3), dtype=torch.promote_types(maps.dtype, torch.float32))


@dataclass(frozen=True)
class ResNet18(NetSpec):
    """Pre-activation ResNet-18: four stages of two blocks.

    The "ResNet-18" of the reference code is this pre-activation net, with width 64. Images from
    96 pixels on get the usual stem of ImageNet (7x7 and max pool), smaller ones that of CIFAR.

    Args:
        width: channels of the first stage; the later stages have 2, 4 and 8 times as many.
        activation: "relu", for which there are fused kernels, or "silu".

    Example:
        >>> import torch
        >>> from demur import CIFAR10, RR, ResNet18
        >>> net = ResNet18(width=4).build(CIFAR10().domain, RR())
        >>> net(torch.rand(2, 3, 32, 32)).logits.shape
        torch.Size([2, 10])
    """

    width: PositiveInt = 64
    activation: Activation = field(default="relu", metadata=later("relu"))

    def trunk(self, domain: Domain) -> ResidualTrunk:
        widths = [self.width * factor for factor in (1, 2, 4, 8)]
        large = min(domain.shape[1:]) >= LARGE
        return ResidualTrunk(domain.shape[0], self.width, widths, 2, large, self.activation)


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

    def trunk(self, domain: Domain) -> ResidualTrunk:
        widths = [self.width * factor for factor in (1, 2, 4)]
        return ResidualTrunk(domain.shape[0], self.width, widths, depth=1)


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

    def trunk(self, domain: Domain) -> ResidualTrunk:
        widths = [16 * self.widen * f for f in (1, 2, 4)]
        return ResidualTrunk(domain.shape[0], 16, widths, depth=(self.depth - 4) // 6)

    def initialise(self, net: RejectingNet) -> None:
        # as in the reference code of WideResNet
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
