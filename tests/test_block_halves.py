"""The first half of a residual block with its norm worked in, against the block itself."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu

from demur.engine.block_halves import FoldedBlockHalf
from demur.engine.frozen_conv import FlippedWeights, FrozenConv
from demur.nets.block import Block
from demur.nets.conv import Conv3x3


def block_of(width: int, stride: int, seed: int) -> Block:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        block = Block(4, width, stride).double()
        assert isinstance(block.norm2, torch.nn.BatchNorm2d)
        for part in (block.norm2.weight, block.norm2.bias, block.norm2.running_mean):
            assert part is not None
            torch.nn.init.normal_(part)
    return block.eval().requires_grad_(False)


def folded(block: Block) -> FoldedBlockHalf:
    norm = block.norm2
    assert isinstance(norm, torch.nn.BatchNorm2d)
    scale = norm.weight / (norm.get_buffer("running_var") + norm.eps).sqrt()
    shift = norm.bias - norm.get_buffer("running_mean") * scale
    half = FoldedBlockHalf(copy.deepcopy(block))  # it fills its block's own weight
    half.weight.own.copy_(block.conv1.weight * scale[:, None, None, None])
    FlippedWeights([half.weight], "none")()
    half.shift = shift
    return half


def plain(block: Block, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    skip = total if block.shortcut is None else block.shortcut(active)
    return skip, relu(block.norm2(block.conv1(active)))


@pytest.mark.parametrize(("width", "stride"), [(4, 1), (6, 1), (8, 2)])
def test_a_folded_half_is_the_half_and_so_is_its_gradient(width: int, stride: int) -> None:
    block = block_of(width, stride, seed=width)
    g = torch.Generator().manual_seed(1)
    total, active = torch.randn(2, 3, 4, 6, 6, generator=g, dtype=torch.float64)
    found = []
    for half in (folded(block), lambda *maps: plain(block, *maps)):
        before = active.clone().requires_grad_()
        skip, within = half(total, before)
        weights = [
            torch.randn(part.shape, generator=torch.Generator().manual_seed(2), dtype=part.dtype)
            for part in (skip, within)
        ]
        value = (skip * weights[0]).sum() + (within * weights[1]).sum()
        (grad,) = torch.autograd.grad(value, before)
        found.append((skip, within, grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert 0 < (found[0][1] == 0).double().mean() < 1, "the cut-off is at work"


@pytest.mark.parametrize("stride", [1, 2])
def test_a_still_convolution_is_the_convolution_and_follows_its_weight(stride: int) -> None:
    g = torch.Generator().manual_seed(5)
    conv = Conv3x3(3, 5, stride).double().requires_grad_(False)
    still = FrozenConv(conv)
    conv.weight.copy_(torch.randn(conv.weight.shape, generator=g, dtype=torch.float64))
    FlippedWeights([still.weight], "none")()
    found = []
    for each in (still, conv):
        x = torch.rand(2, 3, 7, 6, generator=g.manual_seed(6), dtype=torch.float64)
        out = each(x.requires_grad_())
        found.append((out, *torch.autograd.grad(out.sin().sum(), x)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
