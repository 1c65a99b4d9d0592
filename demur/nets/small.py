"""A pre-activation ResNet-8 for small images: three stages of one block, 78 thousand weights."""

from dataclasses import dataclass

from demur.field_types import PositiveInt
from demur.nets.block import ResidualTrunk
from demur.nets.net import NetSpec


@dataclass(frozen=True)
class Small(NetSpec):
    """ResNet-8 with `width` channels in its first stage."""

    width: PositiveInt = 16

    def trunk(self, channels: int) -> ResidualTrunk:
        """A fresh trunk."""
        return ResidualTrunk(channels, self.width, [self.width * f for f in (1, 2, 4)], depth=1)
