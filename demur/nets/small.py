"""A pre-activation ResNet-8 for small images: three stages of one block, 78 thousand weights."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import relu

from demur.declared import Count
from demur.nets.conv import Conv3x3
from demur.nets.net import NetSpec, Trunk


class Block(nn.Module):
    """Norm, ReLU, convolution, twice; the shortcut takes the pre-activated input."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width_in)
        self.conv1 = Conv3x3(width_in, width, stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = Conv3x3(width, width)
        same = stride == 1 and width_in == width
        self.shortcut = None if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        active = relu(self.norm1(x))
        skip: Tensor = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.conv2(relu(self.norm2(self.conv1(active))))
        return out + skip


class SmallTrunk(Trunk):
    """Stem and three stages of widths w, 2w, 4w; each later stage halves the image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.dims = (width, 2 * width, 4 * width)
        self.stem = Conv3x3(channels, width)
        self.stages = nn.ModuleList(
            [
                Block(width, width, stride=1),
                Block(width, 2 * width, stride=2),
                Block(2 * width, 4 * width, stride=2),
            ]
        )
        self.norm = nn.BatchNorm2d(self.dims[-1])

    def forward(self, x: Tensor) -> list[Tensor]:
        """The pooled features of the three stages."""
        x = self.stem(x)
        pooled = []
        for stage in self.stages:
            x = stage(x)
            pooled.append(x.mean((2, 3)))
        return [*pooled[:-1], relu(self.norm(x)).mean((2, 3))]


@dataclass(frozen=True)
class Small(NetSpec):
    """ResNet-8 with `width` channels in its first stage."""

    width: Count = 16

    def trunk(self, channels: int) -> SmallTrunk:
        """A fresh trunk."""
        return SmallTrunk(channels, self.width)
