"""A convolution with folded batch norm and ReLU equals the three layers."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu

from demur.engine.fused_resnet import FoldedConv
from demur.nets.architectures import Block


def random_block(width: int, stride: int, seed: int) -> Block:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        block = Block(4, width, stride).double()
        assert isinstance(block.norm2, torch.nn.BatchNorm2d)
        for part in (block.norm2.weight, block.norm2.bias, block.norm2.running_mean):
            assert part is not None
            torch.nn.init.normal_(part)
    return block.eval().requires_grad_(False)


def fold(block: Block) -> FoldedConv:
    norm = block.norm2
    assert isinstance(norm, torch.nn.BatchNorm2d)
    scale = norm.weight / (norm.get_buffer("running_var") + norm.eps).sqrt()
    shift = norm.bias - norm.get_buffer("running_mean") * scale
    half = FoldedConv(copy.deepcopy(block.conv1))  # its weight is overwritten
    half.weight.copy_(block.conv1.weight * scale[:, None, None, None])
    half.shift = shift
    return half


@pytest.mark.parametrize(("width", "stride"), [(4, 1), (8, 2)])
def test_folded_convolution_has_the_output_and_the_gradient_of_convolution_norm_and_relu(
    width: int, stride: int
) -> None:
    block = random_block(width, stride, seed=width)
    active = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(1)).double()
    results = []
    for half in (fold(block), lambda maps: relu(block.norm2(block.conv1(maps)))):
        x = active.clone().requires_grad_()
        hidden: Tensor = half(x)
        (grad,) = torch.autograd.grad(hidden.sin().sum(), x)
        results.append((hidden, grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert 0 < (results[0][0] == 0).double().mean() < 1, "ReLU is active"
