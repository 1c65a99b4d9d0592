"""The pre-activation residual block that all our nets are made of (He et al. 2016).

Norm, ReLU, convolution, twice. The shortcut takes the pre-activated input, as in the reference
code; where shapes agree it is the input itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from demur.nets.conv import Conv1x1, Conv3x3
from demur.nets.net import Trunk
from demur.nets.norm import Norm2d


class Block(nn.Module):
    """Norm, ReLU, convolution, twice, beside a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = Norm2d(width_in)
        self.conv1 = Conv3x3(width_in, width, stride)
        self.norm2: nn.Module = Norm2d(width)
        self.conv2 = Conv3x3(width, width)
        same = stride == 1 and width_in == width
        self.shortcut = None if same else Conv1x1(width_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        active = relu(self.norm1(x))
        skip: Tensor = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.conv2(relu(self.norm2(self.conv1(active))))
        return out + skip


class ResidualTrunk(Trunk):
    """A stem, then stages of `depth` blocks each; every stage but the first halves the image."""

    def __init__(self, channels: int, stem: int, widths: Sequence[int], depth: int) -> None:
        super().__init__()
        self.dims = tuple(widths)
        self.stem = Conv3x3(channels, stem)
        self.stages = nn.ModuleList()
        for i, width in enumerate(widths):
            before = widths[i - 1] if i else stem
            first = Block(before, width, stride=2 if i else 1)
            self.stages.append(
                nn.Sequential(first, *(Block(width, width, 1) for _ in range(depth - 1)))
            )
        self.norm = Norm2d(widths[-1])

    def forward(self, x: Tensor) -> list[Tensor]:
        """The pooled features of the stages."""
        x = self.stem(x)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(pooled(x))
        return [*features[:-1], pooled(relu(self.norm(x)))]


def pooled(maps: Tensor) -> Tensor:
    """The mean over places, in fp32 or better."""
    return maps.mean((2, 3), dtype=torch.promote_types(maps.dtype, torch.float32))
