"""What the GPU tests share: batch sizes, random nets and distances."""

import torch
from torch import Tensor, nn

from demur.data import CIFAR10
from demur.methods import RR, NoHead
from demur.nets import RejectingNet, ResNet18
from demur.numerics import Precision

BATCHES = (1, 3, 37, 128)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
OUTPUTS = 1e-3  # relative distance of outputs and statistics in fp32
GRADIENTS = 0.05  # of input gradients: a ReLU that rounding switches changes one image by 1 or 2%


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference, relative to the norm of `theirs`."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


def random_maps(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """Standard normal maps in the channels_last layout."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(device, memory_format=torch.channels_last)


def images(device: torch.device, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random CIFAR-shaped images in channels_last, and labels."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, 3, 32, 32, generator=g)
    y = torch.randint(0, 10, (batch,), generator=g)
    return x.to(device, memory_format=torch.channels_last), y.to(device)


def random_net(device: torch.device, head: RR | NoHead = RR(), width: int = 16) -> RejectingNet:
    """A ResNet-18 whose weights and running statistics are not the initial ones."""
    net = ResNet18(width=width).build(CIFAR10().domain, head)
    change_weights(net, seed=1)
    net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


@torch.no_grad()
def change_weights(net: nn.Module, seed: int) -> None:
    """Change weights and statistics in place, so that every layer matters."""
    g = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=g).to(parameter))
    for name, buffer in net.named_buffers():
        noise = torch.rand(buffer.shape, generator=g).to(buffer.device)
        if name.endswith("running_mean"):
            buffer.add_(0.2 * (noise - 0.5))
        if name.endswith("running_var"):
            buffer.mul_(0.5 + noise)
