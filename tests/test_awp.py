"""Adversarial weight perturbation moves each weight tensor by gamma times its norm."""

import pytest
import torch
from torch import Tensor, nn

from demur.training.state import AWP
from tests.test_wrappers import clone_all, max_difference


class Toy(nn.Module):
    """Two linear maps with batch norm between them, in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


@pytest.fixture
def toy() -> Toy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Toy().double()


X = torch.linspace(-1, 2, 18, dtype=torch.float64).view(6, 3).sin()
Y = torch.tensor([0, 1, 1, 0, 1, 0])


def loss_of(net: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(net(X), Y)


def test_weights_move_along_the_gradient_by_gamma_times_their_norm(toy: Toy) -> None:
    awp = AWP(toy, 0.25, 0.0)
    awp.begin(0.0)
    before = clone_all(toy.state_dict())
    with awp.statistics_backup.preserve():
        loss_of(toy).backward()
    assert max_difference(clone_all(toy.state_dict()), before) == 0, "statistics are restored"
    with awp.perturb():
        for name, weight in toy.named_parameters():
            grad = weight.grad
            assert grad is not None
            step = 0.25 * before[name].norm() * grad / grad.norm() if weight.ndim > 1 else 0
            assert float((weight.detach() - before[name] - step).abs().max()) < 1e-15
        assert loss_of(toy.eval()) > loss_of_weights(toy, before)
    after = toy.state_dict()
    weights = [name for name, _ in toy.named_parameters()]
    assert all(torch.equal(after[name], before[name]) for name in weights), "bit by bit"


@torch.no_grad()
def loss_of_weights(net: nn.Module, state: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(torch.func.functional_call(net, state, X), Y)


def test_weights_without_a_gradient_do_not_move(toy: Toy) -> None:
    awp = AWP(toy, 0.25, 0.0)
    awp.begin(0.0)
    before = clone_all(dict(toy.named_parameters()))
    toy.first.weight.grad = torch.zeros_like(toy.first.weight)  # toy.last has none
    with awp.perturb():
        assert all(torch.equal(weight, before[name]) for name, weight in toy.named_parameters())
