"""The fused net equals the plain one; on a CPU torch replaces the Triton kernels."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import batch_norm, relu

from demur.attacks import CE, Objective, PlusLogScore
from demur.data import CIFAR10
from demur.engine import fused_norm, fused_resnet
from demur.engine.fused_norm import FusedBatchNorm
from demur.engine.fused_resnet import FusedResNet, FusedTrainingNet
from demur.methods import RR, BatchNorm
from demur.methods.frameworks import running_stats_frozen
from demur.nets import RejectingNet, ResNet18
from demur.numerics import Precision, autocast
from demur.rejectors import RCon


class TorchNorm(FusedBatchNorm):
    """The formulas of the Triton kernels in torch."""

    def __call__(self, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = a if b is None else a + b
        if self.train:
            weight, bias = self.source.weight, self.source.bias
            return total, relu(batch_norm(total, None, None, weight, bias, True))
        rows = self.saved.coefficients[[fused_norm.SCALE, fused_norm.SHIFT]]
        scale, shift = rows[:, :, None, None]
        return total, relu(total * scale + shift)


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch in place of the Triton kernels."""
    monkeypatch.setattr(fused_resnet, "FusedBatchNorm", TorchNorm)


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> RejectingNet:
    """A small net with random weights and statistics, without Triton kernels."""
    replace_kernels(monkeypatch)
    net = ResNet18(width=4).build(CIFAR10().domain, RR())
    randomise(net, seed=1)
    return net


@torch.no_grad()
def randomise(net: RejectingNet, seed: int) -> None:
    """Change weights and statistics as training does, so that every layer matters."""
    g = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=g))
    mode = net.training
    for _ in range(5):
        net.train()(torch.rand(16, 3, 32, 32, generator=g))
    net.train(mode)


@pytest.mark.parametrize("train", [True, False])
def test_fused_copy_equals_its_source_also_after_a_refresh(train: bool, net: RejectingNet) -> None:
    net.train(train)
    copy = FusedResNet(net, train, "fp32")
    g = torch.Generator().manual_seed(2)
    x, y = torch.rand(6, 3, 32, 32, generator=g), torch.arange(6)
    for refresh in (False, True):
        if refresh:
            randomise(net, seed=3)
            copy.refresh()
        results = []
        for forward in (copy.forward, net):
            x_grad = x.clone().requires_grad_()
            out = forward(x_grad)
            (grad,) = torch.autograd.grad(CE()(out, y).sum(), x_grad)
            results.append((out.logits.detach(), out.aux.detach(), grad))
        for ours, theirs in zip(*results, strict=True):
            assert float((ours - theirs).norm()) < 1e-4 * float(theirs.norm())
    assert not any(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_fused_training_net_has_the_weight_gradients_of_the_net(
    precision: Precision, tolerance: float, net: RejectingNet
) -> None:
    """Also for two forward passes with one backward pass, as in TRADES."""
    fused_net = FusedTrainingNet(net.train(), precision, "none")
    g = torch.Generator().manual_seed(2)
    x, z, y = *torch.rand(2, 8, 3, 32, 32, generator=g), torch.arange(8)
    results = []
    for model in (fused_net, net):
        with autocast(precision, x.device):
            first, second = model(x), model(z)
        loss = CE()(first, y).sum() + first.aux.sum() + 2 * CE()(second, y).sum()
        grads = torch.autograd.grad(loss, list(net.parameters()))
        assert all(grad.dtype == torch.float32 for grad in grads)
        results.append(grads)
    for (name, _), ours, theirs in zip(net.named_parameters(), *results, strict=True):
        assert float((ours - theirs).norm()) < tolerance * float(theirs.norm()) + 1e-6, name


@pytest.mark.parametrize("bn", [pytest.param("batch", marks=pytest.mark.exhaustive), "train"])
def test_skip_aux_removes_a_head_that_the_objective_does_not_read(
    bn: BatchNorm, net: RejectingNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the three matrix products are the head's; statistics of train mode need one."""
    import torch._dynamo  # takes a second, and one worker needs it
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    x, y = torch.rand(6, 3, 32, 32), torch.arange(6)
    copy = FusedResNet(net, bn != "eval", "fp32")
    traced: list[GraphModule] = []

    def trace(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        traced.append(graph)
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    def compile_traced(function: Callable[..., Any], compiler: str) -> Callable[..., Any]:
        torch._dynamo.reset()  # torch.compile keeps at most eight versions of a code object
        backend = aot_autograd(fw_compiler=trace)
        compiled: Callable[..., Any] = torch.compile(function, backend=backend)
        return compiled

    monkeypatch.setattr(fused_resnet, "compile_function", compile_traced)

    def count_products(objective: Objective, skip_aux: bool) -> int:
        traced.clear()
        with running_stats_frozen(copy.net) if bn == "batch" else nullcontext():
            copy.objective_forward(objective, "inductor", skip_aux)(x, y)
        products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return sum(node.target in products for graph in traced for node in graph.graph.nodes)

    if bn == "train":
        assert count_products(CE(), skip_aux=True) == 2
        return
    assert count_products(CE(), skip_aux=True) == 1
    assert count_products(CE(), skip_aux=False) == 3
    assert count_products(PlusLogScore(RCon()), skip_aux=True) == 3


def test_each_training_pass_has_its_own_buffers(net: RejectingNet) -> None:
    """Two forward passes may share a backward pass."""
    fused_net = FusedTrainingNet(net.train(), "bf16", "none")
    norms, passes = fused_net.fused_trunk.norms, []
    for _ in range(2):
        fused_net(torch.rand(4, 3, 32, 32))
        passes.append([part for norm in norms for part in norm.saved])
    assert all(not sums.any() for sums in passes[1][1::2]), "no kernel has added to them"
    parts = [*passes[0], *passes[1]]
    addresses = [part.untyped_storage().data_ptr() + 4 * part.storage_offset() for part in parts]
    assert len(set(addresses)) == 2 * 2 * len(norms)
