"""Deferred updates of running statistics equal updates after each forward pass."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.attacks import CE, PGD, Attack
from demur.balls import Linf
from demur.data import CIFAR10
from demur.engine import Compiler, frozen
from demur.engine.deferred_stats import DeferredBatchNormStats
from demur.engine.frozen import FrozenModel
from demur.methods import RR, BatchNorm, NoHead, SNet, attack_mode
from demur.methods.heads import DenseAux, SelectiveAux
from demur.nets import RejectingNet, ResNet18
from demur.precision import autocast
from tests.test_fused_resnet import replace_kernels

X, Y = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(6)


def statistics(aux: nn.Module) -> list[Tensor]:
    return [buffer.double() for buffer in aux.buffers()]


@pytest.mark.parametrize("compiler", ["none", "aot_eager"])
@pytest.mark.parametrize("aux", [DenseAux(12), SelectiveAux(12, 10)], ids=["one", "nested"])
@pytest.mark.parametrize("passes", [1, 5])
def test_one_deferred_update_equals_an_update_per_forward_pass(
    passes: int, aux: nn.Module, compiler: Compiler
) -> None:
    deferred, immediate = (copy.deepcopy(aux).train() for _ in range(2))
    g = torch.Generator().manual_seed(1)
    stats = DeferredBatchNormStats(deferred, compiler)
    for attack in range(2):  # the second time from statistics other than the initial ones
        for i in range(passes):
            feature = torch.randn(8, 12, generator=g) + i
            stats.add(feature)
            immediate([feature])
        if attack == 0:
            assert statistics(deferred)[0].eq(0).all(), "add() updates nothing yet"
        with autocast("bf16", feature.device):  # heads never run in bf16
            stats.update()
        stats.update()  # nothing is pending
        for ours, theirs in zip(statistics(deferred), statistics(immediate), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_batches_of_several_sizes_can_be_deferred() -> None:
    deferred, immediate = (copy.deepcopy(DenseAux(12)).train() for _ in range(2))
    immediate.load_state_dict(deferred.state_dict())
    stats = DeferredBatchNormStats(deferred, "none")
    for size in (8, 8, 3, 5):
        feature = torch.randn(size, 12, generator=torch.Generator().manual_seed(size))
        stats.add(feature)
        immediate([feature])
    stats.update()
    for ours, theirs in zip(statistics(deferred), statistics(immediate), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_refresh_drops_the_pending_passes_of_an_attack_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen_model, net = fused_frozen_model(RR(), monkeypatch)
    with pytest.raises(KeyboardInterrupt), attack_mode(frozen_model, "train"):
        frozen_model.gradient_only(CE(), X, Y)
        raise KeyboardInterrupt
    frozen_model.refresh()
    with attack_mode(frozen_model, "batch"):
        frozen_model.gradient_only(CE(), X, Y)
    assert [int(buffer.abs().sum()) for buffer in net.aux.buffers() if buffer.ndim == 0] == [0]


def fused_frozen_model(
    head: RR | SNet | NoHead, monkeypatch: pytest.MonkeyPatch
) -> tuple[FrozenModel, RejectingNet]:
    """The FrozenModel of a GPU, with torch in place of the Triton kernels, and its net."""
    replace_kernels(monkeypatch)
    monkeypatch.setattr(frozen, "fused_supported", lambda net, precision: True)
    net = ResNet18(width=4).build(CIFAR10().domain, head).train()
    return FrozenModel(net, "fp32", "none"), net


@pytest.mark.parametrize("bn", ["train", "batch", "eval"])
@pytest.mark.parametrize("head", [RR(), SNet(), NoHead()], ids=["rr", "snet", "plain"])
@pytest.mark.parametrize(
    "attack",
    [
        PGD(Linf(0.03), steps=3, step_size=0.01),
        # also queries values
        PGD(Linf(0.03), steps=3, step_size=0.01, momentum=0.9, backtrack=1.5),
        # also queries outputs
        PGD(Linf(0.03), steps=3, step_size=0.01, restarts=2),
    ],
    ids=["gradients", "values", "outputs"],
)
def test_an_attack_on_the_fused_copy_leaves_the_statistics_of_an_attack_on_the_net(
    attack: Attack, head: RR | SNet | NoHead, bn: BatchNorm, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for fused in (True, False):
        frozen_model, net = fused_frozen_model(head, monkeypatch)
        model = frozen_model if fused else net
        with attack_mode(model, bn):
            x_adv = attack.perturb(model, X, Y, Y)
        norms = [*net.modules(), *(model.batch_norms() if isinstance(model, FrozenModel) else [])]
        assert all(norm.momentum != 0 for norm in norms if isinstance(norm, _BatchNorm))
        results.append([*statistics(net.aux), x_adv.double()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    counts = [int(buffer) for buffer in results[0][:-1] if buffer.ndim == 0]
    assert bn == "train" or counts in ([], [0])
    assert bn != "train" or counts == [] or counts[0] >= 3
