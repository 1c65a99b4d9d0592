"""Residual blocks of the fused net against plain torch, forward and backward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

from demur.engine.fused_norm import SCALE, SHIFT
from demur.engine.fused_resnet import FusedTrunk, run_block
from demur.nets import RejectingNet
from demur.nets.architectures import Block
from demur.numerics import Precision, autocast, no_autocast, products_dtype, tf32
from tests.gpu.tools import BATCHES, PRECISIONS, change_weights, distance, random_maps, random_net

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
EACH = pytest.mark.parametrize(
    ("batch", "precision"), [(batch, precision) for batch in BATCHES for precision in PRECISIONS]
)


# ------------------------------------------------------------------ residual blocks


def fused_trunk(net: RejectingNet, train: bool, learn: bool, precision: Precision) -> FusedTrunk:
    """The trunk as FusedResNet (frozen) and FusedTrainingNet (`learn`) build it."""
    if learn:
        return FusedTrunk(net.trunk, net.trunk, train, learn=True)
    copied = copy.deepcopy(net.trunk).requires_grad_(False)
    for module in copied.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.to(
                products_dtype(precision), memory_format=torch.channels_last
            )
    trunk = FusedTrunk(copied, net.trunk, train)
    if not train:
        with torch.no_grad():
            for buffer, value in zip(*trunk.eval_constants(), strict=True):
                buffer.copy_(value)
    return trunk


def _blocks(net: RejectingNet) -> list[Block]:
    return [module for module in net.trunk.modules() if isinstance(module, Block)]


@EACH
@pytest.mark.parametrize("mode", ["train", "eval", "learn"])
def test_each_block(device: torch.device, batch: int, precision: Precision, mode: str) -> None:
    """Every block gets the same random maps in the fused and in the plain net (fp64)."""
    net = random_net(device).train(mode != "eval")
    trunk = fused_trunk(net, mode != "eval", mode == "learn", precision)
    exact = copy.deepcopy(net).double()
    trunk._prepare_buffers()
    layers = zip(trunk.blocks, trunk.first_norms, trunk.halves, strict=True)
    size = 32
    for i, (block, plain) in enumerate(zip(_blocks(net), _blocks(exact), strict=True)):
        own_block, norm, half = next(layers)
        shape = (batch, block.conv1.in_channels, size, size)
        size //= block.conv1.stride[0]
        x = random_maps(device, *shape, seed=i).to(products_dtype(precision))
        ours_x, theirs_x = x.clone().requires_grad_(), x.double().requires_grad_()
        with tf32("fp32"), autocast(precision, device):
            maps, skip = run_block(own_block, norm, half, ours_x, None)
            ours = maps + skip
        theirs = plain(theirs_x)
        weights = random_maps(device, *theirs.shape, seed=100 + i)
        of = [[ours_x], [theirs_x]]
        if mode == "learn":
            of = [[ours_x, *block.parameters()], [theirs_x, *plain.parameters()]]
        with tf32("fp32"), no_autocast(device):
            ours_grads = torch.autograd.grad(ours, of[0], weights.to(ours.dtype))
        theirs_grads = torch.autograd.grad(theirs, of[1], weights.double())
        # a ReLU that rounding switches changes single gradients; the norm of all hardly changes
        allowed = {"fp32": 0.02, "bf16": 0.1}[precision]
        assert distance(ours, theirs) < TOLERANCE[precision] * 2, f"block {i}"
        for own, grad in zip(ours_grads, theirs_grads, strict=True):
            assert distance(own, grad) < allowed, f"block {i}, {tuple(own.shape)}"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_folded_constants_follow_the_weights(device: torch.device, precision: Precision) -> None:
    """Scales and shifts are those of the running statistics, also after a training step."""
    net = random_net(device).eval()
    trunk = fused_trunk(net, False, False, precision)
    change_weights(net, seed=5)
    with torch.no_grad():
        for buffer, value in zip(*trunk.eval_constants(), strict=True):
            buffer.copy_(value)
    for norm in trunk.norms:
        source = norm.source
        scale = source.weight / (source.get_buffer("running_var") + source.eps).sqrt()
        assert distance(norm.saved.coefficients[SCALE], scale) < 1e-5
        shift = source.bias - source.get_buffer("running_mean") * scale
        assert distance(norm.saved.coefficients[SHIFT], shift) < 1e-5
    block = copy.deepcopy(_blocks(net)[0]).double()
    x = random_maps(device, 3, block.conv1.in_channels, 32, 32).to(products_dtype(precision))
    with tf32("fp32"):
        hidden = trunk.halves[0](x)
    expected = relu(block.norm2(block.conv1(x.double())))
    assert distance(hidden, expected) < TOLERANCE[precision]
