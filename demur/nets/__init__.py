"""Nets: images in [0, 1] to an Output."""

from demur.nets.net import NetSpec, RejectingNet, Trunk
from demur.nets.small import Small

NETS: tuple[type[NetSpec], ...] = (Small,)

__all__ = ["NETS", "NetSpec", "RejectingNet", "Small", "Trunk"]
