"""Fused activations of any net: the kernels against torch in fp64, and whole nets."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

from demur.engine.copies import CopySettings, FastCopy
from demur.engine.fused_graph import FusedActivation, fuse_activations
from demur.numerics import Precision, products_dtype
from tests.gpu.tools import BATCHES, PRECISIONS, distance, random_maps
from tests.test_fused_graph import FUSED, logits_and_grad, prepared

MAPS = ((16, 32), (20, 7), (64, 8), (512, 4))  # channels, height: also no multiple of a tile
TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("keep_sum", [True, False])
@pytest.mark.parametrize("add", [True, False])
def test_kernels(
    device: torch.device, batch: int, precision: Precision, keep_sum: bool, add: bool
) -> None:
    for channels, size in MAPS:
        maps = [random_maps(device, batch, channels, size, size, seed=seed) for seed in range(4)]
        a, b, grad_active, grad_total = (part.to(products_dtype(precision)) for part in maps)
        a, b = a.requires_grad_(), b.requires_grad_()
        scale, shift = 0.5 + torch.rand(channels), torch.randn(channels)
        scale, shift = scale.to(device) if keep_sum else torch.ones_like(shift), shift.to(device)
        fused = FusedActivation(scale.to(device), shift, keep_sum).to(device)
        wide = (a + b if add else a).detach().double().requires_grad_()
        before = wide * fused.coefficients[0].double()[:, None, None]
        before = before + fused.coefficients[1].double()[:, None, None]
        grad_active = grad_active * (before.detach().abs() > 1e-3)  # rounding may switch the ReLU
        total, active = fused(a, b if add else None)
        assert distance(active, relu(before)) < TOLERANCE[precision]
        outputs, grads = [active], [grad_active]
        if keep_sum:
            assert torch.equal(total, a + b if add else a)
            outputs, grads = [active, total], [grad_active, grad_total]
        found = torch.autograd.grad(outputs, (a, b) if add else (a,), grads)
        expected = torch.autograd.grad(relu(before), wide, grad_active.double())[0]
        if keep_sum:
            expected = expected + grad_total.double()
        for grad in found:
            assert distance(grad, expected) < TOLERANCE[precision]


@pytest.mark.parametrize(("kind", "count"), FUSED.items())
def test_nets(device: torch.device, kind: Callable[[], nn.Module], count: int) -> None:
    net, x = prepared(kind).to(device), torch.rand(5, 3, 8, 8, device=device)
    fused = fuse_activations(net, x[:2])
    assert sum(isinstance(module, FusedActivation) for module in fused.modules()) == count
    expected = logits_and_grad(net, x)
    for found, part in zip(logits_and_grad(fused, x), expected, strict=True):
        assert distance(found, part) < 1e-3  # cuDNN may round convolutions to TF32


def test_a_copy_on_a_gpu_is_fused(device: torch.device) -> None:
    net, x = prepared(next(iter(FUSED))).to(device), torch.rand(5, 3, 8, 8, device=device)
    fast = FastCopy(net, CopySettings("bf16", channels_last=True), x)
    assert any(isinstance(module, FusedActivation) for module in fast.net.modules())
    assert distance(fast(x).logits, net(x)) < 0.02
