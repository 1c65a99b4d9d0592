"""What a head's norms remember of looks, taken in late: as if look by look."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.attacks import CE, PGD, Attack
from demur.balls import Linf
from demur.data import CIFAR10
from demur.engine import frozen as crafters
from demur.engine.copies import Compiler
from demur.engine.deferred_stats import DeferredBatchNormStats
from demur.engine.frozen import FrozenModel
from demur.methods import RR, BatchNorm, NoHead, SNet, crafting
from demur.methods.modules import DenseAux, SelectiveAux
from demur.nets import RejectingNet, ResNet18
from demur.precision import autocast
from tests.test_fused_resnet import without_kernels

X, Y = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(6)


def remembered(aux: nn.Module) -> list[Tensor]:
    return [held.double() for held in aux.buffers()]


@pytest.mark.parametrize("compiler", ["none", "aot_eager"])
@pytest.mark.parametrize("aux", [DenseAux(12), SelectiveAux(12, 10)], ids=["one", "nested"])
@pytest.mark.parametrize("looks", [1, 5])
def test_looks_taken_in_late_move_statistics_as_they_would_have_in_turn(
    looks: int, aux: nn.Module, compiler: Compiler
) -> None:
    late, at_once = (copy.deepcopy(aux).train() for _ in range(2))
    g = torch.Generator().manual_seed(1)
    memory = DeferredBatchNormStats(late, compiler)
    for again in range(2):  # the second time from statistics that are not the first day's
        for look in range(looks):
            feature = torch.randn(8, 12, generator=g) + look
            memory.see(feature)
            at_once([feature])
        if again == 0:
            assert remembered(late)[0].eq(0).all(), "nothing is taken in yet"
        with autocast("bf16", feature.device):  # heads are never computed in 16 bits
            memory.take_in()
        memory.take_in()  # there is nothing left to take in
        for ours, theirs in zip(remembered(late), remembered(at_once), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_looks_at_batches_of_several_sizes_are_taken_in_too() -> None:
    late, at_once = (copy.deepcopy(DenseAux(12)).train() for _ in range(2))
    at_once.load_state_dict(late.state_dict())
    memory = DeferredBatchNormStats(late, "none")
    for size in (8, 8, 3, 5):
        feature = torch.randn(size, 12, generator=torch.Generator().manual_seed(size))
        memory.see(feature)
        at_once([feature])
    memory.take_in()
    for ours, theirs in zip(remembered(late), remembered(at_once), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_looks_of_a_step_that_failed_are_not_remembered_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen_model, net = quick_crafter(RR(), monkeypatch)
    with pytest.raises(KeyboardInterrupt), crafting(frozen_model, "train"):
        frozen_model.gradient_only(CE(), X, Y)
        raise KeyboardInterrupt
    frozen_model.refresh()
    with crafting(frozen_model, "batch"):
        frozen_model.gradient_only(CE(), X, Y)
    assert [int(held.abs().sum()) for held in net.aux.buffers() if held.ndim == 0] == [0]


def quick_crafter(
    head: RR | SNet | NoHead, monkeypatch: pytest.MonkeyPatch
) -> tuple[FrozenModel, RejectingNet]:
    """What the engine crafts with on a GPU, with torch in place of its kernels; and its net."""
    without_kernels(monkeypatch)
    monkeypatch.setattr(crafters, "fused_supported", lambda net, precision: True)
    net = ResNet18(width=4).build(CIFAR10().domain, head).train()
    return FrozenModel(net, "fp32", "none"), net


@pytest.mark.parametrize("bn", ["train", "batch", "eval"])
@pytest.mark.parametrize("head", [RR(), SNet(), NoHead()], ids=["rr", "snet", "plain"])
@pytest.mark.parametrize(
    "attack",
    [
        PGD(Linf(0.03), steps=3, step_size=0.01),
        PGD(
            Linf(0.03), steps=3, step_size=0.01, momentum=0.9, backtrack=1.5
        ),  # looks at values too
        PGD(Linf(0.03), steps=3, step_size=0.01, restarts=2),  # asks for answers in between
    ],
    ids=["slopes", "values", "answers"],
)
def test_an_attack_by_the_quick_copy_leaves_the_head_what_the_net_would_remember(
    attack: Attack, head: RR | SNet | NoHead, bn: BatchNorm, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for quick in (True, False):
        frozen_model, net = quick_crafter(head, monkeypatch)
        model = frozen_model if quick else net
        with crafting(model, bn):
            x_adv = attack.perturb(model, X, Y, Y)
        norms = [*net.modules(), *(model.batch_norms() if isinstance(model, FrozenModel) else [])]
        assert all(norm.momentum != 0 for norm in norms if isinstance(norm, _BatchNorm))
        found.append([*remembered(net.aux), x_adv.double()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    counts = [int(held) for held in found[0][:-1] if held.ndim == 0]
    assert bn == "train" or counts in ([], [0])
    assert bn != "train" or counts == [] or counts[0] >= 3
