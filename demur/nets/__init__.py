"""Nets: from images in [0, 1], of shape N, C, H, W, to an Output."""

from demur.nets.net import NetSpec, RejectingNet, Trunk
from demur.nets.resnet import ResNet18, WideResNet
from demur.nets.small import Small

NETS: tuple[type[NetSpec], ...] = (Small, ResNet18, WideResNet)

__all__ = ["NETS", "NetSpec", "RejectingNet", "ResNet18", "Small", "Trunk", "WideResNet"]
