"""The first half of a residual block with folded batch norm equals that of the plain block."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu

from demur.engine.convolutions import FlippedWeights, FrozenConv
from demur.engine.fused_resnet import FoldedBlockHalf
from demur.nets.block import Block
from demur.nets.conv import Conv3x3


def random_block(width: int, stride: int, seed: int) -> Block:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        block = Block(4, width, stride).double()
        assert isinstance(block.norm2, torch.nn.BatchNorm2d)
        for part in (block.norm2.weight, block.norm2.bias, block.norm2.running_mean):
            assert part is not None
            torch.nn.init.normal_(part)
    return block.eval().requires_grad_(False)


def fold(block: Block) -> FoldedBlockHalf:
    norm = block.norm2
    assert isinstance(norm, torch.nn.BatchNorm2d)
    scale = norm.weight / (norm.get_buffer("running_var") + norm.eps).sqrt()
    shift = norm.bias - norm.get_buffer("running_mean") * scale
    half = FoldedBlockHalf(copy.deepcopy(block))  # it overwrites the weight of its block
    half.weight.weight.copy_(block.conv1.weight * scale[:, None, None, None])
    FlippedWeights([half.weight], "none")()
    half.shift = shift
    return half


def plain_half(block: Block, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    skip = total if block.shortcut is None else block.shortcut(active)
    return skip, relu(block.norm2(block.conv1(active)))


@pytest.mark.parametrize(("width", "stride"), [(4, 1), (6, 1), (8, 2)])
def test_folded_half_has_the_outputs_and_the_gradient_of_the_plain_half(
    width: int, stride: int
) -> None:
    block = random_block(width, stride, seed=width)
    g = torch.Generator().manual_seed(1)
    total, active = torch.randn(2, 3, 4, 6, 6, generator=g, dtype=torch.float64)
    results = []
    for half in (fold(block), lambda *maps: plain_half(block, *maps)):
        x = active.clone().requires_grad_()
        skip, hidden = half(total, x)
        weights = [
            torch.randn(part.shape, generator=torch.Generator().manual_seed(2), dtype=part.dtype)
            for part in (skip, hidden)
        ]
        value = (skip * weights[0]).sum() + (hidden * weights[1]).sum()
        (grad,) = torch.autograd.grad(value, x)
        results.append((skip, hidden, grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert 0 < (results[0][1] == 0).double().mean() < 1, "ReLU is active"


@pytest.mark.parametrize("stride", [1, 2])
def test_frozen_convolution_equals_the_plain_one_after_its_weight_changed(stride: int) -> None:
    g = torch.Generator().manual_seed(5)
    conv = Conv3x3(3, 5, stride).double().requires_grad_(False)
    frozen = FrozenConv(conv)
    conv.weight.copy_(torch.randn(conv.weight.shape, generator=g, dtype=torch.float64))
    FlippedWeights([frozen.weight], "none")()
    results = []
    for convolve in (frozen, conv):
        x = torch.rand(2, 3, 7, 6, generator=g.manual_seed(6), dtype=torch.float64)
        out = convolve(x.requires_grad_())
        results.append((out, *torch.autograd.grad(out.sin().sum(), x)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
