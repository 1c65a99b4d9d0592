"""A FrozenModel has the outputs and gradients of its net in both modes, also after a refresh."""

from typing import Any

import pytest
import torch
from torch import Tensor

from demur.attacks import CE, PGD, PlusLogScore, UntargetedMargin
from demur.attacks.attack_model import Gradient, ObjectiveFunction, attack_model
from demur.attacks.balls import Linf
from demur.data import Digits
from demur.engine import FrozenModel
from demur.methods import RR, attack_mode
from demur.nets import NetSpec, RejectingNet, ResNet8
from demur.recipes import recipe
from demur.rejectors import RCon
from tests.one_block import OneBlock

OBJECTIVES: tuple[ObjectiveFunction, ...] = (
    CE(), UntargetedMargin(), PlusLogScore(RCon()), 0.5 * CE() + UntargetedMargin(),
)  # fmt: skip


@pytest.fixture
def net() -> RejectingNet:
    return random_net(ResNet8(4))


def random_net(spec: NetSpec) -> RejectingNet:
    """A net in fp64 with weights and statistics other than the initial ones."""
    net = spec.build(Digits().domain, RR()).double().train()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g, dtype=torch.float64))
        for _ in range(3):
            net(torch.rand(32, 1, 8, 8, generator=g, dtype=torch.float64))
    return net


@pytest.fixture
def digits() -> tuple[Tensor, Tensor]:
    x, y = recipe("digits-pgdat-rr").data.load()["test"].batch(slice(0, 20))
    return x.double(), y


def change_weights(net: RejectingNet) -> None:
    """Change weights and statistics as a training step does."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.1)
        for name, buffer in net.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.mul_(1.3).add_(0.05)


def same_gradient(ours: Gradient, plain: Gradient) -> bool:
    return close((ours.grad, ours.value, *ours.out), (plain.grad, plain.value, *plain.out))


def close(one: Any, other: Any) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(one, other, strict=True))


def test_the_copy_equals_the_net_in_eval_mode_also_after_a_refresh(
    net: RejectingNet, digits: tuple[Tensor, Tensor]
) -> None:
    x, _ = digits
    frozen_model = FrozenModel(net.eval(), "fp64", "none").eval()
    copied = frozen_model._copy().net
    assert close(copied(x), net(x))
    change_weights(net)
    assert not close(copied(x), net(x)), "weights are frozen until refreshed"
    frozen_model.refresh()
    assert close(copied(x), net(x))


def test_train_mode_copy_equals_the_net_and_updates_its_running_statistics(
    net: RejectingNet, digits: tuple[Tensor, Tensor]
) -> None:
    x, y = digits
    before = {name: value.clone() for name, value in net.state_dict().items()}
    expected = net(x)
    after = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(before)
    frozen_model = FrozenModel(net, "fp64", "none")
    assert close(frozen_model.gradient(CE(), x, y).out, expected)
    for name, value in net.state_dict().items():
        assert torch.allclose(value.double(), after[name].double(), atol=1e-12)
    change_weights(net)
    frozen_model.refresh()
    assert close(frozen_model(x), net(x))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("train", [True, False])
def test_gradient_is_that_of_the_net(
    net: RejectingNet, digits: tuple[Tensor, Tensor], train: bool, objective: ObjectiveFunction
) -> None:
    frozen_model = FrozenModel(net.train(train), "fp64", "none")
    ours = frozen_model.gradient(objective, *digits)
    assert same_gradient(ours, attack_model(net).gradient(objective, *digits))


def test_any_number_of_compiled_objectives_have_the_gradient_of_the_net(
    digits: tuple[Tensor, Tensor],
) -> None:
    """torch.compile limits the versions of a code object; every objective has its own."""
    import torch._dynamo  # takes a second, and one worker needs it

    net = random_net(OneBlock())
    with torch._dynamo.config.patch(recompile_limit=1):
        for train, objective in ((True, CE()), (False, PlusLogScore(RCon()))):
            frozen_model = FrozenModel(net.train(train), "fp64", "aot_eager")
            for _ in range(2):  # the second query meets the caches of the first
                ours = frozen_model.gradient(objective, *digits)
                assert same_gradient(ours, attack_model(net).gradient(objective, *digits))


def test_gradient_only_is_the_gradient(net: RejectingNet, digits: tuple[Tensor, Tensor]) -> None:
    for train, fixed in ((True, None), (False, 64)):
        for objective in (CE(), PlusLogScore(RCon())):
            frozen_model = FrozenModel(net.train(train), "fp64", "none", fixed)
            ours = frozen_model.gradient_only(objective, *digits)
            assert torch.equal(ours, frozen_model.gradient(objective, *digits).grad)
            assert torch.allclose(
                ours, attack_model(net).gradient(objective, *digits).grad, atol=1e-12
            )
    assert torch.equal(
        attack_model(net).gradient_only(CE(), *digits),
        attack_model(net).gradient(CE(), *digits).grad,
    )


def test_no_weight_gradient_is_computed(net: RejectingNet, digits: tuple[Tensor, Tensor]) -> None:
    for train in (True, False):
        frozen_model = FrozenModel(net.train(train), "fp64", "none")
        frozen_model.gradient(CE(), *digits)
        assert not any(p.requires_grad for p in frozen_model._copy().net.parameters())
        assert all(p.grad is None for p in net.parameters())
    assert list(frozen_model.parameters()) == [], "a FrozenModel has nothing to train"


def test_padding_changes_neither_gradients_nor_attacks(
    net: RejectingNet, digits: tuple[Tensor, Tensor]
) -> None:
    x, y = digits
    net.eval()
    ours = FrozenModel(net, "fp64", "none", fixed=64).gradient(UntargetedMargin(), x, y)
    assert same_gradient(ours, attack_model(net).gradient(UntargetedMargin(), x, y))
    attack = PGD(Linf(0.2), steps=4, keep="success")
    index = torch.arange(len(x))
    padded = attack.perturb(FrozenModel(net, "fp64", "none", fixed=64), x, y, index)
    assert torch.allclose(padded, attack.perturb(net, x, y, index), atol=1e-12)


def test_bn_batch_normalises_by_the_batch_and_keeps_the_running_statistics(
    net: RejectingNet, digits: tuple[Tensor, Tensor]
) -> None:
    before = {name: value.clone() for name, value in net.named_buffers() if "running" in name}
    updating = FrozenModel(net, "fp64", "none").gradient(CE(), *digits)
    net.load_state_dict(before, strict=False)
    frozen_model = FrozenModel(net, "fp64", "none")
    with attack_mode(frozen_model, "batch"):
        ours = frozen_model.gradient(CE(), *digits)
    assert same_gradient(ours, updating)
    assert all(torch.equal(net.get_buffer(name), value) for name, value in before.items())
