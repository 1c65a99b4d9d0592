"""The pre-activation residual block (He et al. 2016) and the trunk built from it.

A block is batch norm, ReLU, 3x3 convolution, twice, plus a shortcut. The shortcut is the identity
if the shapes agree, otherwise a 1x1 convolution of the activated input, as in the reference code.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from demur.nets.conv import Conv1x1, Conv3x3
from demur.nets.net import Trunk
from demur.nets.norm import Norm2d


class Block(nn.Module):
    """A pre-activation residual block: maps N, C, H, W to N, width, H / stride, W / stride."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = Norm2d(width_in)
        self.conv1 = Conv3x3(width_in, width, stride)
        self.norm2: nn.Module = Norm2d(width)
        self.conv2 = Conv3x3(width, width)
        same = stride == 1 and width_in == width
        self.shortcut = None if same else Conv1x1(width_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = relu(self.norm1(x))
        skip: Tensor = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.conv2(relu(self.norm2(self.conv1(active))))
        return out + skip


class ResidualTrunk(Trunk):
    """A stem convolution, then one stage of `depth` blocks per width.

    Every stage but the first halves height and width. `large` is the stem for large images: a 7x7
    convolution and a max pool, each of stride 2, instead of a 3x3 convolution.
    """

    def __init__(
        self, channels: int, stem: int, widths: Sequence[int], depth: int, large: bool = False
    ) -> None:
        super().__init__()
        self.dims = tuple(widths)
        self.large = large
        self.stem: nn.Module = _large_stem(channels, stem) if large else Conv3x3(channels, stem)
        self.stages = nn.ModuleList()
        for i, width in enumerate(widths):
            width_in = widths[i - 1] if i else stem
            first = Block(width_in, width, stride=2 if i else 1)
            self.stages.append(
                nn.Sequential(first, *(Block(width, width, 1) for _ in range(depth - 1)))
            )
        self.norm = Norm2d(widths[-1])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(global_average_pool(x))
        return [*features[:-1], global_average_pool(relu(self.norm(x)))]


def _large_stem(channels: int, width: int) -> nn.Sequential:
    """The stem of ResNets for ImageNet; its pre-activation form has no norm here."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def global_average_pool(maps: Tensor) -> Tensor:
    """Return the mean over height and width (N, C), in fp32 or fp64."""
    return maps.mean((2, 3), dtype=torch.promote_types(maps.dtype, torch.float32))
