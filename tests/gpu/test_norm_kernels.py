"""The Triton kernels of batch norm with ReLU and residual sum against torch in fp64."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, relu

from demur.engine import fused_norm
from demur.engine.fused_norm import FusedBatchNorm
from demur.numerics import Precision, products_dtype
from tests.gpu.tools import BATCHES, PRECISIONS, distance, random_maps

MAPS = ((16, 32), (20, 7), (64, 8), (512, 4))  # channels, height: also no multiple of a tile
TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}  # bf16 has 8 bits
NEAR_ZERO = 1e-3  # no gradient there, since rounding may switch the ReLU


class Case(NamedTuple):
    norm: FusedBatchNorm
    reference: nn.BatchNorm2d  # in fp64, with the same weights and statistics
    a: Tensor
    b: Tensor
    grad_active: Tensor
    grad_total: Tensor


def make_case(
    device: torch.device, batch: int, maps: tuple[int, int], precision: Precision, train: bool
) -> Case:
    channels, size = maps
    g = torch.Generator().manual_seed(channels)
    source = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for parameter in (source.weight, source.bias, source.running_mean):
            assert parameter is not None
            parameter.copy_(torch.randn(channels, generator=g))
        source.get_buffer("running_var").copy_(0.5 + torch.rand(channels, generator=g))
    source.to(device)
    norm = FusedBatchNorm(
        source, source, torch.zeros(2, 2, channels, device=device), train, learn=train
    )
    reference = copy.deepcopy(source).double().train(train)
    if not train:
        scale = source.weight * (source.get_buffer("running_var") + source.eps).rsqrt()
        shift = source.bias - source.get_buffer("running_mean") * scale
        norm.saved.coefficients[fused_norm.SCALE] = scale.detach()
        norm.saved.coefficients[fused_norm.SHIFT] = shift.detach()
    shape, dtype = (batch, channels, size, size), products_dtype(precision)
    tensors = [random_maps(device, *shape, seed=seed).to(dtype) for seed in range(4)]
    a, b, grad_active, grad_total = tensors
    with torch.no_grad():
        before_relu = copy.deepcopy(reference)((a + b).double())
        alone = copy.deepcopy(reference)(a.double())
    smallest = torch.minimum(before_relu.abs(), alone.abs())
    return Case(norm, reference, a, b, grad_active * (smallest > NEAR_ZERO), grad_total)


EACH = pytest.mark.parametrize(
    ("batch", "precision"), [(batch, precision) for batch in BATCHES for precision in PRECISIONS]
)


@EACH
@pytest.mark.parametrize("add", [True, False])
def test_train_mode_forward(
    device: torch.device, batch: int, precision: Precision, add: bool
) -> None:
    """sums_kernel and normalise_kernel: total, sums, coefficients, statistics, active maps."""
    for maps in MAPS:
        norm, reference, a, b, *_ = make_case(device, batch, maps, precision, train=True)
        total, active, saved = norm.forward(a, b if add else None)
        assert torch.equal(total, a + b if add else a), "rounded as torch rounds"
        wide = total.double()
        centred = wide - wide[:1, :, :1, :1]
        assert distance(saved.sums[0, 0], centred.sum((0, 2, 3))) < 1e-4
        assert distance(saved.sums[0, 1], centred.square().sum((0, 2, 3))) < 1e-5
        expected = relu(reference(wide))
        mean, variance = wide.mean((0, 2, 3)), wide.var((0, 2, 3), unbiased=False)
        invstd = (variance + reference.eps).rsqrt()
        scale = reference.weight * invstd
        rows_of = (scale, reference.bias - mean * scale, mean, invstd)
        for ours, theirs in zip(saved.coefficients, rows_of, strict=True):
            assert distance(ours, theirs) < 1e-4
        for name in ("running_mean", "running_var"):
            assert distance(norm.source.get_buffer(name), reference.get_buffer(name)) < 1e-5
        assert active.dtype == a.dtype
        assert distance(active, expected) < TOLERANCE[precision]


@EACH
@pytest.mark.parametrize("add", [True, False])
def test_train_mode_backward(
    device: torch.device, batch: int, precision: Precision, add: bool
) -> None:
    """grad_sums_kernel and grad_kernel, with and without a gradient of the shortcut."""
    for maps in MAPS:
        norm, reference, a, b, grad_active, grad_total = make_case(
            device, batch, maps, precision, True
        )
        total, _, saved = norm.forward(a, b if add else None)
        ours = norm.backward(total, saved, grad_active, grad_total if add else None)
        wide = total.double().requires_grad_()
        weight, bias = reference.weight, reference.bias
        expected = relu(batch_norm(wide, None, None, weight, bias, True, eps=reference.eps))
        grads = torch.autograd.grad(expected, (wide, weight, bias), grad_active.double())
        theirs = grads[0] + grad_total.double() if add else grads[0]
        # in tiny batches the norm removes nearly all of the gradient
        scale = max(float(theirs.norm()), float(grad_active.double().norm()))
        assert float((ours.double() - theirs).norm()) < TOLERANCE[precision] * scale
        for own, grad in zip(norm.weight_gradients(saved), grads[1:], strict=True):
            assert own is not None
            assert distance(own, grad) < 1e-4


@EACH
@pytest.mark.parametrize("add", [True, False])
def test_eval_mode_forward_and_backward(
    device: torch.device, batch: int, precision: Precision, add: bool
) -> None:
    """affine_kernel, and grad_kernel in eval mode."""
    for maps in MAPS:
        case = make_case(device, batch, maps, precision, train=False)
        norm, reference, a, b, grad_active, grad_total = case
        before = norm.source.get_buffer("running_mean").clone()
        total, active, saved = norm.forward(a, b if add else None)
        assert torch.equal(total, a + b if add else a)
        wide = total.double().requires_grad_()
        expected = relu(reference(wide))
        assert distance(active, expected) < TOLERANCE[precision]
        ours = norm.backward(total, saved, grad_active, grad_total if add else None)
        (theirs,) = torch.autograd.grad(expected, wide, grad_active.double())
        assert (
            distance(ours, theirs + grad_total.double() if add else theirs) < TOLERANCE[precision]
        )
        assert torch.equal(norm.source.get_buffer("running_mean"), before)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("used", ["total", "active", "both"])
def test_autograd_adds_the_gradients_of_both_results(
    device: torch.device, used: str, train: bool
) -> None:
    norm, reference, a, b, grad_active, grad_total = make_case(device, 3, (64, 8), "fp32", train)
    ours_a, ours_b = a.clone().requires_grad_(), b.clone().requires_grad_()
    total, active = norm(ours_a, ours_b)
    theirs_a, theirs_b = (part.double().requires_grad_() for part in (a, b))
    sums = theirs_a + theirs_b
    results = []
    for inputs, out in (
        ((ours_a, ours_b), (total, active)),
        ((theirs_a, theirs_b), (sums, relu(reference(sums)))),
    ):
        loss = torch.zeros((), device=device, dtype=torch.float64)
        if used != "active":
            loss = loss + (out[0].double() * grad_total).sum()
        if used != "total":
            loss = loss + (out[1].double() * grad_active).sum()
        results.append(torch.autograd.grad(loss, inputs))
    for ours, theirs in zip(*results, strict=True):
        assert distance(ours, theirs) < 1e-5


def test_a_large_mean_does_not_cancel(device: torch.device) -> None:
    norm, _, a, *_ = make_case(device, 37, (20, 7), "fp32", train=True)
    shifted = a + 1000
    _, _, saved = norm.forward(shifted, None)
    variance = shifted.double().var((0, 2, 3), unbiased=False)
    assert distance(saved.coefficients[fused_norm.INVSTD], variance.rsqrt()) < 1e-4


def test_momentum_0_keeps_the_running_statistics(device: torch.device) -> None:
    norm, _, a, *_ = make_case(device, 3, (64, 8), "bf16", train=True)
    norm.momentum_norm.momentum = 0.0
    before = {name: value.clone() for name, value in norm.source.named_buffers()}
    norm.forward(a, None)
    assert all(torch.equal(value, before[name]) for name, value in norm.source.named_buffers())
