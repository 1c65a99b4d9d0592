"""A pre-activation ResNet-8 for small images, such as the 8x8 digits."""

from dataclasses import dataclass

from demur.field_types import PositiveInt
from demur.nets.block import ResidualTrunk
from demur.nets.net import NetSpec


@dataclass(frozen=True)
class Small(NetSpec):
    """Pre-activation ResNet-8: three stages of one block; 78 thousand weights by default.

    Args:
        width: channels of the first stage; the later stages have 2 and 4 times as many.

    Example:
        >>> from demur import RR, Digits, Small
        >>> Small(width=4).build(Digits().domain, RR()).trunk.dims
        (4, 8, 16)
    """

    width: PositiveInt = 16

    def trunk(self, channels: int) -> ResidualTrunk:
        return ResidualTrunk(channels, self.width, [self.width * f for f in (1, 2, 4)], depth=1)
