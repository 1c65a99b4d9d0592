"""Activations fused by torch.fx: the net computes the same, and what cannot be fused stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from demur.engine.fused_graph import FusedActivation, fuse_activations


class PreActivation(nn.Module):
    """Two blocks of ReLU(norm(sum)); the sum is also the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, 1, 1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = x + conv(relu(norm(x)))
        return relu(self.norms[2](x)).mean((2, 3))


class PostActivation(nn.Module):
    """ReLU in place of a sum in place of two convolutions with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.shortcut = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Identity())
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        out = self.conv2(self.activation(self.conv1(x)))
        out += self.shortcut(x)
        return self.activation(out).mean((2, 3))


class SumReadTwice(PostActivation):
    """The sum before the ReLU is also part of the result."""

    def forward(self, x: Tensor) -> Any:
        total = self.conv1(x) + self.shortcut(x)
        return (relu(total) + total).mean((2, 3))


class SummandReadAfterwards(PostActivation):
    """A sum in place changes what is read again."""

    def forward(self, x: Tensor) -> Any:
        first = self.conv1(x)
        total = first
        total += self.shortcut(x)
        return (relu(total) + first).mean((2, 3))


class SharedConvolution(PostActivation):
    """One convolution is called twice, so its bias must stay."""

    def forward(self, x: Tensor) -> Any:
        return self.conv2(relu(self.conv2(relu(self.conv1(x))))).mean((2, 3))


class Broadcast(PostActivation):
    """The summands have different shapes."""

    def forward(self, x: Tensor) -> Any:
        return relu(self.conv1(x) + self.shortcut(x).mean((2, 3), keepdim=True)).mean((2, 3))


class Branching(PostActivation):
    """Control flow depends on the pixels."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if x.mean() > 0 else x.mean((2, 3))


class NormBeforeSum(nn.Module):
    """ReLU(norm(conv + conv)), where the convolutions have biases."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 8, 3, 1, 1) for _ in range(2))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.convs[0](x).add(self.convs[1](x))).relu().mean((2, 3))


FUSED: dict[Callable[[], nn.Module], int] = {
    PreActivation: 3,
    PostActivation: 2,
    SumReadTwice: 0,
    SummandReadAfterwards: 0,
    SharedConvolution: 1,
    Broadcast: 0,
    Branching: 0,
    NormBeforeSum: 1,
}


def prepared(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    net = kind().eval().requires_grad_(False)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for part in (module.weight, module.running_var):
                part.uniform_(0.5, 2)  # type: ignore[union-attr]
            for part in (module.bias, module.running_mean):
                part.uniform_(-1, 1)  # type: ignore[union-attr]
    return net


def logits_and_grad(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    logits = net(x)
    return logits, torch.autograd.grad(logits.square().sum(), x)[0]


@pytest.mark.parametrize(("kind", "count"), FUSED.items())
def test_a_fused_net_computes_the_same(kind: Callable[[], nn.Module], count: int) -> None:
    net, x = prepared(kind), torch.rand(4, 3, 8, 8)
    expected = logits_and_grad(net, x)
    fused = fuse_activations(net, x[:2])
    assert sum(isinstance(module, FusedActivation) for module in fused.modules()) == count
    for found, part in zip(logits_and_grad(fused, x), expected, strict=True):
        assert torch.allclose(found, part, atol=1e-5)


def test_only_biases_that_nothing_else_reads_move() -> None:
    x = torch.rand(2, 3, 8, 8)
    net = prepared(PostActivation)
    fused = fuse_activations(net, x)
    assert all(conv.bias is None for conv in fused.modules() if isinstance(conv, nn.Conv2d))
    assert all(conv.bias is not None for conv in net.modules() if isinstance(conv, nn.Conv2d))
    fused = fuse_activations(prepared(SharedConvolution), x)
    assert [fused.get_submodule(name).bias is None for name in ("conv1", "conv2")] == [True, False]


@torch.no_grad()
def test_a_net_is_fused_where_gradients_are_off() -> None:
    fused = fuse_activations(prepared(PreActivation), torch.rand(2, 3, 8, 8))
    assert any(isinstance(module, FusedActivation) for module in fused.modules())
