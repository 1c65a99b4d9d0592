"""Nets: from images in [0, 1], of shape N, C, H, W, to an Output."""

from demur.nets.architectures import FactoryNet, ResNet8, ResNet18, WideResNet
from demur.nets.net import NetSpec, RejectingNet, Trunk

NETS: tuple[type[NetSpec], ...] = (ResNet8, ResNet18, WideResNet, FactoryNet)

__all__ = [
    "NETS", "FactoryNet", "NetSpec", "RejectingNet", "ResNet8", "ResNet18", "Trunk", "WideResNet",
]  # fmt: skip
