"""Gradients of several objectives from one forward pass are those of one query each."""

import pytest
import torch
from torch import Tensor, nn

from demur.attacks import CE, UntargetedMargin
from demur.attacks.attack_model import AttackModel, CheckedModel, NoGradientError, PlainModel
from demur.data import CIFAR10
from demur.engine import FrozenModel, FrozenModule
from demur.engine.copies import FastCopy
from demur.methods import RR
from demur.nets import ResNet18
from demur.output import Output
from tests.approximate_model import ApproximateModel
from tests.test_any_module import FP32, conv_net, seeded

OBJECTIVES = (CE(), UntargetedMargin())


def own_model(device: torch.device) -> tuple[FrozenModel, Tensor]:
    net = ResNet18(width=8).build(CIFAR10().domain, RR()).eval().requires_grad_(False).to(device)
    x = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    return FrozenModel(net, "fp32", "none", fixed=8), x


def any_model(device: torch.device) -> tuple[FrozenModule, Tensor]:
    net, x = seeded(conv_net), torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return FrozenModule(net, FastCopy(net, FP32, x), pytest.fail), x


@pytest.mark.parametrize("make", [own_model, any_model])
def test_they_are_those_of_one_query_each(make: type) -> None:
    model, x = make(torch.device("cpu"))
    y = torch.arange(6) % 4
    together = CheckedModel(model, x.dtype).gradients(OBJECTIVES, x, y)
    for objective, found in zip(OBJECTIVES, together, strict=True):
        expected = model.gradient(objective, x, y)
        assert found.grad.shape == x.shape
        assert torch.allclose(found.grad, expected.grad, rtol=1e-4, atol=1e-7)
        assert torch.allclose(found.value, expected.value)
        assert torch.allclose(found.out.logits, expected.out.logits, atol=1e-6)


def test_one_forward_pass_serves_all_on_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = any_model(torch.device("cpu"))
    sizes, right = list[int](), FastCopy.__call__

    def counted(self: FastCopy, x: Tensor) -> Output:
        sizes.append(len(x))
        return right(self, x)

    monkeypatch.setattr(FastCopy, "__call__", counted)
    model.gradients(OBJECTIVES, x, torch.zeros(6, dtype=torch.int64))
    assert sizes == [6]


def test_a_model_with_its_own_gradient_is_asked_for_each() -> None:
    net, x = seeded(conv_net), torch.rand(3, 1, 8, 8)
    y = torch.zeros(3, dtype=torch.int64)
    for model in (PlainModel(net), ApproximateModel(net, 0.1)):
        assert type(model).gradients is AttackModel.gradients
        found = model.gradients(OBJECTIVES, x, y)
        for query, objective in zip(found, OBJECTIVES, strict=True):
            assert torch.equal(query.grad, model.gradient(objective, x, y).grad)


class Detached(nn.Module):
    """A model whose score has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()

    def forward(self, x: Tensor) -> Output:
        logits = self.net(x)
        return Output(logits, logits[:, :0], x.detach().sum((1, 2, 3))[:, None])


def score(out: Output, y: Tensor) -> Tensor:
    return out.aux[:, 0]


@pytest.mark.parametrize("copied", [False, True])
def test_an_objective_without_a_gradient_is_named(copied: bool) -> None:
    net, x = seeded(Detached).requires_grad_(False), torch.rand(6, 1, 8, 8)
    frozen = FrozenModule(net, FastCopy(net, FP32, x), pytest.fail)
    model = CheckedModel(frozen if copied else net, x.dtype)
    with pytest.raises(
        NoGradientError, match=r"score at .* no gradient with respect to the images"
    ):
        model.gradients((CE(), score), x, torch.zeros(6, dtype=torch.int64))
