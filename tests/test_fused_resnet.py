"""The quick copy of a net on a CPU: all of it but the kernels, which torch stands in for."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule
from torch.nn.functional import batch_norm, relu

from demur.attacks import CE, Evasion, Objective
from demur.data import CIFAR10
from demur.engine import fused_resnet, fused_trunk, norm_kernels
from demur.engine.copies import copy_tensors
from demur.engine.fused_norm import FusedBatchNorm
from demur.engine.fused_resnet import FusedResNet, FusedTrainingNet
from demur.methods import RR, BatchNorm
from demur.methods.batch_norm_mode import running_stats_frozen
from demur.nets import RejectingNet, ResNet18
from demur.precision import Precision, autocast
from demur.rejectors import RCon


class TorchNorm(FusedBatchNorm):
    """What the kernels compute, in torch."""

    def __call__(self, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = a if b is None else a + b
        if self.train:
            evaluator = self.source
            return total, relu(
                batch_norm(total, None, None, evaluator.weight, evaluator.bias, True)
            )
        scale, shift = (
            self.last.kept[row][:, None, None] for row in (norm_kernels.SCALE, norm_kernels.SHIFT)
        )
        return total, relu(total * scale + shift)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch stand in for them."""
    monkeypatch.setattr(fused_trunk, "FusedBatchNorm", TorchNorm)


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> RejectingNet:
    """A small net with statistics of its own, and no kernel asked for."""
    without_kernels(monkeypatch)
    made = ResNet18(width=4).build(CIFAR10().domain, RR())
    stir(made, seed=1)
    return made


@torch.no_grad()
def stir(net: RejectingNet, seed: int) -> None:
    """Change weights and statistics as learning would, so that every layer matters."""
    g = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=g))
    mode = net.training
    for _ in range(20):
        net.train()(torch.rand(16, 3, 32, 32, generator=g))
    net.train(mode)


@pytest.mark.parametrize("train", [True, False])
def test_a_quick_copy_is_its_source_and_follows_it(train: bool, net: RejectingNet) -> None:
    net.train(train)
    copy = FusedResNet(net, train, "fp32")
    g = torch.Generator().manual_seed(2)
    x, y = torch.rand(6, 3, 32, 32, generator=g), torch.arange(6)
    for again in (False, True):
        if again:
            stir(net, seed=3)
            copy.refresh()
        found = []
        for look in (copy.answer, net):
            at = x.clone().requires_grad_()
            out = look(at)
            (grad,) = torch.autograd.grad(CE()(out, y).sum(), at)
            found.append((out.logits.detach(), out.aux.detach(), grad))
        for ours, theirs in zip(*found, strict=True):
            assert float((ours - theirs).norm()) < 1e-4 * float(theirs.norm())
    assert not any(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.parametrize(("precision", "share"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_a_quick_net_teaches_its_weights_as_the_net_does(
    precision: Precision, share: float, net: RejectingNet
) -> None:
    """Also where two passes are differentiated together, as TRADES does."""
    quickly = FusedTrainingNet(net.train(), precision, "none")
    g = torch.Generator().manual_seed(2)
    x, z, y = *torch.rand(2, 8, 3, 32, 32, generator=g), torch.arange(8)
    found = []
    for look in (quickly, net):
        with autocast(precision, x.device):
            first, second = look(x), look(z)
        loss = CE()(first, y).sum() + first.aux.sum() + 2 * CE()(second, y).sum()
        grads = torch.autograd.grad(loss, list(net.parameters()))
        assert all(grad.dtype == torch.float32 for grad in grads)
        found.append(grads)
    for (name, _), ours, theirs in zip(net.named_parameters(), *found, strict=True):
        assert float((ours - theirs).norm()) < share * float(theirs.norm()) + 1e-6, name


def test_tensors_of_all_types_and_layouts_are_copied() -> None:
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(4, 3, 2, 2, generator=g) for _ in range(4)]
    given += [torch.arange(4), torch.randn(5, generator=g).double()]
    given[1] = given[1].to(memory_format=torch.channels_last)
    types = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.int64]
    held = [torch.zeros(new.shape, dtype=t) for new, t in zip(given, types, strict=False)]
    held.append(torch.zeros(5))
    copy_tensors(held, given)
    for own, new in zip(held, given, strict=True):
        assert torch.equal(own, new.to(own.dtype))


@pytest.mark.parametrize("bn", ["eval", "batch", "train"])
def test_a_head_that_the_goal_does_not_look_at_is_left_out(
    bn: BatchNorm, net: RejectingNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the three products are its own; what its norm remembers is not the look's to do."""
    x, y = torch.rand(6, 3, 32, 32), torch.arange(6)
    copy = FusedResNet(net, bn != "eval", "fp32")
    traced: list[GraphModule] = []

    def kept(made: GraphModule, given: list[Tensor]) -> Callable[..., Any]:
        traced.append(made)
        return make_boxed_func(made.forward)

    def traced_too(function: Callable[..., Any], compiler: str) -> Callable[..., Any]:
        torch._dynamo.reset()  # it compiles one piece of code eight times at most
        made: Callable[..., Any] = torch.compile(function, backend=aot_autograd(fw_compiler=kept))
        return made

    monkeypatch.setattr(fused_resnet, "compile_function", traced_too)

    def count(objective: Objective, bare: bool) -> int:
        traced.clear()
        with running_stats_frozen(copy.net) if bn == "batch" else nullcontext():
            copy.objective_forward(objective, "inductor", bare)(x, y)
        products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return sum(node.target in products for made in traced for node in made.graph.nodes)

    assert count(CE(), bare=True) == 1
    assert count(CE(), bare=False) == count(Evasion(RCon()), bare=True) == 3


def test_a_pass_is_kept_apart_from_the_last_and_leaves_no_history(net: RejectingNet) -> None:
    """Two passes may be differentiated together; none ties the weights to itself afterwards."""
    quickly = FusedTrainingNet(net.train(), "bf16", "none")
    norms, looks = quickly.fused_trunk.norms, []
    for _ in range(2):
        quickly(torch.rand(4, 3, 32, 32))
        looks.append([part for norm in norms for part in norm.last])
    assert all(not sums.any() for sums in looks[1][1::2]), "no kernel has added to them"
    each = [*looks[0], *looks[1]]
    places = [part.untyped_storage().data_ptr() + 4 * part.storage_offset() for part in each]
    assert len(set(places)) == 2 * 2 * len(norms)
    assert quickly.fused_trunk.casts is not None
    assert all(cast.weight.grad_fn is None for cast in quickly.fused_trunk.casts.values())
