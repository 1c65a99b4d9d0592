"""Nets: from images in [0, 1], of shape N, C, H, W, to an Output."""

from demur.nets.net import NetSpec, RejectingNet, Trunk
from demur.nets.resnet import ResNet8, ResNet18, WideResNet

NETS: tuple[type[NetSpec], ...] = (ResNet8, ResNet18, WideResNet)

__all__ = ["NETS", "NetSpec", "RejectingNet", "ResNet8", "ResNet18", "Trunk", "WideResNet"]
