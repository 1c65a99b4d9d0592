"""Convolutions and residual blocks of the fused net against plain torch, forward and backward."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu

from demur.engine.convolutions import CastWeights, FlippedWeights, FrozenConv, fork_convolutions
from demur.engine.fused_norm import SCALE, SHIFT
from demur.engine.fused_resnet import FusedTrunk
from demur.nets import RejectingNet
from demur.nets.block import Block
from demur.nets.conv import Conv1x1, Conv3x3
from demur.precision import Precision, autocast, no_autocast, products_dtype, tf32
from tests.gpu.tools import BATCHES, PRECISIONS, change_weights, distance, random_maps, random_net

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
EACH = pytest.mark.parametrize(
    ("batch", "precision"), [(batch, precision) for batch in BATCHES for precision in PRECISIONS]
)


def convolution(device: torch.device, kind: type[nn.Conv2d], stride: int) -> nn.Conv2d:
    with torch.random.fork_rng():
        torch.manual_seed(stride)
        conv = kind(16, 24, stride)
    conv.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return conv.requires_grad_(False)


def cast(conv: nn.Conv2d, dtype: torch.dtype) -> nn.Conv2d:
    conv.weight.data = conv.weight.data.to(dtype, memory_format=torch.channels_last)
    return conv


@EACH
@pytest.mark.parametrize("stride", [1, 2])
def test_frozen_convolution(
    device: torch.device, batch: int, precision: Precision, stride: int
) -> None:
    """Its input gradient uses the flipped weight for stride 1, also after a change of weights."""
    dtype = products_dtype(precision)
    conv = cast(convolution(device, Conv3x3, stride), dtype)
    frozen = FrozenConv(conv)
    x = random_maps(device, batch, 16, 8, 8).to(dtype)
    for _ in range(2):
        with tf32("fp32"):
            results = []
            for dtype_, forward in ((dtype, frozen), (torch.float64, _exact(conv))):
                own_x = x.to(dtype_).requires_grad_()
                maps = forward(own_x)
                weight = random_maps(device, *maps.shape, seed=1).to(dtype_)
                results.append((maps.detach(), *torch.autograd.grad(maps, own_x, weight)))
        for ours, theirs in zip(*results, strict=True):
            assert distance(ours, theirs) < TOLERANCE[precision]
        conv.weight.data.mul_(1.3)
        FlippedWeights([frozen.weight], "none")()


def _exact(conv: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    """The convolution in fp64."""
    return lambda x: conv2d(x, conv.weight.double(), stride=conv.stride, padding=conv.padding)


@EACH
@pytest.mark.parametrize("stride", [1, 2])
def test_fork_of_two_convolutions(
    device: torch.device, batch: int, precision: Precision, stride: int
) -> None:
    dtype = products_dtype(precision)
    convs = [cast(convolution(device, kind, stride), dtype) for kind in (Conv1x1, Conv3x3)]
    results = []
    for own in (dtype, torch.float64):
        x = random_maps(device, batch, 16, 8, 8).to(dtype).to(own).requires_grad_()
        weights = [conv.weight.detach().to(own).requires_grad_() for conv in convs]
        with tf32("fp32"):
            if own == dtype:
                outs = fork_convolutions(x, weights[0], weights[1], stride)
            else:
                outs = (conv2d(x, weights[0], stride=stride),
                        conv2d(x, weights[1], stride=stride, padding=1))  # fmt: skip
            grads = [random_maps(device, *out.shape, seed=3).to(own) for out in outs]
            results.append((*outs, *torch.autograd.grad(outs, (x, *weights), grads)))
    for ours, theirs in zip(*results, strict=True):
        assert distance(ours, theirs) < TOLERANCE[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_cast_together_have_the_values_and_gradients_of_autocast(
    device: torch.device, precision: Precision
) -> None:
    convs = [convolution(device, Conv3x3, stride).requires_grad_() for stride in (1, 2)]
    casts = CastWeights(convs, products_dtype(precision))
    x = random_maps(device, 3, 16, 8, 8)
    results = []
    for together in (True, False):
        with tf32("fp32"), autocast(precision, device):
            if together:
                with casts.refreshed():
                    maps = [casts[conv](x.to(products_dtype(precision))) for conv in convs]
            else:
                maps = [conv(x) for conv in convs]
            loss = torch.stack([part.float().square().sum() for part in maps]).sum()
        with tf32("fp32"), no_autocast(device):
            grads = torch.autograd.grad(loss, [conv.weight for conv in convs])
        assert all(grad.dtype == torch.float32 for grad in grads)
        results.append([*(part.detach() for part in maps), *grads])
    for ours, theirs in zip(*results, strict=True):
        assert distance(ours, theirs) < TOLERANCE[precision]
    assert all(conv.weight.grad_fn is None for conv in casts.values())


# ------------------------------------------------------------------ residual blocks


def fused_trunk(net: RejectingNet, train: bool, learn: bool, precision: Precision) -> FusedTrunk:
    """The trunk as FusedResNet (frozen) and FusedTrainingNet (`learn`) build it."""
    if learn:
        convs = [m for block in _blocks(net) for m in block.modules() if isinstance(m, nn.Conv2d)]
        casts = CastWeights(convs, products_dtype(precision))
        return FusedTrunk(net.trunk, net.trunk, train, casts=casts)
    copied = copy.deepcopy(net.trunk).requires_grad_(False)
    for module in copied.modules():
        if isinstance(module, nn.Conv2d):
            cast(module, products_dtype(precision))
    trunk = FusedTrunk(copied, net.trunk, train)
    if not train:
        with torch.no_grad():
            for buffer, value in zip(*trunk.eval_constants(), strict=True):
                buffer.copy_(value)
    trunk.update_flipped()
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
    layers = zip(trunk.first_norms, trunk.halves, trunk.second_convs, strict=True)
    size = 32
    for i, (block, plain) in enumerate(zip(_blocks(net), _blocks(exact), strict=True)):
        norm, half, conv = next(layers)
        shape = (batch, block.conv1.in_channels, size, size)
        size //= block.conv1.stride[0]
        x = random_maps(device, *shape, seed=i).to(products_dtype(precision))
        ours_x, theirs_x = x.clone().requires_grad_(), x.double().requires_grad_()
        casts = trunk.casts.refreshed() if trunk.casts else nullcontext()
        with tf32("fp32"), autocast(precision, device), casts:
            total, active = norm(ours_x, None)
            skip, hidden = half(total, active)
            ours = conv(hidden) + skip
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
    _, hidden = trunk.halves[0](x, x)
    expected = relu(block.norm2(block.conv1(x.double())))
    assert distance(hidden, expected) < TOLERANCE[precision]
